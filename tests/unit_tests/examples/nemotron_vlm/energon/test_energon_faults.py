# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of storage and of loading processes: the table "When data fails" of your-own-data.md.

Each row there has its cases here, but for the death of a process: data/test_loading_processes.py.
A rank draws an epoch from real shards through real loading processes, and each sample is seen once,
or the run ends in one line with the reason.
"""

import errno
import itertools
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from multistorageclient.file import PosixFile

from examples.mimo.common.errors import BAD_INPUT, UserError, end_rank
from examples.mimo.nemotron_vlm.energon import store
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import source, survey
from tests.unit_tests.examples.nemotron_vlm.runs import options_of, session_of
from tests.unit_tests.test_utilities import Utils

PAGE = Path(__file__).resolve().parents[5] / "docs" / "user" / "your-own-data.md"
RUN = "--train-iters 7 --global-batch-size 12 --micro-batch-size 1 --seq-length 64 --seed 3"
RUN += " --num-workers 2"
EPOCH = 84
SHARD = "train-0001.tar"


def refused(
    file: str, error: int = errno.EIO, stale_after: int | None = None
) -> Callable[[Path], None]:
    """Let reads of a file fail; processes are forked from this one.

    Args:
        stale_after: number of reads after which the file that a process opens first fails; None
            lets each read fail.
    """

    def strike(data: Path) -> None:
        read, reads = PosixFile.read, Counter()

        def faulty(opened: PosixFile, size: int = -1) -> bytes:
            if opened.name.endswith(file):
                reads[opened] += 1
                is_first = opened is next(iter(reads))
                if stale_after is None or (is_first and reads[opened] > stale_after):
                    raise OSError(error, os.strerror(error))
            return read(opened, size)

        PosixFile.read = faulty

    return strike


def changed(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Change bytes of the shard's files, which keep their sizes."""
    return lambda data: (data / SHARD).write_bytes((data / SHARD).read_bytes().replace(old, new))


class Fault(NamedTuple):
    """A fault, and what comes of it.

    strike: called with the data set. says: a pattern of the line that ends the run, or of the log
    if the run goes on. at_start: it strikes before the data are opened, not before the first read.
    ends: whether the run ends.
    """

    strike: Callable[[Path], None]
    says: str
    at_start: bool = False
    ends: bool = True


CHANGED = rf"/{SHARD}/train-\d+ has changed since the survey: {{}}"
ROWS = {
    "a read is refused (`EIO`, `ESTALE`, …), and succeeds later": {
        "ESTALE": Fault(
            refused(SHARD, errno.ESTALE, stale_after=2),
            rf"/{SHARD}, sample \d+: \[Errno 116\] .*; next try in 0.1 s",
            ends=False,
        ),
        "ESTALE of an index": Fault(
            refused(f"{SHARD}.idx", errno.ESTALE, stale_after=0),
            rf"/{SHARD}, sample \d+: \[Errno 116\] .*; next try in 0.1 s",
            ends=False,
        ),
    },
    "a read is refused to the end": {
        "EIO": Fault(
            refused(SHARD), rf"/{SHARD}, sample \d+ cannot be read, also after 0.3 s: \[Errno 5\] "
        ),
    },
    "a shard is replaced, cut short or removed": {
        "other texts": Fault(
            changed(b'"copy', b'"c0py'), CHANGED.format("its text differs from the survey's")
        ),
        "other pixels": Fault(
            changed(b"JFIF\0\1\1", b"JFIF\0\1\2"), CHANGED.format("its images differ from")
        ),
        "unmounted": Fault(
            lambda data: data.rename(data.with_name("elsewhere")),
            r"\.tar/sample \d+ has changed since .*No such file",
        ),
    },
    "a loading process dies": {},
    "the survey or the index cannot be read at the start": {
        "survey cut short": Fault(
            lambda data: [
                os.truncate(file, 300) for file in data.glob(".nv-meta/survey-*[0-9a-f].npy")
            ],
            "survey cannot be read",
            at_start=True,
        ),
        "EIO of metadata": Fault(refused(".yaml"), "Input/output error", at_start=True),
    },
}
CASES = [
    pytest.param(fault, id=name, marks=pytest.mark.shows(row))
    for row, faults in ROWS.items()
    for name, fault in faults.items()
]


@pytest.mark.parametrize("fault", CASES)
def test_a_fault_loses_no_sample_or_ends_the_run_in_a_line(
    fault, digits, tmp_path, capsys, monkeypatch
):
    Utils.initialize_distributed()
    monkeypatch.setenv("RANK", "0")
    data, log = shutil.copytree(digits, tmp_path / "digits"), tmp_path / "log"
    monkeypatch.setattr(store, "PAUSES_S", (0.1, 0.2))
    monkeypatch.setattr(PosixFile, "read", PosixFile.read)  # which faults replace
    # The log of loading processes, too.
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.FileHandler(log)])
    seen, said = Counter(), []
    line = f"{RUN} --data energon:{data} --tokenizer-model {data}/tokenizer"
    try:
        if fault.at_start:
            fault.strike(data)
        with session_of(options_of(*line.split())) as session:
            if not fault.at_start:
                fault.strike(data)
            for batch in itertools.islice(session.loading.training(), EPOCH):
                seen.update(batch["samples"])
    except UserError as error:
        capsys.readouterr()
        assert end_rank(error) == BAD_INPUT
        said = capsys.readouterr().err.splitlines()
    assert set(seen.values()) <= {1}
    if fault.ends:
        assert len(said) == 1 and len(seen) < EPOCH
        assert re.match(f"error: rank 0: --data: .*{fault.says}", said[0]), said
    else:
        assert not said and set(seen) == set(range(EPOCH))
        assert re.search(fault.says, log.read_text()), log.read_text()


def test_a_survey_awaits_a_read_that_fails_for_good_and_blames_no_data(copied, monkeypatch):
    slept, read = [], PosixFile.read
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(PosixFile, "read", read)
    refused(SHARD)(copied)
    why = f"^{copied / SHARD}, sample 0 cannot be read, also after 63 s: .Errno 5. Input/output"
    with pytest.raises(OSError, match=why):
        survey(copied)
    assert slept == list(store.PAUSES_S) == [1, 2, 4, 8, 16, 32]
    PosixFile.read = read
    survey(copied)
    assert not source(copied).left_out("train")


def test_the_page_has_these_rows():
    table = PAGE.read_text().partition("## When data fails\n")[2].partition("\n## ")[0]
    assert re.findall(r"(?m)^\| (.*?) \| ", table)[1:] == list(ROWS)
