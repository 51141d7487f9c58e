# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""tools/generate.py answers as the program's own model does, token by token."""

import html
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

from examples.mimo.nemotron_vlm.data.digits import DigitStrips
from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.energon.chat_template import DEFAULT_TEMPLATE
from examples.mimo.nemotron_vlm.energon.conversation import Chat, Turn
from examples.mimo.nemotron_vlm.loop.asking import ask_command
from tests.unit_tests.checkpoint.conversions import BATCH, assert_verified, convert, loading
from tests.unit_tests.checkpoint.hugging_face import save, whole_vlm
from tests.unit_tests.conftest import _environment_restored  # noqa: F401 (around each test)
from tests.unit_tests.examples.nemotron_vlm.energon import digits_data as shards
from tests.unit_tests.examples.nemotron_vlm.runs import DEVICE, OWN_DEFAULTS, trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import evaluate  # noqa: E402
import generate  # noqa: E402

from conversion.verify import Given, our_logits  # noqa: E402
from conversion.whole_models import _tokenizer, preset_of_checkpoint  # noqa: E402

LENGTH, ANSWER, SEED, SAMPLES = 64, 6, 1234, 4
"""Tokens of a sample, and of an answer at most; the program's default seed; number of samples."""


def before_answer(source: SampleSource, number: int) -> torch.Tensor:
    """Return the tokens before the true answer of a held-out sample."""
    text = source.text("test", number)
    return text.input_ids[: int(text.loss_mask.argmax()) + 1]


def answered(source: SampleSource, answers: dict[int, list[int]]) -> Given:
    """Return held-out samples of a source, by number, with other answers."""
    samples = []
    for number, answer in answers.items():
        known = torch.cat([before_answer(source, number), torch.tensor(answer)])
        ids = torch.full((LENGTH,), source.pad_token)
        ids[: len(known)] = known
        inputs = {
            name: (source.sizes("test", number, 1, name)[0], source.inputs("test", number, name))
            for name in source.token_ids
        }
        samples.append((ids, inputs))
    same = ("fingerprint", "pad_token", "vocab_size", "token_ids")
    return Given(samples, **{name: getattr(source, name) for name in same})


def digits(path: Path) -> tuple[SampleSource, list[str]]:
    """Return the program's digits, and options."""
    return DigitStrips(16, 4, LENGTH, SEED), ["--data", "digits"]


def conversations(path: Path) -> tuple[SampleSource, list[str]]:
    """Return conversations in shards, and options."""
    shards.make_digits(path / "data", 400, 3, "--tasks", "omni")
    tokenizer = path / "data/tokenizer"
    shards.survey(path / "data", makes=[shards.omni])
    given = {"encoder": shards.omni(tokenizer), "seq_length": LENGTH, "seed": SEED}
    data = ["--data", f"energon:{path / 'data'}", "--tokenizer-model", str(tokenizer)]
    return shards.source(path / "data", **given), [*data, "--dynamic-resolution"]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = {
    "tiny": (digits, ["image"] * SAMPLES),
    "tiny-omni": (conversations, ["", "sound", "video", "image sound"]),
}
"""Data by model, and the media of the samples that are taken."""


def ask(source: SampleSource, media: list[str], checkpoints: Path) -> dict[int, list[str]]:
    """Return words that ask for a held-out sample with each of some media, by number."""
    found: dict[str, list[int]] = {}
    for number in range(40):
        kinds = [kind for kind, _ in source.question("test", number).media]
        found.setdefault(" ".join(kinds), []).append(number)
    chosen = [found[each].pop(0) for each in media]
    return {each: shlex.split(ask_command(source, each, checkpoints))[3:] for each in chosen}


class Trained(NamedTuple):
    """A model after one step, in path/saved; how to ask about samples; options of its run."""

    path: Path
    source: SampleSource
    asked: dict[int, list[str]]
    options: list[str]


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    """Random weights at first, so large that every one matters to an answer."""
    Utils.read_environment()
    path, name = tmp_path_factory.mktemp("generate") / "a folder", request.param
    path.mkdir()
    make, media = KINDS[name]
    source, options = make(path)
    options += [*BATCH, "--seq-length", str(LENGTH), *(["--bf16"] if HAVE_CUDA else [])]
    theirs = save(whole_vlm(sound=name == "tiny-omni"), path / "theirs")
    convert("hf-to-megatron", "--vlm", theirs, "--model", name, "--out", path / "first")
    with trainer(*options, *loading(path / "first")) as run:
        run.train_step()
        run.save(path / "saved")
    Utils.destroy()
    yield Trained(path, source, ask(source, media, path / "saved"), options)
    Utils.destroy()


def answers(capsys, checkpoint: Path, questions: Iterable[list[str]]) -> list[str]:
    """Return what is printed for each question."""
    for words in questions:
        assert generate.main([str(checkpoint), *words, "--max-tokens", str(ANSWER)]) == 0
    return capsys.readouterr().out.splitlines()


def messages_of(asked: Iterable[list[str]], folder: Path) -> list[dict]:
    """Return records of questions, whose media are linked in the folder."""
    found = []
    for number, (*media, _, question) in enumerate(asked):
        files = {}
        for kind, file in zip(media[::2], map(Path, media[1::2]), strict=True):
            files[kind[2:]] = f"{number}.{file.name}"  # "wav" in a shard has no suffix
            (folder / files[kind[2:]]).symlink_to(file)
        found.append({"messages": [{"role": "user", "content": question}]} | files)
    return found


def test_answers_are_the_most_likely_tokens_of_our_model(trained, capsys, monkeypatch):
    monkeypatch.setattr(Chat, "words", lambda self, tokens: " ".join(map(str, tokens)))
    path, source, asked, options = trained
    said = answers(capsys, path / "saved", asked.values())
    found = [list(map(int, line.split())) for line in said]
    assert len(set(said)) == SAMPLES and min(map(len, found)) > 1
    answers_of = dict(zip(asked, found, strict=True))
    saved = preset_of_checkpoint(path / "saved")
    logits = our_logits(path / "saved", saved, answered(source, answers_of), *DEVICE)
    for row, (number, answer) in zip(logits, answers_of.items(), strict=True):
        start = len(before_answer(source, number)) - 1
        assert row[start : start + len(answer)].argmax(-1).tolist() == answer
    Utils.destroy()
    capsys.readouterr()
    converted = path / "saved-hugging-face/iter_0000001"
    assert answers(capsys, converted, asked.values()) == said
    assert generate.main([str(converted), "--step", "1", "--ask", "read"]) == 2
    assert capsys.readouterr().err.endswith("is of Hugging Face, and has no steps\n")
    (path / "saved/best.json").write_text('{"step": 1}')
    monkeypatch.chdir(path / "saved")
    assert answers(capsys, Path("best"), asked.values()) == said
    more = " video sound" if "--dynamic-resolution" in options else ""
    assert_verified(path / "saved/best", converted, f"text image{more}")


def test_an_evaluation_asks_about_each_sample(trained, capsys, tmp_path):
    said = answers(capsys, trained.path / "saved", trained.asked.values())
    page, count = tmp_path / "new/page.html", max(trained.asked) + 1
    words = [str(trained.path / "saved"), "--samples", str(count), "--max-tokens", str(ANSWER)]
    assert evaluate.main([*words, "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert err == f"error: --out {tmp_path} is a folder\n" and not out
    assert evaluate.main([*words, "--out", str(page)]) == 0
    scores, shown = json.loads(capsys.readouterr().out), page.read_text()
    assert scores["samples"] + scores["not_asked"] == count and 0 <= scores["anls"] <= 1
    for number, answer in zip(trained.asked, said, strict=True):
        place = shown.index(f"{trained.source.name('test', number)}<")
        assert html.escape(answer) in shown[place : shown.index("</section>", place)]


@pytest.mark.parametrize("template", [None, CHATML, {"default": CHATML, "tool_use": "{{ tools }}"}])
def test_an_export_asks_by_the_template_that_trained(tmp_path, template):
    given, out = shards.byte_tokenizer(tmp_path / "given", template, ["<image>"]), tmp_path / "out"
    out.mkdir()
    _tokenizer(SimpleNamespace(tokenizer_model=str(given)), out)
    theirs = AutoTokenizer.from_pretrained(out)
    talk = [("user", " a: "), ("assistant", "b "), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in talk]
    asked = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    turns = [Turn(*each) for each in talk]
    assert asked == Chat(given).prompt(turns).tolist() == Chat(out).prompt(turns).tolist()
    assert theirs.chat_template == (template or DEFAULT_TEMPLATE)


def test_questions_of_a_file_are_answered_as_each_alone(trained, capsys, tmp_path, monkeypatch):
    """Questions have different lengths, half have no media, and answers differ in length."""
    monkeypatch.setattr(Chat, "words", lambda self, tokens: " ".join(map(str, tokens)))
    monkeypatch.setattr(sys.modules[__name__], "ANSWER", 40)
    asked = []
    for *media, option, question in trained.asked.values():
        text = re.sub("<[a-z]+>", "", question)
        for more in range(3):
            asked.append([*media, option, question + f" {text}" * more])
            asked.append([option, f" {text}" * (more + 1)])
    alone = answers(capsys, trained.path / "saved", asked[::6])
    messages = messages_of(asked, tmp_path)
    talks = []
    for message in messages:
        files = dict(message)
        (turn,) = files.pop("messages")
        talk = [{"from": "human", "value": turn["content"]}, {"from": "gpt", "value": "known"}]
        talks.append({"conversations": talk} | files)
    *media, _, question = asked[0]
    said = []
    for name, text, more in (
        ("a.jsonl", "\n".join(map(json.dumps, messages)), ["--batch", "1"]),
        ("a.json", json.dumps(talks, indent=1), ["--batch", "24"]),
        ("a.txt", f"{question}\n\n{question}\n", media),
    ):
        (tmp_path / name).write_text(text)
        words = ["--questions", str(tmp_path / name), *more]
        found = answers(capsys, trained.path / "saved", [words])
        said.append([json.loads(line)["answer"] for line in found])
    assert said[0] == said[1] and len(said[0]) == 24 and said[0][::6] == alone
    assert said[2] == alone[:1] * 2 and len({len(each.split()) for each in said[0]}) > 1


def test_a_seed_repeats_what_is_drawn(trained, capsys, monkeypatch):
    words, drawn = list(trained.asked.values())[1], ["--temperature", "3", "--top-p", "0.99"]
    given = [[], ["--top-k", "1"], *([*drawn, "--seed", n] for n in "12134")]
    plain, likeliest, *draws = answers(capsys, trained.path / "saved", [words + g for g in given])
    assert plain == likeliest and draws[0] == draws[2] and len(set(draws)) > 2
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    (streamed,) = answers(capsys, trained.path / "saved", [words])
    assert streamed.strip() == plain


@pytest.mark.parametrize("trained", ["tiny"], indirect=True)
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--image", "none.png"], "none.png: no such file, or an empty folder"),
        (["--image", "a.wav", "--ask", "read"], "image 1: "),
        (["--sound", "a.wav", "--ask", "read"], "sound 1: the model has no encoder of sound"),
        (["--ask", "read zebra"], "the tokenizer does not know all of its words"),
        (["--step", "7"], "iter_0000007"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs takes a JSON object"),
        (["--questions", "a.jsonl", "--image", "a.wav"], "media if the file names its own"),
        (["--questions", "a.jsonl"], "a.jsonl:3: none.png: no such file"),
        (["--device", "cuda"], "PyTorch finds no GPU here"),
    ],
)
def test_an_error_is_one_line(words, error, trained, capsys, monkeypatch):
    monkeypatch.chdir(trained.path)
    Path("a.wav").write_bytes(b"RIFF")
    talk = {"conversations": [{"from": "human", "value": "read"}]}
    Path("a.jsonl").write_text(f"{json.dumps(talk)}\n\n{json.dumps(talk | {'image': 'none.png'})}")
    assert generate.main(["saved", *words]) == 2
    out, said = capsys.readouterr()
    assert said.startswith("error: ") and said.count("\n") == 1 and error in said and not out


def test_an_evaluation_counts_the_answers_that_generation_gives(tmp_path, capsys):
    """A run calls a sample right if every next token of its answer, and the end, is the likeliest;
    generation takes these tokens then, and otherwise leaves the answer at the first that is not."""
    batches, sizes = 4, "--global-batch-size 16 --micro-batch-size 16 --seq-length 16"
    learning = (*OWN_DEFAULTS, "--lr", "3e-3", "--train-iters", "100", "--eval-iters", str(batches))
    with trainer("--data", "digits", *sizes.split(), *learning) as run:
        for _ in range(100):
            run.train_step()
        run.source.score = None  # counts whole answers, as eval_exact_match
        known = run.evaluate(batches)
        run.save(tmp_path / "saved")
    Utils.destroy()
    capsys.readouterr()
    words = "--samples", str(16 * batches), "--out", str(tmp_path / "page.html")
    assert evaluate.main([str(tmp_path / "saved"), *words]) == 0
    exact = json.loads(capsys.readouterr().out)["exact_match"]
    assert exact == pytest.approx(known) and 0 < known < 1
