# OpenEnv's environments
# source: TorchRL 0.14, sota-implementations/grpo/README.md
# expect: needs environments
python grpo-sync.py mode=sync --config-name grpo_openenv env.openenv.name=echo-env
