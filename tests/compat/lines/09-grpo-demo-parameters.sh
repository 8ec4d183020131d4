# The unified demo with parameters of one's own
# source: MaxText, src/MaxText/examples/grpo_demo.py
# expect: runs
# bucket: yes
# becomes: 1 prompt a device x 4 completions, 1 update; 200 steps
python3 src/MaxText/examples/grpo_demo.py --model_name=llama3.1-8b --tokenizer_path=meta-llama/Llama-3.1-8B-Instruct --load_parameters_path=gs://path/to/checkpoint --base_output_directory=OUT --hf_access_token=$HF_TOKEN --num_generations=4 --grpo_beta=0.04 --grpo_epsilon=0.15 --learning_rate=5e-6 --steps=200
