#!/usr/bin/env bash
# For a machine with an NVIDIA GPU: runs the emulator's tests on it and measures, in eight minutes, without a network.
#
#   tools/device_check.sh PYTHON [MODEL.gguf] [LLAMA_BENCH]
#
# PYTHON has the wheel, pytest and gguf installed (`pip install dist/*.whl pytest gguf hypothesis`). MODEL is a 7B-shaped
# sparse model; where it lacks, `benches/synth_model.py` writes one. LLAMA_BENCH is llama.cpp's, built for CUDA.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:?usage: tools/device_check.sh PYTHON [MODEL.gguf] [LLAMA_BENCH]}
model=${2:-}
llama_bench=${3:-}
started=$SECONDS

say() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - started)); }

say "what there is"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || exit 1
"$python" -c 'from powerinfer_rs import _engine; print(_engine.gpus())' || exit 1

say "tests of the emulator on this GPU"
timeout 150 "$python" -m pytest -q tests/gpu 2>&1 | tail -15

say "kernels, hand-over and graphs"
timeout 60 "$python" tools/device_times.py

if [ -z "$model" ]; then
    say "writing a 7B-shaped model"
    folder=$(mktemp -d)
    model=$folder/7b.powerinfer.gguf
    gunzip -c tests/data/vocab/llama-spm.gguf.gz >"$folder/vocab.gguf"
    timeout 150 "$python" benches/synth_model.py "${model%.powerinfer.gguf}" --arch llama --type Q4_0 --only sparse \
        --vocab "$folder/vocab.gguf" || exit 1
fi

say "end to end"
timeout 150 "$python" tools/device_times.py "$model"
if [ -n "$llama_bench" ]; then
    timeout 60 "$llama_bench" -m "$model" -ngl 99 -p 512 -n 64
fi
say "done"
