# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters of LoRA runs in Hugging Face's peft, and peft's here: the same logits, none without."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from conversion.peft_files import PREFIX
from conversion.their_model import their_model
from conversion.torch_dist import Checkpoint
from conversion.verify import differences
from megatron.core.transformer.lora import is_adapter
from tests.unit_tests.checkpoint.conversions import (
    BATCH,
    TOLERANCE,
    convert,
    loading,
    run_converter,
    tensors_of,
)
from tests.unit_tests.checkpoint.hugging_face import save, whole_vlm
from tests.unit_tests.checkpoint.test_omni import (
    CONVERSATIONS,
    PLAIN,
    conversations,
    trained_by_pytorch,
)
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import apart
from tests.unit_tests.examples.nemotron_vlm.runs import Trainer, trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

pytestmark = pytest.mark.skipif(HAVE_CUDA, reason="the converter's process has no GPU")

ROUNDING = 3 * TOLERANCE
"""Random adapters as large as their weights make more of rounding."""

WORDS = "all-linear,images:all-linear,sound:all-linear"
LORA = ("--lora-dim", "4", "--lora-rs", "--lora-target-modules", WORDS)


def randomize(run: Trainer) -> None:
    """Give all that a run trains values that matter to its logits."""
    rng = torch.Generator().manual_seed(3)
    for name, weight in run.stages[0].named_parameters():
        if weight.requires_grad and "linear_in" not in name:
            weight.data += 0.03 * torch.randn(weight.shape, generator=rng)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Iterator[Path]:
    """Folder: base (of theirs), run (LoRA and a trained projector), peft and merged (of it).

    The run has begun in the folder, and names its base from there.
    """
    Utils.read_environment()
    path = tmp_path_factory.mktemp("peft")
    theirs = save(whole_vlm(), path / "theirs")
    convert("hf-to-megatron", "--vlm", theirs, "--model", "tiny-omni", "--out", path / "base")
    beside = ("--dynamic-resolution", "--train-parts", "images:projector")
    with contextlib.chdir(path), trainer(*BATCH, *loading(Path("base")), *LORA, *beside) as run:
        randomize(run)
        run.save(path / "run")
    words = ("megatron-to-hf", path / "run", "--like", theirs, "--out")
    convert(*words, path / "peft", "--adapter")
    convert(*words, path / "merged")
    yield path
    Utils.destroy()


def largest(checkpoint: Path, directory: Path) -> dict[str, float]:
    """Largest differences of logits between the program and transformers, by kind of input."""
    Utils.destroy()
    return {kind: difference for kind, difference, _ in differences(checkpoint, directory)}


def test_transformers_with_the_adapters_has_our_logits_and_the_base_has_others(
    path, record_property
):
    for directory in ("peft", "merged"):
        found = largest(path / "run", path / directory)
        record_property(f"largest difference, {directory}", max(found.values()))
        assert list(found) == ["text", "image", "video", "sound"]
        assert max(found.values()) <= ROUNDING, found
    assert min(largest(path / "run", path / "theirs").values()) > 0.1
    names = [name.rpartition(".lora_B")[0] for name in tensors_of(path / "peft")]
    kinds = {name.rpartition(".")[2] for name in names}
    assert kinds >= {*"in_proj out_proj q_proj experts base_layer fc1 relative_k_proj".split()}


def test_a_part_that_was_trained_beside_its_adapters_is_refused(path, capsys):
    with trainer(*BATCH, *loading(path / "base"), *LORA, "--train-parts", "images:encoder") as run:
        run.save(path / "beside")
    words = ("megatron-to-hf", path / "beside", "--adapter", "--out", path / "none")
    assert run_converter(*words) == 2 and not (path / "none").exists()
    assert "was trained, too: leave out --adapter" in capsys.readouterr().err


def test_a_merge_into_another_base_is_refused(path, tmp_path, capsys, monkeypatch):
    read = Checkpoint.whole
    monkeypatch.setattr(Checkpoint, "whole", lambda *of: {k: t + 1 for k, t in read(*of).items()})
    words = ("megatron-to-hf", path / "run", "--like", path / "theirs", "--out", tmp_path / "none")
    assert run_converter(*words) == 2 and not (tmp_path / "none").exists()
    said = capsys.readouterr().err
    assert "has adapters of another base: its checksum is" in said and said.count("\n") == 1


def share_first_matrices(model: torch.nn.Module) -> None:
    """Make one parameter of the equal A's of q, k and v, as our linear_qkv has one."""
    for layer in model.modules():
        linears = [getattr(layer, f"{name}_proj", None) for name in "qkv"]
        firsts = [each.lora_A["default"] for each in linears if hasattr(each, "lora_A")]
        for other in firsts[1:]:
            if torch.equal(other.weight, firsts[0].weight):
                other.weight = firsts[0].weight


def test_five_steps_of_adamw_are_those_on_peft(path, record_property):
    """Losses, gradient norms, and A and B of all layers, by the way that they have moved."""
    words = f"{PLAIN} --lr 1e-4"  # larger steps make more of rounding
    options = (*BATCH, *loading(path / "base"), *CONVERSATIONS, *words.split(), *LORA)
    images, source = conversations(path / "base")
    with trainer(*options, "--train-iters", "5", source=source) as run:
        randomize(run)
        run.save(path / "begun")
        ours, args = [run.train_step() for _ in range(5)], run.args
        run.save(path / "ended")
    like = ("--adapter", "--like", path / "theirs", "--out")
    for name in ("begun", "ended"):
        convert("megatron-to-hf", path / name, *like, path / f"{name}-peft")
    model = their_model(path / "begun-peft", as_ours=True)
    for name, weight in model.named_parameters():
        weight.requires_grad_(".lora_" in name)
    share_first_matrices(model)
    theirs = trained_by_pytorch(model, args, len(ours), images, source)
    found = apart(ours, theirs)
    start, end = tensors_of(path / "begun-peft"), tensors_of(path / "ended-peft")
    names = dict(model.named_parameters(remove_duplicate=False))
    trained = {name.replace(".default", ""): w for name, w in names.items() if ".lora_" in name}
    assert {PREFIX + name for name in trained} == end.keys()
    far = {}
    for name, weight in trained.items():
        way = (weight - start[PREFIX + name]).norm()
        far[name] = float((end[PREFIX + name] - weight).norm() / way)
        assert way > 0, name
    record_property("largest difference", found | {"weight": max(far.values())})
    assert found["loss"] <= TOLERANCE and found["grad_norm"] <= 1e-4, found
    # What all keys of a sound share changes no attention: Adam moves it by rounding.
    most = {name: 5e-3 if "k_proj" in name else 1e-3 for name in far}
    assert not (over := {name: each for name, each in far.items() if each > most[name]}), over


def test_adapters_of_peft_go_on_training_here(path, record_property):
    """Its projections have A's of their own, and some layers have no adapter."""
    model = their_model(path / "theirs", as_ours=True)
    modules = ["q_proj", "v_proj", "in_proj", "fc1", "linear2", "layers.7.mixer.up_proj"]
    experts = ["experts.up_proj", "layers.1.mixer.experts.down_proj"]
    how = {"r": 3, "lora_alpha": 2, "init_lora_weights": False}
    torch.manual_seed(3)
    adapted = get_peft_model(
        model, LoraConfig(target_modules=modules, target_parameters=experts, **how)
    )
    adapted.save_pretrained(path / "of-peft")
    given = ("--adapter", path / "of-peft", "--model", path / "base/model.json")
    said = convert("hf-to-megatron", *given, "--out", path / "from-peft")
    words = said.split(": ")[1].replace("BASE", str(path / "base")).split()
    assert words[words.index("--lora-dim") + 1] == "6"
    model = ("--model", str(path / "base/model.json"), "--dynamic-resolution", "--lr", "1e-3")
    with trainer(*BATCH, *model, *words) as run:
        run.save(path / "went-on")
        language = run.stages[0].language_model
        seconds = [p for n, p in language.named_parameters() if is_adapter(n) and "_out" in n]
        before = [each.clone() for each in seconds]
        assert run.train_step()["grad_norm"] > 0
        assert not any(map(torch.equal, seconds, before))
    found = largest(path / "went-on", path / "of-peft")
    record_property("largest difference", max(found.values()))
    assert max(found.values()) <= ROUNDING, found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_dora": True}, "use_dora is True, and ours has False"),
        ({"target_modules": ["lm_head"]}, "our model has no adapters of"),
    ],
)
def test_adapters_that_ours_cannot_have_are_refused(path, tmp_path, capsys, change, reason):
    model = their_model(path / "theirs")
    get_peft_model(model, LoraConfig(**{"target_modules": ["q_proj"]} | change)).save_pretrained(
        tmp_path / "peft"
    )
    given = ("--adapter", tmp_path / "peft", "--model", path / "base/model.json")
    assert run_converter("hf-to-megatron", *given, "--out", tmp_path / "out") == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "out").exists()
