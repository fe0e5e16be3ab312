#!/bin/sh
# Checks and measures the Pallas kernels on a CUDA device: scripts/gpu_check.sh --help.
# $PYTHON names an interpreter; otherwise that of this checkout's .venv, or python3.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
# Several processes share the device: each takes memory as it needs it.
export XLA_PYTHON_CLIENT_PREALLOCATE="${XLA_PYTHON_CLIENT_PREALLOCATE:-false}"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
export PYTHONUNBUFFERED=1
exec "$PYTHON" -m scripts.gpu_check "$@"
