# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the processes of a survey import, and when."""

from pathlib import Path

from examples.mimo.nemotron_vlm.energon import survey

NEEDED = survey.__name__, "torch", "megatron.energon"
NOT_NEEDED = ("megatron.training", "megatron.core.transformer", "matplotlib", "sklearn", "pytest")
NOT_NEEDED += ("torch._dynamo", "torch._inductor", "transformers.models.auto.modeling_auto")


def test_import_once_what_they_need_and_nothing_else(tmp_path: Path):
    """A process that does nothing has all modules: it is forked from one that imported them."""
    said = tmp_path / "modules"
    code = f"import sys; open({str(said)!r}, 'w').write(chr(10).join(sys.modules))"
    process = survey._importing_once().Process(target=exec, args=(code,))
    process.start()
    process.join()
    found = set(said.read_text().splitlines())
    assert set(NEEDED) <= found
    assert found.isdisjoint(NOT_NEEDED)
