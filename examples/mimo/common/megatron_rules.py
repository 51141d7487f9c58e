# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rules for Megatron's options in training programs of MIMO models."""

import re
from argparse import SUPPRESS, ArgumentParser
from signal import SIGTERM

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

ONE_MODEL = "it knows one model on one grid, and this one has a grid for each module"
DATA = "--data gives the samples"
GRAPHS = "only --cuda-graph-impl local captures layers of several modules"
WEIGHTS = (
    "initial weights follow from the seed and each parameter's name, so that no layout changes them"
)

WHEREVER_SET = {
    ONE_MODEL: """
        --use-megatron-fsdp --use-torch-fsdp2 --log-params-norm --qk-clip --log-max-attention-logit
        --check-weight-hash-across-dp-replicas-interval --gpu-sniff-test-interval
        --moe-use-upcycling --save-wgrads-interval --save-dgrads-interval --save-params-interval
        --save-activations-interval --save-tokens-per-expert-interval --use-tp-pp-dp-mapping
        --overlap-param-gather-with-optimizer-step --reuse-grad-buf-for-mxfp8-param-ag
        --hybrid-context-parallel --hierarchical-context-parallel-sizes --tp-comm-overlap
        --iterations-to-skip --result-rejected-tracker-filename --logits-save-dir --logits-load-dir
        --dump-param-to-param-group-map --config-logger-dir --fsdp-manual-registration
        --tp-only-amax-red""",
    "--hybrid-layer-pattern gives the layers": """
        --linear-attention-freq --experimental-attention-variant
        --heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json""",
    "no layer of a hybrid model reads it": """
        --cpu-offloading-num-layers --apply-residual-connection-post-layernorm
        --use-grouped-gemm-for-dense-mlp""",
    "--recompute-granularity has taken its place": "--checkpoint-activations",
    "it calls pretrain() again, before which groups are made; torchrun --max-restarts works": """
        --inprocess-restart""",
    "it asks a scheduler of NVIDIA's own cluster": "--adlr-autoresume",
    "it looks for the layers of one model": """
        --moe-expert-rank-capacity-factor --moe-paged-stash""",
    "--optimizer-cpu-offload keeps Adam's state on the host, and steps on the GPU": """
        --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads
        --no-pin-cpu-params""",
    "the norm of all modules' gradients is read on the host in each step": "--optimizer-cuda-graph",
    "it exchanges tokens in Megatron's own TP group, not its module's": """
        --use-grouped-gemm-for-shared-expert""",
    "tensor parallelism brings sequence parallelism, which all-reduces no activations": """
        --symmetric-ar-type""",
    "process groups are made from the modules' grids": """
        --nccl-communicator-config-path --use-sharp --sharp-enabled-group --lazy-mpu-init
        --high-priority-stream-groups --create-all-gather-group --fake-process-group
        --pipeline-model-parallel-comm-backend""",
    WEIGHTS: """
        --data-parallel-random-init --init-method-xavier-uniform --init-model-with-meta-device
        --embedding-init-method-std --use-mup --fp8-param-gather --fp4-param-gather""",
    "no layer here has latent keys and values": "--multi-latent-attention",
    "it is another training loop": "--perform-rl-step --vision-pretraining",
    DATA: """
        --sft --data-path --train-data-path --mock-data --data-args-path --per-split-data-args-path
        --valid-data-path --test-data-path --split --reset-position-ids --reset-attention-mask
        --eod-mask-loss --dataloader-inter-document-masking --phase-transition-iterations
        --decoder-seq-length --fim-data --save-tokenizer-assets""",
    "no schedule of these modules does that work later": """
        --overlap-moe-expert-parallel-comm --delay-wgrad-compute --defer-embedding-wgrad-compute""",
    GRAPHS: "--enable-cuda-graph --external-cuda-graph",
    "options come from the command line": """
        --yaml-cfg --use-checkpoint-args --use-mp-args-from-checkpoint-args""",
    "checkpoints are of one format, torch_dist": "--ckpt-convert-format",
    "weights that the optimizer keeps are loaded with its state, or made of the model's": """
        --load-main-params-from-ckpt""",
    "a hybrid model does not scale its rotary embeddings": "--use-rope-scaling",
    "it counts batches over groups that this model does not make": "--full-validation",
    "--data has one held-out set": "--multiple-validation-sets --validation-set-names",
    "ranks exchange what they read in one module's groups": "--ckpt-fully-parallel-load",
    "gradients are sums over tokens, divided once": "--ddp-average-in-collective",
    "Megatron's loop reads --step-batch-size-schedule": "--rampup-batch-size",
    "--transformer-impl chooses the layers": "--spec",
    "--freeze names the parts": "--freeze-all-layers",
    "gradients of all parts are clipped by one norm": "--mtp-detach-heads",
    "a hybrid model has all layers of later tokens on its last stage": "--mtp-standalone --mtp-hsm",
    "copies between checkpoints were dropped; --save-interval with --save-retain-interval keeps "
    "the newest and every N-th checkpoint": """
        --non-persistent-ckpt-type --non-persistent-save-interval --non-persistent-local-ckpt-dir
        --non-persistent-global-ckpt-dir --replication --replication-jump""",
    "--language vpp=… gives virtual stages": """
        --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank""",
}
"""Options that are refused wherever they are set, by reason."""

NEEDS_GPU = """
    --async-save --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion
    --use-precision-aware-optimizer --optimizer-cpu-offload --fine-grained-activation-offloading
    --moe-shared-expert-overlap --record-memory-history --log-memory-to-tensorboard
    --log-device-memory-used"""

FAMILIES = [
    *(refused(option, why) for why, names in WHEREVER_SET.items() for option in names.split()),
    *map(on_cpu, NEEDS_GPU.split()),
]
"""Rules whose options a test walks by Megatron's parser, with a value of each."""

POSITIONS = "a hybrid model has none, learned_absolute, rope and yarn"
LOCAL = "--device cuda --transformer-impl local"
WEIGHT_SHARDS = {
    "--tensor-parallel-num-weight-shards": "tensor_model_parallel_size",
    "--expert-tensor-parallel-num-weight-shards": "expert_tensor_parallel_size",
}
"""Options that must have the value of an argument, which is their default."""


OF_MEGATRON = [
    on_cpu("--use-nccl-ub"),
    on_cpu("--moe-token-dispatcher-type flex"),
    Rule(
        "--recompute-modules with layernorm",
        lambda r: (
            has(r, "--device cpu with --recompute-granularity selective")
            and "layernorm" in (r.args.recompute_modules or ())
        ),
        "it needs Transformer Engine, which no CPU rank sees: --device cuda",
        example="--recompute-granularity selective --recompute-modules layernorm",
    ),
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
    not_local("--fp32-residual-connection", f"{LOCAL} --bf16 --fp32-residual-connection"),
    not_local("--moe-latent-size", "--moe-latent-size 16"),
    Rule(
        "--cp-comm-type",
        lambda r: (
            has(r, "--transformer-impl local") and set(r.args.cp_comm_type) - {"p2p", "all_gather"}
        ),
        ENGINE,
        example="--cp-comm-type a2a",
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

OTHER_PROGRAMS = {"rl", "biencoder", "vision", "Logits Distillation", "inference", "sft", "mla"}
OTHER_PROGRAMS |= {"In-process restart", "data and dataloader", "tokenizer"}
"""Groups of Megatron's parser whose options do nothing here, except those in `TAKEN`."""

TAKEN = """--seq-length --num-workers --vocab-size --tokenizer-model
    --cuda-graph-modules --cuda-graph-scope --rotary-scaling-factor --mscale --mscale-all-dim"""

UNREAD = r"""--(en|de)coder-num-layers|--onnx-safe|--relative-attention-.*|--bert-no-binary-head|
    --dist-ckpt-save-pre-mcore-014|--enable-msc|--exit-signal-handler-for-dataloader|--sgd-.*|
    --muon-.*|--lion-.*|--.*fsdp.*|--(outer-dp|data-parallel)-sharding-strategy|
    --no-gradient-reduce-div-fusion|--suggested-communication-unit-size|
    --keep-fp8-transpose-cache|--enable-full-sharding-in-hsdp|--openai-gelu|
    --(no-)?tp-comm-.*|--qk-clip-.*|--(no-)?dsa-.*|--mup-.*|--cpu-offloading-retain-.*|
    --(use-)?kitchen-attention.*|--wgrad-deferral-limit|--max-seqlen-per-dp-cp-rank|
    --moe-upcycling-granularity|--moe-paged-stash-.*|--moe-router-quantile-.*|
    --adlr-autoresume-interval|--non-persistent-.*|--replication-factor|--ckpt-convert-.*|
    --ckpt-fully-parallel-load-.*|--inference-(?!cuda|rng).*|--nccl-all-reduce-for-prefill|
    --mlp-chunks-for-prefill|--flash-decode|--rope-scaling-factor|--mrope-section|
    --no-clone-scatter-output-in-embedding|--ep-overlap-early-attn-memory-release"""
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
