# TorchRL's recipe for IFEval
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
# becomes: 4 prompts x 16 completions = 64 completions, 4 updates (1 epoch x 4 mini-batches); 1,563 steps
python grpo.py --config-name grpo_ifeval
