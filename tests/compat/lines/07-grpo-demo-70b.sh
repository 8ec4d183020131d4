# The unified demo on a pod: 16 devices train, 4 samplers of 4
# source: MaxText, src/MaxText/examples/grpo_demo.py
# expect: runs
# devices: 32
# bucket: yes
# becomes: 1 prompt a device x 2 completions x 16 devices = 32 completions, 1 update; 100 steps
python3 src/MaxText/examples/grpo_demo.py --model_name=llama3.1-70b --tokenizer_path=meta-llama/Llama-3.1-70B-Instruct --load_parameters_path=gs://path/to/checkpoint --base_output_directory=gs://path/to/output --hf_access_token=$HF_TOKEN --use_pathways --inference_devices_per_replica=4 --inference_replicas=4 --ici_fsdp_parallelism=16 --steps=100
