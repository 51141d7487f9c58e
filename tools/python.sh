#!/usr/bin/env bash
# Run the repository's Python (.venv when it is there, else python3), refusing one below 3.11.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="${PYTHON:-python3}"
[ -x "$root/.venv/bin/python" ] && python="$root/.venv/bin/python"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: $python is missing or older than Python 3.11; set PYTHON to a newer one" >&2
    exit 1
fi
exec "$python" "$@"
