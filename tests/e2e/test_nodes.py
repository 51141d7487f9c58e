# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs on several hosts: one that dies and comes back, and one whose link stalls."""

import json
import re
import subprocess
import time

import pytest

from tests.e2e.launch import run, wait_until
from tests.e2e.nodes import Nodes
from tests.e2e.test_faults import assert_whole, losses, newest

NODES, LAST = 3, 2

WAITING_S = 8
"""Limit on a collective after the first step."""

ARGUMENTS = (
    *("--train-iters", "6", "--save-interval", "2", "--seed", "1"),
    *("--global-batch-size", "12", "--micro-batch-size", "4"),
    *("--distributed-timeout-minutes", "1"),
    *("--distributed-timeout-seconds-after-init", str(WAITING_S)),
)


@pytest.fixture
def nodes(tmp_path):
    """Nodes of one network."""
    made = Nodes(NODES, tmp_path)
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory):
    """The losses of the ranks of one host."""
    metrics = tmp_path_factory.mktemp("one") / "metrics.jsonl"
    ends = run(NODES, *ARGUMENTS, "--metrics-out", metrics)
    assert [end.code for end in ends] == [0] * NODES, ends
    return losses(metrics)


def test_a_node_that_dies_and_comes_back_loses_no_step(nodes, on_one_node, tmp_path):
    """The run goes on from the last save, with the losses of one node, each step once."""
    metrics, saved = tmp_path / "metrics.jsonl", tmp_path / "saved"
    line = (*ARGUMENTS, "--metrics-out", metrics, "--save", saved, "--load", saved)
    fault = {"kind": "node", "rank": LAST, "iteration": 4, "at": "optimizer"}
    for number in range(NODES):
        nodes.start(number, line, restarts=2, fault=fault)
    wait_until(lambda: not all(map(nodes.alive, range(NODES))), 60)
    (dead,) = [number for number in range(NODES) if not nodes.alive(number)]
    assert newest(saved) == 2
    nodes.kill(dead)
    nodes.start(dead, line, restarts=2)
    ends = nodes.ends(60)
    assert ends == [0] * NODES, [nodes.said(number)[-3000:] for number in range(NODES)]
    for number in {*range(NODES)} - {dead}:
        assert re.search("(?m)^error: rank . has lost another rank, which", nodes.said(number))
    assert "going on after step 2 of 6" in "".join(map(nodes.said, range(NODES)))
    assert losses(metrics) == on_one_node
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_stalled_link_ends_the_run_on_every_node(nodes, tmp_path):
    saved = tmp_path / "saved"
    line = (*ARGUMENTS, "--save", saved, "--train-iters", "10000", "--save-interval", "10")
    for number in range(NODES):
        nodes.start(number, line)
    wait_until(lambda: newest(saved), 60)
    nodes.link(LAST, "down")
    time.sleep(WAITING_S + 4)
    nodes.link(LAST, "up")
    ends = nodes.ends(60)
    assert not {None, 0} & set(ends)
    for number in range(NODES):
        lines = re.findall("(?m)^error: rank . has lost another rank, .*$", nodes.said(number))
        assert len(lines) == 1, nodes.said(number)[-3000:]
    assert_whole(saved / f"iter_{newest(saved):07d}", NODES)
