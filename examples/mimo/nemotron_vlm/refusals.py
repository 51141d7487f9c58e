# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of Megatron that this program does not take, and why."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from examples.mimo.nemotron_vlm.errors import UserError


class Refusal(NamedTuple):
    """An option, when it is refused, and the reason."""

    option: str
    applies: Callable[[Namespace], object]
    reason: str


def _given(option: str, reason: str) -> Refusal:
    name = option.removeprefix("--").replace("-", "_")
    return Refusal(option, lambda args: getattr(args, name), reason)


def _on_cpu(option: str) -> Refusal:
    name = option.removeprefix("--").replace("-", "_")
    return Refusal(
        option,
        lambda args: args.device == "cpu" and getattr(args, name),
        "it needs a GPU: --device cuda",
    )


ONE_MODEL = "it knows one model on one grid, and this one has a grid for each module"
NAMED_WEIGHTS = (
    "initial weights follow from the seed and each parameter's name, so that no layout changes them"
)
OWN_LOOP = "it is another training loop"

REFUSALS = [
    _given("--use-megatron-fsdp", ONE_MODEL),
    _given("--use-torch-fsdp2", ONE_MODEL),
    _given("--log-params-norm", ONE_MODEL),
    _given("--check-weight-hash-across-dp-replicas-interval", ONE_MODEL),
    _given("--gpu-sniff-test-interval", ONE_MODEL),
    _given("--save-wgrads-interval", ONE_MODEL),
    _given("--save-dgrads-interval", ONE_MODEL),
    _given("--save-params-interval", ONE_MODEL),
    _given("--save-activations-interval", ONE_MODEL),
    _given("--save-tokens-per-expert-interval", ONE_MODEL),
    _given("--moe-use-upcycling", ONE_MODEL),
    _given("--overlap-param-gather-with-optimizer-step", ONE_MODEL),
    _given("--reuse-grad-buf-for-mxfp8-param-ag", ONE_MODEL),
    _given("--qk-clip", ONE_MODEL),
    _given("--log-max-attention-logit", ONE_MODEL),
    _given("--hybrid-context-parallel", ONE_MODEL),
    _given("--hierarchical-context-parallel-sizes", ONE_MODEL),
    _given("--use-tp-pp-dp-mapping", ONE_MODEL),
    _given("--tp-comm-overlap", ONE_MODEL),
    _given("--full-validation", "it counts batches over groups that this model does not make"),
    _given("--multiple-validation-sets", "--data has one held-out set"),
    _given("--data-parallel-random-init", NAMED_WEIGHTS),
    _given("--init-method-xavier-uniform", NAMED_WEIGHTS),
    _given("--init-model-with-meta-device", NAMED_WEIGHTS),
    _given("--iterations-to-skip", ONE_MODEL),
    _given("--ckpt-fully-parallel-load", "ranks exchange what they read in one module's groups"),
    _given("--ddp-average-in-collective", "gradients are sums over tokens, divided once"),
    _given("--rampup-batch-size", "Megatron's loop reads --step-batch-size-schedule"),
    Refusal(
        "--moe-apply-probs-on-input",
        lambda args: args.moe_apply_probs_on_input and args.moe_router_topk > 1,
        "it needs --moe-router-topk 1",
    ),
    Refusal(
        "--qk-layernorm",
        lambda args: args.qk_layernorm and args.transformer_impl == "local",
        "it needs --transformer-impl transformer_engine",
    ),
    _given("--perform-rl-step", OWN_LOOP),
    _given("--vision-pretraining", OWN_LOOP),
    _given("--yaml-cfg", "options come from the command line"),
    _given("--use-checkpoint-args", "options come from the command line"),
    _given("--spec", "--transformer-impl chooses the layers"),
    _given("--freeze-all-layers", "--freeze names the parts"),
    _given("--mtp-num-layers", "it looks up the embeddings of later tokens, and images have none"),
    _given("--num-layers-per-virtual-pipeline-stage", "--language vpp=… gives virtual stages"),
    _given("--num-virtual-stages-per-pipeline-rank", "--language vpp=… gives virtual stages"),
    _given("--sft", "--data gives the samples"),
    _given("--data-path", "--data gives the samples"),
    _given("--train-data-path", "--data gives the samples"),
    Refusal(
        "--hybrid-layer-pattern with /",
        lambda args: "/" in args.hybrid_layer_pattern,
        "multi-token prediction looks up embeddings of later tokens, and images have none",
    ),
    Refusal(
        "--cuda-graph-impl",
        lambda args: args.cuda_graph_impl != "none",
        "a graph is captured for one model, and the encoder's shapes differ from batch to batch",
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
        "--non-persistent-ckpt-type local",
        lambda args: args.non_persistent_ckpt_type == "local",
        "it does not save fully reshardable state",
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        lambda args: args.tensor_parallel_num_weight_shards,
        ONE_MODEL,
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        lambda args: args.expert_tensor_parallel_num_weight_shards,
        ONE_MODEL,
    ),
    Refusal(
        "--transformer-impl",
        lambda args: args.device == "cpu" and args.transformer_impl != "local",
        "Transformer Engine's layers need a GPU: --device cuda",
    ),
    Refusal(
        "--moe-token-dispatcher-type flex",
        lambda args: args.device == "cpu" and args.moe_token_dispatcher_type == "flex",
        "it needs a GPU: --device cuda",
    ),
    Refusal(
        "--fp8-format",
        lambda args: args.device == "cpu" and args.fp8,
        "it needs a GPU: --device cuda",
    ),
    Refusal(
        "--fp4-format",
        lambda args: args.device == "cpu" and args.fp4,
        "it needs a GPU: --device cuda",
    ),
    *map(
        _on_cpu,
        (
            "--async-save",
            "--moe-grouped-gemm",
            "--moe-permute-fusion",
            "--moe-router-fusion",
            "--optimizer-cuda-graph",
            "--use-precision-aware-optimizer",
            "--optimizer-cpu-offload",
            "--fine-grained-activation-offloading",
            "--delay-wgrad-compute",
            "--moe-shared-expert-overlap",
            "--overlap-moe-expert-parallel-comm",
        ),
    ),
]


def refuse(args: Namespace) -> None:
    """Refuse what does not go with this program.

    Args:
        args: as parsed, before Megatron has validated them.

    Raises:
        UserError: with the first such option and the reason.
    """
    for option, applies, reason in REFUSALS:
        if applies(args):
            raise UserError(f"{option} is not taken here: {reason}")
