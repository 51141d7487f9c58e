# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The encoders: a file or folder each, whose class is entered here under the name of its module."""

from examples.mimo.nemotron_vlm.model.encoders.entry import Encoder
from examples.mimo.nemotron_vlm.model.encoders.radio import Radio
from examples.mimo.nemotron_vlm.model.encoders.sound import Sound

ENCODERS: dict[str, type[Encoder]] = {Radio.name: Radio, Sound.name: Sound}
