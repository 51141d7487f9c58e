# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point: ``python tools/staging CHECKOUT``."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from staging.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
