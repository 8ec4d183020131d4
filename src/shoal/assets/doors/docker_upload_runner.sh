#!/usr/bin/env bash
# MaxText's script by its name; written by `shoal compat`: tags the image and pushes it.
#   bash docker_upload_runner.sh CLOUD_IMAGE_NAME=path/to/gcr.io
set -euo pipefail

for word in "$@"; do export "${word?}"; done
if [[ -z "${CLOUD_IMAGE_NAME:-}" ]]; then
    echo "error: expected CLOUD_IMAGE_NAME=NAME, the image's name in the registry" >&2
    exit 2
fi
echo "docker tag maxtext_base_image $CLOUD_IMAGE_NAME:latest"
echo "docker push $CLOUD_IMAGE_NAME:latest"
if ! type docker >/dev/null 2>&1; then
    echo "error: docker is not installed here: run these commands where it is" >&2
    exit 1
fi
docker tag maxtext_base_image "$CLOUD_IMAGE_NAME:latest"
exec docker push "$CLOUD_IMAGE_NAME:latest"
