# The time limit and a preemption send SIGTERM: the run saves its last complete step, and this job is queued again.
export SHOAL_MESH_TOKEN="${SHOAL_MESH_TOKEN:-$(openssl rand -hex 16)}"
stopped=
trap 'stopped=1; kill -TERM "$child"' TERM
srun --kill-on-bad-exit=1 "$@" &
child=$!
wait "$child"
code=$?
while [ "$code" -gt 128 ] && kill -0 "$child" 2>/dev/null; do  # a trap ends `wait` before srun has ended
    wait "$child"
    code=$?
done
if [ -n "$stopped" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
