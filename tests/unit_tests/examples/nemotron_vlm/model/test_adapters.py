# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters against merged weights, what they keep and save, and what is refused.

That adapters train in every layout as on one rank is in rows.py.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.mimo.common.errors import UserError
from megatron.core.dist_checkpointing.safe_loading import SafeReader
from megatron.core.transformer.lora import Adapter, is_adapter, merged
from tests.unit_tests.examples.nemotron_vlm.loop.models import FULL
from tests.unit_tests.examples.nemotron_vlm.loop.rows import ALLGATHER
from tests.unit_tests.examples.nemotron_vlm.runs import SMALL, Trainer, trainer
from tests.unit_tests.test_utilities import requires_world_size

CALM = (*SMALL, *"--moe-aux-loss-coeff 0 --clip-grad 0 --train-iters 1 --seed 7".split())
WORDS = "all-linear,images:all-linear"
LORA = ("--lora-dim", "4", "--lora-target-modules", WORDS)


def parameters(run: Trainer) -> dict[str, torch.nn.Parameter]:
    return dict(run.stages[0].named_parameters())


def gradients(run: Trainer) -> dict[str, torch.Tensor]:
    """The gradients of a step, by name."""
    run.loss = run.train_step()["loss"]
    return {
        name: parameter.main_grad.clone()
        for name, parameter in parameters(run).items()
        if parameter.requires_grad
    }


def adapters_of(run: Trainer) -> dict[str, Adapter]:
    """The adapters by their names."""
    modules = run.stages[0].named_modules()
    return {name: module for name, module in modules if isinstance(module, Adapter)}


def places(name: str, adapter: Adapter) -> dict[str, int]:
    """The layers that an adapter belongs to, and their places in its matrices."""
    if not adapter.is_expert:
        return {name.removesuffix(".adapter"): ...}
    experts, layer = name.split(".adapters.")
    count = len(adapter.linear_in.weight)
    return {f"{experts}.local_experts.{number}.{layer}": number for number in range(count)}


def matrices(run: Trainer, held: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the entries for A and B in ``held``, by the name of the adapted layer."""
    return {
        layer: tuple(held[f"{name}.linear_{each}.weight"][place] for each in ("in", "out"))
        for name, adapter in adapters_of(run).items()
        for layer, place in places(name, adapter).items()
    }


@requires_world_size(1)
@pytest.mark.parametrize(
    "options",
    [
        ("--model", "tiny"),
        ("--model", "tiny", "--swiglu", "--no-squared-relu", "--lora-rs"),
        ("--model", "tiny", "--moe-token-dispatcher-type", "allgather"),
        ("--model", "tiny-gdn", "--hybrid-layer-pattern", "G*E-/*-", "--lora-alpha", "3"),
    ],
)
def test_loss_and_all_gradients_are_those_of_merged_weights(options):
    """The gradients of B and A are s·G·Aᵀ and s·Bᵀ·G; G is the gradient of W + s·B·A."""
    with trainer(*CALM, *LORA, *options) as run:
        held, adapters = parameters(run), adapters_of(run)
        with torch.no_grad():
            for adapter in adapters.values():
                adapter.linear_out.weight.normal_(0, 0.05)
        scale = next(iter(adapters.values())).settings.scale
        copies = {name: parameter.detach().clone() for name, parameter in held.items()}
        pairs = matrices(run, copies)
        assert {name.rpartition(".")[2] for name in pairs} >= {"linear_qkv", "linear_fc2"}
        base = {name: copy for name, copy in copies.items() if not is_adapter(name)}
        found = gradients(run)
        loss, found_pairs = run.loss, matrices(run, found)
        assert {*found} == {name for name in held if is_adapter(name)}
    plain = [word for word in options if word != "--lora-rs"]
    if "--lora-alpha" in plain:
        del plain[plain.index("--lora-alpha") :][:2], plain[-2:]
    with trainer(*CALM, *plain) as run:
        with torch.no_grad():
            for name, parameter in parameters(run).items():
                layer = name.removesuffix(".weight")
                a_and_b = pairs.get(layer) if name.endswith(".weight") else None
                parameter.copy_(merged(base[name], *a_and_b, scale) if a_and_b else base[name])
        whole = gradients(run)
        assert loss == pytest.approx(run.loss, rel=1e-6)
    for layer, (first, second) in pairs.items():
        gradient = whole[f"{layer}.weight"]
        right = scale * second.T @ gradient, scale * gradient @ first.T
        for actual, expected in zip(found_pairs[layer], right, strict=True):
            assert (actual - expected).norm() <= 3e-5 * expected.norm(), layer
            assert expected.any() or ".experts." in layer, layer


@requires_world_size(1)
def test_dropout_is_of_the_adapters_input_in_training_alone():
    """B is zero in the first step. The same seed repeats, also where activations are recomputed."""
    words = (*CALM[:-4], "--train-iters", "2", "--lr", "1e-2", *LORA, "--lora-dropout")
    runs = []
    for options in (("0.5",), ("0.5", *FULL), ("0",)):
        with trainer(*words, *options) as run:
            runs.append([run.train_step() for _ in range(2)])
            run.stages[0].eval()
            for adapter in adapters_of(run).values():
                rows = torch.randn(3, adapter.linear_in.in_features)
                assert adapter.dropped(rows) is rows
    dropped, recomputed, whole = runs
    assert dropped == recomputed
    assert dropped[0]["loss"] == whole[0]["loss"]
    assert dropped[0]["grad_norm"] != pytest.approx(whole[0]["grad_norm"], rel=1e-2)
    assert dropped[1]["loss"] != pytest.approx(whole[1]["loss"], rel=1e-4)


@requires_world_size(4)
@pytest.mark.parametrize(
    ("encoder", "language"), [("tp=2", "tp=2,dp=2,ep=4,etp=1"), ("dp=4", "cp=2,dp=2,ep=2")]
)
def test_ranks_drop_alike_only_what_they_hold_alike(encoder, language):
    layout = (*SMALL, "--encoder", encoder, "--language", language, "--lora-dropout", "0.5")
    with trainer(*LORA, *layout) as run:
        for name, adapter in adapters_of(run).items():
            rows = adapter.dropped(torch.ones(16, adapter.linear_in.in_features))
            assert {*rows.unique().tolist()} == {0.0, 2.0}
            everywhere = [torch.empty_like(rows) for _ in range(4)]
            dist.all_gather(everywhere, rows)
            is_whole = adapter.mode == "column" and not (adapter.has_sequence or adapter.is_expert)
            alike = adapter.group.size() if is_whole and adapter.group else 1
            assert len({each.numpy().tobytes() for each in everywhere}) == 4 // alike, name


@requires_world_size(1)
@pytest.mark.parametrize("options", [ALLGATHER, ()])
def test_frozen_experts_keep_no_rows_and_nothing_of_the_base_has_gradients_or_moments(options):
    with trainer(*CALM, *LORA[:3], "linear_qkv", *options) as run:
        experts = next(m for n, m in run.stages[0].named_modules() if n.endswith("mlp.experts"))
        for first, *_ in experts.weights() if options else ():  # laid out for grouped GEMMs
            assert first.untyped_storage().nbytes() == first.nbytes * experts.num_local_experts
        rows = torch.randn(12, 64, requires_grad=True)
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            counts = torch.tensor([12] + [0] * (experts.num_local_experts - 1))
            experts(rows, counts, torch.ones(12))
        assert kept and all(each.data_ptr() != rows.data_ptr() for each in kept)
        run.train_step()
        trained = sum(p.numel() for n, p in parameters(run).items() if is_adapter(n))
        held = [p.numel() for p in parameters(run).values() if hasattr(p, "main_grad")]
        assert sum(held) == trained
        (language,) = run.optimizer._optimizers.values()
        states = [leaf.optimizer.state for leaf in language.chained_optimizers]
        moments = [state["exp_avg"].numel() for each in states for state in each.values()]
        assert trained <= sum(moments) < 1.05 * trained  # padding of buffers


@requires_world_size(1)
def test_a_checkpoint_has_what_is_trained_alone_and_goes_on_with_its_own_base(tmp_path: Path):
    base, adapters = str(tmp_path / "base"), str(tmp_path / "adapters")
    words = (*SMALL, "--data", "mock", "--vocab-size", "65")
    padded = (*words, "--make-vocab-size-divisible-by", "64")
    with trainer(*padded, "--seed", "3", "--train-iters", "2") as run:
        run.train_step()
        run.save(Path(base))
    own = (*padded, "--pretrained-checkpoint", base, "--train-iters", "3", "--lr", "1e-2")
    with trainer(*own, *LORA, "--train-parts", "projector") as run:
        assert run.step == 0
        run.train_step()
        run.save(Path(adapters))
        expected = run.train_step()
    stored = SafeReader(Path(adapters, "iter_0000001")).read_metadata().state_dict_metadata
    weights = [name for name in stored if name.endswith("weight") and "optimizer." not in name]
    assert weights
    assert all(is_adapter(name) or ".input_projections." in name for name in weights)
    again = ("--load", adapters, *LORA, "--train-parts", "projector", "--lr", "1e-2")
    again = (*again, "--train-iters", "3")
    with trainer(*words, *again, "--pretrained-checkpoint", base) as run:
        assert run.step == 1
        found = run.train_step()
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for line, text in (
        (again, "adapters of another base: its checksum is"),
        (again[:2], "has adapters alone, which go on with --lora-dim 4"),
        ((*LORA, "--load", base), "has a whole model: give it as --pretrained-checkpoint"),
        ((*again, "--lora-alpha", "1"), "other adapters .*lora_alpha 32.0 → 1.0"),
        (("--pretrained-checkpoint", adapters), "has adapters alone"),
        ((*LORA[:3], "linear_qkv,output_layer"), "output_layer: no layer's name ends like this"),
        ((*LORA[:3], "radio:linear_qkv"), "radio: no such encoder; choose from images:"),
    ):
        with pytest.raises(UserError, match=text), trainer(*words, *line):
            pass
