#!/usr/bin/env bash
# MaxText's 70B script, run by Shoal; written by `shoal compat`. Its settings come from the environment:
#   MODEL=llama3.3-70b TOKENIZER=... NUM_SAMPLERS=8 DEVICES_PER_SAMPLER=8 STEPS=20 bash test_grpo.sh
# HF_TOKEN is read from the environment as it stands. Arguments come after, and lie over them.
set -euo pipefail

words=()
add() { if [[ -n "${2:-}" ]]; then words+=("$1=$2"); fi }
add model_name "${MODEL:-}"
add tokenizer_path "${TOKENIZER:-}"
add inference_replicas "${NUM_SAMPLERS:-}"
add inference_devices_per_replica "${DEVICES_PER_SAMPLER:-}"
add per_device_batch_size "${TRAINING_PER_DEVICE_BATCH_SIZE:-}"
add sampling.slots_per_device "${INFERENCE_PER_DEVICE_BATCH_SIZE:-}"
add steps "${STEPS:-}"
exec "${PYTHON:-python3}" "$(dirname "$0")/../../src/MaxText/examples/grpo_demo.py" "${words[@]}" "$@"
