#!/usr/bin/env bash
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
# First stage: only the projector is trained, on captions, between a converted encoder and language
# model.
#
#   WEIGHTS=DIR DATA=PATH TOKENIZER=DIR OUT=DIR LAUNCH="--nproc-per-node 8" \
#       examples/mimo/recipes/align_projector.sh [options of the program, which come last]
#
# WEIGHTS  what convert.py has made      DATA    prepared and surveyed captions
# OUT      checkpoints and metrics; started again with the same OUT, the run goes on
set -euo pipefail
for name in WEIGHTS DATA TOKENIZER OUT; do
    [ -n "${!name:-}" ] || { echo "error: set $name; the head of $0 says to what" >&2; exit 2; }
done
: "${LAUNCH:=--nproc-per-node 8}"
mkdir -p "$OUT"
# shellcheck disable=SC2086
exec python -m torch.distributed.run $LAUNCH \
    "$(dirname "$0")/../pretrain_nemotron_vlm.py" \
    --model "$WEIGHTS/model.json" --pretrained-checkpoint "$WEIGHTS" \
    --freeze encoder,language \
    --data "energon:$DATA" --tokenizer-model "$TOKENIZER" --pack --micro-batch-size 1 \
    --lr 1e-3 --min-lr 1e-5 --lr-warmup-fraction 0.03 --weight-decay 0 \
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --metrics-out "$OUT/metrics.jsonl" \
    --exit-signal-handler "$@"
