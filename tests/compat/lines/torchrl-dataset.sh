# Another data set
# source: TorchRL 0.14, sota-implementations/grpo/README.md
# expect: runs
python grpo-sync.py mode=sync env.dataset=ifeval
