# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A whole run on one rank: arguments, groups, Megatron's ``pretrain``, and the report."""

import io
import math
import os
import signal
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

import megatron.core.datasets.utils
from examples.mimo.common.config_file import write_config
from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import PLANNED, layout_table
from examples.mimo.common.standing import standing
from examples.mimo.common.steps import data_provider
from examples.mimo.nemotron_vlm.data import SampleSource, make_source
from examples.mimo.nemotron_vlm.data.provider import Loading
from examples.mimo.nemotron_vlm.loop.all_ranks import on_all_ranks
from examples.mimo.nemotron_vlm.loop.asking import next_commands
from examples.mimo.nemotron_vlm.loop.best import best_of
from examples.mimo.nemotron_vlm.loop.builder import VLMBuildConfig
from examples.mimo.nemotron_vlm.loop.checkpoint_loading import (
    check_inputs,
    safe_loading,
    saves_into,
)
from examples.mimo.nemotron_vlm.loop.forward_step import answers, forward_step
from examples.mimo.nemotron_vlm.loop.metrics import Record, observed
from examples.mimo.nemotron_vlm.loop.outputs import (
    Log,
    check_outputs,
    config_folder,
    log_file,
    output_to,
)
from examples.mimo.nemotron_vlm.loop.page import write_report
from examples.mimo.nemotron_vlm.loop.terminal import beginning, ending, say, tell
from examples.mimo.nemotron_vlm.model.model import placed
from examples.mimo.nemotron_vlm.options.command_line import read
from examples.mimo.nemotron_vlm.options.own_options import HELP
from examples.mimo.nemotron_vlm.options.run import Run
from megatron.core.enums import ModelType
from megatron.core.models.mimo.bridge.encoders_to_language import encoders_to_language
from megatron.core.models.mimo.forward.flops import StepWork, note_work
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.setup.module_groups import (
    ModuleGroups,
    limit_waiting,
    make_modules,
    schedule_collection,
    stages_of,
)
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.packed_flash_attention import check_kernel
from megatron.training import async_utils
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.config import PretrainConfigContainer
from megatron.training.global_vars import set_global_variables, unset_global_variables
from megatron.training.initialize import _initialize_distributed
from megatron.training.training import pretrain


@dataclass
class Session:
    """A run whose process groups are made, ready for Megatron's loop.

    run: its options, with the facts of its data. modules: their grids and groups. loading: this
    rank's data loading. cfg: Megatron's configurations. communicator: between non-colocated
    modules, else None. stages: the model's virtual stages, empty until it is built. writer: see
    `start_checkpoint_writer`.
    """

    run: Run
    modules: dict[str, ModuleGroups]
    loading: Loading
    cfg: PretrainConfigContainer
    communicator: MultiModulePipelineCommunicator | None
    stages: list[MimoModel]
    writer: object | None


def run(argv: list[str]) -> None:
    """Carry out a run, under the CPU runtime without GPUs; collective over all ranks.

    Raises:
        UserError: the input is bad; on every rank alike.
    """
    if {"-h", "--help"} & set(argv):
        print(HELP)
        return
    argv = ["--help" if word == "--help-all" else word for word in argv]
    # Megatron prints all arguments: not before the checks, whose refusal that would hide.
    with output_to(sys.stdout if "--help" in argv else io.StringIO()) as early:
        line = read(argv)
        asked = line.args
        if asked.device == "cuda" and not line.only_asks and not torch.cuda.is_available():
            raise UserError(
                "--device cuda: PyTorch finds no GPU here; --device cpu trains without one"
            )
        if line.only_asks or asked.language == PLANNED:
            # PyTorch's fake process groups come with its test tools, which are slow to import.
            from examples.mimo.nemotron_vlm.planner.report import answer, planned

            if asked.language == PLANNED and "--plan" not in line.given:
                line = planned(line, asked.dry_run or int(os.environ["WORLD_SIZE"]))
            if line.only_asks:
                print(answer(line), file=sys.__stdout__)
                return
        chosen = Run.of(line)
        sys.argv[1:] = line.words  # Megatron's own readers see the files' options too
        _check_machine(chosen)
        check_outputs(chosen.args)
        check_inputs(chosen.args)
        source = make_source(chosen.args, chosen.preset)
        _say_left_out(source, chosen.args)
        session = open_session(chosen, source)
    args = session.run.args
    log = log_file(args)
    with Log(log) if log else nullcontext(sys.stdout) as file, output_to(file):
        print(early.getvalue(), end="", flush=True)
        lay = chosen.layouts
        say(
            f"{chosen.preset.name} on {args.world_size} ranks, {lay.placement}; "
            f"{lay.num_microbatches} microbatches of {lay.batch.micro_size} × dp {lay.language.dp} "
            f"samples a step\n{layout_table(lay, chosen.preset.names)}",
            args,
        )
        if not (args.load or args.pretrained_checkpoint):
            say(beginning(args, None, None), args)
        last: deque[Record] = deque(maxlen=100)
        try:
            train(session, last.append)
        except SystemExit as left:  # all ranks together, as a signal or an option has asked
            if left.code:
                raise
            standing.has_left = True
            standing.note()
            say(f"left as asked: {standing}", args)
        else:
            _print_outcome(session, last, log)
        close_session(session)
        dist.destroy_process_group()


def _check_machine(chosen: Run) -> None:
    """Check that this machine has what the options need.

    Raises:
        UserError: a library is missing, or a kernel is wrong here.
    """
    args, images = chosen.args, chosen.preset.images
    if args.transformer_impl != "local" and find_spec("transformer_engine") is None:
        raise UserError(
            f"--transformer-impl {args.transformer_impl}: Transformer Engine is not installed; "
            "local takes Megatron's own layers"
        )
    if args.encoder_attention == "flash4":
        try:
            with torch.cuda.device(args.local_rank):
                check_kernel(2, images.hidden // images.heads, args.params_dtype)
        except Exception as error:  # whatever its compiler raises
            why = str(error) or type(error).__name__
            raise UserError(
                f"--encoder-attention flash4: {why}; --encoder-attention te takes Transformer "
                "Engine's attention"
            ) from error


def open_session(chosen: Run, source: SampleSource) -> Session:
    """Join the ranks and make all process groups; collective."""
    chosen = chosen.with_data(source)
    args, layouts = chosen.args, chosen.layouts
    if args.save:
        standing.save, same = str(Path(args.save).absolute()), "the same command"
        is_same = saves_into(args, args.load) and not (args.finetune or args.ckpt_step)
        other = f"{same} with --load {args.save}, without --finetune and --ckpt-step,"
        standing.goes_on = f"{same if is_same else other} goes on from there"
    standing.note()
    # The package has no Makefile for the index builder of .bin data, which is not read here.
    megatron.core.datasets.utils.compile_helpers = lambda: None
    set_global_variables(args, build_tokenizer=False)
    writes_apart = args.async_save and args.exit_signal_handler
    writer = start_checkpoint_writer(args) if writes_apart else None
    say("making the process groups", args)
    _initialize_distributed(None, None, store_of_attempt(), skip_model_parallel_init=True)
    modules = make_modules(
        placed(chosen.preset, layouts),
        args.distributed_backend,
        args.num_distributed_optimizer_instances,
    )
    communicator = None
    if layouts.non_colocated:
        grids = {name: module.grid for name, module in modules.items()}
        communicator = encoders_to_language(grids, chosen.configs.language)
    limit = timedelta(minutes=args.distributed_timeout_minutes)
    limit_waiting(limit)
    loading = Loading(args, layouts, chosen.preset, modules, source, chosen.schedule)
    build = VLMBuildConfig(_run=chosen, _modules=modules)
    stages = stages_of(build.post_wrap_hooks, limit)
    cfg = pretrain_cfg_container_from_args(args, build)
    return Session(chosen, modules, loading, cfg, communicator, stages, writer)


def start_checkpoint_writer(args: Namespace) -> object:
    """Start the writer, ignoring the signal that asks ranks to save and exit; Megatron uses it.

    The signal may go to all processes of a job. It would end the writer, and the last save would
    wait for it for ever. A process passes the signals that it ignores on to those that it starts.

    Returns:
        A handle to keep until training ends: NVRx ends the process when it is deleted.
    """
    handler = signal.signal(args.exit_signal, signal.SIG_IGN)
    async_utils.init_persistent_async_worker(args.rank, "forkserver")
    signal.signal(args.exit_signal, handler)
    return async_utils._async_calls_queue


def store_of_attempt() -> dist.Store | None:
    """Return the store through which the ranks of this attempt meet; None for PyTorch's choice.

    torchrun may keep one store for all attempts (PyTorch 2.13 does, without a prefix for each);
    ranks of a later attempt would find the addresses of processes that have ended.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    return dist.PrefixStore(f"attempt/{attempt}", store)


def train(session: Session, note: Callable[[Record], object] | None = None) -> None:
    """Run Megatron's ``pretrain``; call ``note`` with each step's record on the last rank."""
    args, loading = session.run.args, session.loading

    def begin() -> None:
        # Only now: a run whose checkpoint is refused, or that trains nothing, keeps the last file.
        trains = not args.skip_train and args.iteration < (args.train_iters or math.inf)
        if trains and (folder := config_folder(args)):
            file, text = folder / "config.yaml", session.run.line.config
            if errors := on_all_ranks(lambda: args.rank or write_config(file, text))[1]:
                raise UserError(f"{file}: cannot write it: {errors[0]}")
        say("opening the data", args)

    with observed(args, loading, note), safe_loading(args):
        pretrain(
            session.cfg,
            data_provider(loading, begin),
            ModelType.encoder_or_decoder,
            partial(forward_step, score=loading.reader.source.score),
            skip_model_parallel_init=True,
            p2p_communicator=session.communicator,
            pg_collection=schedule_collection(session.modules),
        )


def close_session(session: Session) -> None:
    """Free the model, its groups and Megatron's global state; collective.

    The default group stays. The caller must drop its own references to the model first.
    """
    session.cfg.model.post_wrap_hooks.clear()
    destroy(session.stages, session.modules)
    unset_global_variables()
    destroy_rerun_state_machine()
    MTPLossLoggingHelper.tracker.clear()  # has groups
    note_work(StepWork(0.0))


def _print_outcome(session: Session, last: Sequence[Record], log: Path | None) -> None:
    args, source = session.run.args, session.loading.reader.source
    if args.report:
        everywhere, _ = on_all_ranks(lambda: answers)
    if args.rank < args.world_size - 1:
        return
    tell(ending(args, list(last), log))
    if args.keep_best:
        with suppress(UserError):
            tell(f"best {args.keep_best}: {best_of(Path(args.save).absolute())}")
    if args.report:
        read = {place: token for part in everywhere for place, token in part.items()}
        tell(write_report(args, source, read))
    has_base = args.pretrained_checkpoint or not args.lora_dim  # else tools have no base
    if args.save and has_base and session.run.preset.is_in_transformers:
        tell("\n".join(next_commands(source, Path(args.save), bool(args.keep_best))))


def _say_left_out(source: SampleSource, args: Namespace) -> None:
    for split in ("train", "test") if args.eval_iters else ("train",):
        try:
            found = source.left_out(split)
        except (ValueError, OSError) as error:
            rank = args.rank if isinstance(error, OSError) else None
            raise UserError(f"--data: {error}", rank) from error
        if found:
            counts = ", ".join(f"{count} {reason}" for reason, count in found.items())
            part = source.part(split)
            say(f"--data {args.data}: {part} leaves out {counts}; see its survey", args)
