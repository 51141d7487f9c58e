# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the processes of a survey import, and when."""

import subprocess
import sys
from pathlib import Path

NEEDED = "examples.mimo.nemotron_vlm.energon.survey", "torch", "megatron.energon"
NOT_NEEDED = ("megatron.training", "megatron.core.transformer", "matplotlib", "sklearn", "pytest")
NOT_NEEDED += ("torch._dynamo", "torch._inductor", "transformers.models.auto.modeling_auto")

PROGRAM = """
import sys
from examples.mimo.nemotron_vlm.energon import survey

code = "import sys; open(%r, 'w').write(chr(10).join(sys.modules))" % sys.argv[1]
process = survey._importing_once().Process(target=exec, args=(code,))
process.start()
process.join()
"""


def test_import_once_what_they_need_and_nothing_else(tmp_path: Path):
    """A process that does nothing has all modules: it is forked from one that imported them.

    The survey runs in a program of its own, because pytest's process may have a fork server.
    """
    said = tmp_path / "modules"
    subprocess.run([sys.executable, "-c", PROGRAM, str(said)], check=True)
    found = set(said.read_text().splitlines())
    assert set(NEEDED) <= found
    assert found.isdisjoint(NOT_NEEDED)
