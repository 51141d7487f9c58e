# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A trained model answers on a GPU, in bf16 and by Mamba-2's kernels, as on a CPU in fp32."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_generate import Trained, messages_of, trained  # noqa: F401 (a fixture)
from tests.unit_tests.test_utilities import requires_world_size

GENERATE = Path(__file__).resolve().parents[2] / "tools" / "generate.py"


@requires_world_size(1)
@pytest.mark.parametrize("trained", ["tiny-omni"], indirect=True)
def test_answers_begin_as_a_cpus(trained: Trained, tmp_path, record_property):  # noqa: F811
    """Questions are of images, sounds and text. Rounding may change a token, and all after it."""
    asked = tmp_path / "asked.jsonl"
    asked.write_text("\n".join(map(json.dumps, messages_of(trained.asked.values(), tmp_path))))
    words = [trained.path / "saved", "--questions", asked, "--max-tokens", "6"]
    first = [first_words([*words, "--device", device]) for device in ("cpu", "cuda")]
    same = sum(one == other for one, other in zip(*first, strict=True))
    record_property("found", f"{same} of {len(trained.asked)}")
    assert same >= len(trained.asked) - 1 and len(set(first[0])) > 1, first


def first_words(words: list) -> list[str]:
    """Return the first word of each answer of the command, in a process of its own."""
    command = [sys.executable, "-W", "ignore", GENERATE, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["answer"].split()[0] for line in done.stdout.splitlines()]
