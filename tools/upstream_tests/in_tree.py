# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's tests in the tree that is the working directory, on forked ranks:
``in_tree.py OVERLAY RECORDS`` reads a number of ranks and a file from each line of stdin, then
tests of it that are left out.
"""

import functools
import json
import os
import sys
import types
import typing
from datetime import timedelta
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

sys.path[0] = os.getcwd()

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import typing_extensions  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

TEST_LIMIT_S = float(os.environ.get("UPSTREAM_TEST_LIMIT_S", "150"))
COLLECTIVE_LIMIT = timedelta(seconds=30)


def stand_in(cpu_runtime: Path) -> None:
    """Stand in for what upstream's tests need and CPU ranks lack: CUDA, NCCL, Python 3.12."""
    typing.override = typing_extensions.override
    # Under its usual name, which a pristine tree does not have.
    name = "megatron.core.cpu_runtime"
    spec = spec_from_file_location(name, cpu_runtime / "__init__.py")
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    sys.modules[name].install()
    # Upstream's conftest downloads test data, and some tests ask for ModelOpt to get transformers.
    downloads = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    downloads.download_and_extract_asset = lambda assets_dir: False
    sys.modules[downloads.__name__] = downloads
    skip = pytest.importorskip
    pytest.importorskip = lambda name, *a, **k: None if name == "modelopt" else skip(name, *a, **k)
    # Without TE, CLIP's norm is PyTorch's by default, which takes no config.
    norm = import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    vit = import_module("megatron.core.models.vision.clip_vit_model").CLIPViTModel
    init = vit.__init__
    init.__defaults__ = tuple(norm if d is torch.nn.LayerNorm else d for d in init.__defaults__)


class Recorder:
    """A plugin that records outcomes, and makes the ranks begin each test together."""

    def __init__(self, record: Path):
        self.record = record
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store, _, _ = next(dist.rendezvous("env://"))
        self.meetings = self.groups = 0
        self.init, new_group = dist.init_process_group, dist.new_group

        @functools.wraps(new_group)
        def new_group_in_time(ranks=None, timeout=None, *args, **named):
            return new_group(ranks, COLLECTIVE_LIMIT, *args, **named)

        distributed_c10d.default_pg_timeout = COLLECTIVE_LIMIT
        for module in (dist, distributed_c10d):
            module.init_process_group, module.new_group = self.init_again, new_group_in_time

    def init_again(self, backend=None, init_method=None, timeout=None, **named) -> None:
        # Each time a new prefix: otherwise gloo would find the addresses of earlier groups.
        self.groups += 1
        store = named.pop("store", None)
        prefix = dist.PrefixStore(f"groups/{self.meetings}/{self.groups}", store or self.store)
        ranks = {} if store else {"rank": self.rank, "world_size": self.size}
        self.init(backend, timeout=COLLECTIVE_LIMIT, store=prefix, **named | ranks)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        item.config.option.experimental = item.get_closest_marker("experimental") is not None
        self.outcome = ("passed", "")
        self.write(item.nodeid, "hung", "a rank did not end it")  # unless another line follows
        result = yield
        self.write(item.nodeid, *self.outcome)
        self.groups = 0
        keys = [f"tests/{self.meetings}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], self.outcome[0])
        self.meetings += 1
        self.store.wait(keys, timedelta(seconds=TEST_LIMIT_S + 5))
        if b"failed" in [self.store.get(key) for key in keys] and dist.is_initialized():
            # Ranks may have made other groups.
            sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
            dist.destroy_process_group()
            self.init_again("gloo")
        return result

    def pytest_runtest_logreport(self, report) -> None:
        if report.outcome != "passed" and self.outcome[0] != "failed":
            self.outcome = report.outcome, report.longreprtext[-300:].replace("\n", " ")

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.write(report.nodeid, "failed", report.longreprtext[-300:].replace("\n", " "))

    def write(self, *line: str) -> None:
        with self.record.open("a") as file:
            file.write(json.dumps([self.rank, *line]) + "\n")


def run_file(file: str, done: list[str], record: Path) -> None:
    """Run the tests of a file on this rank, but those that are done; exit if pytest breaks."""
    # A test for GPUs of 80 GB shall harm no other program: the system ends this one first.
    Path("/proc/self/oom_score_adj").write_text("1000")
    settings = "pyproject.toml" if Path("pyproject.toml").exists() else os.devnull
    options = ["-qq", "--tb=short", "-Wignore", "-p", "no:cacheprovider", "-o", "addopts="]
    options += ["-o", f"faulthandler_timeout={TEST_LIMIT_S}", "--rootdir", ".", "-c", settings]
    options += ["-o", "faulthandler_exit_on_timeout=true", f"--basetemp={record}-{os.getpid()}"]
    skipped = [f"--deselect={test}" for test in done]
    code = pytest.main([*options, *skipped, file], plugins=[Recorder(record)])
    if code not in (0, 1, 2, 5):
        sys.exit(int(code))


def main(overlay: Path, records: Path) -> None:
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from ranks import run_ranks

    del sys.path[-1]  # tests must not find our modules
    stand_in(overlay / "megatron/core/cpu_runtime")
    import megatron.training  # noqa: F401  the ranks share what is imported
    import tests.unit_tests.test_utilities  # noqa: F401

    for number, line in enumerate(sys.stdin):
        size, file, *done = line.rstrip().split("\t")
        record, tried = records / f"{number}.jsonl", None
        while run_ranks(int(size), run_file, file, done, record) and tried != done:
            # A rank has ended in a test, which counts as hung; the tests after it run now.
            begun = record.read_text().splitlines() if record.exists() else []
            tried, done = done, sorted({json.loads(line)[1] for line in begun} | set(done))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
