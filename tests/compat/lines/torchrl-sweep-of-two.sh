# A sweep of two keys
# source: TorchRL 0.14, sota-implementations/grpo/README.md
# expect: runs
python grpo-sync.py mode=sync --multirun optimizer.lr=1e-4,1e-5 policy.kl_coef=0.01,0.1
