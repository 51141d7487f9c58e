# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program in Megatron's loop: the parts that it provides, and those that it watches."""

import ctypes
import os
import re
import signal
import time
from importlib.util import find_spec

import numpy as np
import psutil
import pytest

from examples.mimo.nemotron_vlm.data.reading import Reader
from examples.mimo.nemotron_vlm.loop import forward_step
from examples.mimo.nemotron_vlm.loop.forward_step import run_microbatch
from examples.mimo.nemotron_vlm.model.encoders.sound import SoundEncoder
from examples.mimo.nemotron_vlm.model.encoders.stage import EncoderStage
from megatron.training.training import num_floating_point_operations
from tests.unit_tests.examples.nemotron_vlm.loop.models import PACK
from tests.unit_tests.examples.nemotron_vlm.loop.rows import OVERLAP
from tests.unit_tests.examples.nemotron_vlm.loop.sound_and_images import (
    STEP,
    PartlyText,
    SoundAndImages,
    SoundAndVideo,
)
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import (
    one_rank_trajectory,
    trajectory,
)
from tests.unit_tests.examples.nemotron_vlm.runs import FOUR_LAYERS, trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

ONE_MICROBATCH = ("--micro-batch-size", "32")


@requires_world_size(1)
class TestStep:
    def test_the_signal_that_ends_a_run_leaves_its_loading_processes(self):
        """The signal goes to all processes of a rank, and the run still reads its current step."""
        with trainer(*ONE_MICROBATCH, "--num-workers", "2", "--exit-signal-handler") as run:
            batches = run.loading.training()
            next(batches)
            loading = psutil.Process().children()
            assert len(loading) >= 2
            for process in loading:
                process.send_signal(run.args.exit_signal)
            samples = [next(batches)["samples"] for _ in range(12)]
        assert sorted(samples[-1]) == list(range(12 * 32, 13 * 32))

    @pytest.mark.skipif(HAVE_CUDA, reason="a fork cannot use its parent's GPU")
    def test_loading_processes_end_with_a_rank_that_is_killed(self, monkeypatch):
        """They wait for room in the pipe to it, which takes less than a microbatch here."""
        large = {"read": bytes(2**17), "step_work": (0.0, None)}
        monkeypatch.setattr(Reader, "__getitem__", lambda *_: dict(large))
        with trainer(*ONE_MICROBATCH, "--num-workers", "2") as run:
            if (rank := os.fork()) == 0:
                batches = run.loading.training()
                next(batches)
                signal.raise_signal(signal.SIGSTOP)
            os.waitpid(rank, os.WUNTRACED)
            loading = psutil.Process(rank).children()
            time.sleep(1)  # they read on
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
            _, left = psutil.wait_procs(loading, timeout=300)
            for process in left:
                process.kill()
        assert len(loading) == 2 and not left

    def test_a_step_takes_the_signal_that_ends_a_run_back(self):
        """LLVM, in Triton's compiler, takes it by such a call, and drops it."""
        heard, ignored = [], ctypes.c_void_p(signal.SIG_IGN)
        with trainer(*ONE_MICROBATCH, "--exit-signal-handler", "--exit-signal", "SIGUSR1") as run:
            before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(run))
            ctypes.CDLL(None).signal(signal.SIGUSR1, ignored)
            signal.raise_signal(signal.SIGUSR1)
            assert not heard
            run.train_step()
            signal.raise_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, before)
        assert len(heard) == 1


class SoundOfOneRank(SoundAndImages):
    """Samples for two ranks with two rows in a microbatch; the second rank has no sound."""

    fingerprint = "sound of one rank"

    def _sounds(self, number: int) -> np.ndarray:
        return super()._sounds(number)[: 2 * (number % 4 < 2)]


@requires_world_size(2)
@pytest.mark.parametrize("has_few", [True, False])
def test_encoders_without_an_input_run_at_a_steps_ends_at_most(has_few, monkeypatch):
    """One rank has sound in half of its microbatches, but in no third step; the other has none."""
    macro_batch, runs, forward = 2, [], SoundEncoder.forward

    def counted(encoder, frames, lengths):
        runs.append(len(lengths))
        return forward(encoder, frames, lengths)

    monkeypatch.setattr(SoundEncoder, "forward", counted)
    monkeypatch.setattr(SoundEncoder, "has_few_inputs", has_few)
    options = ("--model", "tiny-omni", *FOUR_LAYERS, "--micro-batch-size", "2", "--disable-balance")
    options += ("--encoder", "dp=2", "--language", "dp=2", *OVERLAP)
    options += ("--encoder-macro-batch", str(macro_batch))
    few = trajectory(*options, steps=3, source=SoundOfOneRank())
    skipped, runs[:] = list(runs), []
    monkeypatch.setattr(EncoderStage, "skips_blank", False)
    all_runs = trajectory(*options, steps=3, source=SoundOfOneRank())
    numbers = [[(r["loss"], r["grad_norm"]) for r in records] for records in (few, all_runs)]
    assert numbers[0] == numbers[1]
    assert len(runs) == 3 * 8 // macro_batch
    blank = {place for place, sounds in enumerate(runs) if not sounds}
    ends = {step * 8 // macro_batch + end for step in range(3) for end in (0, 8 // macro_batch - 1)}
    assert blank & ends and blank - ends
    assert len(skipped) == len(runs) - len(blank if has_few else blank - ends)


OMNI = ("--model", "tiny-omni", *FOUR_LAYERS, "--dynamic-resolution")
OMNI += ("--global-batch-size", str(STEP))


@pytest.mark.parametrize("layout", ["cp=2", "pp=2"])
@requires_world_size(2)
def test_the_throughput_counts_the_steps_own_samples_in_every_layout(layout):
    """Every third step has no sound, so the steps differ. What an encoder counts of its inputs is
    in test_encoders.py."""
    counts, source = [], SoundAndVideo()
    layouts = "--encoder", "dp=2", "--language", layout
    with trainer(*OMNI, *PACK, *layouts, source=source) as run:
        args, preset = run.args, run.session.run.preset
        width = preset.language.hidden_size
        for first in range(0, 3 * STEP, STEP):
            run.train_step()
            counts.append(num_floating_point_operations(args, STEP))
            numbers = [n for row in run.loading.rows("train").samples(first, STEP) for n in row]
            lengths = [len(source.text("train", n).labels) for n in numbers]
            expected = num_floating_point_operations.__wrapped__(
                args, 0, sum(length**2 for length in lengths), sum(lengths)
            )
            for each in preset.encoders:
                sizes = [source.sizes("train", n, 1, each.name)[0] for n in numbers]
                expected += sum(each.operations(own, width).sum() for own in sizes)
            assert counts[-1] == pytest.approx(expected, rel=1e-9)
    assert len(set(counts)) == 3


@requires_world_size(1)
def test_a_checkpoint_is_loaded_and_its_score_said_where_nothing_is_trained(tmp_path, capsys):
    """The score is what the first run had at its end; that run's config.yaml stays."""
    saved, evaluates = str(tmp_path), ("--eval-iters", "2")
    *_, last = trajectory(*ONE_MICROBATCH, *evaluates, "--save", saved, steps=1)
    written = (tmp_path / "config.yaml").read_text()
    again = (*ONE_MICROBATCH, *evaluates, "--load", saved, "--save", saved)
    assert trajectory(*again, steps=1) == []  # the step is there
    capsys.readouterr()
    assert trajectory(*again, "--skip-train", steps=1) == []
    assert (tmp_path / "config.yaml").read_text() == written
    names = "eval_loss", "eval_accuracy", "eval_exact_match"
    score = ", ".join(f"{name.replace('_', ' ')} {last[name]}" for name in names)
    assert score in capsys.readouterr().err.splitlines()


@requires_world_size(2)
@pytest.mark.parametrize("rows", [("--micro-batch-size", "16"), PACK])
def test_the_losses_of_modalities_are_those_of_one_rank(rows):
    """A quarter of the first step's samples have tiles, and none of the second's."""
    run = ("--global-batch-size", str(STEP), *rows)
    alone = one_rank_trajectory(*run, steps=2, source=PartlyText())
    records = trajectory(*run, "--language", "cp=2", steps=2, source=PartlyText())
    names = ("loss_images", "loss_text")
    for record, other in zip(records, alone, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=1e-4)
        for name in names:
            assert record.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-4)
    first, second = records
    low, high = sorted(first[name] for name in names)
    assert low < first["loss"] < high
    if rows != PACK:  # whose steps have other samples
        assert second["loss_text"] == pytest.approx(second["loss"], rel=1e-6)
        assert "loss_images" not in second


@pytest.mark.skipif(HAVE_CUDA and not find_spec("pynvml"), reason="needs nvidia-ml-py")
@requires_world_size(2)
def test_a_slow_rank_is_named_within_ten_steps(monkeypatch, caplog):
    def slow(*batch):
        time.sleep(0.2 * (Utils.rank == 1))
        return run_microbatch(*batch)

    monkeypatch.setattr(forward_step, "run_microbatch", slow)
    trajectory("--micro-batch-size", "16", "--log-straggler", "--log-interval", "10")
    named = [re.findall(r"MxRtt/Rnk: [\d.]+ms/(\d)", line) for line in caplog.messages]
    assert [name for name in named if name] == [["1"]] * (Utils.rank == 0)
