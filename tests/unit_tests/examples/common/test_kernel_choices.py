# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A second process launches the configuration that the first one found fastest, with its hook."""

from types import SimpleNamespace

import pytest
from triton import language
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner
from triton.runtime.autotuner import Autotuner, Config
from triton.runtime.jit import JITFunction

from examples.mimo.common.kernel_choices import keep_choices
from tests.unit_tests.test_utilities import requires_world_size

TIMES = {16: 3.0, 32: 1.0, 64: 2.0}


@JITFunction  # triton.jit would interpret it on a CPU
def kernel(pointer, BLOCK: language.constexpr):
    language.store(pointer, BLOCK)


class Tuned(Autotuner):
    """A kernel's tuner in a process of its own: it counts what it times, and launches nothing."""

    def __init__(self):
        def zero(_):
            self.zeroed += 1

        configs = [Config({"BLOCK": size}, pre_hook=zero) for size in TIMES]
        super().__init__(kernel, ["pointer", "BLOCK"], configs, ["pointer"], None, None)
        self.cache_results = True
        self.timed, self.zeroed = [], 0

    def _bench(self, *_, config, **__):
        self.timed.append(config.kwargs["BLOCK"])
        return [TIMES[config.kwargs["BLOCK"]]]


@requires_world_size(1)
@pytest.mark.parametrize(
    "text", [None, "", '{"configs_timings": [[{"kwargs": {"BLOCK": 8}}, 1.0]]}']
)
def test_choices_of_kernels_with_hooks_are_kept(text, monkeypatch, tmp_path):
    """A file that is cut short, or of other configurations, is left aside. No GPU is there."""
    target, launched = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)), []
    monkeypatch.setattr(autotuner, "driver", SimpleNamespace(active=target))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Autotuner, "check_disk_cache", Autotuner.check_disk_cache)
    monkeypatch.setattr(kernel, "run", lambda *_, BLOCK, **__: launched.append(BLOCK))
    keep_choices()
    first, second = Tuned(), Tuned()
    first.run(1)
    (file,) = tmp_path.glob("**/*.autotune.json")
    if text is not None:
        file.write_text(text)
    second.run(1)
    assert (first.timed, second.timed) == ([16, 32, 64], [] if text is None else [16, 32, 64])
    assert (launched, first.zeroed, second.zeroed) == ([32, 32], 1, 1)
