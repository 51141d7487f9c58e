# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run tools that import the program and Megatron: find both, and report user errors in one line."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1] / "build" / "Megatron-LM"


def run(tool: Callable[[], None]) -> int:
    """Call a tool; return the exit status, 2 for user errors.

    The tool must import from the checkout only when it is called: that on PYTHONPATH, or the one in
    build/Megatron-LM. It sees no GPU, as on CPU ranks, and reports user errors by raising UserError
    or OSError.
    """
    if find_spec("torch") is None:
        print("error: no PyTorch: run make setup, then source .venv/bin/activate", file=sys.stderr)
        return 2
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        if not (CHECKOUT / "megatron" / "core" / "cpu_runtime").exists():
            reason = "no applied checkout of Megatron-LM: run make setup, or set PYTHONPATH to one"
            print(f"error: {reason}", file=sys.stderr)
            return 2
        sys.path.insert(0, str(CHECKOUT))
        sys.modules.pop("megatron", None)  # found without megatron.core: another package's part
    from examples.mimo.common.errors import BAD_INPUT, UserError
    from examples.mimo.pretrain_nemotron_vlm import GPU_KERNELS

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    hidden = [name for name in GPU_KERNELS if name not in sys.modules and find_spec(name)]
    sys.modules.update(dict.fromkeys(hidden))
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core import cpu_runtime

            cpu_runtime.install()
            tool()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    finally:
        logging.disable(logging.NOTSET)
    return 0
