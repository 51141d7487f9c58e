# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run upstream's ``pretrain_mimo.py``, of the tree in the working directory, on a GPU.

    torchrun … upstream_script.py SCRIPT [its options]

Two things stand in, as on CPU ranks: the compiled index builder of data sets, and a ViT of two
layers whose position embeddings do not move at random.
"""

import os
import runpy
import sys
from pathlib import Path

sys.path[:0] = [os.getcwd(), str(Path(__file__).parents[1] / "e2e/upstream_scripts")]

import stand_ins  # noqa: E402

stand_ins.index_builder()
stand_ins.small_radio()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
