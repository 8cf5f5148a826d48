#!/usr/bin/env bash
# A quantizer of one's own against KIVI and TurboQuant at 3 bits, with a LaTeX table. From a fresh clone, six commands.
#     scripts/walkthroughs/own_quantizer.sh [FOLDER NAME]
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-docs/examples/mine} name=${2:-symmetric}

python3 -m venv .venv
.venv/bin/pip install --quiet --constraint constraints.txt torch
.venv/bin/pip install --quiet --constraint constraints.txt .
.venv/bin/semkv-bench sweep --conf "$folder" methods=["$name",kivi,turboquant] grid.levels=[16,8,4,3,2] \
  method.kivi.keys.keep.block=32 method.kivi.values.keep.recent=32 per_task=30 task.length=300 stats.at_bits=[3,4] \
  stats.margin=0.1 out=results/runs/own-quantizer
.venv/bin/semkv-bench cliff-report run=results/runs/own-quantizer
cat results/runs/own-quantizer/methods.tex
