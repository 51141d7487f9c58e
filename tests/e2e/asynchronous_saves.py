# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The training program on one CPU rank, with saves written by another process.

    python -m tests.e2e.asynchronous_saves [program arguments]

The program refuses such saves on a CPU, because training would change the tensors while they are
written. Here nothing is trained after the last save.
"""

import sys
from pathlib import Path

from megatron.core import cpu_runtime  # noqa: E402

cpu_runtime.install()  # also in the writing process, which imports this file

from examples.mimo.nemotron_vlm.options.rules import RULES  # noqa: E402
from examples.mimo.pretrain_nemotron_vlm import main  # noqa: E402

# The writing process finds this file: the program has put its checkout first.
sys.path.insert(0, str(Path(__file__).parents[2]))

if __name__ == "__main__":
    (on_cpu,) = [rule for rule in RULES if rule.title == "--async-save"]
    RULES.remove(on_cpu)
    sys.exit(main(sys.argv[1:]))
