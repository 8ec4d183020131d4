# TorchRL's recipe, synchronous
# source: TorchRL, sota-implementations/grpo/README.md of 0.9
# expect: runs
# devices: 6
VLLM_USE_V1=0 python sota-implementations/grpo/grpo.py train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2
