# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The encoder of images, RADIO: on tiles (tiles.py), or on whole images of any size (any_size.py).

Both have the same parameters, by the same names.
"""

from examples.mimo.nemotron_vlm.model.encoders.radio.any_size import RadioOfAnySize
from examples.mimo.nemotron_vlm.model.encoders.radio.entry import Radio
from examples.mimo.nemotron_vlm.model.encoders.radio.tiles import pixel_shuffle

__all__ = ["Radio", "RadioOfAnySize", "pixel_shuffle"]
