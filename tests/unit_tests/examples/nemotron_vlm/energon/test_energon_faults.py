# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of storage and of loading processes: the table "When data fails" of your-own-data.md.

Each row there has its cases here. A rank draws an epoch from real shards through real loading
processes, and each sample is seen once, or the run ends in one line with the reason.
"""

import errno
import io
import logging
import os
import re
import shutil
import signal
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from multistorageclient.file import PosixFile
from PIL import Image

from examples.mimo.common.errors import BAD_INPUT, UserError, end_rank
from examples.mimo.nemotron_vlm.energon import store
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import image, source, survey
from tests.unit_tests.examples.nemotron_vlm.runs import options_of, session_of
from tests.unit_tests.test_utilities import Utils

PAGE = Path(__file__).resolve().parents[5] / "docs" / "user" / "your-own-data.md"
RUN = "--train-iters 7 --global-batch-size 12 --micro-batch-size 1 --seq-length 64 --seed 3"
RUN += " --num-workers 2"
EPOCH = 84
SHARD = "train-0001.tar"
ALWAYS = 10**9
LATER = 6
"""Microbatches that the rank has drawn when a fault strikes that does not strike from the start."""


def refused(error: int, times: int, file: str = SHARD) -> Callable[[Path], None]:
    """Let each process's first reads of a file fail."""
    return lambda data: _in_reads(file, times, lambda _: _raise(error))


def _raise(error: int) -> None:
    raise OSError(error, os.strerror(error))


def _in_reads(file: str, times: int, act: Callable[[PosixFile], None]) -> None:
    """Act in each process's first reads of a file; processes are forked from this one."""
    read, left = PosixFile.read, [times]

    def faulty(opened: PosixFile, size: int = -1) -> bytes:
        if opened.name.endswith(file) and left[0]:
            left[0] -= 1
            act(opened)
        return read(opened, size)

    PosixFile.read = faulty


def stale(data: Path) -> None:
    """Let the first file that each process has read twice be stale until it is opened anew."""
    reads = Counter()

    def act(opened: PosixFile) -> None:
        reads[opened] += 1
        if opened is next(iter(reads)) and reads[opened] > 2:
            _raise(errno.ESTALE)

    _in_reads(SHARD, ALWAYS, act)


def killed(data: Path) -> None:
    # Older children are of other tests.
    max(psutil.Process().children(), key=psutil.Process.create_time).kill()
    time.sleep(0.2)  # the rank is busy elsewhere


def changed(suffix: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change each file of a kind in the shard; all keep their sizes."""

    def act(data: Path) -> None:
        content = bytearray((data / SHARD).read_bytes())
        with tarfile.open(data / SHARD) as tar:
            members = [member for member in tar if member.name.endswith(suffix)]
        for member in members:
            where = slice(member.offset_data, member.offset_data + member.size)
            content[where] = change(bytes(content[where])).ljust(member.size, b"\0")
        (data / SHARD).write_bytes(content)

    return act


def truncated(path: str, size: int) -> Callable[[Path], None]:
    return lambda data: [os.truncate(file, size) for file in data.glob(path)]


class Fault(NamedTuple):
    """A fault, and what comes of it.

    strike: called with the data set. says: a pattern of the log if the run goes on,
    else of the line that ends it. later: it strikes when an epoch has begun. ends: whether the run
    ends.
    """

    strike: Callable[[Path], None]
    says: str
    later: bool = False
    ends: bool = True


CHANGED = rf"/{SHARD}/train-\d+ has changed since the survey: {{}}"
NEXT_TRY = rf"/{SHARD}, sample \d+: \[Errno {{}}\] .*; next try in 0.1 s"
ROWS = {
    "a read is refused (`EIO`, `ESTALE`, …), and succeeds later": {
        "EIO": Fault(refused(errno.EIO, 2), NEXT_TRY.format(5), ends=False),
        "ESTALE": Fault(stale, NEXT_TRY.format(116), ends=False),
    },
    "a read is refused to the end": {
        "EIO for good": Fault(
            refused(errno.EIO, ALWAYS),
            rf"/{SHARD}, sample \d+ cannot be read, also after 0.3 s: \[Errno 5\] ",
        ),
    },
    "a shard is replaced, cut short or removed": {
        "another shard in place of an open one": Fault(
            lambda data: shutil.copy(data / "train-0002.tar", data / SHARD),
            *(CHANGED.format(""), True),
        ),
        "other texts": Fault(
            changed(".json", lambda text: re.sub(rb'(?<=")\d', b"0", text)),
            CHANGED.format("its text differs from the survey's"),
        ),
        "other pixels": Fault(
            changed("g", lambda old: image(*Image.open(io.BytesIO(old)).size)),
            CHANGED.format("its images differ from"),
        ),
        "cut short": Fault(truncated(SHARD, 3000), CHANGED.format("Unexpected end"), later=True),
        "unmounted": Fault(
            lambda data: data.rename(data.with_name("elsewhere")),
            *(r"\.tar/sample \d+ has changed since .*No such file", True),
        ),
    },
    "a loading process dies": {
        "killed": Fault(killed, r"DataLoader worker \(pid.*\) .*; it was reading .*", later=True),
    },
    "the survey or the index cannot be read at the start": {
        "survey cut short": Fault(
            truncated(".nv-meta/survey-*[0-9a-f].npy", 300), "survey cannot be read"
        ),
        "EIO of metadata": Fault(refused(errno.EIO, ALWAYS, ".yaml"), "Input/output error"),
    },
}
CASES = [
    pytest.param(fault, id=name, marks=pytest.mark.shows(row))
    for row, faults in ROWS.items()
    for name, fault in faults.items()
]


def draw(data: Path, fault: Fault) -> Iterator[list[int]]:
    """Yield the samples of each microbatch, with the fault among them."""
    if not fault.later:
        fault.strike(data)
    line = f"{RUN} --data energon:{data} --tokenizer-model {data}/tokenizer"
    with session_of(options_of(*line.split())) as session:
        batches = session.loading.training()
        for number in range(EPOCH):
            if fault.later and number == LATER:
                fault.strike(data)
            yield next(batches)["samples"]


@pytest.mark.parametrize("fault", CASES)
def test_a_fault_loses_no_sample_or_ends_the_run_in_a_line(
    fault, digits, tmp_path, capsys, monkeypatch
):
    Utils.initialize_distributed()
    monkeypatch.setenv("RANK", "0")
    data, log = shutil.copytree(digits, tmp_path / "digits"), tmp_path / "log"
    monkeypatch.setattr(store, "PAUSES_S", (0.1, 0.2))
    monkeypatch.setattr(PosixFile, "read", PosixFile.read)  # which faults replace
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the handler of surveys' processes would raise
    # The log of loading processes, too.
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.FileHandler(log)])
    seen, said, code = Counter(), [], None
    with closing(draw(data, fault)) as drawn:
        try:
            for samples in drawn:
                seen.update(samples)
        except UserError as error:
            capsys.readouterr()
            code, said = end_rank(error), capsys.readouterr().err.splitlines()
    assert set(seen.values()) <= {1}
    if fault.ends:
        assert len(said) == 1 and code == BAD_INPUT and len(seen) < EPOCH
        assert re.match(f"error: rank 0: --data: .*{fault.says}", said[0]), said
    else:
        assert not said and set(seen) == set(range(EPOCH))
        assert re.search(fault.says, log.read_text()), log.read_text()


def test_a_survey_awaits_a_read_that_fails_for_good_and_blames_no_data(copied, monkeypatch):
    slept, read = [], PosixFile.read
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(PosixFile, "read", read)
    refused(errno.EIO, ALWAYS)(copied)
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
