# The recipe with Llama 2
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
python grpo.py model.name=meta-llama/Llama-2-7b-hf
