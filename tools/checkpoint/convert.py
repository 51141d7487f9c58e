# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Convert weights of Hugging Face's Nemotron 3 Nano Omni to a checkpoint, and back.

Usage, with the applied checkout on PYTHONPATH, or in build/Megatron-LM:
    python tools/checkpoint/convert.py hf-to-megatron --vlm DIR --model NAME --out DIR
    python tools/checkpoint/convert.py megatron-to-hf CHECKPOINT --like DIR --out DIR
    python tools/checkpoint/convert.py verify CHECKPOINT DIR
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command_line import Parser  # noqa: E402
from in_checkout import run  # noqa: E402


def main(argv: list[str]) -> int:
    """Convert weights; return the exit status, 2 for user errors."""
    options = _parser().parse_args(argv)
    return run(lambda: _convert(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    into = commands.add_parser("hf-to-megatron", help="write a checkpoint that --load takes")
    into.set_defaults(run=_to_megatron)
    given = into.add_mutually_exclusive_group(required=True)
    given.add_argument("--vlm", type=Path, metavar="DIR", help="a whole VLM")
    given.add_argument("--adapter", type=Path, metavar="DIR", help="adapters of peft")
    encoders = "has the model's encoders, and the adapters' base; nano-omni-30b-a3b by default"
    into.add_argument("--model", default="nano-omni-30b-a3b", metavar="NAME|FILE", help=encoders)
    back = commands.add_parser("megatron-to-hf", help="write a Hugging Face directory")
    back.set_defaults(run=_to_hugging_face)
    back.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="as --load takes it")
    like = "Hugging Face model from which all but the weights is copied; else the run says it"
    back.add_argument("--like", type=Path, metavar="DIR", help=like)
    what = "write LoRA's adapters for peft; without, they are merged into their base"
    back.add_argument("--adapter", action="store_true", help=what)
    check = commands.add_parser("verify", help="compare logits with those of transformers")
    check.set_defaults(run=_verify, out=None)
    check.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="as --load takes it")
    check.add_argument("directory", type=Path, metavar="DIR", help="of Hugging Face")
    most = "largest difference, as a share of the logits' standard deviation; 1e-3 by default"
    check.add_argument("--tolerance", type=float, default=1e-3, metavar="SHARE", help=most)
    for command in (into, back):
        command.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory")
    return parser


def _convert(options: argparse.Namespace) -> None:
    from examples.mimo.common.errors import UserError

    if options.out and options.out.exists():
        raise UserError(f"--out {options.out} exists already")
    options.run(options)


def _to_megatron(options: argparse.Namespace) -> None:
    from conversion.whole_models import MODEL, to_megatron
    from examples.mimo.nemotron_vlm.model.presets import find_preset

    base, out = find_preset(options.model), options.out
    if options.adapter:
        from conversion.peft_files import from_peft

        words = f"--pretrained-checkpoint BASE {from_peft(options.adapter, base, out)}"
        print(f"begin a run with: --finetune --load {out} {words}")
        return
    left_out, lacking = to_megatron(options.vlm, base, out)
    _list("not in our model, left out", left_out)
    _list(f"not in {options.vlm}, left out", lacking)
    print(f"load it with: --model {out / MODEL} --pretrained-checkpoint {out}")


def _to_hugging_face(options: argparse.Namespace) -> None:
    from conversion.whole_models import export, to_hugging_face

    if options.adapter:
        from conversion.peft_files import to_peft

        return to_peft(options.checkpoint, options.like, options.out)
    if not options.like:
        return export(options.checkpoint, options.out)
    copied = to_hugging_face(options.checkpoint, options.like, options.out)
    _list(f"not in our model, copied from {options.like}", copied)


def _verify(options: argparse.Namespace) -> None:
    from conversion.verify import differences
    from examples.mimo.common.errors import UserError

    found = list(differences(options.checkpoint, options.directory))
    for kind, difference, deviation in found:
        print(f"{kind}: largest difference {difference:.1e}, deviation of logits {deviation:.2g}")
    wrong = [kind for kind, *both in found if not both[0] <= options.tolerance * both[1]]
    if wrong:
        raise UserError(f"the logits of {', '.join(wrong)} differ by more than --tolerance")


def _list(what: str, names: list[str]) -> None:
    if names:
        print(f"{what}: " + ", ".join(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
