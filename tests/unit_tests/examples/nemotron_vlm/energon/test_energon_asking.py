# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A prompt that asks is a prefix of the text that trained the model, for any tokenizer."""

import itertools

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.mimo.nemotron_vlm.energon.conversation import Chat, Turn
from tests.unit_tests.examples.nemotron_vlm.energon.templates import (
    SPECIAL,
    TEMPLATES,
    without_marks,
)

PROMPTED = "chatml", "headers"
CHOSEN = {"none": None} | {name: without_marks(TEMPLATES[name]) for name in (*PROMPTED, "mistral")}
TOKENS = ["<unk>", "</s>", "<|im_start|>", "<|im_end|>", *SPECIAL]
QUESTIONS = ["ask", "Wie heißt das Mädchen? ", "名前は何ですか？", "3 + 4 = ", "a:\n", "\n\n", "e"]
ANSWERS = ["yo", " yo", "\nyo", "Größe: 12", "画像", "7", "  12 34", "é", ": :", "assistant: e"]
PAIRS = list(itertools.product(QUESTIONS, ANSWERS))
CORPUS = [f"user: {q}\nassistant: {a}\n" for q, a in PAIRS] + [f"\n\n{a}" for a in ANSWERS]
"""Each question precedes each answer, so that they may be merged."""

BYTES = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
SPACES = {"prepend_scheme": "first"}
KINDS = {
    "bytes": (
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        trainers.BpeTrainer(vocab_size=300, special_tokens=TOKENS, **BYTES),
    ),
    "bytes over words": (
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
        trainers.BpeTrainer(special_tokens=TOKENS, **BYTES),
    ),
    "unigram": (
        models.Unigram(),
        pre_tokenizers.Metaspace(split=False, **SPACES),
        decoders.Metaspace(**SPACES),
        trainers.UnigramTrainer(unk_token="<unk>", special_tokens=TOKENS),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_begins_what_trains_and_the_next_token_bears_a_loss(kind, tmp_path):
    model, before, after, trainer = KINDS[kind]
    made = Tokenizer(model)
    made.pre_tokenizer, made.decoder = before, after
    made.train_from_iterator(CORPUS, trainer)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    for name, template in CHOSEN.items():
        given = {"tokenizer_object": made, "chat_template": template}
        PreTrainedTokenizerFast(**given, **names).save_pretrained(tmp_path / name)
        apart = check(Chat(tmp_path / name), name in PROMPTED)
        if kind == "bytes" and name == "chatml":
            assert not any(apart), "tokens are taken apart where they need not be"
        if kind == "bytes over words" and name == "headers":
            assert any(apart)


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
