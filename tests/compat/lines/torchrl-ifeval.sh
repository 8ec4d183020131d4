# IFEval
# source: TorchRL 0.14, sota-implementations/grpo/README.md
# expect: runs
# becomes: 4 prompts x 16 completions = 64 completions, 4 updates (1 epoch x 4 mini-batches); 1,563 steps
python grpo-sync.py mode=sync --config-name grpo_ifeval
