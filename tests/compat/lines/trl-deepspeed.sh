# With DeepSpeed
# source: TRL 1.16, docs/source/clis.md
# expect: runs
# becomes: 1 prompt a device x 8 completions x 1 device = 8 completions, 1 update; 40 steps
trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name HuggingFaceH4/Polaris-Dataset-53K --reward_funcs accuracy_reward --deepspeed examples/deepspeed_configs/zero2.json
