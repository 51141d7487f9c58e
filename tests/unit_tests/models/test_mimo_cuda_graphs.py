# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""When CUDA graphs of colocated modules are captured and deleted."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron.core.models.mimo.teardown import destroy
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.models.one_step import arguments
from tests.unit_tests.test_utilities import Utils, requires_world_size


class TestCapture:
    @requires_world_size(2)
    @pytest.mark.parametrize("language", ["dp=2", "pp=2,dp=1"])
    def test_comes_once_in_a_step_after_all_gradients_are_final(self, language, monkeypatch):
        found = []
        with trainer(*arguments("dp=2", language)) as run:
            config = run.stages[0].config
            config.cuda_graph_impl = "local"
            finalize = config.finalize_model_grads_func

            def finalized(*args, **kwargs):
                found.append("final")
                if finalize is not None:
                    finalize(*args, **kwargs)

            def captured():
                encoder = run.stages[0].modality_submodules.parameters()
                found.append([bool(weight.main_grad.any()) for weight in encoder])

            monkeypatch.setattr(schedules, "create_cudagraphs", captured)
            monkeypatch.setattr(config, "finalize_model_grads_func", finalized)
            run.train_step()
        assert found[0] == "final" and len(found) == 2 and all(found[1])


class TestTeardown:
    def test_deletes_graphs_before_groups(self):
        Utils.initialize_distributed()
        manager = CudaGraphManager.__new__(CudaGraphManager)
        torch.nn.Module.__init__(manager)
        graph = torch.nn.Identity()  # anything that can be watched
        alive = weakref.ref(graph)
        manager.cudagraph_runners = [SimpleNamespace(fwd_graph=graph, bwd_graph=None)]
        del graph
        kept = manager.cudagraph_runners[0]  # as autograd keeps it
        stage = torch.nn.Sequential(manager)
        stage.destroy, stage.config = lambda: None, SimpleNamespace(grad_scale_func=None)
        closed = []

        def close():
            gc.collect()
            closed.append(alive() is None and kept.fwd_graph is None)

        destroy([stage], {"language": SimpleNamespace(grid=SimpleNamespace(destroy=close))})
        assert closed == [True]
