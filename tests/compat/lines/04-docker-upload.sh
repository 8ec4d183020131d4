# The upload of the image
# source: MaxText, docs/tutorials/grpo_with_pathways.md
# expect: needs docker
bash docker_upload_runner.sh CLOUD_IMAGE_NAME=path/to/gcr.io
