# Another model
# source: TorchRL 0.14, sota-implementations/grpo/README.md
# expect: runs
# becomes: 2 prompts x 16 completions = 32 completions, 1 update (1 epoch x 1 mini-batch); 3,125 steps
python grpo-sync.py mode=sync model.name=meta-llama/Llama-2-7b-hf
