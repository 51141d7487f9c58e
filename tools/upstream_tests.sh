#!/usr/bin/env bash
# Run upstream's own tests on a pristine and on an applied copy of a checkout: docs/contributor/testing.md
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
exec "$root/tools/python.sh" "$root/tools/upstream_tests" "$@"
