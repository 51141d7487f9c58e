# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What asks a model is a prefix of what trained it, for any tokenizer."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.mimo.nemotron_vlm.energon.conversation import Chat, Turn
from tests.unit_tests.examples.nemotron_vlm.energon.test_energon_conversation import CHATML

TEMPLATES = {
    "none": None,
    "chatml": CHATML,
    "prompted": CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "spaced": "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% else %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
}
SPECIAL = ["<unk>", "<s>", "</s>", "<image>", "<|im_start|>", "<|im_end|>"]
QUESTIONS = [
    "ask",
    "Wie heißt das Mädchen? ",
    "名前は何ですか？",
    "3 + 4 = ",
    "a:\n",
    "x  ",
    "\n\n",
    "e",
]
ANSWERS = [
    "yo",
    " yo",
    "\nyo",
    "Größe: 12",
    "画像",
    "7",
    "  12 34",
    "é",
    ": :",
    "assistant: e",
    "\n\n",
]


def corpus() -> list[str]:
    """Return lines in which each question precedes each answer, so that they may be merged."""
    draw = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyzäöüßé0123456789名前画像は何"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(10000)]
    lines = [" ".join(words[n : n + 20]) for n in range(0, len(words), 20)]
    talks = [f"user: {q}\nassistant: {a}\n" for q in QUESTIONS for a in ANSWERS]
    marked = [f"assistant\n{a}\nUSER: {q} ASSISTANT:{a}" for q in QUESTIONS for a in ANSWERS]
    return lines + 10 * (talks + marked)


def trained(kind: str) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind.startswith("bytes"):
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex="whole" not in kind
        )
        made.decoder, size = decoders.ByteLevel(), int(kind.split()[1])
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=SPECIAL
        )
    elif kind == "words":
        made = Tokenizer(models.WordLevel(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL)
    else:
        made = Tokenizer(models.Unigram())
        scheme = kind.split()[1]
        made.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme=scheme, split=scheme == "always"
        )
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(
            vocab_size=2000, special_tokens=SPECIAL, unk_token="<unk>"
        )
    made.train_from_iterator(corpus(), trainer)
    return made


KINDS = ["bytes 300", "bytes 8000", "bytes 8000 whole", "words", "unigram always", "unigram first"]


@pytest.fixture(scope="module", params=KINDS)
def directories(request, tmp_path_factory) -> tuple[str, dict[str, Path]]:
    """A kind of tokenizer, and its directories with each template."""
    path, made = tmp_path_factory.mktemp("tokenizers"), trained(request.param)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    for name, template in TEMPLATES.items():
        given = {"tokenizer_object": made, "chat_template": template}
        PreTrainedTokenizerFast(**given, **names).save_pretrained(path / name)
    return request.param, {name: path / name for name in TEMPLATES}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_prompt_begins_what_trains_and_the_next_token_bears_a_loss(directories, template):
    kind, paths = directories
    chat, theirs, apart = Chat(paths[template]), AutoTokenizer.from_pretrained(paths[template]), []
    for number, question in enumerate(QUESTIONS):
        for answer in ANSWERS:
            other = ANSWERS[number]
            turns = [Turn("user", question), Turn("assistant", answer)]
            turns += [Turn("user", answer), Turn("assistant", other)]
            ids, bears = chat.encode(turns)
            for before in (turns[:1], turns[:3]):
                prompt = chat.prompt(before)
                assert ids[: len(prompt)].tolist() == prompt.tolist()
                assert bears[len(prompt)] and not bears[len(prompt) - 1]
            if template in ("prompted", "spaced"):
                messages = [{"role": turn.role, "content": turn.text} for turn in turns]
                how = {"add_generation_prompt": True, "return_dict": False}
                asked = theirs.apply_chat_template(messages[:1], **how)
                assert asked == chat.prompt(turns[:1]).tolist()
                whole = theirs.apply_chat_template(messages, return_dict=False)
                apart.append(whole != ids.tolist())
    if kind in ("bytes 300", "words"):
        assert not any(apart), "tokens are taken apart where they need not be"
    if kind == "bytes 8000 whole":
        assert any(apart) or template in ("none", "chatml")
