# MaxText's script for 70B on a pod: its settings come from the environment.
HF_TOKEN=$HF_TOKEN MODEL=llama3.3-70b TOKENIZER=meta-llama/Llama-3.3-70B-Instruct NUM_SAMPLERS=8 DEVICES_PER_SAMPLER=8 \
    TRAINING_PER_DEVICE_BATCH_SIZE=1 INFERENCE_PER_DEVICE_BATCH_SIZE=8 STEPS=20 bash examples/compat/test_grpo.sh
