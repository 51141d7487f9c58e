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


def run(tool: Callable[[], None], device: str | None = "cpu") -> int:
    """Call a tool; return the exit status, 2 for user errors.

    The tool must import from the checkout only when it is called: that on PYTHONPATH, or the one in
    build/Megatron-LM. It reports user errors by raising UserError or OSError; a missing package is
    one, too.

    Args:
        device: "cuda"; "cpu", with which the tool sees no GPU; or None for a GPU if there is one.
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
    import torch

    from examples.mimo.common.errors import BAD_INPUT, UserError
    from examples.mimo.pretrain_nemotron_vlm import GPU_KERNELS

    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if device == "cpu" or not torch.accelerator.is_available():
                if device == "cuda":
                    raise UserError("--device cuda: PyTorch finds no GPU here")
                os.environ["CUDA_VISIBLE_DEVICES"] = ""
                hidden = [each for each in GPU_KERNELS if each not in sys.modules]
                sys.modules.update(dict.fromkeys(filter(find_spec, hidden)))
                from megatron.core import cpu_runtime

                cpu_runtime.install()
            tool()
    except ModuleNotFoundError as error:
        print(f"error: {error}: install it as docs/user/install.md says", file=sys.stderr)
        return BAD_INPUT
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    finally:
        logging.disable(logging.NOTSET)
    return 0
