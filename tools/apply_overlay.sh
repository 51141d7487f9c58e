#!/usr/bin/env bash
# Put the overlay onto a Megatron-LM checkout. Usage and exit codes: docs/contributor/patch-set.md
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
exec "$root/tools/python.sh" "$root/tools/overlay" apply "$@"
