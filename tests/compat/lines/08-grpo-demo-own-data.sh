# The unified demo with a data set of one's own, which has no reward
# source: MaxText, src/MaxText/examples/grpo_demo.py
# expect: needs a reward
# bucket: yes
python3 src/MaxText/examples/grpo_demo.py --model_name=llama3.1-8b --tokenizer_path=meta-llama/Llama-3.1-8B-Instruct --load_parameters_path=gs://path/to/checkpoint --base_output_directory=OUT --hf_access_token=$HF_TOKEN --steps=100 --hf_path=custom/dataset --hf_data_split=train
