# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run tells its steps in records, on boards and in the terminal's lines."""

import gc
import json
import resource
import sys
import time
from argparse import Namespace
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.mimo.nemotron_vlm.loop import metrics
from examples.mimo.nemotron_vlm.loop.forward_step import LOSS, TOKENS, count_exact
from examples.mimo.nemotron_vlm.loop.metrics import MetricsWriter, observed, read_metrics
from examples.mimo.nemotron_vlm.loop.outputs import Log
from examples.mimo.nemotron_vlm.loop.run import train
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.training import training
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import trajectory
from tests.unit_tests.examples.nemotron_vlm.runs import options_of, session_of
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

ONE_MICROBATCH = ("--micro-batch-size", "32")


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
                assert (gc.get_freeze_count() > kept) == HAVE_CUDA
                at_saves.append([record["step"] for record in read_metrics(path)])
                time.sleep(0.5)
                return save(*arguments, **named)

            save, kept = training.save_checkpoint, gc.get_freeze_count()
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
        def take(function, data, model, optimizer, losses, skipped, ends=False):
            """Megatron's step, whose result has not come to the host."""
            return losses, skipped, False, ends, None, 0.5, 0, None

        args = options_of("--metrics-out", str(tmp_path / "metrics.jsonl")).args
        args.rank, args.world_size = 0, 1
        monkeypatch.setattr(training, "train_step", take)
        monkeypatch.setattr(metrics, "get_current_global_batch_size", lambda: 32)
        device, seen = torch.cuda.current_device(), []
        given = None, None, None, Namespace(param_groups=[])
        with observed(args, Namespace(waited_s=0.0), seen.append):
            for step in (1, 2, 3):
                reported = {LOSS: float(step), TOKENS: 8.0}
                scalars = {k: torch.full((), v, device=device) for k, v in reported.items()}
                args.curr_iteration = step - 1
                with no_host_sync():
                    training.train_step(*given, scalars, int(step == 2))
                assert len(seen) == step - 1
            training.train_step(*given, scalars, 0, True)  # Megatron does not count this step
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

    @requires_world_size(1)
    def test_boards_have_the_steps_of_their_interval(self, tmp_path):
        run = ("--tensorboard-dir", str(tmp_path), "--tensorboard-log-interval", "2")
        trajectory(*ONE_MICROBATCH, *run, steps=4)
        board = EventAccumulator(str(tmp_path)).Reload()
        for name in ("learning-rate", *metrics.IN_BOARDS):
            assert [event.step for event in board.Scalars(name)] == [2, 4]

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


@requires_world_size(2)
def test_whole_answers_are_counted_over_their_cp_ranks():
    """One sample is right on both ranks, one is wrong on one rank, one lies on one rank alone, and
    the last has no answer."""
    Utils.initialize_distributed()
    is_right, places = [([True, True], [0, 1]), ([True, False, True], [0, 1, 2])][Utils.rank]
    own = (torch.tensor(each, device=Utils.device) for each in (is_right, places))
    counts = count_exact(*own, 4, dist.group.WORLD)
    assert counts.tolist() == ([2, 3] if Utils.rank == 0 else [0, 0])
