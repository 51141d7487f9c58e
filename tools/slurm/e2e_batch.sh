#!/usr/bin/env bash
#SBATCH --job-name=mimo-e2e
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=mimo-e2e-%j.log
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
# Run the end-to-end cases as a Slurm job, submitted from the repository: docs/user/slurm.md
set -euo pipefail
root="${SLURM_SUBMIT_DIR:-$PWD}" # Slurm runs a copy of this file
if [ ! -x "$root/tools/slurm/e2e_batch.sh" ]; then
    echo "error: $root is not the repository: submit from there" >&2
    exit 2
fi
exec "$root/tools/python.sh" "$root/tools/slurm/e2e_batch.py" "$@"
