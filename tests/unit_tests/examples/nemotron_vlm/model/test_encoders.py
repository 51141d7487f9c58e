# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A model of two encoders: its options, parts, inputs, parameters, and file of sizes.

That it trains as on one rank is in rows.py.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.model.encoders import Encoder, sound
from examples.mimo.nemotron_vlm.model.encoders.radio import RadioOfAnySize
from examples.mimo.nemotron_vlm.model.names import IMAGES
from examples.mimo.nemotron_vlm.options.run import Run
from megatron.core.utils import unwrap_model
from tests.unit_tests.examples.nemotron_vlm.loop.sound_and_images import SOUND, SoundAndImages
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, requires_world_size

MODEL = ("--model", "tiny-omni")


def parsed(line: str):
    return Run.of([*MODEL, *line.split()], world_size=8)


class TestOptions:
    @pytest.mark.parametrize(
        ("line", "text"),
        [
            ("--encoder sonar:dp=8", "--encoder sonar:dp=8: no such encoder; choose from images, "),
            ("--encoder images:dp=8", "--encoder: sound is missing; add --encoder sound:AXIS"),
            ("--encoder sound:dp=8 --encoder sound:dp=8", "sound is given twice"),
            ("--encoder tp=2", "sound:tp=2,dp=4: tp=2 must divide the 1 encoder.*tp=1,dp=8"),
            ("--encoder images:tp=2 --encoder dp=8 --encoder-tp 4", "says tp=2, and --encoder-tp"),
            (
                "--placement non-colocated --encoder images:dp=2 --encoder sound:pp=2,dp=1",
                "sound:.*: pp=2 must divide the 1 encoder of transformers",
            ),
            (
                "--placement non-colocated --encoder images:pp=2,dp=1 --encoder sound:dp=2",
                "several encoders on ranks of their own take as many stages each: pp=1. .*dp=1",
            ),
            ("--encoder-lr sonar:1", "--encoder-lr sonar:1: no such encoder"),
        ],
    )
    def test_names_what_is_wrong_in_a_line(self, line, text):
        with pytest.raises(UserError, match=text) as refusal:
            parsed(line)
        assert "\n" not in str(refusal.value)

    def test_sound_needs_transformers(self, monkeypatch):
        monkeypatch.setattr(sound, "find_spec", lambda name: None)
        with pytest.raises(UserError, match="sound needs transformers: pip install"):
            parsed("")


@requires_world_size(1)
@pytest.mark.parametrize(
    ("options", "still"),
    [
        ("--freeze sound:encoder", {"sound.encoders"}),
        ("--freeze projector", {"sound.input_projections", "images.input_projections"}),
        ("--freeze language", {"language"}),
        (
            "--encoder-lr sound:0 --projector-lr images:0",
            {"sound.encoders", "images.input_projections"},
        ),
    ],
)
def test_parts_of_one_encoder_or_of_all_have_their_own_settings(options, still):
    """All weights and experts' biases move, except in parts that stay and in the weight of clips'
    patches: tiles are no clips."""
    line = (*MODEL, "--micro-batch-size", "32", *options.split())
    with trainer(*line, source=SoundAndImages()) as run:
        (stage,) = run.stages
        biases = [pair for pair in stage.named_buffers() if pair[0].endswith("expert_bias")]
        weights = dict(biases) | dict(stage.named_parameters())
        weights = {n: weight for n, weight in weights.items() if "video_embedder" not in n}
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        run.train_step()
        moved = defaultdict(set)
        for name, weight in weights.items():
            *_, encoder = name.replace("module.", "").partition("modality_submodules.")
            part = ".".join(encoder.split(".")[:2]) or "language"
            moved[part].add(not weight.equal(before[name]))
    assert biases and len(moved) == 5
    assert moved == {part: {part not in still} for part in moved}


SIZES = {
    IMAGES: [[(16, 16)], [(16, 48)], [(2, 16, 16)], [(3, 24, 16)], [(16, 16), (2, 40, 8)]],
    SOUND.name: [[8000], [80000], [35000, 35000]],
}
"""Height and width of images, also of clips after their frames; samples of sounds, which fill the
rows to which they are padded."""


def made(entry: Encoder, shapes: list) -> tuple[np.ndarray, Sequence[torch.Tensor]]:
    """Return the sizes of inputs, and the inputs."""
    if entry.name == SOUND.name:
        return np.array(shapes), [torch.randn(samples) for samples in shapes]
    if not isinstance(entry, RadioOfAnySize):
        return np.ones(len(shapes), np.int64), torch.zeros(len(shapes), 3, 16, 16).byte()
    kinds = [entry.clips if len(shape) == 3 else entry.grids for shape in shapes]
    pixels = [torch.zeros(*shape[:-2], 3, *shape[-2:]).byte() for shape in shapes]
    pairs = list(zip(kinds, shapes, pixels, strict=True))
    sizes = np.array([kind.size_of(*shape) for kind, shape, _ in pairs])
    return sizes, [kind.cut(each) for kind, _, each in pairs]


def computed(module: torch.nn.Module, given: dict) -> tuple[int, int, float]:
    """Return the rows, the operations and the kept elements, but weights, of a forward."""
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    kept = {}

    def keep(tensor):
        place = tensor.untyped_storage()
        if place.data_ptr() not in weights:
            kept[place.data_ptr()] = tensor, place.nbytes() / tensor.element_size()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, FlopCounterMode(display=False) as counter:
        rows = module(encoder_inputs=given)
    return len(rows), counter.get_total_flops(), sum(elements for _, elements in kept.values())


@requires_world_size(1)
@pytest.mark.skipif(HAVE_CUDA, reason="PyTorch counts attention of GPUs, and not the engine")
@pytest.mark.parametrize("options", [(), ("--dynamic-resolution",)])
def test_entries_count_the_rows_operations_and_memory_of_inputs(options):
    """Besides, PyTorch keeps an index of each patch, and bits. It does not count RADIO's attention,
    whose output it keeps twice where several sequences are packed.
    """
    with trainer(*MODEL, "--micro-batch-size", "32", *options, source=SoundAndImages()) as run:
        preset = run.session.run.preset
        stage, packed = unwrap_model(run.stages[0].modality_submodules[IMAGES]), []
        decoder = stage.encoders[preset.images.key].radio.decoder
        decoder.register_forward_pre_hook(lambda *each: packed.append(each[-1]), with_kwargs=True)
        pairs = [(entry, each) for entry in preset.encoders for each in SIZES[entry.name]]
        for entry, shapes in pairs:
            sizes, inputs = made(entry, shapes)
            module = run.stages[0].modality_submodules[entry.name]
            rows, operations, kept = computed(module, {entry.key: entry.collate([inputs])})
            near = 0.02, 0.03
            if entry.name == IMAGES:
                tokens, count, near = entry.tokens(sizes), entry.sequences(sizes), (1e-12, 0.002)
                operations += entry.layers * 4 * (tokens**2 // count).sum() * entry.hidden
                is_packed = options and count.sum() > 1
                kept -= entry.layers * tokens.sum() * entry.hidden if is_packed else 0
            if entry.name == IMAGES and options:
                # Transformer Engine attends by these; Megatron's own layers, by the host's lengths.
                bounds, lengths = packed[-1]["packed_seq_params"], (tokens // count).repeat(count)
                assert bounds.cu_seqlens_q.diff().tolist() == lengths.tolist()
                assert bounds.cu_seqlens_kv.equal(bounds.cu_seqlens_q)
                assert bounds.max_seqlen_q == bounds.max_seqlen_kv == max(lengths)
            assert rows == entry.rows(sizes).sum()
            found = entry.operations(sizes, preset.language.hidden_size).sum()
            assert found == pytest.approx(3 * operations, rel=near[0]), shapes
            found = entry.kept(sizes, Layout(dp=1, etp=1)).sum()
            assert found == pytest.approx(kept, rel=near[1]), shapes
