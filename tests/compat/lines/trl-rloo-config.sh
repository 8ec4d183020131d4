# `trl rloo` with a file
# source: TRL 1.16, docs/source/clis.md
# expect: runs
trl rloo --config rloo_config.yaml
