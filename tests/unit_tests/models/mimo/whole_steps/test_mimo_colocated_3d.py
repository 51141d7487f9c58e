# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every kind of parallelism with every other, colocated: the steps equal one rank's.

Samples have one to three tiles each.
"""

import itertools

import pytest

from examples.mimo.common.layout import Layout, parse_layout
from tests.unit_tests.examples.nemotron_vlm.runs import assert_same_trajectory_as_one_rank
from tests.unit_tests.test_utilities import requires_world_size

LAYOUTS = [
    # encoder, language model
    ("tp=1,dp=8", "tp=2,cp=2,pp=2,dp=1,ep=4,etp=1,vpp=2"),
    ("tp=1,dp=8", "dp=8,ep=4,etp=2"),
    ("tp=2,dp=4", "cp=2,pp=4,dp=1,ep=2"),
    ("tp=4,dp=2", "tp=4,cp=2,dp=1"),
    ("tp=8,dp=1", "tp=2,pp=2,dp=2,ep=4,etp=1,vpp=2"),
    ("tp=8,dp=1", "cp=2,pp=2,dp=2,ep=2,etp=2,vpp=2"),
    ("tp=8,dp=1", "tp=2,cp=2,dp=2,ep=8,etp=1"),
    ("tp=8,dp=1", "cp=8,dp=1,ep=8"),
]

KINDS = {"tp", "cp", "pp", "vpp", "ep", "etp", "fan-in", "fan-out"}


def kinds(encoder: Layout, language: Layout) -> set[str]:
    """Kinds of parallelism in a pair of layouts; ``etp`` is one if it differs from ``tp``."""
    has = {axis: getattr(language, axis) > 1 for axis in ("tp", "cp", "pp", "vpp", "ep")}
    has["etp"] = language.etp not in (0, language.tp)
    has["fan-in"], has["fan-out"] = encoder.dp > language.dp, encoder.dp < language.dp
    return {kind for kind, found in has.items() if found}


class TestColocated3D:
    def test_the_layouts_cover_every_triple_of_kinds_and_every_size(self):
        layouts = [
            (parse_layout(encoder, "encoder"), parse_layout(language, "language"))
            for encoder, language in LAYOUTS
        ]
        found = [kinds(*pair) for pair in layouts]
        wanted = {frozenset(triple) for triple in itertools.combinations(KINDS, 3)}
        wanted = {triple for triple in wanted if not {"fan-in", "fan-out"} <= triple}
        assert not [sorted(group) for group in wanted if not any(group <= f for f in found)]
        assert {encoder.tp for encoder, _ in layouts} == {1, 2, 4, 8}
        for axis, sizes in {"tp": 4, "cp": 8, "pp": 4, "ep": 8}.items():
            assert {getattr(language, axis) for _, language in layouts} >= {1, 2, sizes}

    @requires_world_size(8)
    @pytest.mark.parametrize(("encoder", "language"), LAYOUTS)
    def test_trajectory_equals_one_rank(self, encoder, language):
        assert_same_trajectory_as_one_rank(encoder, language, microbatches=1)
