# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs on several hosts: one that dies, and comes back or not, and one whose link stalls."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from examples.mimo.nemotron_vlm.loop.metrics import read_metrics
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
    metrics, line = outputs(tmp_path)
    dead = lose_a_node(nodes, line)
    nodes.start(dead, line, restarts=2)
    assert_all_end_well(nodes)
    assert "going on after step 2 of 6" in "".join(map(nodes.said, range(NODES)))
    assert losses(metrics) == on_one_node
    assert [record["step"] for record in read_metrics(metrics)] == [1, 2, 3, 4, 5, 6]


def test_the_others_go_on_in_the_layout_that_the_planner_finds_for_them(
    nodes, on_one_node, tmp_path
):
    metrics, line = outputs(tmp_path)
    nodes.least = NODES - 1
    lose_a_node(nodes, (*line, "--language", "planned"))
    assert_all_end_well(nodes)
    said = "".join(map(nodes.said, range(NODES)))
    ranks = re.findall(r"(?m)^tiny on (\d) ranks, .*; (\d) microbatches of (\d) × dp (\d)", said)
    assert [each[0] for each in ranks] == [str(NODES), str(NODES - 1)]
    assert "going on after step 2 of 6" in said
    assert losses(metrics) == pytest.approx(on_one_node, rel=1e-5)
    assert [record["step"] for record in read_metrics(metrics)] == [1, 2, 3, 4, 5, 6]


def outputs(path: Path) -> tuple[Path, tuple]:
    """Return the metrics' file, and the command line with the outputs."""
    metrics, saved = path / "metrics.jsonl", path / "saved"
    return metrics, (*ARGUMENTS, "--metrics-out", metrics, "--save", saved, "--load", saved)


def lose_a_node(nodes: Nodes, line: tuple) -> int:
    """Start a run, and wait until a node of it has died in its fourth step; return the node."""
    fault = {"kind": "node", "rank": LAST, "iteration": 4, "at": "optimizer"}
    for number in range(NODES):
        nodes.start(number, line, restarts=2, fault=fault)
    wait_until(lambda: not all(map(nodes.alive, range(NODES))), 60)
    (dead,) = [number for number in range(NODES) if not nodes.alive(number)]
    nodes.kill(dead)
    return dead


def assert_all_end_well(nodes: Nodes) -> None:
    """Assert that all nodes that are left end with 0, and that those which lost another say so."""
    ends = nodes.ends(60)
    said = [nodes.said(number) for number in range(NODES)]
    assert set(ends) == {0}, [each[-3000:] for each in said]
    found = [re.search("(?m)^error: rank . has lost another rank, which", each) for each in said]
    assert len(list(filter(None, found))) == NODES - 1


def test_a_stalled_link_ends_the_run_on_every_node(nodes, tmp_path):
    """But not one that stalls for a shorter time than the limits on waiting."""
    metrics, saved = tmp_path / "metrics.jsonl", tmp_path / "saved"
    line = (*ARGUMENTS, "--metrics-out", metrics, "--save", saved)
    line = (*line, "--train-iters", "10000", "--save-interval", "10")
    for number in range(NODES):
        nodes.start(number, line)
    wait_until(lambda: newest(saved), 60)
    stall(nodes, WAITING_S / 4)
    before = len(read_metrics(metrics))
    wait_until(lambda: len(read_metrics(metrics)) > before + 10, 60)
    stall(nodes, WAITING_S + 4)
    ends = nodes.ends(60)
    assert not {None, 0} & set(ends)
    for number in range(NODES):
        lines = re.findall("(?m)^error: rank . has lost another rank, .*$", nodes.said(number))
        assert len(lines) == 1, nodes.said(number)[-3000:]
    assert_whole(saved / f"iter_{newest(saved):07d}", NODES)


def stall(nodes: Nodes, seconds: float) -> None:
    """Let a node's link carry nothing for a time."""
    nodes.link(LAST, "down")
    time.sleep(seconds)
    nodes.link(LAST, "up")
