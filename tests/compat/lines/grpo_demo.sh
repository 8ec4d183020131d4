# MaxText's demo: one command for every model.
python examples/compat/grpo_demo.py --model_name=llama3.1-8b --tokenizer_path=meta-llama/Llama-3.1-8B-Instruct \
    --load_parameters_path=gs://bucket/llama3.1-8b/0/items --base_output_directory=gs://bucket/out \
    --hf_access_token=$HF_TOKEN --steps=100
python examples/compat/grpo_demo.py --model_name=llama3.1-8b --tokenizer_path=meta-llama/Llama-3.1-8B-Instruct \
    --load_parameters_path=gs://bucket/llama3.1-8b/0/items --base_output_directory=gs://bucket/out \
    --hf_access_token=$HF_TOKEN --hf_path=custom/dataset --hf_data_split=train --steps=100
python examples/compat/grpo_demo.py --model_name=llama3.1-8b --tokenizer_path=meta-llama/Llama-3.1-8B-Instruct \
    --load_parameters_path=gs://bucket/llama3.1-8b/0/items --base_output_directory=gs://bucket/out \
    --hf_access_token=$HF_TOKEN --num_generations=4 --grpo_beta=0.04 --grpo_epsilon=0.15 --learning_rate=5e-6 --steps=200
python examples/compat/grpo_demo.py --config_file=src/MaxText/configs/grpo.yml --model_name=llama3.1-8b \
    --tokenizer_path=meta-llama/Llama-3.1-8B-Instruct --load_parameters_path=gs://bucket/llama3.1-8b/0/items \
    --base_output_directory=gs://bucket/out --hf_access_token=$HF_TOKEN
