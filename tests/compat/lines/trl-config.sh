# `trl grpo` with a file
# source: TRL 1.16, docs/source/clis.md
# expect: runs
trl grpo --config grpo_config.yaml
