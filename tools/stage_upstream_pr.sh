#!/usr/bin/env bash
# Stage features of the patch set as upstream PRs, on branches of a git checkout: docs/contributor/upstream-prs.md
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
exec "$root/tools/python.sh" "$root/tools/staging" "$@"
