# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The lengths of sounds; a survey needs them, too."""

import numpy as np

SAMPLING_RATE = 16000
"""Samples of a sound in a second."""

HOP = 160
"""Samples from one log-mel frame to the next."""

SHORTEST = 2 * HOP
"""Samples of the shortest sound: frames are scaled by their deviation."""


def rows_of(samples: np.ndarray, subsampling: int) -> np.ndarray:
    """Return the rows that sounds become, int64 [sounds].

    Args:
        samples: of each sound, int64 [sounds].
        subsampling: log-mel frames that become a row.
    """
    return samples // (HOP * subsampling) + 1
