#!/usr/bin/env bash
# Every check and measurement that needs a CUDA GPU: `bash bench/gpu.sh [--seconds 540] [--output FOLDER] [PART…]`.
# `--help` lists the parts, `--needs` the wheels that a machine without a network must be given, and `--rehearse` runs
# everything at tiny sizes without a GPU. PYTHON names the interpreter, python3 by default.
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" bench/gpu.py "$@"
