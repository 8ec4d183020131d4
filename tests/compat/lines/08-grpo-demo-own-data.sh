# The unified demo with a data set of one's own: questions and answers as GSM8K's
# source: MaxText, src/MaxText/examples/grpo_demo.py
# expect: runs
# bucket: yes
# becomes: 1 prompt a device x 2 completions, 1 update; 100 steps
python3 src/MaxText/examples/grpo_demo.py --model_name=llama3.1-8b --tokenizer_path=meta-llama/Llama-3.1-8B-Instruct --load_parameters_path=gs://path/to/checkpoint --base_output_directory=OUT --hf_access_token=$HF_TOKEN --steps=100 --hf_path=custom/dataset --hf_data_split=train
