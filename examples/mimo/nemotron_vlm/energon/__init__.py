# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--data energon:PATH``: megatron-energon's data sets and blends, read by sample number.

One pass over the data, the *survey*, records how many tokens and tiles each sample has, and which
samples are bad. The survey and the seed determine which sample has which number, alike on every
rank and without decoding anything. The order of energon's own loader depends on the number of ranks
and workers; here energon provides the metadata, the blends and the decoding of a sample.

``python -m examples.mimo.nemotron_vlm.energon`` makes a survey and prints it.
"""

from examples.mimo.common.errors import UserError

try:
    import PIL  # noqa: F401
    import transformers  # noqa: F401

    import megatron.energon  # noqa: F401
except ModuleNotFoundError as error:
    raise UserError(
        f"--data energon needs {error.name}; install with pip install '.[energon]'"
    ) from error
