# The recipe with another optimizer
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
# becomes: 2 prompts x 16 completions = 32 completions, 1 update (1 epoch x 1 mini-batch); 3,125 steps
python grpo.py optimizer.lr=2e-5 optimizer.weight_decay=0.01
