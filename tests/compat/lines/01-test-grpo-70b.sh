# MaxText's experimental GRPO, Llama 3.3 70B: 64 chips train, 8 samplers of 8 chips
# source: MaxText, end_to_end/tpu/test_grpo.sh
# expect: runs
# devices: 128
# becomes: 1 prompt a device x 2 completions, 1 update; 20 steps
HF_TOKEN=${HF_TOKEN} MODEL=llama3.3-70b TOKENIZER=meta-llama/Llama-3.3-70B-Instruct NUM_SAMPLERS=8 DEVICES_PER_SAMPLER=8 TRAINING_PER_DEVICE_BATCH_SIZE=1 INFERENCE_PER_DEVICE_BATCH_SIZE=8 STEPS=20 bash end_to_end/tpu/test_grpo.sh
