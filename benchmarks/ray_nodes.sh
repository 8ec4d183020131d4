#!/usr/bin/env bash
# Tries the lines of docs/clusters.md, "Ray on several machines", on machines that are really apart: a head, other nodes,
# a run whose workers are on all of them.
#
#   benchmarks/ray_nodes.sh m1=10.0.0.1 m2=10.0.0.2 ...
#
# NAME=ADDRESS of each machine, the head first. ON is what runs a command there (default `ssh`): `$ON NAME 'command'`.
# RUN is the run; each machine needs Shoal with the extra `ray` in its PATH, and nothing else: model and data are read
# on the head alone. WAIT is how many seconds lie between two looks at the cluster. Exit code 0: all of it went well, with a worker on each machine.
set -euo pipefail
on=${ON:-ssh}
run=${RUN:-shoal train model=tiny steps=3 batch.prompts_per_step=4 batch.group_size=4 sampling.max_completion_tokens=16 train.evaluate_every=-1}
secret=$(openssl rand -hex 32)
variables="export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$secret RAY_raylet_start_wait_time_s=200;"
head=${1%%=*} address=${1#*=}
stop() { for machine in "$@"; do $on "${machine%%=*}" 'ray stop --force' >/dev/null 2>&1 || true; done; }
trap 'stop "$@"' EXIT

say() { printf '\n== %s: %s\n' "$1" "$2"; }
fail() { echo "error: $1" >&2; exit 1; }
say "$head" "ray start --head --node-ip-address=$address --port=6379 --dashboard-host=127.0.0.1"
$on "$head" "$variables ray start --head --node-ip-address=$address --port=6379 --dashboard-host=127.0.0.1 --num-cpus=1" | tail -2
for machine in "${@:2}"; do
    say "${machine%%=*}" "ray start --address=$address:6379 --node-ip-address=${machine#*=}"
    $on "${machine%%=*}" "$variables ray start --address=$address:6379 --node-ip-address=${machine#*=} --num-cpus=1" | tail -2
done
say "$head" "ray status"
for _ in 1 2 3 4 5; do  # a node is listed some seconds after it has joined
    status=$($on "$head" "$variables ray status --address=$address:6379")
    nodes=$(grep -c '^ 1 node_' <<< "$status" || true)
    [ "$nodes" -lt $# ] || break
    sleep "${WAIT:-3}"
done
grep -A 8 -i 'active\|usage' <<< "$status" || true
[ "$nodes" = $# ] || fail "of $# machines $nodes are in the cluster"
other=${!#}
other=${other%%=*}
say "$other" "a node without the secret is refused"
answer=$($on "$other" "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=wrong; timeout 60 ray status --address=$address:6379" 2>&1 || true)
tail -1 <<< "$answer"
grep -qi authenticat <<< "$answer" || fail "the head answers, or says nothing of a secret, where the secret is wrong"
say "$head" "$run sampler.kind=ray sampler.workers=$# ray.address=$address:6379"
$on "$head" "$variables $run sampler.kind=ray sampler.workers=$# sampler.resources=[CPU=1] ray.address=$address:6379"
for machine in "$@"; do
    say "${machine%%=*}" "a worker was here"
    $on "${machine%%=*}" "grep -ls '^:actor_name:Worker' /tmp/ray/session_latest/logs/worker-*.out" ||
        fail "no worker of the run was on ${machine%%=*}"
done
