#!/usr/bin/env bash
# Fetch the pinned upstream into a checkout. Usage and exit codes: docs/contributor/patch-set.md
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
exec "$root/tools/python.sh" "$root/tools/overlay" fetch "$@"
