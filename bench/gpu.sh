#!/usr/bin/env bash
# Every check and measurement that only a CUDA GPU can make, in one command: `bash bench/gpu.sh [OUTPUT_FOLDER] [PART…]`.
# Parts: checks attention tune loss optimizer train sizes save memory generate run; all of them when none is named. One table
# at the end. Where a command may run for ten minutes only, name one part at a time: each writes what it has as it goes.
# Needs torch, triton, numpy, tiktoken, safetensors, transformers and PyYAML; memory and run need Hydra too (train.py),
# and 8-bit products are measured where torchao is there.
set -uo pipefail
cd "$(dirname "$0")/.."
output=${1:-bench/results}
shift || true
parts=${*:-checks attention tune loss optimizer train sizes save memory generate run}
mkdir -p "$output"
python=${PYTHON:-python3}
export PYTHONPATH=. PYTHONUNBUFFERED=1
unset TRITON_INTERPRET

"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA GPU"; print(torch.cuda.get_device_name(), torch.__version__)' || exit 1
stamp=$(date -u +%Y%m%d-%H%M%S)
log="$output/gpu-$stamp.log"

float8=$("$python" -c "import torch, torchao; assert torch.cuda.get_device_capability() >= (8, 9)" 2> /dev/null && echo --float8)

measure() {
    local part=$1
    shift
    [[ " $parts " == *" $part "* ]] || return 0
    echo "== $part: $*" | tee -a "$log"
    "$python" "$@" 2>&1 | tee -a "$log" || echo "FAILED $part" | tee -a "$log"
}

measure checks bench/gpu_checks.py --output "$output/checks-cuda-$stamp.json"
measure attention bench/attention.py --output "$output/attention-cuda-$stamp.json"
measure tune bench/attention.py --tune --lengths 1024 --output "$output/attention-tune-cuda-$stamp.json"
measure loss bench/loss.py --device cuda --batch 64 --output "$output/loss-cuda-$stamp.json"
measure optimizer bench/optimizer.py --device cuda --output "$output/optimizer-cuda-$stamp.json"
measure train bench/train.py --device cuda --batch 32 --peers fp32 bf16 bf16-compiled --optimizer muon \
    $float8 --output "$output/train-andrea-120m-cuda-$stamp.json"
for size in andrea-480m:16 andrea-2b:4; do
    measure sizes bench/train.py --model "${size%:*}" --batch "${size#*:}" --device cuda --peers --optimizer muon \
        $float8 --output "$output/train-${size%:*}-cuda-$stamp.json"
done
measure save bench/async_save.py --ranks 1 --limit 0.05 --output "$output/async-save-cuda-$stamp.json"
"$python" -c "import hydra" 2> /dev/null && measure memory bench/memory.py --device cuda --output "$output/memory-cuda-$stamp.json"
measure generate bench/generate.py --device cuda --ours bf16 --peers bf16 bf16-static \
    --output "$output/generate-andrea-120m-cuda-$stamp.json"
measure generate bench/generate.py --device cuda --compiled --output "$output/generate-compiled-cuda-$stamp.json"
measure generate bench/generate.py --device cuda --batch 64 --ours bf16 --compiled \
    --output "$output/generate-batch-64-cuda-$stamp.json"
# A real run on the Python source installed here: about seven minutes at half a million tokens a second.
"$python" -c "import hydra" 2> /dev/null && measure run train.py model=andrea-120m data=text tokenizer.vocab_size=50257 \
    data.path="$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" train.steps="${RUN_STEPS:-440}" \
    runs_dir="$output/runs" data_dir="$output/data" name="run-$stamp" logger=none &&
    cp "$output/runs/run-$stamp/metrics.jsonl" "$output/run-andrea-120m-cuda-$stamp.jsonl" 2> /dev/null

echo "== all of it"
grep -E "passed|FAIL|TFLOP/s|^tuned|tokens/s +ratio|^andrea|^hugging|^fused|^written-out|^torch,|^written" "$log"
