#!/usr/bin/env bash
# MaxText's script by its name; written by `shoal compat`: bash docker_upload_runner.sh CLOUD_IMAGE_NAME=path/to/gcr.io
exec "${PYTHON:-python3}" -m shoal launch target=docker "$@"
