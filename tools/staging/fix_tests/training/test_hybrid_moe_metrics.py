# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""MoE metrics of a hybrid model's pipeline stages, which sum them."""

from types import SimpleNamespace

import pytest

from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from megatron.training import training


class _Reported(Exception):
    """The log has come as far as it needs to here."""


class _Tracker(MoEMetricsTracker):
    def report(self, **_):
        raise _Reported


def test_a_stage_without_experts_has_a_number_for_every_layer(monkeypatch):
    known = {"num_experts": 4, "num_layers": 6, "hybrid_layer_pattern": "M*EM*E"}
    known |= {"moe_router_load_balancing_type": ["aux_loss"], "log_interval": 10}
    sizes = "seq_length micro_batch_size data_parallel_size world_size gtp_weight_remat_size"
    known |= dict.fromkeys(sizes.split(), 1)
    args = type("Args", (), {**known, "__getattr__": lambda args, name: 0})()
    tracker = _Tracker()
    values = {
        "get_args": args,
        "get_timers": SimpleNamespace(write=lambda *_, **__: None),
        "get_num_microbatches": 1,
        "get_moe_metrics_tracker": tracker,
        "reduce_max_stat_across_model_parallel_group": 0.1,
        "is_hybrid_model": True,
    }
    writers = ("tensorboard_writer", "wandb_writer", "one_logger", "energy_monitor")
    values |= {f"get_{name}": None for name in writers}
    for name, value in values.items():
        monkeypatch.setattr(training, name, lambda *_, _value=value, **__: _value)
    monkeypatch.setattr(training.one_logger_utils, "track_app_tag", lambda *_: None)
    with pytest.raises(_Reported):
        training.training_log({}, {}, 0.1, 1, 1.0, False, 0, 0.0, None, None, None)
    assert len(tracker.metrics["load_balancing_loss"].values) == args.num_layers
