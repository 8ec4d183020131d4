# TorchRL's recipe, asynchronous
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
# devices: 6
# becomes: 2 prompts x 16 completions = 32 completions, 1 update (1 epoch x 1 mini-batch); 3,125 steps
VLLM_USE_V1=0 python sota-implementations/grpo/grpo-async.py train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2
