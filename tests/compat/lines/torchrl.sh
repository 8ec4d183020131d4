# TorchRL's GRPO recipe, synchronous and asynchronous.
VLLM_USE_V1=0 python examples/compat/grpo.py train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2
VLLM_USE_V1=0 python examples/compat/grpo-async.py train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2
python examples/compat/grpo.py --config-name grpo_ifeval optimizer.lr=2e-5
python examples/compat/grpo.py env.dataset=ifeval optimizer.lr=2e-5 model.name=meta-llama/Llama-2-7b-hf
python examples/compat/grpo.py --multirun optimizer.lr=1e-4,1e-5 policy.kl_coef=0.01,0.1
