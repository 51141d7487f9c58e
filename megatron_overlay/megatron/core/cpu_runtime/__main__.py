# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron.core.cpu_runtime SCRIPT ARGS…`: install the CPU runtime, then run SCRIPT."""

import os
import runpy
import sys

from megatron.core.cpu_runtime.installer import install


def main(argv: list[str]) -> None:
    """Run the script `argv[0]` as `__main__`, with `argv` as its `sys.argv`."""
    if not argv or not os.path.isfile(argv[0]):
        found = f"no file at {argv[0]!r}" if argv else "no script given"
        sys.exit(f"usage: python -m megatron.core.cpu_runtime SCRIPT ARGS…   ({found})")
    install()
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
