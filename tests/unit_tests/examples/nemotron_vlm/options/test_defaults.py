# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Defaults that follow from the device, the layout and CUDA graphs."""

import os

import pytest
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.options import derived
from examples.mimo.nemotron_vlm.options.run import Run
from tests.unit_tests.examples.nemotron_vlm.options.test_run_rules import (
    ENGINE,
    FP8,
    GRAPHS,
    PACK,
    parsed,
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--device cuda", 2),
        ("", 1),
        ("--device cuda --global-batch-size 8", 1),  # a step of one microbatch
        ("--device cuda --language pp=2", 1),
        ("--encoder-macro-batch 3", 3),
    ],
)
def test_microbatches_encoded_at_once_by_default(options, expected):
    found = Run.of(["--transformer-impl", "local", *options.split()], world_size=2)
    assert found.args.encoder_macro_batch == expected


@pytest.mark.parametrize(
    ("options", "at_once"),
    [
        ("--language pp=2", 1),
        ("--language dp=4 --global-batch-size 48", 1),  # three microbatches
        ("--language dp=4 --encoder-macro-batch 4", 4),  # a step has two
    ],
)
def test_with_cuda_graphs_macro_batches_divide_a_step(options, at_once):
    found = parsed(f"{GRAPHS} --data mock {options}", 4).args
    assert found.encoder_macro_batch == at_once


@pytest.mark.parametrize(
    ("options", "dispatcher"),
    [
        ("--bf16", "allgather"),
        ("--bf16 --moe-token-dispatcher-type alltoall", "alltoall"),
        ("--bf16 --language ep=2", "alltoall"),
        (f"--bf16 {GRAPHS}", "allgather"),
        (f"--bf16 {GRAPHS} --language tp=2,ep=2,etp=1", "allgather"),
        (f"--bf16 {GRAPHS} --language ep=4", "alltoall"),
        (f"--bf16 {GRAPHS} --no-squared-relu --swiglu", "alltoall"),
        ("--bf16 --moe-shared-expert-overlap", "alltoall"),
        (
            "--bf16 --recompute-granularity selective --recompute-modules moe_act",
            "alltoall",
        ),
        (
            f"--bf16 {GRAPHS} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
            "alltoall",
        ),
        (f"{ENGINE} {FP8}", "alltoall"),
        (f"{ENGINE} {FP8} --fp8-parts encoder", "allgather"),
        ("--bf16 --placement non-colocated --language dp=2", "alltoall"),
    ],
)
def test_token_counts_stay_on_the_device_where_it_is_faster(options, dispatcher, hopper):
    line = f"--device cuda --data mock --moe-grouped-gemm {options}"
    assert parsed(line, 4).args.moe_token_dispatcher_type == dispatcher


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ("", "zigzag"),
        (GRAPHS, "zigzag"),
        (PACK, "contiguous"),
        (f"{PACK} --linear-cp-layout zigzag", "zigzag"),
    ],
)
def test_packed_rows_are_contiguous_where_states_pass(options, layout):
    line = f"--data digits --bf16 --language cp=2 {options}"
    assert parsed(line, 4).args.linear_cp_layout == layout


@pytest.mark.parametrize("generation", [8, 10])
def test_token_counts_stay_on_the_host_of_other_gpus(generation, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (generation, 0))
    line = "--device cuda --data mock --moe-grouped-gemm --bf16"
    assert parsed(line, 4).args.moe_token_dispatcher_type == "alltoall"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--device cuda", "1"),
        ("--device cuda --model tiny-omni --dynamic-resolution", None),
        ("--device cpu", None),
    ],
)
def test_cudnn_has_the_norms_of_one_number_of_tokens(options, expected, monkeypatch):
    """It makes a kernel for each number; Transformer Engine reads the variables."""
    variables = "NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN"
    for variable in variables:
        monkeypatch.setenv(variable, "")  # so that the test's end restores it
        del os.environ[variable]
    parsed(f"--data mock --transformer-impl local {options}", 1)
    assert [os.environ.get(variable) for variable in variables] == [expected] * 2


@pytest.mark.parametrize(
    ("options", "has_kernel", "expected"),
    [
        ("--device cuda --bf16", True, "kernel"),
        ("--device cuda --bf16 --cross-entropy-loss-fusion", True, "Megatron's fused"),
        ("--device cuda --bf16 --no-cross-entropy-loss-fusion", True, "Megatron's"),
        ("--device cuda --bf16", False, "Megatron's fused"),
        ("--device cuda --fp16", False, "Megatron's"),
        ("--device cpu", True, "Megatron's"),
    ],
)
def test_the_loss(options, has_kernel, expected, monkeypatch):
    """Megatron's fused one rounds the gradients of the logits to bfloat16, in any precision."""
    monkeypatch.setattr(derived, "has_loss_kernel", lambda: has_kernel)
    args = parsed(f"--data mock --transformer-impl local {options}", 1).args
    fused = "Megatron's fused" if args.cross_entropy_loss_fusion else "Megatron's"
    assert ("kernel" if args.loss_kernel else fused) == expected


@pytest.mark.parametrize(
    ("modules", "captured"),
    [
        ("", "attn mamba moe_router"),
        ("--cuda-graph-modules moe_router attn", "moe_router attn"),
        ("--bf16 --pack --moe-token-dispatcher-type alltoall", "mamba moe_router"),
    ],
)
def test_graphs_of_routers_have_the_preparation_of_the_dispatch(modules, captured, hopper):
    """Without it, the dispatcher copies counts on a stream that the capture does not join."""
    found = Run.of(f"{GRAPHS} --data mock {modules}".split(), world_size=1).configs.language
    names = [module.name for module in found.cuda_graph_modules]
    assert names == [*captured.split(), "moe_preprocess"]


@pytest.mark.parametrize(
    ("options", "is_taken"),
    [
        ("--bf16", True),
        (f"{FP8} --moe-token-dispatcher-type allgather", True),
        (FP8, False),
        ("--bf16 --moe-token-dispatcher-type alltoall", False),
        ("--moe-token-dispatcher-type allgather", False),
    ],
)
def test_cuda_graphs_have_whole_moe_layers_whose_counts_stay_on_the_device(
    options, is_taken, hopper
):
    line = f"{GRAPHS} --data mock --moe-grouped-gemm --cuda-graph-modules attn moe {options}"
    if is_taken:
        found = Run.of(line.split(), world_size=1).configs.language
        assert [module.name for module in found.cuda_graph_modules] == ["attn", "moe"]
        return
    with pytest.raises(UserError, match="^--cuda-graph-modules moe needs token counts that"):
        Run.of(line.split(), world_size=1)


@pytest.mark.parametrize(
    ("options", "overlaps"),
    [("--data mock", True), ("--dynamic-resolution", True), (f"{GRAPHS} --data mock", True)]
    + [(f"{GRAPHS} --data mock --dynamic-resolution", False), (f"{GRAPHS} --data digits", False)]
    + [(f"{GRAPHS} --data digits:2 --pack", False)],
)
def test_collectives_overlap_unless_the_host_may_load_kernels_amid_them(options, overlaps, hopper):
    line = f"--device cuda --transformer-impl transformer_engine --bf16 {options}"
    args = Run.of(line.split(), world_size=1).args
    assert (args.overlap_grad_reduce, args.overlap_param_gather) == (overlaps, overlaps)


@pytest.mark.parametrize(
    ("frozen", "captured"),
    [("", True), ("encoder", False), ("projector", True), ("language", True)],
)
def test_encoders_have_graphs_only_if_a_backward_follows(frozen, captured, hopper):
    """The language model has graphs in any case, as what comes before it is trained."""
    configs = Run.of(f"{GRAPHS} --data mock --freeze={frozen}".split(), world_size=1).configs
    (encoder,) = configs.encoders
    impls = {each.cuda_graph_impl for each in encoder.values()}
    assert impls == {"local" if captured else "none"}
    assert configs.language.cuda_graph_impl == "local"


@pytest.mark.parametrize(("pp", "is_kept"), [(1, True), (2, False)])
def test_no_weights_in_fp8_are_kept_for_the_graphs_of_other_microbatches(pp, is_kept, hopper):
    """With a pipeline each microbatch has graphs of its own, whose weights would grow old."""
    line = f"{GRAPHS} {FP8} --language pp={pp}"
    assert parsed(line, 2).configs.language.disable_parameter_transpose_cache is not is_kept
