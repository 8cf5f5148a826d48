#!/usr/bin/env bash
# Which of four cache types of llama.cpp is safe for this GGUF file and these prompts? From a fresh clone, six commands.
#     scripts/walkthroughs/cache_types.sh MODEL.gguf PROMPTS.jsonl
set -euo pipefail
cd "$(dirname "$0")/../.."
model=${1:?a GGUF file} prompts=${2:-docs/examples/prompts.jsonl}

python3 -m venv .venv
.venv/bin/pip install --quiet --constraint constraints.txt torch
.venv/bin/pip install --quiet --constraint constraints.txt ".[llamacpp]"
.venv/bin/semkv-bench sweep engine=llamacpp model=custom model.path="$model" engine.types=[f16,q8_0,q5_1,q4_0,q2_0] \
  task=jsonl task.path="$prompts" per_task=null stats.margin=0.1 out=results/runs/cache-types
.venv/bin/semkv-bench cliff-report run=results/runs/cache-types
.venv/bin/semkv-bench badge run=results/runs/cache-types
