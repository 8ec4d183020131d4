# The recipe of today, synchronous
# source: TorchRL 0.14, sota-implementations/grpo/README.md
# expect: runs
# devices: 6
python sota-implementations/grpo/grpo-sync.py mode=sync train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2
