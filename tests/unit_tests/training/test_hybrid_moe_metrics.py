# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A hybrid model's pipeline stages, which sum their MoE metrics, have as many numbers each."""

from types import SimpleNamespace
from unittest import mock

from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from megatron.training import training


def test_a_stage_without_experts_has_a_number_for_every_layer(monkeypatch):
    known = {"num_experts": 4, "num_layers": 6, "hybrid_layer_pattern": "M*EM*E"}
    known |= {"moe_router_load_balancing_type": ["aux_loss"], "log_interval": 10}
    sizes = "seq_length micro_batch_size data_parallel_size world_size gtp_weight_remat_size"
    known |= dict.fromkeys(sizes.split(), 1)
    tracker = MoEMetricsTracker()
    returned = {
        "get_args": type("Args", (), {**known, "__getattr__": lambda args, name: 0})(),
        "get_timers": SimpleNamespace(write=lambda *_, **__: None),
        "get_num_microbatches": 1,
        "get_moe_metrics_tracker": tracker,
        "reduce_max_stat_across_model_parallel_group": 0.1,
        "is_hybrid_model": True,
    }
    writers = ("tensorboard_writer", "wandb_writer", "one_logger", "energy_monitor")
    for name, value in (returned | {f"get_{name}": None for name in writers}).items():
        monkeypatch.setattr(training, name, mock.Mock(return_value=value))
    monkeypatch.setattr(training, "one_logger_utils", mock.Mock())
    monkeypatch.setattr(tracker, "report", mock.Mock(return_value=""))
    training.training_log({}, {}, 0.1, 1, 1.0, False, 0, 0.0, None, None, None)
    assert len(tracker.metrics["load_balancing_loss"].values) == known["num_layers"]
