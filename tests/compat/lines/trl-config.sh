# `trl grpo` with a file
# source: TRL 1.16, docs/source/clis.md
# expect: runs
# becomes: 1 prompt a device x 8 completions x 1 device = 8 completions, 1 update; 40 steps
trl grpo --config grpo_config.yaml
