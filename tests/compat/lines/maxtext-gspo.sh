# GSPO on one host, by today's paths
# source: MaxText, docs/tutorials/posttraining/rl.md
# expect: runs
# bucket: yes
# becomes: 1 prompt x 2 completions = 2 completions, 1 update (1 epoch x 1 mini-batch); 4 steps
python3 -m src.maxtext.trainers.post_train.rl.train_rl src/maxtext/configs/post_train/rl.yml model_name=${MODEL} tokenizer_path=${TOKENIZER} load_parameters_path=${MAXTEXT_CKPT_PATH} run_name=${RUN_NAME} base_output_directory=${BASE_OUTPUT_DIRECTORY} hf_access_token=${HF_TOKEN} loss_algo=gspo-token chips_per_vm=${CHIPS_PER_VM}
