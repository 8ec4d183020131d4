# The unified demo with a configuration file
# source: MaxText, src/MaxText/examples/grpo_demo.py
# expect: runs
# bucket: yes
# becomes: 1 prompt a device x 8 completions, 1 update; 100 steps
python3 src/MaxText/examples/grpo_demo.py --config_file=/path/to/custom_config.yml --model_name=llama3.1-8b --tokenizer_path=meta-llama/Llama-3.1-8B-Instruct --load_parameters_path=gs://path/to/checkpoint --base_output_directory=OUT --hf_access_token=$HF_TOKEN --steps=100
