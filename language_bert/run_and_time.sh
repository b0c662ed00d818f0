#!/usr/bin/env bash
# One timed run of this benchmark: run_and_time.sh [CONFIGURATION [flags of `ttt run`]], default: optimized.
# Alone it uses every GPU of this machine. Below torchrun or srun it is one of the ranks that they start:
#   torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
#     --no-python language_bert/run_and_time.sh baseline
#   srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 --kill-on-bad-exit language_bert/run_and_time.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -n ${TTT:-} || ! -x .venv/bin/ttt ]] || TTT=.venv/bin/ttt
exec "${TTT:-ttt}" run language_bert "${@:-optimized}"
