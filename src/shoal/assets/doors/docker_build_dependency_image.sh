#!/usr/bin/env bash
# MaxText's script by its name; written by `shoal compat`: bash docker_build_dependency_image.sh MODE=grpo
exec "${PYTHON:-python3}" -m shoal launch target=docker "$@"
