# A sweep of learning rates
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
python grpo.py --multirun optimizer.lr=1e-4,1e-5,1e-6
