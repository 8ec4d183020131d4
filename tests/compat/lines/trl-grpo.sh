# `trl grpo` in short
# source: TRL 1.16, docs/source/clis.md
# expect: runs
trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name HuggingFaceH4/Polaris-Dataset-53K --reward_funcs accuracy_reward
