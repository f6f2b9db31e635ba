#!/usr/bin/env bash
# Every check and measurement that only a CUDA card can make, in one command: `bash bench/gpu.sh [OUTPUT_FOLDER]`.
# Needs torch, numpy, tiktoken, safetensors, transformers and PyYAML; not Hydra, not wandb.
set -uo pipefail
cd "$(dirname "$0")/.."
output=${1:-bench/results}
mkdir -p "$output"
python=${PYTHON:-python3}
export PYTHONPATH=.

"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA card"; print(torch.cuda.get_device_name(), torch.__version__)' || exit 1
stamp=$(date -u +%Y%m%d-%H%M%S)

echo "== correctness: attention and model on the card against the CPU in fp64"
"$python" bench/gpu_checks.py --output "$output/checks-cuda-$stamp.json"
echo "== training throughput, andrea-120m"
"$python" bench/train.py --device cuda --batch 32 --peers fp32 bf16 bf16-compiled --optimizer muon \
    --output "$output/train-andrea-120m-cuda-$stamp.json"
echo "== generation, andrea-120m, batch 1"
"$python" bench/generate.py --device cuda --output "$output/generate-andrea-120m-cuda-$stamp.json"
