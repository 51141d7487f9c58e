# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The lengths of clips of sound; a survey needs them, too."""

from __future__ import annotations

import numpy as np

SAMPLING_RATE = 16000
"""Samples of a clip in a second."""

HOP = 160
"""Samples from one log-mel frame to the next."""

SHORTEST = 2 * HOP
"""Samples of the shortest clip: frames are scaled by their deviation."""


def rows_of(samples: np.ndarray, subsampling: int) -> np.ndarray:
    """Return the rows that clips become, int64 [clips].

    Args:
        samples: of each clip, int64 [clips].
        subsampling: log-mel frames that become a row.
    """
    return samples // (HOP * subsampling) + 1
