#!/usr/bin/env bash
#SBATCH --job-name=mimo-e2e
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=mimo-e2e-%j.log
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
# Run the end-to-end cases as a Slurm job, submitted from the repository, or on this host:
#     sbatch [options of sbatch] tools/slurm/e2e_batch.sh OUT [options of pytest]
# Environment: PYTHON, CONTAINER_IMAGE, CONTAINER_MOUNTS; docs/user/slurm.md
set -euo pipefail
root="${SLURM_SUBMIT_DIR:-$PWD}" # Slurm runs a copy of this file
if [ ! -x "$root/tools/slurm/e2e_batch.sh" ]; then
    echo "error: $root is not the repository: submit from there" >&2
    exit 2
fi
if [ $# -eq 0 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: e2e_batch.sh OUT [options of pytest]; OUT is a folder that all nodes see" >&2
    exit 2
fi
OUT="$(realpath --canonicalize-missing "$1")"
shift
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || rm -rf "$OUT/runs" # a requeued job goes on
"$root/tools/fetch_upstream.sh" "$OUT/Megatron-LM"
"$root/tools/apply_overlay.sh" "$OUT/Megatron-LM"
export OUT CHECKOUT="$OUT/Megatron-LM" PYTHONPATH="$OUT/Megatron-LM:$root"
cd "$root"
exec tools/python.sh -m pytest -v -W ignore -p no:cacheprovider --junitxml "$OUT/junit.xml" \
    tests/slurm/rows_on_nodes.py "$@"
