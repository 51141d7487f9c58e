# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A prompt that asks is a prefix of the text that trained the model, for any tokenizer."""

import itertools
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.mimo.nemotron_vlm.energon.conversation import Chat, Turn

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
)
TEMPLATES = {
    "none": None,
    "chatml": CHATML,
    "prompted": CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "spaced": "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% else %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
}
SPECIAL = ["<unk>", "<s>", "</s>", "<image>", "<|im_start|>", "<|im_end|>"]
QUESTIONS = ["ask", "Wie heißt das Mädchen? ", "名前は何ですか？", "3 + 4 = ", "a:\n", "\n\n", "e"]
ANSWERS = ["yo", " yo", "\nyo", "Größe: 12", "画像", "7", "  12 34", "é", ": :", "assistant: e"]
PAIRS = list(itertools.product(QUESTIONS, ANSWERS))


def corpus() -> list[str]:
    """Return lines in which each question precedes each answer, so that they may be merged."""
    draw = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyzäöüßé0123456789名前画像は何"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(10000)]
    lines = [" ".join(words[n : n + 20]) for n in range(0, len(words), 20)]
    talks = [f"user: {q}\nassistant: {a}\n" for q, a in PAIRS]
    return lines + 10 * (talks + [f"assistant\n{a}\nUSER: {q} ASSISTANT:{a}" for q, a in PAIRS])


def of_bytes(size: int, use_regex: bool = True) -> tuple:
    before = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    more = {"vocab_size": size, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    return models.BPE(), before, decoders.ByteLevel(), trainers.BpeTrainer, more


def unigram() -> tuple:
    before = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    after = decoders.Metaspace(prepend_scheme="first")
    more = {"vocab_size": 2000, "unk_token": "<unk>"}
    return models.Unigram(), before, after, trainers.UnigramTrainer, more


KINDS = {
    "bytes 300": of_bytes(300),
    "bytes 8000 whole": of_bytes(8000, use_regex=False),
    "words": (
        *(models.WordLevel(unk_token="<unk>"), pre_tokenizers.Whitespace(), None),
        *(trainers.WordLevelTrainer, {}),
    ),
    "unigram": unigram(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_begins_what_trains_and_the_next_token_bears_a_loss(kind, tmp_path):
    model, before, after, trainer, more = KINDS[kind]
    made = Tokenizer(model)
    made.pre_tokenizer = before
    if after:
        made.decoder = after
    made.train_from_iterator(corpus(), trainer(special_tokens=SPECIAL, **more))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    for name, template in TEMPLATES.items():
        given = {"tokenizer_object": made, "chat_template": template}
        PreTrainedTokenizerFast(**given, **names).save_pretrained(tmp_path / name)
        apart = check(Chat(tmp_path / name), template and "add_generation" in template)
        if kind in ("bytes 300", "words"):
            assert not any(apart), "tokens are taken apart where they need not be"
        if kind == "bytes 8000 whole":
            assert any(apart) or name in ("none", "chatml")


def check(chat: Chat, is_prompted: bool) -> list[bool]:
    """Check all pairs; return whether tokens of the whole text are apart, if templates prompt."""
    theirs, apart = AutoTokenizer.from_pretrained(chat.path), []
    for question, answer in PAIRS:
        other = ANSWERS[QUESTIONS.index(question)]
        turns = [Turn("user", question), Turn("assistant", answer)]
        turns += [Turn("user", answer), Turn("assistant", other)]
        ids, bears = chat.encode(turns)
        for asked in (turns[:1], turns[:3]):
            prompt = chat.prompt(asked)
            assert ids[: len(prompt)].tolist() == prompt.tolist()
            assert bears[len(prompt)] and not bears[len(prompt) - 1]
        if is_prompted:
            messages = [{"role": turn.role, "content": turn.text} for turn in turns]
            how = {"add_generation_prompt": True, "return_dict": False}
            asked = theirs.apply_chat_template(messages[:1], **how)
            assert asked == chat.prompt(turns[:1]).tolist()
            whole = theirs.apply_chat_template(messages, return_dict=False)
            apart.append(whole != ids.tolist())
    return apart
