# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rules for Megatron's options in training programs of MIMO models."""

from importlib.util import find_spec
from signal import SIGTERM
from typing import Any

from examples.mimo.common.layout import option_of
from examples.mimo.common.refused_options import DATA, GRAPHS, ONE_MODEL, WEIGHTS
from examples.mimo.common.rules import (
    ENGINE,
    ON_ENGINE,
    OTHER,
    Rule,
    has,
    not_local,
    on_cpu,
    refused,
    with_graphs,
)
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

POSITIONS = "a hybrid model has none, learned_absolute, rope and yarn"
ADAM_TYPES = {"main_grads": "bf16", "main_params": "fp16", "exp_avg": "bf16", "exp_avg_sq": "bf16"}
"""Numbers that only the precision-aware optimizer keeps in other types than fp32, and one such."""
LOCAL = "--device cuda --transformer-impl local"
WEIGHT_SHARDS = {
    "--tensor-parallel-num-weight-shards": "tensor_model_parallel_size",
    "--expert-tensor-parallel-num-weight-shards": "expert_tensor_parallel_size",
}
"""Options that must have the value of an argument, which is their default."""


def _only_predicts(run: Any) -> bool:
    return bool(getattr(run.args, "dry_run", 0) or getattr(run.args, "plan", 0))


def _without(options: str, package: str, what: str) -> Rule:
    """Refuse options that need a package which is not installed here, unless nothing is run."""

    def is_broken(run: Any) -> bool:
        return has(run, options) and not _only_predicts(run) and find_spec(package) is None

    return Rule(options, is_broken, f"{what} is not installed", example=None)


OF_MEGATRON = [
    on_cpu("--use-nccl-ub"),
    on_cpu("--moe-token-dispatcher-type flex"),
    on_cpu(
        "--transformer-impl other than local",
        "Transformer Engine's layers need a GPU: --device cuda",
        "--transformer-impl transformer_engine",
    ),
    not_local("--window-size", "--window-size 4,0"),
    refused(
        "--softmax-type learnable",
        "no rule gives its offsets initial values, and the gradient norm would have those of one "
        "TP rank alone",
    ),
    not_local("--softmax-type other than vanilla", "--softmax-type off-by-one"),
    not_local("--qk-layernorm"),
    not_local("--moe-latent-size", "--moe-latent-size 16"),
    Rule(
        "--cp-comm-type",
        lambda r: (
            has(r, "--transformer-impl local") and set(r.args.cp_comm_type) - {"p2p", "all_gather"}
        ),
        ENGINE,
        example="--cp-comm-type a2a",
    ),
    _without("--use-precision-aware-optimizer", "transformer_engine", "Transformer Engine"),
    _without("--enable-ft-package", "nvidia_resiliency_ext", "nvidia-resiliency-ext"),
    _without("--log-straggler with --device cuda", "pynvml", "nvidia-ml-py"),
    _without("--wandb-project", "wandb", "wandb"),
    *(
        Rule(
            f"{option_of(f'{name}_dtype')} other than fp32",
            lambda r, name=name: (
                not r.args.use_precision_aware_optimizer
                and "32" not in str(getattr(r.args, f"{name}_dtype"))
            ),
            "it needs --use-precision-aware-optimizer",
            example=f"{option_of(f'{name}_dtype')} {other}",
        )
        for name, other in ADAM_TYPES.items()
    ),
    refused(
        "--transformer-impl inference_optimized",
        "its layers are not trained",
        example="--device cuda --bf16 --transformer-impl inference_optimized",
    ),
    Rule("--no-initialization", lambda r: not r.args.perform_initialization, WEIGHTS),
    Rule(
        "--fp8-recipe delayed with a pipeline",
        lambda r: (
            has(r, "--fp8-format with --fp8-recipe delayed")
            and (r.layouts.non_colocated or r.layouts.language.pp > 1)
        ),
        "without groups of Megatron's own, its maxima are taken over all ranks, and those of "
        "another stage have other layers",
        "choose tensorwise, blockwise or mxfp8",
        f"{ON_ENGINE} --bf16 --fp8-format hybrid --fp8-recipe delayed --language pp=2",
    ),
    not_local("--fp8-format", f"{LOCAL} --bf16 --fp8-format hybrid"),
    not_local("--fp4-format", f"{LOCAL} --bf16 --fp4-format e2m1"),
    refused(
        "--moe-layer-freq other than 1",
        "--hybrid-layer-pattern gives the layers",
        example="--moe-layer-freq 2",
    ),
    refused("--dataloader-type other than external", DATA, example="--dataloader-type cyclic"),
    refused("--cuda-graph-impl full_iteration", GRAPHS),
    refused("--cuda-graph-impl transformer_engine", GRAPHS),
    on_cpu(
        "--num-distributed-optimizer-instances other than 1 with --overlap-grad-reduce",
        "a GPU's stream orders the sums within and between instances, and a CPU has none",
        "--num-distributed-optimizer-instances 2 --overlap-grad-reduce",
    ),
    not_local("--cuda-graph-impl local", f"{LOCAL} --cuda-graph-impl local"),
    with_graphs(
        "--step-batch-size-schedule",
        "steps run graphs of one size",
        "--step-batch-size-schedule 0:32",
    ),
    refused(
        "--optimizer other than adam",
        "only adam has a state that can be saved for any layout",
        example="--optimizer muon",
    ),
    refused(
        "--ckpt-format other than torch_dist",
        "only torch_dist saves parameters by name, for any layout",
        example="--ckpt-format torch",
    ),
    Rule(
        "--cross-entropy-loss-fusion without --bf16",
        lambda r: r.args.cross_entropy_loss_fusion and not r.args.bf16,
        "it rounds the gradients of the logits to bfloat16",
        example="--cross-entropy-loss-fusion --device cuda --fp16",
    ),
    refused(
        "--optimizer-cpu-offload with --async-save",
        "the writing process would get the host's state through /dev/shm",
        example=f"{LOCAL} --optimizer-cpu-offload --use-precision-aware-optimizer --async-save "
        "--dry-run 1",
    ),
    Rule(
        "--exit-signal SIGTERM with --async-save",
        lambda r: (
            has(r, "--exit-signal-handler with --async-save") and r.args.exit_signal == SIGTERM
        ),
        "it ends the process that writes the last save, too",
        "add --exit-signal SIGUSR1",
        f"{LOCAL} --exit-signal SIGTERM --exit-signal-handler --async-save",
    ),
    refused("--position-embedding-type relative", POSITIONS),
    refused("--position-embedding-type mrope", POSITIONS),
    refused("--apply-layernorm-1p", "norms begin with weights of one, to which it would add one"),
    refused(
        "--moe-apply-probs-on-input with --moe-router-topk other than 1",
        "the experts of a token would each get a part of it",
        example="--moe-apply-probs-on-input",
    ),
    Rule(
        "--moe-router-load-balancing-type sinkhorn",
        lambda r: "sinkhorn" in r.args.moe_router_load_balancing_type,
        "it balances the tokens of a rank's microbatch, so that the layout decides their experts",
    ),
    Rule(
        "--moe-router-load-balancing-type quantile_balancing",
        lambda r: "quantile_balancing" in r.args.moe_router_load_balancing_type,
        "no rule gives the initial values of its thresholds",
    ),
    Rule(
        "--quick-geglu",
        lambda r: r.args.quick_geglu and (r.args.squared_relu or r.args.swiglu),
        "--squared-relu or --swiglu would take its place",
        "add --no-squared-relu",
    ),
    *(
        Rule(
            option,
            lambda r, o=option, size=size: has(r, f"{o} {OTHER}{getattr(r.args, size)}"),
            ONE_MODEL,
            example=f"{option} 4",
        )
        for option, size in WEIGHT_SHARDS.items()
    ),
]
"""Rules for Megatron's options in every program, in the order in which they are checked."""

IN_OTHERS = [
    refused(
        "--cuda-graph-impl local", "only pretrain_nemotron_vlm.py prepares its modules for graphs"
    ),
    refused(
        "--log-straggler", "its detector times parts of pretrain_nemotron_vlm.py's steps alone"
    ),
    Rule(
        "--mtp-num-layers",
        lambda r: (
            r.args.mtp_num_layers or Symbols.MTP_SEPARATOR in (r.args.hybrid_layer_pattern or "")
        ),
        "only pretrain_nemotron_vlm.py has shown its loss to be the same in every layout",
    ),
]
"""Rules of other programs than pretrain_nemotron_vlm.py."""
