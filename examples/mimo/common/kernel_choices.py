# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Keep Triton's choice of a kernel's configuration for later runs, also where configurations have
hooks.

With ``TRITON_CACHE_AUTOTUNING`` Triton times a kernel's configurations once and writes the times
beside the compiled code. It leaves out configurations with a function to call before a launch,
because it cannot write down a function. Mamba-2's backward has four such kernels: each process
would time them at each start, and a restarted run could choose otherwise and round otherwise.
(Where nothing is kept yet, each rank times them itself, and the last to write decides for later
runs.)
"""

from copy import copy

from triton.runtime.autotuner import Autotuner, Config

_kept_without_hooks = getattr(Autotuner, "check_disk_cache", None)


def keep_choices() -> None:
    """Let Triton write and read the times of all kernels; call it before the first launch."""
    if _kept_without_hooks is not None:  # an older Triton keeps none
        Autotuner.check_disk_cache = _check_disk_cache


def _check_disk_cache(self: Autotuner, tuning_key, configs: list[Config], bench_fn) -> bool:
    """Do what the method does, with hooks taken off what is written and put onto what is read.

    Kernels are timed anew if their file is damaged, or if hooks are all that tells configurations
    apart.
    """
    hooked = {str(config): config for config in configs}
    if len(hooked) < len(configs):
        return _kept_without_hooks(self, tuning_key, configs, bench_fn)

    def measure() -> None:
        bench_fn()
        times = self.configs_timings.items()
        self.configs_timings = {_without_hook(config): time for config, time in times}

    bare = list(map(_without_hook, configs))
    try:
        was_found = _kept_without_hooks(self, tuning_key, bare, measure)
        self.cache[tuning_key] = hooked[str(self.cache[tuning_key])]
    except (KeyError, TypeError, ValueError):
        bench_fn()
        return False
    return was_found


def _without_hook(config: Config) -> Config:
    bare = copy(config)
    bare.pre_hook = None
    return bare
