# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Names of the encoders, and the token ids that all presets have."""

IMAGES = "images"
"""Name of the encoder of image tiles."""
SOUND = "sound"
"""Name of the encoder of sound."""

PAD, BOS, EOS, IMAGE, READ = range(5)
FIRST_DIGIT = 10
"""Token id of the digit 0; 1 to 9 follow. Every preset's vocabulary holds all these ids."""
