# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The images teach the model, through every parameter, and whatever the micro batch size."""

import itertools

import torch

from examples.mimo.nemotron_vlm.data import SampleSource
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

ONE_MICROBATCH = ("--micro-batch-size", "32")


class OneTile(SampleSource):
    """A source's samples of one tile, which are learned in few steps."""

    def __init__(self, source):
        self._source, self.score = source, source.score

    def _number(self, split, number):
        tries = (number + i for i in itertools.count(0, 10**6))
        return next(n for n in tries if self._source.costs(split, n, 1)[0, 1] == 1)

    def text(self, split, number):
        return self._source.text(split, self._number(split, number))

    def tiles(self, split, number):
        return self._source.tiles(split, self._number(split, number))


class ShuffledTiles(SampleSource):
    """The samples of a source with the tiles of others, which have as many."""

    def __init__(self, source):
        self._source, self.score = source, source.score

    def text(self, split, number):
        return self._source.text(split, number)

    def tiles(self, split, number):
        return self._source.tiles(split, number + 10**9)


def gradients(micro_batch_size: int) -> dict[str, torch.Tensor]:
    with trainer("--micro-batch-size", str(micro_batch_size)) as run:
        run.forward_backward()
        return {name: p.main_grad.clone() for name, p in run.stages[0].named_parameters()}


class TestGradientFlow:
    @requires_world_size(1)
    def test_every_parameter_moves_and_is_finite(self):
        with trainer(*ONE_MICROBATCH) as run:
            before = {name: p.detach().clone() for name, p in run.stages[0].named_parameters()}
            for _ in range(3):
                run.train_step()
            for name, parameter in run.stages[0].named_parameters():
                assert parameter.isfinite().all(), name
                assert not torch.equal(parameter, before[name]), name

    @requires_world_size(1)
    def test_gradients_do_not_depend_on_the_micro_batch_size(self):
        """Upstream's balancing loss did; the tolerance is fp32 sums in another order."""
        tolerance = 5e-3 if HAVE_CUDA else 2e-5  # GPUs' kernels multiply in TF32: 1.6e-3 found
        whole, parts = gradients(32), gradients(4)
        for name, gradient in whole.items():
            error = (parts[name] - gradient).norm()
            if "linear_qkv.bias" not in name:  # a key bias has no gradient but rounding
                assert error <= tolerance * gradient.norm(), name

    @requires_world_size(1)
    def test_without_tiles_every_parameter_has_a_gradient_and_no_layer_an_empty_tensor(self):
        """Kernels of norms refuse empty tensors."""

        def not_empty(layer, inputs):
            assert all(i.numel() for i in inputs if isinstance(i, torch.Tensor)), layer

        # otherwise kernels add weights' gradients up themselves
        with trainer(*ONE_MICROBATCH, "--no-gradient-accumulation-fusion") as run:
            vision = run.stages[0].modality_submodules["images"].module
            for part in (vision.encoders["radio"].radio, vision.input_projections):
                for layer in part.modules():
                    layer.register_forward_pre_hook(not_empty)
            tiles = run.source.tiles("train", 0)[:0].to(Utils.device)
            rows = vision(encoder_inputs={"radio": {"tiles": tiles}})
            assert rows.shape == (0, run.session.options.preset.language.hidden_size)
            for gradient in torch.autograd.grad(rows.sum(), [*vision.parameters()]):
                assert not gradient.any()

    @requires_world_size(1)
    def test_accuracy_falls_to_chance_with_other_images(self):
        rates = ("--lr", "3e-3", "--adam-eps", "1e-5", "--lr-warmup-iters", "10")
        arguments = ("--train-iters", "30", *rates, *ONE_MICROBATCH)
        with trainer(*arguments) as run:
            run.source = OneTile(run.source)
            for _ in range(30):
                run.train_step()
            read = run.evaluate(batches=4)
            run.source = ShuffledTiles(run.source)
            chance = run.evaluate(batches=4)
        assert read > 0.5
        assert chance < 0.2
