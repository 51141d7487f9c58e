# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program in Megatron's loop: the parts that it provides, and those that it watches."""

import ctypes
import gc
import json
import os
import re
import resource
import signal
import sys
import time
from argparse import Namespace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.mimo.nemotron_vlm.data.reading import Reader
from examples.mimo.nemotron_vlm.loop import forward_step, metrics
from examples.mimo.nemotron_vlm.loop import run as program
from examples.mimo.nemotron_vlm.loop.forward_step import (
    LOSS,
    TOKENS,
    count_exact,
    run_microbatch,
)
from examples.mimo.nemotron_vlm.loop.metrics import MetricsWriter, observed, read_metrics
from examples.mimo.nemotron_vlm.loop.outputs import Log
from examples.mimo.nemotron_vlm.loop.run import train
from examples.mimo.nemotron_vlm.loop.terminal import beginning, ending
from examples.mimo.nemotron_vlm.model.encoders.sound import SoundEncoder
from examples.mimo.nemotron_vlm.model.encoders.stage import EncoderStage
from examples.mimo.pretrain_nemotron_vlm import ALONE
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.training import training
from megatron.training.training import num_floating_point_operations
from tests.unit_tests.examples.nemotron_vlm.loop.models import PACK
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
from tests.unit_tests.examples.nemotron_vlm.runs import SHORT_RUN, options_of, session_of, trainer
from tests.unit_tests.no_host_sync import no_host_sync
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

    def test_a_run_that_leaves_early_leaves_no_groups(self, monkeypatch):
        """A signal gives a job some seconds; groups that end by themselves take theirs."""
        Utils.destroy()
        for name, value in ALONE.items():
            monkeypatch.setenv(name, value)
        program.run([*SHORT_RUN, *ONE_MICROBATCH, "--exit-interval", "2"])
        assert not dist.is_initialized()

    def test_a_run_that_has_ended_leaves_no_model(self):
        """A model would keep its groups, and under gloo three threads for each."""
        with trainer(*ONE_MICROBATCH) as run:
            run.train_step()
        del run
        gc.collect()
        assert not [thing for thing in gc.get_objects() if isinstance(thing, MimoModel)]


@requires_world_size(2)
@pytest.mark.parametrize("macro_batch", [1, 2])
def test_encoders_without_an_input_run_at_a_steps_ends_alone(macro_batch, monkeypatch):
    """Of eight microbatches, two to five have sound, and in every third step none."""
    runs, forward = [], SoundEncoder.forward

    def counted(encoder, frames, lengths):
        runs.append(len(lengths))
        return forward(encoder, frames, lengths)

    monkeypatch.setattr(SoundEncoder, "forward", counted)
    options = ("--model", "tiny-omni", "--micro-batch-size", "2", "--disable-balance")
    options += ("--encoder", "dp=2", "--language", "dp=2", "--overlap-grad-reduce")
    options += ("--encoder-macro-batch", str(macro_batch))
    few = trajectory(*options, steps=3, source=SoundAndImages())
    skipped, runs[:] = list(runs), []
    monkeypatch.setattr(EncoderStage, "skips_blank", False)
    all_runs = trajectory(*options, steps=3, source=SoundAndImages())
    numbers = [[(r["loss"], r["grad_norm"]) for r in records] for records in (few, all_runs)]
    assert numbers[0] == numbers[1]
    assert len(runs) == 3 * 8 // macro_batch
    blank = [place for place, sounds in enumerate(runs) if not sounds]
    ends = {step * 8 // macro_batch + end for step in range(3) for end in (0, 8 // macro_batch - 1)}
    assert len(skipped) == len(runs) - len(set(blank) - ends) < len(runs)


OMNI = ("--model", "tiny-omni", "--dynamic-resolution", "--global-batch-size", str(STEP))


@pytest.mark.parametrize("rows", [("--micro-batch-size", "16"), PACK])
@pytest.mark.parametrize("layout", ["dp=2", "cp=2", "pp=2"])
@requires_world_size(2)
def test_the_throughput_counts_the_steps_own_samples_in_every_layout(layout, rows):
    """Every third step has no sound, so the steps differ."""
    _check_operations(*OMNI, *rows, "--encoder", "dp=2", "--language", layout)


@pytest.mark.parametrize("rows", [ONE_MICROBATCH, PACK])
@requires_world_size(1)
def test_the_throughput_counts_the_steps_own_samples(rows):
    _check_operations(*OMNI, *rows)


def _check_operations(*options: str) -> None:
    """Hold Megatron's count of each of three steps against sums over its samples by hand."""
    counts, source = [], SoundAndVideo()
    with trainer(*options, source=source) as run:
        args, preset = run.args, run.session.run.preset
        for first in range(0, 3 * STEP, STEP):
            run.train_step()
            counts.append(num_floating_point_operations(args, STEP))
            rows = run.loading.rows("train").samples(first, STEP)
            lengths = [len(source.text("train", n).labels) for row in rows for n in row]
            squares = STEP * args.seq_length**2
            if args.pack:
                squares = sum(length**2 for length in lengths)
            tokens = sum(lengths) if args.pack else STEP * args.seq_length
            language = num_floating_point_operations.__wrapped__(args, 0, squares, tokens)
            numbers = [n for row in rows for n in row]
            encoders = sum(_operations_of(preset, source, number) for number in numbers)
            assert counts[-1] == pytest.approx(language + encoders, rel=1e-9)
    assert len(set(counts)) == 3


def _operations_of(preset, source, number: int) -> float:
    """Count what encoders compute of a sample: each image and each tubelet attends to itself."""
    images, sound = preset.encoders
    width, total = preset.language.hidden_size, 0
    for pixels in source.inputs("train", number, images.name):
        patches = pixels.shape[-3] * pixels.shape[-2]
        tokens, features = patches + images.class_tokens, pixels.shape[-1]
        products = 4 * images.hidden**2 + 2 * images.hidden * images.ffn
        layer = 2 * tokens * products + 4 * tokens**2 * images.hidden
        row = images.projector_ffn * (4 * images.hidden + width)
        vit = images.layers * layer + 2 * patches * features * images.hidden
        times = len(pixels) if pixels.ndim == 4 else 1
        total += 3 * times * (vit + 2 * patches // 4 * row)
    lengths = [len(each) for each in source.inputs("train", number, sound.name)]
    return total + sound.operations(np.array(lengths, np.int64), width).sum()


@requires_world_size(1)
def test_a_checkpoint_is_loaded_and_its_score_said_where_nothing_is_trained(tmp_path, capsys):
    """The score is the one that the run which saved it had at its end."""
    saved, evaluates = str(tmp_path), ("--eval-iters", "2")
    *_, last = trajectory(*ONE_MICROBATCH, *evaluates, "--save", saved, steps=1)
    capsys.readouterr()
    again = (*ONE_MICROBATCH, *evaluates, "--load", saved, "--skip-train")
    assert trajectory(*again, steps=1) == []
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


@requires_world_size(2)
def test_a_sample_is_read_right_if_no_cp_rank_holds_a_wrong_token():
    """The first rank counts the samples, and those that have an answer."""
    Utils.initialize_distributed()
    right, places = (([True, False], [0, 1]), ([True, True], [1, 2]))[Utils.rank]
    given = torch.tensor(right, device=Utils.device), torch.tensor(places, device=Utils.device)
    found = count_exact(*given, samples=4, cp_group=dist.group.WORLD)
    assert found.tolist() == ([2, 3], [0, 0])[Utils.rank]


WRITTEN_BY_MEGATRON = {
    *("consumed_train_samples", "consumed_valid_samples", "curr_iteration", "iteration"),
    *("do_train", "do_valid", "do_test", "lr_decay_iters", "num_floating_point_operations_so_far"),
}
"""Arguments in which Megatron keeps the state of its loop; nobody else writes to its arguments."""


class TestMetrics:
    @requires_world_size(1)
    def test_a_record_has_its_steps_rate_and_evaluation_and_is_written_before_a_checkpoint(
        self, tmp_path
    ):
        """Megatron evaluates once more after the loop, and saves before."""
        Utils.initialize_distributed()
        path, records, at_saves = tmp_path / "metrics.jsonl", [], []
        run = ("--eval-interval", "2", "--eval-iters", "1", "--train-iters", "3")
        run += ("--save", str(tmp_path / "saved"), "--metrics-out", str(path))
        with session_of(options_of(*ONE_MICROBATCH, *run, "--save-interval", "1")) as session:

            def observe_save(*arguments, **named):
                at_saves.append([record["step"] for record in read_metrics(path)])
                time.sleep(0.5)
                return save(*arguments, **named)

            save = training.save_checkpoint
            args = session.run.args
            before = {name: str(value) for name, value in vars(args).items()}
            with replaced(training, save_checkpoint=observe_save):
                train(session, records.append)
            after = {name: str(value) for name, value in vars(args).items()}
            assert {n for n in after if after[n] != before.get(n)} <= WRITTEN_BY_MEGATRON
            step = args.global_batch_size * args.seq_length
        assert at_saves == [[1], [1, 2], [1, 2, 3]]
        assert records == [json.loads(line) for line in path.read_text().splitlines()]
        assert [record["lr"] for record in records] == pytest.approx([1e-4, 7.5e-5, 2.5e-5])
        assert ["eval_accuracy" in record for record in records] == [False, True, True]
        tokens = [record["tokens_per_s"] * record["step_time_s"] for record in records]
        assert tokens == pytest.approx([step] * 3)
        assert not any(record["skipped"] for record in records)
        pauses = [record["pause_s"] for record in records]
        assert pauses[0] == 0 and min(pauses[1:]) > 0.5

    def test_the_host_does_not_wait_for_the_numbers_of_a_step(self, tmp_path, monkeypatch):
        def log(loss_dict, iteration, grad_norm, skipped_iter):
            """Megatron's log, where it prints nothing."""

        args = options_of("--metrics-out", str(tmp_path / "metrics.jsonl")).args
        args.rank, args.world_size = 0, 1
        monkeypatch.setattr(training, "training_log", log)
        device, seen = torch.cuda.current_device(), []
        with observed(args, None, seen.append):
            for step in (1, 2, 3):
                reported = {LOSS: float(step), TOKENS: 8.0}
                scalars = {k: torch.full((), v, device=device) for k, v in reported.items()}
                with no_host_sync():
                    training.training_log(scalars, step, 0.5, int(step == 2))
                assert len(seen) == step - 1
        names = ("step", "loss", "num_tokens", "skipped")
        found = [tuple(record[name] for name in names) for record in seen]
        assert found == [(1, 1.0, 8, False), (2, 2.0, 8, True), (3, 3.0, 8, False)]
        assert seen == read_metrics(args.metrics_out)

    @requires_world_size(1)
    def test_tensorboard_and_wandb_have_the_metrics(self, tmp_path, monkeypatch):
        wandb = mock.MagicMock(__spec__=ModuleSpec("wandb", None))
        wandb.finish.side_effect = lambda: setattr(wandb, "run", None)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        run = ("--wandb-project", "reading", "--wandb-exp-name", "first", "--log-interval", "1")
        run += ("--tensorboard-dir", str(tmp_path / "board"), "--save", str(tmp_path / "saved"))
        records = trajectory(*ONE_MICROBATCH, *run, steps=3)
        (made,) = wandb.init.call_args_list
        assert (made.kwargs["project"], made.kwargs["name"]) == ("reading", "first")
        board = EventAccumulator(str(tmp_path / "board")).Reload()
        for name in ("lm loss", *metrics.IN_BOARDS):
            found = {event.step: event.value for event in board.Scalars(name)}
            assert list(found) == [1, 2, 3]
            logged = [call.args for call in wandb.log.call_args_list if name in call.args[0]]
            steps = [step for _, step in logged]
            assert steps == ([1, 2] if name in metrics.IN_BOARDS else [1, 2, 3])
            for record in records:
                assert found[record["step"]] == pytest.approx(record.get(name, record["loss"]))
        steps = [step for _, step in (call.args for call in wandb.log.call_args_list)]
        assert steps == sorted(steps)

    def test_without_a_terminal_a_line_comes_once_a_minute_and_at_the_end(self, capsys):
        times = [0, 61, 100, 121, 122, 123]
        with mock.patch.object(metrics.time, "monotonic", side_effect=times):
            writer = MetricsWriter(None, total_steps=5)
            for step in range(1, 6):
                several = {"loss_text": 0.25, "loss_images": 1.0} if step == 3 else {}
                record = {"step": step, "loss": 0.5, "skipped": step == 2, "loss_text": 0.5}
                writer.write(record | several)
        writer.close()
        assert capsys.readouterr().err.splitlines() == [
            "step 1 of 5: loss 0.5",
            "step 3 of 5: loss 0.5, loss text 0.25, loss images 1, skipped steps 1",
            "step 5 of 5: loss 0.5, skipped steps 1",
        ]

    def test_records_that_a_full_disk_does_not_take_are_written_later(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        writer, most = MetricsWriter(path, 5), resource.getrlimit(resource.RLIMIT_FSIZE)
        records = [{"step": step, "loss": 0.5} for step in (1, 2, 3, 4)]
        writer.write(records[0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, most[1]))
        for record in (records[1], records[1], records[2]):
            writer.write(record)
        assert read_metrics(path) == records[:1]
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        writer.write(records[3])
        writer.close()
        assert read_metrics(path) == records

    def test_a_full_disk_does_not_end_the_run_that_logs(self):
        with Log(Path("/dev/full")) as log:
            for _ in range(3):
                print("x" * 10_000, file=log, flush=True)

    def test_steps_that_are_run_again_replace_their_records(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        for records in ([(1, 3.25), (2, 2.5), (2, 1.0), (3, 1.0)], [(3, 2.0)]):
            writer = MetricsWriter(path, total_steps=4)
            for step, loss in records:
                writer.write({"step": step, "loss": loss})
            writer.close()
        expected = [{"step": 1, "loss": 3.25}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 2.0}]
        assert read_metrics(path) == expected
        assert path.read_text().count('"step": 3') == 1  # the second run drops it


SAVED = {"encoder": "dp=2", "language": "tp=2", "lr": 1e-3, "train_iters": 100}
RUN = SAVED | {"load": "/saved", "finetune": False, "use_checkpoint_opt_param_scheduler": False}


@pytest.mark.parametrize(
    ("directory", "changed", "said"),
    [
        (None, {}, "a new run"),
        ("/weights/iter_0000100", {}, "a new run, with the weights of /weights/iter_0000100"),
        ("/saved/iter_0000100", {"finetune": True}, "a new run, with the weights of /saved/iter_"),
        ("/saved/iter_0000100", {}, "going on after step 100 of 100, from /saved/iter_0000100"),
        (
            "/saved/iter_0000100",
            {"encoder": "tp=2", "lr": 1e-4},
            "\nanother layout: encoder dp=2 → tp=2; random states begin anew"
            "\nanother schedule of learning rates: lr 0.001 → 0.0001",
        ),
    ],
)
def test_a_beginning_tells_where_the_run_stands(directory, changed, said):
    found = beginning(Namespace(**RUN | changed), directory, Namespace(**SAVED))
    assert said in found
    assert ("another" in found) == ("another" in said)


def test_an_ending_has_the_median_speed_without_the_first_step(tmp_path):
    args = Namespace(device="cpu", save="/saved", load="/saved/", metrics_out=None)
    args.tensorboard_dir = None
    speeds = (1, 3000, 1000, 2000)
    records = [{"tokens_per_s": speed, "tflops": speed / 1000} for speed in speeds]
    assert ending(args, records, tmp_path / "log.txt").splitlines() == [
        "speed: 2,000 tokens/s and 2 TFLOP/s a rank",
        "checkpoints: /saved",
        f"log: {tmp_path}/log.txt",
        "next: the same command with a larger --train-iters goes on from here",
    ]
