# The recipe of today, synchronous
# source: TorchRL 0.14, sota-implementations/grpo/README.md
# expect: runs
# devices: 6
# becomes: 2 prompts x 16 completions = 32 completions, 1 update (1 epoch x 1 mini-batch); 3,125 steps
python sota-implementations/grpo/grpo-sync.py mode=sync train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2
