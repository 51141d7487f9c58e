# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of Megatron that are refused wherever they are set, by the reason."""

ONE_MODEL = "it knows one model on one grid, and this one has a grid for each module"
NAMED_WEIGHTS = (
    "initial weights follow from the seed and each parameter's name, so that no layout changes them"
)
DATA = "--data gives the samples"
GRAPHS = "a graph is captured for one model, and the encoder's shapes differ from batch to batch"

REFUSED_NAMES = {
    ONE_MODEL: (
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
    "torchrun starts the program again, in new processes": ("--inprocess-restart",),
    "it asks a scheduler of NVIDIA's own cluster": ("--adlr-autoresume",),
    "process groups are made from the modules' grids": (
        "--nccl-communicator-config-path",
        "--use-sharp",
        "--sharp-enabled-group",
        "--high-priority-stream-groups",
        "--create-all-gather-group",
    ),
    NAMED_WEIGHTS: (
        "--data-parallel-random-init",
        "--init-method-xavier-uniform",
        "--init-model-with-meta-device",
        "--embedding-init-method-std",
        "--use-mup",
    ),
    "it is another training loop": (
        "--perform-rl-step",
        "--vision-pretraining",
    ),
    DATA: (
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
    "no schedule of these modules does that work later": (
        "--overlap-moe-expert-parallel-comm",
        "--delay-wgrad-compute",
        "--defer-embedding-wgrad-compute",
    ),
    GRAPHS: (
        "--enable-cuda-graph",
        "--external-cuda-graph",
    ),
    "options come from the command line": (
        "--yaml-cfg",
        "--use-checkpoint-args",
        "--use-mp-args-from-checkpoint-args",
    ),
}
