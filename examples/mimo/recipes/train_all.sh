#!/usr/bin/env bash
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
# Second stage: all parts are trained, on conversations, from the weights of the first; the encoder
# learns at a tenth of the others' rate.
#
#   WEIGHTS=DIR ALIGNED=DIR DATA=PATH TOKENIZER=DIR OUT=DIR LAUNCH="--nproc-per-node 8" \
#       examples/mimo/recipes/train_all.sh [options of the program, which come last]
#
# WEIGHTS  as in the first stage; only its model.json is read     ALIGNED  OUT of the first stage
set -euo pipefail
for name in WEIGHTS ALIGNED DATA TOKENIZER OUT; do
    [ -n "${!name:-}" ] || { echo "error: set $name; the head of $0 says to what" >&2; exit 2; }
done
: "${LAUNCH:=--nproc-per-node 8}"
mkdir -p "$OUT"
# shellcheck disable=SC2086
exec python -m torch.distributed.run $LAUNCH \
    "$(dirname "$0")/../pretrain_nemotron_vlm.py" \
    --model "$WEIGHTS/model.json" --pretrained-checkpoint "$ALIGNED/checkpoints" \
    --data "energon:$DATA" --tokenizer-model "$TOKENIZER" --pack --micro-batch-size 1 \
    --lr 2e-5 --min-lr 2e-6 --encoder-lr 2e-6 --lr-warmup-fraction 0.03 --weight-decay 0.05 \
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --metrics-out "$OUT/metrics.jsonl" \
    --exit-signal-handler "$@"
