# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The Mamba mixer with its heads spread over CP ranks, against the same mixer on whole samples."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.context_parallel_layout import PaddedLengths, pad_lengths, zigzag_layout
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.head_parallel_limits import check_head_parallel, fitting_cp_sizes
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.token_order import sample_of_each_token, to_rank_order, to_sequence_order
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils, requires_world_size

HIDDEN, HEADS, SEQUENCE, BATCH = 32, 12, 24, 2
# Odd, empty, below 2·cp, and longer than a chunk of the scan.
PACKED = (5, 0, 1, 19, 9)


@dataclass(frozen=True)
class Case:
    """``cp`` ranks, beside ``tp``; ranks of the world beyond them stay idle."""

    cp: int
    groups: int
    tp: int = 1

    def __str__(self) -> str:
        return f"tp={self.tp},cp={self.cp},groups={self.groups}"


# Whole groups on each rank, then groups that two, three or four ranks share.
CASES = [
    pytest.param(case, marks=requires_world_size(world), id=str(case))
    for world, case in [
        (2, Case(cp=2, groups=4)),
        (2, Case(cp=2, groups=1)),
        (4, Case(cp=3, groups=6)),
        (4, Case(cp=3, groups=1)),
        (4, Case(cp=4, groups=4)),
        (4, Case(cp=4, groups=2)),
        (4, Case(cp=4, groups=1)),
        (4, Case(cp=2, groups=4, tp=2)),
        (4, Case(cp=2, groups=2, tp=2)),
    ]
]


class Mixers:
    """A mixer over CP ranks and, with the same weights, its oracle over one CP rank."""

    def __init__(self, case: Case):
        Utils.initialize_distributed()
        self.grids = [
            HyperCommGrid([case.tp, case.cp], ["tp", "cp"]),
            HyperCommGrid([case.tp, 1, case.cp], ["tp", "cp", "dp"]),
        ]
        groups = [
            SimpleNamespace(tp=grid.create_pg("tp"), cp=grid.create_pg("cp")) for grid in self.grids
        ]
        self.is_member = self.grids[0].is_current_rank_in_grid()
        if self.is_member:
            self.cp_group = groups[0].cp
            self.rank, self.size = self.cp_group.rank(), case.cp
            self.sharded, self.whole = (make_mixer(case.groups, g) for g in groups)
            self.sharded.load_state_dict(self.whole.state_dict())

    def destroy(self) -> None:
        for grid in self.grids:
            grid.destroy()

    def sharded_call(self, hidden: Tensor, lengths: PaddedLengths, packed: bool) -> Tensor:
        """Output of this rank's tokens, as attention's zigzag layout has them."""
        params = lengths.packed_seq_params(Utils.device) if packed else None
        shard = zigzag_layout(lengths, self.size).shard(hidden, self.rank)
        return self.sharded(shard, packed_seq_params=params)[0]

    def summed_gradients(self) -> dict[str, Tensor]:
        """Gradients of the parameters over CP, as the data-parallel reduction adds them up."""
        gradients = {name: p.grad.clone() for name, p in self.sharded.named_parameters()}
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=self.cp_group)
        return gradients


def make_mixer(groups: int, pg_collection: SimpleNamespace) -> MambaMixer:
    model_parallel_cuda_manual_seed(
        7, tp_rank=pg_collection.tp.rank(), ep_rank=0, etp_rank=pg_collection.tp.rank()
    )
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        mamba_num_heads=HEADS,
        mamba_head_dim=8,
        mamba_num_groups=groups,
        mamba_state_dim=8,
        use_cpu_initialization=True,
    )
    submodules = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixer = MambaMixer(config, submodules, HIDDEN, chunk_size=16, pg_collection=pg_collection)
    with torch.no_grad():
        # Heads that differ in every parameter: those that start out as ones would hide a mix-up.
        generator = torch.Generator().manual_seed(pg_collection.tp.rank())
        for parameter in (mixer.D, mixer.norm.weight, mixer.conv1d.bias):
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.device))
    return mixer.to(Utils.device)


@pytest.fixture
def mixers(request):
    """The mixers; None on an idle rank, which has only taken part in making the groups."""
    mixers = Mixers(request.param)
    yield mixers if mixers.is_member else None
    mixers.destroy()


def random_rows(tokens: int, batch: int, seed: int) -> Tensor:
    """``[tokens, batch, HIDDEN]``, alike on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, batch, HIDDEN, generator=generator).to(Utils.device)


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    """To 1e-5 of the whole tensor's norm: fp32 sums of the same terms in another order."""
    error = (found - expected).norm() / expected.norm()
    assert error < 1e-5, f"{name}: relative error {error:.1e}"


def assert_equals_whole_samples(mixers: Mixers, hidden: Tensor, lengths: PaddedLengths, packed):
    """Output and all gradients of real tokens ``hidden``, against sample after sample alone."""
    weight = random_rows(*hidden.shape[:2], seed=2)
    expected_input = hidden.clone().requires_grad_()
    samples = [s for s in expected_input.split(lengths.real) if len(s)]
    expected = torch.cat([mixers.whole(sample)[0] for sample in samples])
    (expected * weight).sum().backward()

    found_input = hidden.clone().requires_grad_()
    layout = zigzag_layout(lengths, mixers.size)
    # Padding with numbers that would show, were they to reach a real token.
    found = mixers.sharded_call(lengths.pad(found_input, value=3.0), lengths, packed)
    (found * layout.shard(lengths.pad(weight), mixers.rank)).sum().backward()

    real = layout.shard(lengths.valid, mixers.rank).to(Utils.device)
    expected_shard = layout.shard(lengths.pad(expected), mixers.rank)
    assert_close(found[real], expected_shard[real], "output")
    # A rank's input gradient is that of its own tokens; zero elsewhere.
    dist.all_reduce(found_input.grad, group=mixers.cp_group)
    assert_close(found_input.grad, expected_input.grad, "input gradient")
    expected_gradients = dict(mixers.whole.named_parameters())
    for name, gradient in mixers.summed_gradients().items():
        assert_close(gradient, expected_gradients[name].grad, f"gradient of {name}")


@pytest.mark.parametrize("mixers", CASES, indirect=True)
class TestMixerOverContextParallelRanks:
    def test_a_plain_batch_equals_one_rank(self, mixers):
        if mixers:
            hidden = random_rows(SEQUENCE, BATCH, seed=1)
            lengths = PaddedLengths((SEQUENCE,), (SEQUENCE,))
            assert_equals_whole_samples(mixers, hidden, lengths, packed=False)

    def test_packed_samples_equal_each_sample_alone(self, mixers):
        if mixers:
            hidden = random_rows(sum(PACKED), 1, seed=1)
            lengths = pad_lengths(PACKED, mixers.size)
            assert_equals_whole_samples(mixers, hidden, lengths, packed=True)

    def test_no_sample_nor_padding_reaches_another_sample(self, mixers):
        """To rounding: a scan takes differences of sums that run on over sample boundaries."""
        if mixers:
            lengths = pad_lengths((5, 13), mixers.size)
            hidden = random_rows(lengths.total, 1, seed=1).requires_grad_()
            layout = zigzag_layout(lengths, mixers.size)
            second = torch.arange(lengths.total) >= lengths.padded[0]
            chosen = layout.shard(second & lengths.valid, mixers.rank).to(Utils.device)
            mixers.sharded_call(hidden, lengths, packed=True)[chosen].square().sum().backward()
            dist.all_reduce(hidden.grad, group=mixers.cp_group)
            reach = hidden.grad.flatten(1).norm(dim=1).cpu()
            own = second & lengths.valid
            assert reach[own].min() > 0
            assert reach[~own].norm() < 1e-5 * reach[own].norm()


def zigzag_and_stream(lengths: PaddedLengths, cp_size: int) -> tuple[Tensor, Tensor]:
    """Token numbers in rank order and in sequence order, one feature a token."""
    tokens = zigzag_layout(lengths, cp_size).tokens.flatten()
    return tokens.unsqueeze(1).float(), torch.arange(lengths.total).unsqueeze(1).float()


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
class TestTokenOrder:
    def test_a_plain_batch_comes_into_sequence_order_and_back(self, cp_size):
        ranks, stream = zigzag_and_stream(PaddedLengths((48,), (48,)), cp_size)
        assert torch.equal(to_sequence_order(ranks, cp_size), stream)
        assert torch.equal(to_rank_order(stream, cp_size), ranks)

    def test_packed_samples_come_into_sequence_order_and_back(self, cp_size):
        lengths = pad_lengths(PACKED, cp_size)
        params = lengths.packed_seq_params("cpu")
        ranks, stream = zigzag_and_stream(lengths, cp_size)
        assert torch.equal(to_sequence_order(ranks, cp_size, params), stream)
        assert torch.equal(to_rank_order(stream, cp_size, params), ranks)

    @pytest.mark.parametrize("reorder", [to_sequence_order, to_rank_order])
    def test_the_gradient_is_the_adjoint(self, cp_size, reorder):
        rows = torch.randn(48, 1, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: reorder(x, cp_size), rows)

    def test_a_length_that_does_not_halve_is_refused(self, cp_size):
        """It divides by cp, so every rank has equally many tokens and nothing else would notice."""
        with pytest.raises(ValueError, match=f"multiples of {2 * cp_size}"):
            to_sequence_order(torch.zeros(5 * cp_size, 1), cp_size)

    def test_unpadded_odd_samples_are_refused(self, cp_size):
        params = PaddedLengths(PACKED, PACKED).packed_seq_params("cpu")
        with pytest.raises(ValueError, match=f"multiples of {2 * cp_size}"):
            to_sequence_order(torch.zeros(sum(PACKED), 1), cp_size, params)

    def test_boundaries_of_one_rank_are_refused(self, cp_size):
        params = pad_lengths((48,), cp_size).packed_seq_params("cpu")
        with pytest.raises(ValueError, match=f"end at 48.*hold {48 * cp_size} tokens"):
            to_sequence_order(torch.zeros(48 * cp_size, 1), cp_size, params)


class TestSampleOfEachToken:
    def test_padding_belongs_to_its_sample(self):
        params = pad_lengths((3, 1, 0, 4), cp_size=2).packed_seq_params("cpu")
        found = sample_of_each_token(params, tokens=12)
        assert found.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 3, 3, 3, 3]]

    def test_samples_that_cannot_be_told_apart_are_refused(self):
        cu_seqlens = torch.tensor([0, 4, 8], dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens)
        with pytest.raises(ValueError, match="total_tokens"):
            sample_of_each_token(params, tokens=8)

    def test_another_number_of_tokens_is_refused(self):
        params = pad_lengths((8,), cp_size=2).packed_seq_params("cpu")
        with pytest.raises(ValueError, match="describes 8 tokens, the Mamba layer has 4"):
            sample_of_each_token(params, tokens=4)


class TestLimits:
    @pytest.mark.parametrize(
        "heads, groups, tp, expected",
        [
            (64, 8, 1, [1, 2, 4, 8, 16, 32, 64]),
            (64, 8, 8, [1, 2, 4, 8]),
            (12, 4, 1, [1, 2, 4, 12]),
            (12, 6, 2, [1, 3, 6]),
            (12, 1, 1, [1, 2, 3, 4, 6, 12]),
            (12, 4, 8, []),
            (12, 4, 3, []),
        ],
    )
    def test_sizes_that_fit(self, heads, groups, tp, expected):
        assert fitting_cp_sizes(heads, groups, tp) == expected

    @pytest.mark.parametrize(
        "heads, groups, tp, cp, message",
        [
            (
                64, 8, 2, 64,
                "a Mamba layer of 64 heads in 8 groups cannot be spread over tp=2, cp=64: "
                "tp·cp = 128 must divide the heads; "
                "cp sizes that fit with tp=2: 1, 2, 4, 8, 16, 32",
            ),
            (
                12, 4, 1, 3,
                "a Mamba layer of 12 heads in 4 groups cannot be spread over tp=1, cp=3: one of cp "
                "and the 4 groups of a TP rank must divide the other; "
                "cp sizes that fit with tp=1: 1, 2, 4, 12",
            ),
            (
                12, 4, 3, 1,
                "a Mamba layer of 12 heads in 4 groups cannot be spread over tp=3, which must "
                "divide both; tp sizes that fit: 1, 2, 4",
            ),
        ],
        ids=["heads", "groups", "tp"],
    )  # fmt: skip
    def test_the_refusal_names_numbers_rule_and_sizes(self, heads, groups, tp, cp, message):
        with pytest.raises(ValueError) as refusal:
            check_head_parallel(heads, groups, tp, cp)
        assert str(refusal.value) == message

    @pytest.mark.parametrize("cp, groups", [(5, 1), (3, 4)])
    def test_the_mixer_refuses_before_it_builds_anything(self, cp, groups):
        def must_not_be_built(*args, **kwargs):
            raise AssertionError("a layer was built")

        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            mamba_num_heads=HEADS,
            mamba_head_dim=8,
            mamba_num_groups=groups,
        )
        submodules = MambaMixerSubmodules(in_proj=must_not_be_built, out_proj=must_not_be_built)
        tp, cp = (SimpleNamespace(size=lambda size=size: size) for size in (1, cp))
        with pytest.raises(ValueError, match="cp sizes that fit"):
            MambaMixer(config, submodules, HIDDEN, pg_collection=SimpleNamespace(tp=tp, cp=cp))
