#!/usr/bin/env bash
# The CUDA path checked against the reference and timed, on one GPU, in under 8 minutes.
#
# Installs nothing. Needs the project's packages with a CUDA build of torch and a GPU of compute
# capability 8.0 or newer:
#   make install TORCH=torch==2.13.0
# then
#   tests/benchmarks/gpu.sh [--model FOLDER|random] [--seconds 420]
# PYTHON names another interpreter than .venv's. Ends with a table and build/gpu.json, which is
# copied to $OUT where that is set. Exits with 2 and one line where there is no such GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
export PYTHONPATH="$PWD:$PWD/protos${PYTHONPATH:+:$PYTHONPATH}"
rm -f build/gpu.json
status=0
timeout --signal=INT 480 "$python" -m tests.benchmarks.gpu "$@" || status=$?
if [[ -n "${OUT:-}" && $status -ne 2 && -f build/gpu.json ]]; then
  mkdir -p "$OUT"
  cp build/gpu.json "$OUT/"
fi
exit "$status"
