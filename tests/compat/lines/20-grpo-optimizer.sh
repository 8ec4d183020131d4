# The recipe with another optimizer
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
python grpo.py optimizer.lr=2e-5 optimizer.weight_decay=0.01
