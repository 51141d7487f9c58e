# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A script as Megatron's users write them for GPUs: `megatron.training.pretrain` on a small GPT.

It knows nothing of the CPU runtime, and names CUDA and NCCL as such scripts do.
"""

import torch

import megatron.core.datasets.utils
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args


class Counting(torch.utils.data.Dataset):
    """Sample i counts upwards from i, modulo the vocabulary: each next token can be learnt."""

    def __init__(self, samples: int, length: int, vocabulary: int):
        self.samples, self.length, self.vocabulary = samples, length, vocabulary

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = torch.arange(index, index + self.length + 1) % self.vocabulary
        return {"tokens": text[:-1], "labels": text[1:]}


def datasets(sizes):
    args = get_args()
    return [Counting(size or 1, args.seq_length, args.vocab_size) for size in sizes]


datasets.is_distributed = True


def model(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def mean_loss(losses: torch.Tensor):
    total = losses.float().sum()
    tokens = torch.tensor(losses.numel(), dtype=torch.int, device="cuda")
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
    positions = torch.arange(batch["tokens"].shape[1], device=torch.cuda.current_device())
    losses = model(batch["tokens"], positions[None], None, labels=batch["labels"])
    return losses, mean_loss


if __name__ == "__main__":
    # The PyPI package has no Makefile for the index builder of .bin datasets, which are not used.
    megatron.core.datasets.utils.compile_helpers = lambda: None
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=model,
    )
