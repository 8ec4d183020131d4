# TorchRL's recipe, devices as lists
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
# devices: 6
# becomes: 2 prompts x 16 completions = 32 completions, 1 update (1 epoch x 1 mini-batch); 3,125 steps
VLLM_USE_V1=0 python sota-implementations/grpo/grpo.py train_model.devices=[0,1] ref_model.devices=[2,3] inference_model.devices=[4,5]
