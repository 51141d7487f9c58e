# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The Slurm that the tests share; without one they are skipped."""

import sys
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.environment["PYTHON"] = sys.executable
    try:
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        cluster.end_daemons()
