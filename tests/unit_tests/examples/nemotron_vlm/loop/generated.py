# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rows drawn at random that cover every triple of values: models, layouts, frozen parts, options.

A row is drawn value by value, and kept if the program takes its command line: the rules are the
program's own. Of several draws, the one that shows most new triples of values is the next row. So
the rows depend on the seed, the number of ranks and the rules alone.
"""

import contextlib
import io
import itertools
import random
from collections.abc import Iterator

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.options.run import Run
from tests.unit_tests.examples.nemotron_vlm.loop.models import FULL
from tests.unit_tests.examples.nemotron_vlm.loop.rows import (
    ADAPTED,
    ALLGATHER,
    APART,
    CONTIGUOUS,
    EVALUATION,
    MACRO_BATCH,
    OVERLAP,
    ZIGZAG,
    Row,
)
from tests.unit_tests.examples.nemotron_vlm.runs import DEVICE, OWN_DEFAULTS

SIZES = (1, 2, 4)
AGAIN = ("--recompute-encoder", "1")
PARTLY = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
BUCKETS = ("--overlap-grad-reduce", "--ddp-num-buckets", "5", "--use-cpu-initialization")
BUCKETS += ("--rerun-mode", "disabled", "--manual-gc", "--log-throughput")
INSTANCES = ("--num-distributed-optimizer-instances", "2")
BALANCED = "--moe-router-load-balancing-type"
TIED = ("--no-untie-embeddings-and-output-weights", "--moe-z-loss-coeff", "1e-3")
TIED += (BALANCED, "aux_loss")
LEARNED = ("--position-embedding-type", "learned_absolute", "--moe-shared-expert-gate")
LEARNED += (BALANCED, "global_aux_loss")
GATED = ("--swiglu", "--no-squared-relu", "--normalization", "LayerNorm")
BY_PART = ("--encoder-lr", "4e-4", "--projector-lr", "6e-3", "--encoder-weight-decay", "0.3")
SCHEDULE = ("--lr-decay-style", "inverse-square-root", "--lr-warmup-iters", "1")
SCHEDULE += ("--start-weight-decay", "0", "--end-weight-decay", "0.1")
SCHEDULE += ("--weight-decay-incr-style", "linear")
MODELS = ("tiny", "tiny-gdn", "few experts", "three tokens ahead", "packed")
MODELS += ("three tokens ahead, packed", "digits of any size", "packed images of any size")
MODELS += ("sound and images", "packed sound and video")
TWO_ENCODERS = ("sound and images", "packed sound and video")

FACTORS = {
    "model": MODELS,
    "placement": ((), APART),
    "tp": SIZES,
    "cp": SIZES,
    "pp": SIZES,
    "vpp": (1, 2),
    "ep": SIZES,
    "etp": (0, 1, 2),
    "encoder tp": SIZES,
    "encoder pp": (1, 2),
    "microbatches": (1, 2, 4),
    "tokens": (ZIGZAG, CONTIGUOUS),
    "recompute": ((), FULL, AGAIN, (*FULL, *AGAIN), PARTLY),
    "at once": ((), MACRO_BATCH),
    "overlap": ((), OVERLAP, BUCKETS),
    "dispatcher": ((), ALLGATHER),
    "optimizer": ((), ("--no-use-distributed-optimizer",), INSTANCES),
    "frozen": ((), ("--freeze", "encoder"), ("--freeze", "language")),
    "model's options": ((), TIED, LEARNED, GATED),
    "steps": ((), EVALUATION, (*EVALUATION, *SCHEDULE), (*OWN_DEFAULTS, *BY_PART)),
}
"""Values of each factor, from which rows are drawn."""

LORA = ("--lora-dim", "4", "--lr", "1e-2", "--adam-eps", "1e-3", "--lora-target-modules")
SOME_LAYERS = (*LORA, "experts.linear_fc?,in_proj,out_proj", "--lora-rs")
ADAPTERS = (
    (*ADAPTED, "--adam-eps", "1e-3"),
    (*LORA, "all-linear"),
    (*SOME_LAYERS, "--train-parts", "encoder"),
)
"""Adapters of both modules, of the language model, and of some layers beside a trained encoder. The
epsilon keeps Adam from full steps of rounding, after which a token takes another expert."""

KINDS = {"": FACTORS, "adapted": FACTORS | {"frozen": ADAPTERS}}
"""Factors by kind of row."""

DRAWS = 20
"""Rows that are drawn for each that is kept."""


def rows(ranks: int, seed: int, kind: str = "") -> Iterator[Row]:
    """Yield rows of a kind until no draw that the program takes has a new triple."""
    return (_row(ranks, values) for values in values_of_rows(ranks, seed, kind))


def values_of_rows(ranks: int, seed: int, kind: str = "") -> Iterator[dict[str, object]]:
    """Yield the value of each factor in each of the rows."""
    draw, shown = random.Random(f"{ranks} {seed}"), set()
    while True:
        drawn = [_drawn(draw, ranks, KINDS[kind]) for _ in range(DRAWS)]
        drawn.sort(key=lambda values: len(_triples(values) - shown), reverse=True)
        values = next((values for values in drawn if _is_taken(_row(ranks, values))), None)
        if values is None or _triples(values) <= shown:
            return
        shown |= _triples(values)
        yield values


def _drawn(draw: random.Random, ranks: int, factors: dict) -> dict[str, object]:
    """Draw values whose modules fill the ranks; what a value leaves without effect is off."""
    while True:
        values = {name: draw.choice(choices) for name, choices in factors.items()}
        apart = bool(values["placement"])
        if not apart:
            values["encoder pp"] = 1
        if apart or values["pp"] == 1:
            values["vpp"] = 1
        if apart and AGAIN[0] in values["recompute"]:
            values["recompute"] = values["recompute"][: -len(AGAIN)]
        if values["cp"] == 1:
            values["tokens"] = ()
        dp, encoder_dp = _dp(ranks, values)
        copies = values["tp"] * values["cp"] * dp / values["ep"] / (values["etp"] or values["tp"])
        if dp.is_integer() and encoder_dp.is_integer() and copies.is_integer():
            return values


def _dp(ranks: int, values: dict) -> tuple[float, float]:
    """Return the DP sizes of the language model and of an encoder that fill the ranks."""
    v, of_language, of_encoder = values, ranks, ranks
    if v["placement"]:
        of_language, of_encoder = ranks // 2, ranks // 2 // len(_encoders(v))
    encoder = of_encoder / (v["encoder tp"] * v["encoder pp"])
    return of_language / (v["tp"] * v["cp"] * v["pp"]), encoder


def _encoders(values: dict) -> tuple[str, ...]:
    return ("images:", "sound:") if values["model"] in TWO_ENCODERS else ("",)


def _row(ranks: int, values: dict) -> Row:
    v, (dp, encoder_dp) = values, map(int, _dp(ranks, values))
    sizes = {"": (v["encoder tp"], encoder_dp), "sound:": (1, encoder_dp * v["encoder tp"])}
    sizes["images:"] = sizes[""]
    encoders = (
        "{}tp={},dp={},pp={}".format(name, *sizes[name], v["encoder pp"]) for name in _encoders(v)
    )
    language = "tp={tp},cp={cp},pp={pp},vpp={vpp},ep={ep}".format(**v) + f",dp={dp}"
    language += f",etp={v['etp']}" if v["etp"] else ""
    names = "placement", "tokens", "recompute", "at once", "overlap", "dispatcher", "optimizer"
    options = tuple(word for name in names for word in v[name])
    common = (*v["steps"], *v["frozen"], *v["model's options"])
    rest = {"options": options, "common": common, "microbatches": v["microbatches"]}
    return Row(ranks, v["model"], " ".join(encoders), language, **rest)


def _is_taken(row: Row) -> bool:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints all arguments
            Run.of([*DEVICE, *row.commands[0]], row.ranks)
    except UserError:
        return False
    return True


def _triples(values: dict) -> set[frozenset]:
    return set(map(frozenset, itertools.combinations(values.items(), 3)))
