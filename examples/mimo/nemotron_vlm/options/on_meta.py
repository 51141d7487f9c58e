# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run's model on the meta device, where parameters have a shape and take no memory.

The planner counts its parameters, and the converter reads the names and shapes of its tensors.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.mimo.nemotron_vlm.model.model import build_vlm, placed
from examples.mimo.nemotron_vlm.options.run import Run
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.core.models.mimo.setup.module_groups import make_modules, prepare_process
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.training.global_vars import set_global_variables, unset_global_variables


@contextmanager
def stages_on_meta(options: Run, rank: int) -> Iterator[list[MimoModel]]:
    """Build a rank's virtual stages on the meta device, with process groups that send nothing."""
    args, configs = options.args, options.configs
    with ExitStack() as undone:
        # Nothing runs, so no graph is needed; Megatron's own layers have the same parameters.
        counted = {"cuda_graph_impl": "none", "transformer_impl": "local"}
        of_encoders = [config for each in configs.encoders for config in each.values()]
        for part in (args, *of_encoders, configs.language):
            undone.enter_context(replaced(part, **counted))
        set_global_variables(args, build_tokenizer=False)
        undone.callback(unset_global_variables)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
        undone.callback(dist.destroy_process_group)
        modules = make_modules(placed(options.preset, options.layouts), "fake")
        prepare_process(modules, args)
        with torch.device("meta"):  # under the CPU runtime the current CUDA device, too
            stages = build_vlm(args, options.preset, configs, modules, adapters=options.adapters)
        undone.callback(destroy, stages, modules)
        yield stages
