# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The forward step: losses in training, the model's answers in evaluation."""

import signal
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.data.sample import Score
from megatron.core.models.mimo.forward.encoding import run_microbatch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.partition.language_batch import packed_parameters
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import StragglerDetector
from megatron.training import get_args

LOSS, TOKENS, ACCURACY, EXACT = "lm loss", "tokens", "accuracy", "exact match"
"""Names in Megatron's log; the first is that of its own programs."""

SCORES = {"eval_loss": LOSS, "eval_accuracy": ACCURACY, "eval_exact_match": EXACT}
"""Scores of an evaluation, as records and ``--keep-best`` name them."""

Answers = dict[tuple[int, int], int]
"""The token that the model read, by sample and position."""

answers: Answers = {}
"""Tokens read by this rank in the last evaluation; filled only with ``--report``."""

OF_MODALITY = f"{LOSS} of "
"""Begins the name of a modality's loss, which is 0 where a step has no token of it."""

NO_TOKENS = 1e-12
"""Added to a modality's tokens, so that Megatron does not divide by 0."""

timer = StragglerDetector()
"""Does nothing without ``--log-straggler``."""

AT_A_TIME = 512
"""Answer tokens for which a rank gathers whole-vocabulary logits at a time."""


def forward_step(microbatches: Iterator[dict], model: MimoModel, score: Score | None = None):
    """Run one microbatch of training or, if gradients are disabled, of an evaluation.

    Returns:
        Losses or logits, and a function of them that returns the loss, the number of tokens and the
        report.
    """
    _hear_exit_signal()
    with timer(bdata=True):
        batch = dict(next(microbatches))
    samples, places = batch.pop("samples"), batch.pop("sample_places")
    kinds, packed = batch.pop("kinds", {}), batch.get("packing_kwargs")
    if not torch.is_grad_enabled():
        return _read(batch, model, samples, places, score)
    with timer:
        losses, loss_mask = run_microbatch(model, batch)
    if kinds and model.partition_adapter is not None:
        lengths = model.partition_adapter.lengths(places.size(1), packed_parameters(packed))
        places = model.partition_adapter.shard_tokens(places, lengths)
    has = {name: of_samples[places] for name, of_samples in kinds.items()}
    given = {"loss_mask": loss_mask, "has": has, "groups": model.pg_collection}
    return losses, partial(_summed_loss, step_losses=model.step_losses, **given)


def _hear_exit_signal() -> None:
    """Set the handler of ``--exit-signal`` again.

    When Triton compiles its first kernel, LLVM sets handlers of its own for SIGUSR1 and others, and
    drops what they receive.
    """
    args = get_args()
    if args.exit_signal_handler:
        signal.signal(args.exit_signal, signal.getsignal(args.exit_signal))


def _summed_loss(losses: torch.Tensor, loss_mask: torch.Tensor, has: dict, groups, step_losses):
    """Sum the loss over tokens; Megatron divides it by the global number of tokens.

    Args:
        losses: [b, S], loss of each token.
        loss_mask: [b, S], 1 for tokens that count.
        has: by modality bool [b, S], tokens of samples that have it.
        step_losses: losses of the step's microbatches so far, to be checked at its end.
    """
    total, tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
    _check(total, step_losses)
    share = 1.0 / (get_num_microbatches() * groups.dp_cp.size())
    report = {
        LOSS: torch.stack([total.detach().double(), tokens.double()]),
        # Megatron logs a quotient of sums: the shares of all reports add up to 1.
        TOKENS: torch.stack([tokens.double(), torch.full_like(tokens, share).double()]),
    }
    for name, of_tokens in has.items():
        counted = loss_mask * of_tokens
        loss, number = (losses.detach().float() * counted).sum(), counted.sum()
        report[OF_MODALITY + name] = torch.stack([loss.double(), number.double() + NO_TOKENS])
    return total, tokens.to(torch.int), report


def _check(loss: torch.Tensor, step_losses: list[torch.Tensor]) -> None:
    """Note a loss for the check at the end of the step; look for a spike now, so the host waits."""
    args, machine = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        step_losses.append(loss.detach())
    if args.check_for_spiky_loss:
        is_spiky = partial(machine.is_unexpectedly_large, threshold=10.0, context="loss")
        message = "the loss of a microbatch is far above the ones before"
        machine.validate_result(loss, is_spiky, message, tolerance=0.0, fatal=False)


def _read(batch: dict, model: MimoModel, samples: list[int], places, score: Score | None):
    labels, positions = batch.pop("labels", None), batch["position_ids"]
    packed = batch.get("packing_kwargs")
    output, loss_mask = run_microbatch(model, batch)
    if labels is None:
        return output, None
    tokens = labels, positions, places
    if model.partition_adapter is not None:
        lengths = model.partition_adapter.lengths(labels.size(1), packed_parameters(packed))
        tokens = (model.partition_adapter.shard_tokens(t, lengths) for t in tokens)
    asked = loss_mask.bool()
    answered = [token[asked] for token in tokens]
    return output, partial(_count, asked, *answered, samples, model.pg_collection, score)


def _count(asked, labels, positions, places, samples: list[int], groups, score, logits) -> tuple:
    """Count the answers that were read right.

    Args:
        asked: bool [b, S], which tokens on this CP rank are answers.
        labels, positions, places: int64 [n] for these n tokens; a place is the sample's index in
            ``samples``.
        logits: [b, S, V/tp].
    """
    read, loss = read_answers(logits[asked], labels, groups.tp)
    if get_args().report:
        numbers = [samples[place] for place in places.tolist()]
        asked_of = zip(numbers, positions.tolist(), strict=True)
        answers.update(zip(asked_of, read.tolist(), strict=True))
    right = exact = count_exact(read == labels, places, len(samples), groups.cp)
    if score is not None:
        right = torch.stack([part.sum() for part in score(labels, read)]).double()
    report = {LOSS: torch.stack([loss, asked.sum().double()]), ACCURACY: right, EXACT: exact}
    return logits.new_zeros(()), asked.sum().to(torch.int), report


def read_answers(
    logits: torch.Tensor, labels: torch.Tensor, tp_group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely tokens, int64 [n], and the sum of the labels' losses, float64.

    `AT_A_TIME` tokens are taken at a time: whole-vocabulary logits of all answers may not fit.

    Args:
        logits: [n, V/tp].
        labels: [n].
    """
    read, loss = [labels[:0]], torch.zeros((), dtype=torch.float64, device=labels.device)
    for part, wanted in zip(logits.split(AT_A_TIME), labels.split(AT_A_TIME), strict=True):
        whole = gather_from_tensor_model_parallel_region(part.float(), tp_group)
        read.append(whole.argmax(-1))
        loss += F.cross_entropy(whole, wanted, reduction="sum")
    return torch.cat(read), loss


def count_exact(
    is_right: torch.Tensor, places: torch.Tensor, samples: int, cp_group: dist.ProcessGroup
) -> torch.Tensor:
    """Count the samples whose whole answers are right, and those with answers; float64 [2].

    Each CP rank holds some of a sample's tokens; the first returns the counts, the others zeros.

    Args:
        is_right: bool [n], which answer tokens on this rank are right.
        places: int64 [n], the index of each token's sample.
        samples: number of samples of the microbatch.
    """
    found = torch.zeros(2, samples, dtype=torch.int64, device=places.device)
    found[0].index_add_(0, places, (~is_right).long())
    found[1].index_add_(0, places, torch.ones_like(places))
    dist.all_reduce(found, group=cp_group)
    wrong, asked = found
    counts = torch.stack([((wrong == 0) & (asked > 0)).sum(), (asked > 0).sum()]).double()
    return counts if cp_group.rank() == 0 else torch.zeros_like(counts)
