# MaxText's demo on a pod: sixteen devices train, four samplers of four draw.
python examples/compat/grpo_demo.py --model_name=llama3.1-70b --tokenizer_path=meta-llama/Llama-3.1-70B-Instruct \
    --load_parameters_path=gs://bucket/llama3.1-70b/0/items --base_output_directory=gs://bucket/out \
    --hf_access_token=$HF_TOKEN --use_pathways --inference_devices_per_replica=4 --inference_replicas=4 \
    --ici_fsdp_parallelism=16
