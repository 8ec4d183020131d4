# MaxText's conversion of a checkpoint.
python3 -m examples.compat.to_maxtext src/MaxText/configs/base.yml model_name=llama3.1-8b \
    base_output_directory=gs://bucket/llama3.1-8b/scanned hf_access_token=$HF_TOKEN scan_layers=True hardware=cpu \
    skip_jax_distributed_system=true --lazy_load_tensors=true
