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


class _Anything:
    """Arguments: those that matter here, and 0 for all others."""

    def __init__(self, **known):
        self.__dict__.update(known)

    def __getattr__(self, name):
        return 0


def test_a_stage_without_experts_has_a_number_for_every_layer(monkeypatch):
    args = _Anything(
        num_experts=4,
        num_layers=6,
        hybrid_layer_pattern="M*EM*E",
        moe_router_load_balancing_type=["aux_loss"],
        micro_batch_size=1,
        data_parallel_size=1,
        gtp_weight_remat_size=1,
        world_size=1,
        seq_length=8,
        log_interval=10,
    )
    timers = SimpleNamespace(write=lambda *_, **__: None)
    tracker = _Tracker()
    values = {
        "get_args": args,
        "get_timers": timers,
        "get_tensorboard_writer": None,
        "get_wandb_writer": None,
        "get_one_logger": None,
        "get_energy_monitor": None,
        "get_num_microbatches": 1,
        "get_moe_metrics_tracker": tracker,
        "reduce_max_stat_across_model_parallel_group": 0.1,
        "is_hybrid_model": True,
    }
    for name, value in values.items():
        monkeypatch.setattr(training, name, lambda *_, _value=value, **__: _value)
    monkeypatch.setattr(training.one_logger_utils, "track_app_tag", lambda *_: None)
    with pytest.raises(_Reported):
        training.training_log({}, {}, 0.1, 1, 1.0, False, 0, 0.0, None, None, None)
    name = "load_balancing_loss"
    assert name in tracker.metrics
    assert len(tracker.metrics[name].values) == args.num_layers
