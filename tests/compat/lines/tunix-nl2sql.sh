# SQL queries that are executed
# source: Tunix, examples/rl/grpo/nl2sql/README.md
# expect: needs its reward functions
python3 -m tunix.cli.grpo_main examples/rl/grpo/nl2sql/configs/base_config.yaml
