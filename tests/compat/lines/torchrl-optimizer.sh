# Another optimizer
# source: TorchRL 0.14, sota-implementations/grpo/README.md
# expect: runs
python grpo-sync.py mode=sync optimizer.lr=2e-5 optimizer.weight_decay=0.01
