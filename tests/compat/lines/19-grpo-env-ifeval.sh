# IFEval under the recipe for GSM8K
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
python grpo.py env.dataset=ifeval
