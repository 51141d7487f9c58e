# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run these tests on ranks as the unit tests are run: one outcome for all ranks, and no hang."""

from tests.unit_tests.conftest import (  # noqa: F401  pytest finds hooks and fixtures by name
    _aux_loss_scale_forgotten,
    _environment_restored,
    _guard_global_parallel_state,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_protocol,
    pytest_unconfigure,
    shared_path,
)
