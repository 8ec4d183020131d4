#!/bin/sh
# Trains in a Ray cluster: deploy/ray-job.sh KEY=VALUE ... ; RAY_API_SERVER_ADDRESS is that of its dashboard.
set -eu
: "${RAY_API_SERVER_ADDRESS:=http://127.0.0.1:8265}"
export RAY_API_SERVER_ADDRESS
exec ray job submit -- shoal train sampler.kind=ray "$@"
