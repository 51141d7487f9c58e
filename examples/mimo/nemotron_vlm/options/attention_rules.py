# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for the kernel of the images' attention."""

from argparse import Namespace

import torch

from examples.mimo.common.errors import UserError
from megatron.core.transformer.padded_flash_attention import check_kernel, is_installed

FLASH4, ENGINE = "flash4", "te"


def set_encoder_attention(args: Namespace) -> None:
    """Choose the kernel, unless the user chose it: flash-attn-4 where it was measured.

    Raises:
        UserError: the chosen kernel needs something else.
    """
    needs = {
        "--device cuda": args.device == "cuda",
        "--dynamic-resolution": args.dynamic_resolution,
        "--bf16 or --fp16": args.bf16 or args.fp16,
        "layers of Transformer Engine": args.transformer_impl != "local",
        "a run without --deterministic-mode": not args.deterministic_mode,
        "flash-attn-4, which is not installed": is_installed(),
    }
    lacking = next((need for need, is_met in needs.items() if not is_met), None)
    if args.encoder_attention == FLASH4 and lacking:
        raise UserError(f"--encoder-attention flash4 needs {lacking}; te does not")
    if args.encoder_attention is None:
        is_on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
        args.encoder_attention = FLASH4 if is_on_hopper and not lacking else ENGINE


def check_encoder_attention(args: Namespace, channels: int) -> None:
    """Run flash-attn-4 on short sequences, if it is chosen.

    Args:
        channels: of a head.

    Raises:
        UserError: it does not run here, or is wrong.
    """
    if args.encoder_attention != FLASH4:
        return
    try:
        with torch.cuda.device(args.local_rank):
            check_kernel(2, channels, args.params_dtype)
    except Exception as error:  # whatever its compiler raises
        raise UserError(
            f"--encoder-attention flash4: {error}; --encoder-attention te takes Transformer "
            "Engine's attention"
        ) from error
