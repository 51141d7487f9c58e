# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts as they are written on the command line; no process needed."""

import pytest

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout, parse_layout


def test_reads_axes_in_any_order():
    assert parse_layout("dp=4, tp=2", "encoder") == Layout(tp=2, dp=4)


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=two", "xp=2", "tp=-1", "tp=2,tp=2"])
def test_refuses_what_is_no_layout(text):
    with pytest.raises(UserError, match="--language"):
        parse_layout(text, "language")
