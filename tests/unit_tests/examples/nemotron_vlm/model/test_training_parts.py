# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A step trains every parameter but frozen parts, each part by its own settings.

That parts train as on one rank is in rows.py.
"""

import numpy as np
import pytest
import torch

from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from examples.mimo.nemotron_vlm.options.run import Run
from tests.unit_tests.examples.nemotron_vlm.loop.models import PACK, PROPORTIONAL_STEP
from tests.unit_tests.examples.nemotron_vlm.runs import FOUR_LAYERS, LOCAL, SMALL, trainer
from tests.unit_tests.models.mimo.one_step import TOLERANCE
from tests.unit_tests.models.mimo.weights import (
    Weights,
    assert_shards_moved_alike,
    gather_weights,
)
from tests.unit_tests.test_utilities import requires_world_size

ONE_MICROBATCH = ("--micro-batch-size", "32")


@requires_world_size(1)
def test_packed_samples_train_as_samples_one_by_one():
    """The first window is packed into rows, and also laid out with a row for each sample.

    Experts are not balanced: balancing counts padding, of which the two have unlike amounts.
    """
    alone = ("--global-batch-size", "24", "--micro-batch-size", "1", "--seq-length", "64")
    losses = (
        *(*LOCAL, *FOUR_LAYERS, *PROPORTIONAL_STEP, "--moe-aux-loss-coeff", "0"),
        *("--no-moe-router-enable-expert-bias", "--position-embedding-type", "learned_absolute"),
    )
    with trainer(*alone, *losses) as run:
        before = gather_weights(run.stages)
        one_by_one = run.train_step()
        after = gather_weights(run.stages)
        stream = Rows(run.source, "train", 64, Packing(window=24, multiple=16), run.args.seed)
    rows = len(stream.first())
    assert rows < 24
    with trainer(*PACK, *alone[2:4], *losses, "--global-batch-size", str(rows)) as run:
        together = run.train_step()
        assert_shards_moved_alike(run.stages, before, after, TOLERANCE)
    assert together["loss"] == pytest.approx(one_by_one["loss"], rel=1e-6)
    assert together["num_tokens"] == one_by_one["num_tokens"]


@requires_world_size(1)
def test_each_part_has_its_own_learning_rate_and_weight_decay():
    own = ("--encoder-lr", "0", "--projector-lr", "3e6", "--projector-weight-decay", "1e-6")
    moves: list[Weights] = []
    for options in ((), own):
        with trainer(*SMALL, *PROPORTIONAL_STEP, "--lr-decay-style", "constant", *options) as run:
            before = gather_weights(run.stages)
            run.train_step()
            after = gather_weights(run.stages)
        moves.append({name: after[name] - weight for name, weight in before.items()})
    for name, move in moves[0].items():
        if ".encoders." in name:
            move = 0 * move
        if ".input_projections." in name:
            move = 3 * move - 3 * before[name] * (move.dim() > 1)  # norms do not decay
        torch.testing.assert_close(moves[1][name], move, rtol=1e-3, atol=1e-4)


FORMAT = "--fp8-format hybrid --fp8-recipe tensorwise"
ENGINE = "--device cuda --bf16 --transformer-impl transformer_engine"


class TestFP8:
    """FP8 itself is run on GPUs."""

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("--fp8-parts encoder", ("hybrid", None)),
            ("--fp8-parts images:encoder,language", ("hybrid", "hybrid")),
            ("", ("hybrid", "hybrid")),
        ],
    )
    def test_parts_have_it_each_on_its_own(self, line, found, hopper):
        line = f"{ENGINE} --model tiny-omni {FORMAT} {line}"
        configs = Run.of(line.split(), world_size=1).configs
        images, sound = configs.encoders
        assert (images["encoder"].fp8, configs.language.fp8) == found
        assert sound["encoder"].fp8 is images["projector"].fp8 is None
        if images["encoder"].fp8:
            assert images["encoder"].fp8_recipe == "tensorwise"

    @requires_world_size(1)
    @pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
    @pytest.mark.parametrize(
        "inputs", [0, 1, 3, [], [(4, 6)], [(2, 2), (2, 10), (4, 4)], [(4, 2), (2, 4)]], ids=str
    )
    def test_blank_inputs_fill_up_the_tokens(self, inputs, recipe):
        """Matrix products in FP8 take multiples of 16 or 32 tokens; tiny's tile has 16 + 8.

        Inputs are a number of tiles, or the grids of images of any size.
        """
        are_tiles = isinstance(inputs, int)
        with trainer(*["--dynamic-resolution"] * (not are_tiles)) as run:
            encoder = run.stages[0].modality_submodules["images"].module.encoders["radio"]
            if are_tiles:
                given = [torch.rand(inputs, 3, 16, 16) * 255]
            else:
                grids = np.array([(0, *each) for each in inputs], dtype=np.int64).reshape(-1, 3)
                patches = torch.rand(sum(a * b for a, b in inputs), 3 * encoder.sizes.patch**2)
                given = [patches * 255, patches[:0], grids]
            plain, layer, seen = encoder(*given), encoder.radio.decoder.layers[0], []
            encoder.config.fp8, encoder.config.fp8_recipe = "hybrid", recipe
            layer.register_forward_hook(lambda *found: seen.append(found[2][0].shape))
            torch.testing.assert_close(encoder(*given), plain)
        ((tokens, count, _),) = seen
        multiple = 32 if recipe == "mxfp8" else 16
        assert tokens * count % multiple == 0
        if are_tiles:
            assert (count - inputs) * tokens <= multiple * 3
