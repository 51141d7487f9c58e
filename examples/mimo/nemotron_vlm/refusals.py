# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of Megatron that this program does not take, and why.

Those that are refused wherever they are set are in ``refused_names.py``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NamedTuple

from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.refused_names import DATA, GRAPHS, ONE_MODEL, REFUSED_NAMES

Condition = Callable[[Namespace], object]


class Refusal(NamedTuple):
    """An option, when it is refused, and the reason."""

    option: str
    applies: Condition
    reason: str


def _is_set(option: str) -> Condition:
    name = option.removeprefix("--").replace("-", "_")
    # Megatron removes some deprecated options once it has read them.
    return lambda args: getattr(args, name, None)


def _given(option: str, reason: str) -> Refusal:
    """Refuse an option wherever it is set."""
    return Refusal(option, _is_set(option), reason)


def _on_cpu(option: str, applies: Condition) -> Refusal:
    return Refusal(
        option,
        lambda args: args.device == "cpu" and applies(args),
        "it needs a GPU: --device cuda",
    )


def _not_local(option: str, applies: Condition) -> Refusal:
    return Refusal(
        option,
        lambda args: args.transformer_impl == "local" and applies(args),
        "it needs --transformer-impl transformer_engine",
    )


REFUSALS = [
    *(_given(option, reason) for reason, options in REFUSED_NAMES.items() for option in options),
    _given("--ckpt-convert-format", "checkpoints are of one format, torch_dist"),
    _given(
        "--load-main-params-from-ckpt",
        "weights that the optimizer keeps are loaded with its state, or made of the model's",
    ),
    _given("--use-rope-scaling", "a hybrid model does not scale its rotary embeddings"),
    Refusal(
        "--position-embedding-type",
        lambda args: args.position_embedding_type in ("relative", "mrope"),
        "a hybrid model has none, learned_absolute, rope and yarn",
    ),
    Refusal(
        "--dataloader-type",
        lambda args: args.dataloader_type not in (None, "external"),
        DATA,
    ),
    Refusal(
        "--apply-layernorm-1p",
        lambda args: args.layernorm_zero_centered_gamma,
        "norms begin with weights of one, to which it would add one",
    ),
    _not_local("--window-size", lambda args: args.window_size is not None),
    _not_local("--softmax-type", lambda args: args.softmax_type != "vanilla"),
    _not_local("--qk-layernorm", lambda args: args.qk_layernorm),
    _given("--full-validation", "it counts batches over groups that this model does not make"),
    _given("--multiple-validation-sets", "--data has one held-out set"),
    _given("--ckpt-fully-parallel-load", "ranks exchange what they read in one module's groups"),
    _given("--ddp-average-in-collective", "gradients are sums over tokens, divided once"),
    _given("--rampup-batch-size", "Megatron's loop reads --step-batch-size-schedule"),
    Refusal(
        "--moe-apply-probs-on-input",
        lambda args: args.moe_apply_probs_on_input and args.moe_router_topk > 1,
        "it needs --moe-router-topk 1",
    ),
    _given("--spec", "--transformer-impl chooses the layers"),
    _given("--freeze-all-layers", "--freeze names the parts"),
    _given("--mtp-num-layers", "it looks up the embeddings of later tokens, and images have none"),
    _given("--num-layers-per-virtual-pipeline-stage", "--language vpp=… gives virtual stages"),
    _given("--num-virtual-stages-per-pipeline-rank", "--language vpp=… gives virtual stages"),
    Refusal(
        "--hybrid-layer-pattern with /",
        lambda args: "/" in args.hybrid_layer_pattern,
        "multi-token prediction looks up embeddings of later tokens, and images have none",
    ),
    Refusal(
        "--cuda-graph-impl",
        lambda args: args.cuda_graph_impl != "none",
        GRAPHS,
    ),
    Refusal(
        "--optimizer",
        lambda args: args.optimizer != "adam",
        "only adam has a state that can be saved for any layout",
    ),
    Refusal(
        "--ckpt-format",
        lambda args: args.ckpt_format != "torch_dist",
        "only torch_dist saves parameters by name, for any layout",
    ),
    Refusal(
        "--non-persistent-ckpt-type global",
        lambda args: args.non_persistent_ckpt_type == "global",
        "the newest checkpoint is looked for, and checked, in --load alone",
    ),
    Refusal(
        "--non-persistent-ckpt-type local",
        lambda args: args.non_persistent_ckpt_type == "local",
        "it does not save fully reshardable state",
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        lambda args: (
            args.tensor_parallel_num_weight_shards not in (None, args.tensor_model_parallel_size)
        ),
        ONE_MODEL,
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        lambda args: (
            args.expert_tensor_parallel_num_weight_shards
            not in (None, args.expert_tensor_parallel_size)
        ),
        ONE_MODEL,
    ),
    Refusal(
        "--transformer-impl",
        lambda args: args.device == "cpu" and args.transformer_impl != "local",
        "Transformer Engine's layers need a GPU: --device cuda",
    ),
    _on_cpu(
        "--moe-token-dispatcher-type flex", lambda args: args.moe_token_dispatcher_type == "flex"
    ),
    _on_cpu("--fp8-format", lambda args: args.fp8),
    _on_cpu("--fp4-format", lambda args: args.fp4),
    *(
        _on_cpu(option, _is_set(option))
        for option in (
            "--async-save",
            "--moe-grouped-gemm",
            "--moe-permute-fusion",
            "--moe-router-fusion",
            "--optimizer-cuda-graph",
            "--use-precision-aware-optimizer",
            "--optimizer-cpu-offload",
            "--fine-grained-activation-offloading",
            "--moe-shared-expert-overlap",
        )
    ),
]

TURNED_BACK = [
    Refusal(
        "--no-calculate-per-token-loss",
        lambda args: not args.calculate_per_token_loss,
        "ranks have answers of different lengths, and a mean of their means depends on the layout",
    ),
    Refusal(
        "--no-dist-ckpt-optim-fully-reshardable",
        lambda args: args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable,
        "an optimizer of several modules is saved so that any layout can load it, and no other way",
    ),
]
"""Defaults of ``pretrain_nemotron_vlm.py`` that are turned back; other programs have other ones."""


def refuse(args: Namespace, refusals: Sequence[Refusal] = REFUSALS) -> None:
    """Refuse what does not go with this program.

    Args:
        args: as parsed, or as validated: Megatron then has set some by others.
        refusals: that hold.

    Raises:
        UserError: with the first such option and the reason.
    """
    for option, applies, reason in refusals:
        if applies(args):
            raise UserError(f"{option} is not taken here: {reason}")
