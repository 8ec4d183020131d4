# The image for the experimental trainer
# source: MaxText, docs/tutorials/grpo_with_pathways.md
# expect: needs docker
bash docker_build_dependency_image.sh MODE=grpo-experimental
