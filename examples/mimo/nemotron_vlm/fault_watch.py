# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""End the whole run, with one report, when a rank dies, hangs or raises.

Every rank has a thread that tells the store that torch.distributed met in that it is alive and what
its main thread does, and that looks at the next rank. The first to find a fault writes the verdict
into the store and prints it; all others read it there and end. Collectives have no part in this:
they may be what hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

from examples.mimo.nemotron_vlm import progress
from examples.mimo.nemotron_vlm.errors import FAILED, report

INTERVAL_S = 1.0
GRACE_S = 4.0
"""How long the reporter lives on, for the others to read its verdict from a store it may serve."""

LATE_S = 12.0
"""How long it waits for those that have not read it by then: a busy host gives threads no time."""

WAITING = ("torch/distributed", "p2p_communication", "bridge_communicator")
"""Files in which a rank waits for others."""

LOST_PEER = ("gloo", "nccl", "connection", "timed out", "socket")
"""In messages of errors that another rank's end may have caused."""


class FaultWatch:
    """Watches from construction on, until :meth:`stop`.

    Args:
        timeout_s: longest time without progress; without any sign of life it is half of that.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._is_ending = False
        self._answered = time.monotonic()
        self._seen: tuple[str, float] = ("", time.monotonic())
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"fault-watch/{attempt}", store)
        self._beat(0)
        threading.Thread(target=self._watch_others, daemon=True).start()
        threading.Thread(target=self._watch_store, daemon=True).start()

    def stop(self) -> None:
        """All ranks are well and about to end; each calls it."""
        self._store.set(f"beat/{self.rank}", "done")
        self._stopped.set()

    def end_after(self, error: BaseException) -> None:
        """End the process, and with it the run, because the main thread raised.

        An error that a lost peer may have caused waits for the verdict on the peer.
        """
        text = str(error).lower()
        if any(word in text for word in LOST_PEER):
            time.sleep(self.timeout_s / 2 + 2 * GRACE_S)  # a verdict ends the process meanwhile
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split()) or "no message"
        self._end(
            f"rank {self.rank} raised {type(error).__name__}: {reason[:300]}; "
            f"{progress.now().what}, {where.filename}:{where.lineno}",
            "".join(traceback.format_exception(error)),
        )

    def _watch_others(self) -> None:
        count = 0
        while not self._stopped.wait(INTERVAL_S):
            count += 1
            try:
                self._beat(count)
                if self._store.check(["verdict"]) and not self._is_ending:
                    self._store.set(f"read/{self.rank}", "")
                    os._exit(FAILED)
                self._look_at_next()
                self._look_at_progress()
            except dist.DistError:
                continue  # the other thread counts the seconds
            self._answered = time.monotonic()

    def _watch_store(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            silence = time.monotonic() - self._answered
            if silence > self.timeout_s / 2:
                # Rank 0 may serve it; then it cannot tell who reports, so that the next one does.
                if self.rank == 1:
                    report(
                        f"rank 0 died or was stopped, or the store that all ranks met in: "
                        f"no answer for {silence:.0f} s; {progress.now().what}"
                    )
                os._exit(FAILED)

    def _beat(self, count: int) -> None:
        doing = progress.now()
        frames = traceback.extract_stack(sys._current_frames()[self._main])
        inner = " ".join(frame.filename for frame in frames[-4:])
        beat = {
            "count": count,
            "what": doing.what,
            "stuck_s": time.monotonic() - doing.since,
            "waits": any(file in inner for file in WAITING),
            "where": f"{frames[-1].filename}:{frames[-1].lineno}",
        }
        self._store.set(f"beat/{self.rank}", json.dumps(beat))

    def _look_at_next(self) -> None:
        other = (self.rank + 1) % self.ranks
        if not self._store.check([f"beat/{other}"]):
            return  # it is still starting
        beat = self._store.get(f"beat/{other}").decode()
        if beat != self._seen[0] or beat == "done":
            self._seen = (beat, time.monotonic())
        silence = time.monotonic() - self._seen[1]
        if silence > self.timeout_s / 2:
            what = json.loads(beat)["what"]
            self._end(
                f"rank {other} died or was stopped: no sign of life for {silence:.0f} s; its last: "
                f"{what}",
                dead=other,
            )

    def _look_at_progress(self) -> None:
        doing = progress.now()
        if time.monotonic() - doing.since < self.timeout_s * doing.patience:
            return
        beats = {}
        for rank in range(self.ranks):
            if not self._store.check([f"beat/{rank}"]):
                continue
            text = self._store.get(f"beat/{rank}").decode()
            if text != "done":
                beats[rank] = json.loads(text)
        busy = {rank: beat for rank, beat in beats.items() if not beat["waits"]} or beats
        rank = max(busy, key=lambda rank: busy[rank]["stuck_s"])
        beat = busy[rank]
        self._end(
            f"rank {rank} hangs: no progress for {beat['stuck_s']:.0f} s; {beat['what']}, "
            f"{beat['where']}"
        )

    def _end(self, verdict: str, details: str = "", dead: int | None = None) -> None:
        """Print the verdict unless another one was first, and end this process.

        Args:
            dead: a rank that will not read it.
        """
        self._is_ending = True  # or the other thread ends the process at its own verdict
        try:
            mine = f"{self.rank}: {verdict}"  # two ranks may come to the same words
            first = self._store.compare_set("verdict", "", mine).decode() == mine
        except dist.DistError:
            first = True
        self._stopped.set()
        if first:
            print(details, end="", file=sys.stderr)
            report(verdict)
            time.sleep(GRACE_S)
            others = [f"read/{rank}" for rank in range(self.ranks) if rank not in (self.rank, dead)]
            deadline = time.monotonic() + LATE_S
            with contextlib.suppress(dist.DistError):
                while not self._store.check(others) and time.monotonic() < deadline:
                    time.sleep(INTERVAL_S)
        os._exit(FAILED)
