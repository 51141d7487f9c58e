# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""docs/user/troubleshooting.md lists messages that the code still has."""

import ast
import mmap
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from mini import REPOSITORY

DOCUMENT = REPOSITORY / "docs/user/troubleshooting.md"
ANYTHING = "…"

MEGATRON_DDP = REPOSITORY / "build/Megatron-LM/megatron/core/distributed"
TORCH = Path(find_spec("torch").origin).parent
FROM_ELSEWHERE = {
    "found NaN in local grad norm for bucket": MEGATRON_DDP / "param_and_grad_buffer.py",
    "received by PID": TORCH / "distributed/elastic/multiprocessing/errors/__init__.py",
    "Timed out waiting": TORCH / "lib/libtorch_cpu.so",
    "Connection closed by peer": TORCH / "lib/libtorch_cpu.so",
    "Watchdog caught collective operation timeout": TORCH / "lib/libtorch_cuda.so",
}
"""Messages of Megatron and PyTorch, and the file that has each."""


def listed() -> list[str]:
    """Return the first cells of the tables."""
    return re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(), re.MULTILINE)


def plain(text: str) -> str:
    """Strip a text of backticks, line breaks and repeated placeholders."""
    return re.sub(f"{ANYTHING}+", ANYTHING, " ".join(text.replace("`", "").split()))


def templates() -> str:
    """Return all texts of our programs, a line each, with placeholders for inserted values."""
    texts = []
    for root in ("examples", "tools", "megatron_overlay"):
        for path in (REPOSITORY / root).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (getattr(part, "value", None) for part in node.values)
                    texts.append("".join(p if isinstance(p, str) else ANYTHING for p in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    for path in (REPOSITORY / "Makefile", *(REPOSITORY / "tools").glob("*.sh")):
        texts += re.sub(r"\$(\w+|\([^)]*\))", ANYTHING, path.read_text()).splitlines()
    return "\n".join(map(plain, texts))


def test_our_messages_are_in_the_code():
    code = templates()
    messages = [message for message in listed() if message not in FROM_ELSEWHERE]
    assert len(messages) > 50
    assert [message for message in messages if plain(message) not in code] == []


@pytest.mark.parametrize("message", FROM_ELSEWHERE)
def test_messages_of_others_are_in_their_files(message):
    assert message in listed()
    path = FROM_ELSEWHERE[message]
    if not path.exists():
        pytest.skip(f"needs {path.name}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(message.encode()) >= 0
