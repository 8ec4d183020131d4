# The recipe with Llama 2
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
# becomes: 2 prompts x 16 completions = 32 completions, 1 update (1 epoch x 1 mini-batch); 3,125 steps
python grpo.py model.name=meta-llama/Llama-2-7b-hf
