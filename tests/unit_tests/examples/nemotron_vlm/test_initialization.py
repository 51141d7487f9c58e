# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Initial weights: the same bits on every device and in every shard, and rightly distributed."""

import hashlib
import itertools
import math
from fnmatch import fnmatch
from functools import partial

import pytest
import torch
from scipy import stats

from examples.mimo.nemotron_vlm import initialization
from examples.mimo.nemotron_vlm.counted_numbers import hashed_bits, normal_pairs
from examples.mimo.nemotron_vlm.initialization import draw_part
from tests.unit_tests.test_utilities import HAVE_CUDA

LAYERS = 8
MATRIX = "mlp.linear_fc1.weight"
DISTRIBUTIONS = {
    MATRIX: (torch.Tensor.double, stats.norm(0, 512**-0.5)),
    "layers.linear_fc2.weight": (torch.Tensor.double, stats.norm(0, (512 * 2 * LAYERS) ** -0.5)),
    "conv1d.weight": (torch.Tensor.double, stats.uniform(-0.5, 1)),
    "A_log": (torch.exp, stats.uniform(1, 15)),
    "dt_bias": (torch.nn.functional.softplus, stats.loguniform(1e-3, 1e-1)),
}
"""What is distributed, and how: 512 columns."""
DIGEST = "f80ed933a1970e4fdfffadedb9085a5e3a2661770145802f813e7c5f60239276"
SHAPES = [(37,), (12, 9), (6, 3, 10), (8, 1, 4), (4, 2, 3, 5)]


def draw_of(name: str, key: int = 5):
    rules = initialization._rules(LAYERS)
    return partial(next(draw for pattern, draw in rules if fnmatch(name, pattern)), key)


def drawn(name: str, *shape: int, key: int = 5, dtype=torch.float32) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    draw_part(out, shape, (0,) * len(shape), draw_of(name, key))
    return out


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].item()


class TestNumbers:
    def test_bits_are_those_of_splitmix64(self):
        """The published generator's first outputs from seed 0: its states are gamma, 2 gamma, …"""
        published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
        bits = hashed_bits(0, torch.arange(1, 4)).tolist()
        assert [number % 2**64 for number in bits] == published

    def test_pairs_are_those_of_box_and_muller(self):
        """In float64; where u is close to 1 the radius has the square root of float32's error."""
        index = torch.arange(100_000)
        bits = hashed_bits(9, index)
        u = ((bits >> 32) % 2**32 + 0.5) / 2.0**32
        angle = ((bits + 2**31) % 2**32 - 2**31) * (2 * math.pi / 2.0**32)
        radius = (-2 * u.double().log()).sqrt()
        pair = torch.stack(normal_pairs(9, index)).double()
        expected = torch.stack((angle.double().cos(), angle.double().sin())) * radius
        torch.testing.assert_close(pair, expected, rtol=0, atol=2e-5)
        assert (pair - expected).abs().mean() < 2e-7

    @pytest.mark.parametrize("device", ["cpu", *["cuda"] * HAVE_CUDA])
    def test_bits_are_the_same_on_every_device(self, device):
        pair = torch.stack(normal_pairs(-3, torch.arange(2**16, device=device)))
        digest = hashlib.sha256(pair.cpu().numpy().tobytes()).hexdigest()
        assert digest == DIGEST


class TestShards:
    @pytest.mark.parametrize("name", [*DISTRIBUTIONS, "final_norm.weight", "linear.bias"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_every_part_has_the_bits_of_the_whole(self, shape, name, monkeypatch):
        """Each dim's first third, the rest and both, drawn in chunks of their own."""
        whole = drawn(name, *shape)
        monkeypatch.setattr(initialization, "CPU_CHUNK", 16)
        cuts = [(0, n // 3, n) if n > 2 else (0, n) for n in shape]
        for window in itertools.product(*(itertools.combinations(cut, 2) for cut in cuts)):
            part = torch.empty([stop - start for start, stop in window])
            draw_part(part, shape, tuple(start for start, _ in window), draw_of(name))
            assert torch.equal(part, whole[tuple(slice(*ends) for ends in window)]), window

    def test_another_dtype_is_rounded_from_the_same_numbers(self):
        rounded = drawn(MATRIX, 64, 64).bfloat16()
        assert torch.equal(drawn(MATRIX, 64, 64, dtype=torch.bfloat16), rounded)

    def test_a_part_that_is_no_contiguous_memory_is_filled_in_place(self):
        memory = torch.zeros(12, 18)
        draw_part(memory[:, 9:], (12, 9), (0, 0), draw_of(MATRIX))
        assert torch.equal(memory[:, 9:], drawn(MATRIX, 12, 9))
        assert not memory[:, :9].any()


class TestDistribution:
    @pytest.mark.parametrize("name", DISTRIBUTIONS)
    def test_kolmogorov_and_smirnov_find_no_difference(self, name):
        """Of a million numbers: a wrong std shows from 0.5 % on."""
        meaning, expected = DISTRIBUTIONS[name]
        numbers = meaning(drawn(name, 2048, 512)).flatten()
        assert stats.kstest(numbers.numpy(), expected.cdf).pvalue > 0.01

    def test_moments_and_tails_are_the_normal_ones(self):
        numbers = drawn(MATRIX, 8192, 512).double().flatten() * 512**0.5
        n = len(numbers)
        for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
            error = (stats.norm.moment(2 * power) - moment**2) ** 0.5 / n**0.5
            assert abs((numbers**power).mean() - moment) < 4 * error, power
        beyond = (numbers.abs() > 4).sum().item()
        expected = 2 * stats.norm.sf(4) * n
        assert abs(beyond - expected) < 4 * expected**0.5
        assert numbers.abs().max() > 4.8

    @pytest.mark.parametrize("power", [1, 2])
    def test_numbers_do_not_depend_on_their_neighbours_nor_on_other_parameters(self, power):
        """Squares too: the two numbers of a pair have one radius."""
        first, other = (drawn(MATRIX, 1024, 1024, key=key).double() ** power for key in (5, 6))
        pairs = {
            "a pair": (first[:, ::2], first[:, 1::2]),
            "next pair": (first[:, 1:-1:2], first[:, 2::2]),
            "next row": (first[1:], first[:-1]),
            "other key": (first, other),
        }
        for place, (a, b) in pairs.items():
            assert abs(correlation(a, b)) < 4 / a.numel() ** 0.5, place

    def test_seed_name_and_expert_each_change_the_key(self):
        keys = {
            initialization._key(seed, name, expert)
            for seed in (1, 2)
            for name in ("a.weight", "b.weight")
            for expert in ((), (0, 0), (0, 1), (1, 0))
        }
        assert len(keys) == 16
