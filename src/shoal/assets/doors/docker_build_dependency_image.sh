#!/usr/bin/env bash
# MaxText's script by its name; written by `shoal compat`: the image that Shoal runs in.
#   bash docker_build_dependency_image.sh MODE=grpo            DEVICE=tpu, gpu or cpu
# MODE=grpo and grpo-experimental add vLLM there; Shoal samples itself, so that every MODE is the same image.
# SHOAL is a clone of Shoal's repository, in which deploy/Dockerfile is; by default this folder.
set -euo pipefail

for word in "$@"; do export "${word?}"; done
case "${DEVICE:-tpu}" in gpu) extras=cuda,ray ;; cpu) extras=ray ;; *) extras=tpu,ray ;; esac
command=(docker build --build-arg "EXTRAS=$extras" -f "${SHOAL:-.}/deploy/Dockerfile" -t maxtext_base_image "${SHOAL:-.}")
echo "${command[@]}"
if ! type docker >/dev/null 2>&1; then
    echo "error: docker is not installed here: run this command where it is" >&2
    exit 1
fi
exec "${command[@]}"
