# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""When CUDA graphs of colocated modules are recorded, captured and deleted."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import torch

from megatron.core import parallel_state
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.token_layout import pad_lengths
from megatron.core.transformer import colocated_graphs
from megatron.core.transformer.colocated_graphs import of_one_shape
from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord
from tests.unit_tests.examples.nemotron_vlm.loop.rows import Row
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import Utils, requires_world_size


class TestRecording:
    @requires_world_size(2)
    def test_is_of_training_steps_alone(self, monkeypatch):
        """Graphs are captured once in a step, when all gradients are final. Evaluations record and
        capture nothing."""
        found = []

        def note(*_):
            found.append(colocated_graphs.modules_alone)

        (line,) = Row(2, "one step", "dp=2", "pp=2,dp=1").commands
        with trainer(*line, "--train-iters", "2", "--lr", "1e-3") as run:
            stage = run.stages[0]
            stage.config.cuda_graph_impl = "local"
            finalize = stage.config.finalize_model_grads_func

            def finalized(*args, **kwargs):
                found.append("final")
                finalize(*args, **kwargs)

            monkeypatch.setattr(stage.config, "finalize_model_grads_func", finalized)
            captured = lambda: found.append("captured")  # noqa: E731
            monkeypatch.setattr(_CudagraphGlobalRecord, "create_cudagraphs", captured)
            stage.language_model.register_forward_pre_hook(note)
            for encoders in stage.modality_submodules.values():
                encoders.register_forward_pre_hook(note)
                encoders.register_full_backward_pre_hook(note)
            run.train_step()
            first, found[:] = found[:], []
            with contextlib.suppress(KeyError):  # only the last stage has results
                run.evaluate(1)
            evaluated, found[:] = found[:], []
            run.train_step()
        assert set(evaluated) == {True}
        for step in first, found:
            assert step[-2:] == ["final", "captured"] and set(step[:-2]) == {False}


class TestPackedRows:
    def test_have_one_shape(self):
        rows = [pad_lengths(each, 1).packed_seq_params("cpu") for each in ((8,), (3, 5), (4, 2, 2))]
        given = [of_one_shape({"packed_seq_params": row, "hidden_states": 3}) for row in rows]
        assert {tuple(each) for each in given} == {("packed_seq_params", "hidden_states")}
        for row, own in zip(rows, given, strict=True):
            packed = vars(own["packed_seq_params"])
            tensors = [name for name, value in packed.items() if torch.is_tensor(value)]
            assert tensors == ["seq_idx"] and packed["seq_idx"] is row.seq_idx
        others = [dict(vars(own["packed_seq_params"]), seq_idx=None) for own in given]
        assert others[0] == others[1] == others[2]

    def test_of_upstreams_runs_stay(self, monkeypatch):
        """They have global groups, and capture attention too."""
        monkeypatch.setattr(parallel_state, "is_initialized", lambda: True)
        given = {"packed_seq_params": pad_lengths((3, 5), 1).packed_seq_params("cpu")}
        assert of_one_shape(given) is given


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
