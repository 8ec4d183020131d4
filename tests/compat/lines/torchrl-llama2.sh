# Another model
# source: TorchRL 0.14, sota-implementations/grpo/README.md
# expect: runs
python grpo-sync.py mode=sync model.name=meta-llama/Llama-2-7b-hf
