# TorchRL's recipe for IFEval
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
python grpo.py --config-name grpo_ifeval
