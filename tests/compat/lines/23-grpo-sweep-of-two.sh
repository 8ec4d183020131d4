# A sweep of two keys
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
python grpo.py --multirun optimizer.lr=1e-4,1e-5 policy.kl_coef=0.01,0.1
