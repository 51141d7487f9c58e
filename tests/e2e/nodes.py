# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces on a bridge, each with an agent and a rank.

A node has an address of its own, its own shared memory and temporary files; the file system is
shared. It needs root, and a kernel that allows namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

from tests.agent import run_ranks
from tests.e2e.launch import CHECKOUT, faulty_rank, forked, kill

NETWORK, MOUNTS = 0x40000000, 0x00020000  # CLONE_NEWNET, CLONE_NEWNS
PORT = 29400

AGENT = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3, "last_call_timeout": 1}
"""Rendezvous settings (``--rdzv-conf``): a node that says nothing for 3 s has gone."""


class Nodes:
    """Hosts with a link each to a common switch.

    Args:
        count: number of hosts. directory: for their files.

    Attributes:
        least: number of hosts that go on without the others; all by default.
    """

    def __init__(self, count: int, directory: Path) -> None:
        self.directory, self.least, self._started = directory, count, {}
        self._names = [f"mimo-{os.getpid()}-{number}" for number in range(count)]
        self._switch = f"mimo-{os.getpid()}-switch"

    def make(self) -> None:
        """Make the namespaces.

        Raises:
            OSError, subprocess.CalledProcessError: they are not allowed here.
        """
        switch = ("-n", self._switch)
        _ip("netns", "add", self._switch)
        _ip(*switch, "link", "add", "bridge", "type", "bridge")
        _ip(*switch, "link", "set", "bridge", "up")
        for number, name in enumerate(self._names):
            own, port = ("-n", name), f"port{number}"
            _ip("netns", "add", name)
            pair = ("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip(*switch, *pair)
            _ip(*switch, "link", "set", port, "master", "bridge", "up")
            _ip(*own, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip(*own, "link", "set", link, "up")

    def close(self) -> None:
        """Kill what runs on the nodes, and remove them."""
        for number in list(self._started):
            self.kill(number)
        for name in (*self._names, self._switch):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def link(self, number: int, state: str) -> None:
        """Set a node's link "up" or "down"; what was on its way is lost."""
        _ip("-n", self._switch, "link", "set", f"port{number}", state)

    def start(
        self, number: int, arguments: tuple, restarts: int = 0, fault: dict | None = None
    ) -> None:
        """Start a node's agent and its rank, with a fault of faulty_rank.py; return at once."""
        log, line = self.directory / f"node{number}.txt", list(map(str, arguments))
        own = (self._names, number, self.least, restarts, log, fault, line)
        self._started[number] = forked(_node, *own)

    def kill(self, number: int) -> None:
        """Kill a node's processes."""
        kill(self._started.pop(number))

    def alive(self, number: int) -> bool:
        return self._started[number].is_alive()

    def ends(self, limit_s: float) -> list[int | None]:
        """Wait for all nodes; return their agents' exit codes, None where one does not end."""
        for process in self._started.values():
            process.join(limit_s)
        return [process.exitcode for _, process in sorted(self._started.items())]

    def said(self, number: int) -> str:
        """Return what a node's agent and ranks have written."""
        return (self.directory / f"node{number}.txt").read_text()


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _node(
    names: list[str],
    number: int,
    least: int,
    restarts: int,
    log: Path,
    fault: dict | None,
    line: list[str],
) -> None:
    """Enter the node's namespaces, and be its agent."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{names[number]}") as namespace:
        assert libc.setns(namespace.fileno(), NETWORK) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(MOUNTS) == 0, os.strerror(ctypes.get_errno())
    own = log.with_suffix("")
    own.mkdir(exist_ok=True)
    for command in ("--make-rprivate /", "-t tmpfs own /dev/shm", f"-t tmpfs own {own}"):
        subprocess.run(["mount", *command.split()], check=True)
    with log.open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(CHECKOUT)
    tempfile.tempdir = str(own)
    os.environ |= {"TMPDIR": str(own), "GLOO_SOCKET_IFNAME": "eth0"}
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agent = {
        "min_nodes": least,
        "max_nodes": len(names),
        "rdzv_endpoint": f"{address(0)}:{PORT}",
        "rdzv_configs": AGENT | {"is_host": number == 0},
        "local_addr": address(number),
    }
    os._exit(run_ranks(1, faulty_rank, fault, line, restarts=restarts, **agent))
