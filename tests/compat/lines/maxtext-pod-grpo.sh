# The command of a job on a pod, GRPO
# source: MaxText, docs/tutorials/posttraining/rl_on_multi_host.md
# expect: runs
# devices: 8
# bucket: yes
# becomes: 1 prompt x 2 completions = 2 completions, 1 update (1 epoch x 1 mini-batch); 4 steps
python3 -m maxtext.trainers.post_train.rl.train_rl model_name=${MODEL?} load_parameters_path=${MAXTEXT_CKPT_PATH?} run_name=${RUN_NAME?} base_output_directory=${BASE_OUTPUT_DIRECTORY?} rollout_tensor_parallelism=8 hf_access_token=${HF_TOKEN?} enable_single_controller=True
