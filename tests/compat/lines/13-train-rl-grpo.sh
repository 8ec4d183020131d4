# GRPO on one host
# source: MaxText, docs/tutorials/grpo.md
# expect: runs
# bucket: yes
# becomes: 1 prompt x 2 completions = 2 completions, 1 update (1 epoch x 1 mini-batch); 4 steps
python3 -m src.MaxText.rl.train_rl src/MaxText/configs/rl.yml model_name=${MODEL} tokenizer_path=${TOKENIZER} load_parameters_path=${MAXTEXT_CKPT_PATH} run_name=${RUN_NAME} base_output_directory=${BASE_OUTPUT_DIRECTORY} hf_access_token=${HF_TOKEN}
