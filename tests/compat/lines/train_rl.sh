# MaxText's RL tutorial on one host: GRPO, and GSPO.
python3 -m examples.compat.train_rl src/MaxText/configs/rl.yml model_name=llama3.1-8b \
    tokenizer_path=meta-llama/Llama-3.1-8B-Instruct load_parameters_path=gs://bucket/llama3.1-8b/0/items \
    run_name=first base_output_directory=gs://bucket/out hf_access_token=$HF_TOKEN
python3 -m examples.compat.train_rl src/MaxText/configs/rl.yml model_name=llama3.1-8b \
    tokenizer_path=meta-llama/Llama-3.1-8B-Instruct load_parameters_path=gs://bucket/llama3.1-8b/0/items \
    run_name=first base_output_directory=gs://bucket/out hf_access_token=$HF_TOKEN loss_algo=gspo-token
