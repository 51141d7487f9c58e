# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's options that do nothing in this program, which its parser refuses by name."""

import re
from argparse import SUPPRESS, ArgumentParser

from examples.mimo.common.refused_options import WHEREVER_SET

OTHER_PROGRAMS = {"rl", "biencoder", "vision", "Logits Distillation", "inference", "sft", "mla"}
OTHER_PROGRAMS |= {"In-process restart", "data and dataloader", "tokenizer"}
"""Groups of Megatron's parser whose options do nothing here, except those in `TAKEN`."""

TAKEN = """--seq-length --num-workers --vocab-size --tokenizer-model
    --cuda-graph-modules --cuda-graph-scope --rotary-scaling-factor --mscale --mscale-all-dim"""

UNREAD = r"""--(en|de)coder-num-layers|--onnx-safe|--relative-attention-.*|--bert-no-binary-head|
    --dist-ckpt-save-pre-mcore-014|--enable-msc|--exit-signal-handler-for-dataloader|--sgd-.*|
    --muon-.*|--lion-.*|--.*fsdp.*|--(outer-dp|data-parallel)-sharding-strategy|
    --no-gradient-reduce-div-fusion|--suggested-communication-unit-size|
    --keep-fp8-transpose-cache|--enable-full-sharding-in-hsdp|--openai-gelu"""
"""Patterns of more options that no code reads, or that only refused options need."""


def idle_options(parser: ArgumentParser) -> dict[str, str]:
    """Return the names of Megatron's options that would do nothing or are refused wherever they
    are set, and why; the parser's help leaves them out."""
    known, unread = parser._option_string_actions, re.compile(re.sub(r"\s", "", UNREAD))
    groups = [group for group in parser._action_groups if group.title in OTHER_PROGRAMS]
    found = {name for group in groups for a in group._group_actions for name in a.option_strings}
    found |= {name for name in known if unread.fullmatch(name)}
    why = dict.fromkeys(found - {*TAKEN.split()}, "nothing in this program reads it")
    why |= {name: reason for reason, names in WHEREVER_SET.items() for name in names.split()}
    for name in why.keys() & known.keys():
        known[name].help = SUPPRESS
    return why
