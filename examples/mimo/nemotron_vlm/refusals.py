# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of Megatron that modules with grids of their own do not take, and why.

Those that are refused for what this program itself does are in ``program_refusals.py``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import NamedTuple

from examples.mimo.nemotron_vlm.errors import UserError


class Refusal(NamedTuple):
    """An option, when it is refused, and the reason."""

    option: str
    applies: Callable[[Namespace], object]
    reason: str


def given(option: str, reason: str) -> Refusal:
    """Refuse an option wherever it is set."""
    name = option.removeprefix("--").replace("-", "_")
    # Megatron removes some deprecated options once it has read them.
    return Refusal(option, lambda args: getattr(args, name, None), reason)


def _on_cpu(option: str) -> Refusal:
    name = option.removeprefix("--").replace("-", "_")
    return Refusal(
        option,
        lambda args: args.device == "cpu" and getattr(args, name),
        "it needs a GPU: --device cuda",
    )


def _each(reason: str, options: Iterable[str]) -> list[Refusal]:
    return [given(option, reason) for option in options]


def _not_local(option: str, applies: Callable[[Namespace], object]) -> Refusal:
    return Refusal(
        option,
        lambda args: args.transformer_impl == "local" and applies(args),
        "it needs --transformer-impl transformer_engine",
    )


ONE_MODEL = "it knows one model on one grid, and this one has a grid for each module"
NAMED_WEIGHTS = (
    "initial weights follow from the seed and each parameter's name, so that no layout changes them"
)
OWN_LOOP = "it is another training loop"
GROUPS = "process groups are made from the modules' grids"
DATA = "--data gives the samples"
COMMAND_LINE = "options come from the command line"
SCHEDULE = "no schedule of these modules does that work later"
GRAPHS = "a graph is captured for one model, and the encoder's shapes differ from batch to batch"

REFUSALS = [
    *_each(
        ONE_MODEL,
        (
            "--use-megatron-fsdp",
            "--use-torch-fsdp2",
            "--log-params-norm",
            "--check-weight-hash-across-dp-replicas-interval",
            "--gpu-sniff-test-interval",
            "--save-wgrads-interval",
            "--save-dgrads-interval",
            "--save-params-interval",
            "--save-activations-interval",
            "--save-tokens-per-expert-interval",
            "--moe-use-upcycling",
            "--overlap-param-gather-with-optimizer-step",
            "--reuse-grad-buf-for-mxfp8-param-ag",
            "--qk-clip",
            "--log-max-attention-logit",
            "--hybrid-context-parallel",
            "--hierarchical-context-parallel-sizes",
            "--use-tp-pp-dp-mapping",
            "--tp-comm-overlap",
            "--iterations-to-skip",
            "--result-rejected-tracker-filename",
            "--logits-save-dir",
            "--logits-load-dir",
            "--dump-param-to-param-group-map",
        ),
    ),
    *_each(
        GROUPS,
        (
            "--nccl-communicator-config-path",
            "--use-sharp",
            "--sharp-enabled-group",
            "--high-priority-stream-groups",
            "--create-all-gather-group",
        ),
    ),
    *_each(
        NAMED_WEIGHTS,
        (
            "--data-parallel-random-init",
            "--init-method-xavier-uniform",
            "--init-model-with-meta-device",
            "--embedding-init-method-std",
            "--use-mup",
        ),
    ),
    *_each(
        OWN_LOOP,
        (
            "--perform-rl-step",
            "--vision-pretraining",
            "--inprocess-restart",
            "--adlr-autoresume",
        ),
    ),
    *_each(
        DATA,
        (
            "--sft",
            "--data-path",
            "--train-data-path",
            "--mock-data",
            "--data-args-path",
            "--per-split-data-args-path",
            "--valid-data-path",
            "--test-data-path",
            "--split",
            "--reset-position-ids",
            "--reset-attention-mask",
            "--eod-mask-loss",
            "--dataloader-inter-document-masking",
            "--phase-transition-iterations",
            "--decoder-seq-length",
            "--fim-data",
        ),
    ),
    *_each(
        SCHEDULE,
        (
            "--overlap-moe-expert-parallel-comm",
            "--delay-wgrad-compute",
            "--defer-embedding-wgrad-compute",
        ),
    ),
    *_each(
        GRAPHS,
        (
            "--enable-cuda-graph",
            "--external-cuda-graph",
        ),
    ),
    *_each(
        COMMAND_LINE,
        (
            "--yaml-cfg",
            "--use-checkpoint-args",
            "--use-mp-args-from-checkpoint-args",
        ),
    ),
    given("--ckpt-convert-format", "checkpoints are of one format, torch_dist"),
    given(
        "--load-main-params-from-ckpt",
        "weights that the optimizer keeps are loaded with its state, or made of the model's",
    ),
    given("--use-rope-scaling", "a hybrid model does not scale its rotary embeddings"),
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
    given("--full-validation", "it counts batches over groups that this model does not make"),
    given("--multiple-validation-sets", "--data has one held-out set"),
    given("--ckpt-fully-parallel-load", "ranks exchange what they read in one module's groups"),
    given("--ddp-average-in-collective", "gradients are sums over tokens, divided once"),
    given("--rampup-batch-size", "Megatron's loop reads --step-batch-size-schedule"),
    Refusal(
        "--moe-apply-probs-on-input",
        lambda args: args.moe_apply_probs_on_input and args.moe_router_topk > 1,
        "it needs --moe-router-topk 1",
    ),
    given("--spec", "--transformer-impl chooses the layers"),
    given("--freeze-all-layers", "--freeze names the parts"),
    given("--mtp-num-layers", "it looks up the embeddings of later tokens, and images have none"),
    given("--num-layers-per-virtual-pipeline-stage", "--language vpp=… gives virtual stages"),
    given("--num-virtual-stages-per-pipeline-rank", "--language vpp=… gives virtual stages"),
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
            "--moe-shared-expert-overlap",
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
