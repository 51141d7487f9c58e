# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--data energon:PATH``: megatron-energon's data sets and blends, read by sample number.

One pass over the data, the *survey*, records how many tokens and tiles each sample has, and which
samples are bad. The survey and the seed determine which sample has which number, alike on every
rank and without decoding anything. The order of energon's own loader depends on the number of ranks
and workers; here energon provides the metadata, the blends and the decoding of a sample.

    tiling.py        an image's tiles
    conversation.py  chat template, image tokens, loss on answers
    records.py       energon's samples as conversations with images
    store.py         samples by index
    encoding.py      records as tokens and tiles
    survey.py        tokens and tiles of all samples, on disk
    order.py         sample numbers: epochs and blends
    source.py        EnergonSource

``python -m examples.mimo.nemotron_vlm.energon`` makes a survey and prints it.
"""

from __future__ import annotations

from importlib.util import find_spec


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


_missing = [name for name in ("megatron.energon", "PIL", "transformers") if not _installed(name)]
if _missing:
    raise ImportError(
        f"--data energon needs {' and '.join(_missing)}; install with pip install '.[energon]'"
    )
