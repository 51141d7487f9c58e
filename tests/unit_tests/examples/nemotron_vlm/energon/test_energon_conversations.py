# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens and loss of conversations are those of transformers, for templates of all styles.

Each template marks what the model is to produce, and transformers' mask of it is the reference,
also for the same template without marks. A prompt that asks is a prefix of the text that trained
the model, for any tokenizer.
"""

import itertools
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.mimo.nemotron_vlm.energon.chat_template import MODES
from examples.mimo.nemotron_vlm.energon.conversation import Chat, Turn, place_media
from examples.mimo.nemotron_vlm.energon.errors import BadConversation
from examples.mimo.nemotron_vlm.energon.records import (
    MediaFile,
    Medium,
    Record,
    decode_text,
    read_record,
)
from examples.mimo.nemotron_vlm.model.names import IMAGES
from megatron.energon import CrudeSample
from tests.unit_tests.examples.nemotron_vlm.energon import digits_data
from tests.unit_tests.examples.nemotron_vlm.energon.templates import (
    SPECIAL,
    TEMPLATES,
    without_marks,
)

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def said(role: str, content, **more) -> dict:
    return {"role": role, "content": content, **more}


def call(**more) -> dict:
    function = {"name": "look", "arguments": {"at": "Zürich"}}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **more}


def texts(*parts: str) -> list[dict]:
    return [{"type": "text", "text": each} for each in parts]


ANSWERS = {
    "plain": said("assistant", "yo"),
    "spaces": said("assistant", " \n yo 名前 \n"),
    "same words": said("assistant", "ask me: yo"),
    "no loss": said("assistant", "yo", loss=False),
}
THOUGHTS = {
    "reasoning": said("assistant", "yo", reasoning_content="because"),
    "thinking": said("assistant", "\nyo ", thinking=" because\n\nso "),
    "tags": said("assistant", "<think>\nbecause</think>\nyo"),
    "tags alone": said("assistant", "<think>because</think>yo"),
}
CALLS = {
    "call": call(),
    "empty": call(content=""),
    "words": call(content="Let me look.", reasoning_content="because"),
    "no loss": call(content=None, weight=0),
}
TALKS = {"greeting": [said("assistant", "Hi!"), said("user", "yo"), said("assistant", "yo")]}
for name, answer in (ANSWERS | THOUGHTS).items():
    ask, last = said("user", "ask  me"), said("assistant", "bye")
    TALKS[name] = [ask, answer]
    TALKS[f"system, {name}"] = [said("system", "Be brief."), ask, answer]
    TALKS[f"{name}, again"] = [ask, answer, said("user", " yo "), last]
    TALKS[f"again, {name}"] = [ask, last, ask, answer]
for name, answer in CALLS.items():
    turns = [said("user", "look"), answer, said("tool", "1", name="look", tool_call_id="a")]
    turns += [said("tool", "2"), said("assistant", "two")]
    TALKS[f"tool, {name}"] = turns
    TALKS[f"tool, {name}, again"] = [*turns, said("user", "so?"), said("assistant", "Yes.")]

ITEMS = [said("user", texts("a ", " b")), said("assistant", texts("a ", " b"))]
RESULTS = [said("user", "look"), call(), said("tool", texts("a ", "", " b")), last]
THOUGHT = said("assistant", "yo", reasoning_content="because", weight=0)
BOTH = [said("user", "ask"), THOUGHT, said("user", "so?"), call()]
KEYS = {"role": "from", "content": "value"}
LLAVA = [{KEYS.get(key, key): each[key] for key in each} for each in BOTH]
LLAVA[3] |= {"value": None, "loss": True, "weight": 1, "name": None}
SAYS_NOTHING = {"id": 7, "image": "a.png", "source": "x", "metadata": {"a": 1}, "model": None}
TWICE = TALKS["reasoning, again"]


def knows(template: str, talk: list[dict]) -> bool:
    thinks = any("think" in str(message) or "reasoning" in str(message) for message in talk)
    return template in ("nemotron", "chatml") or not thinks


CASES = [
    *(
        (style, {"messages": talk, "tools": TOOLS if "tool" in name else None}, talk)
        for style, (name, talk) in itertools.product(list(TEMPLATES)[:3], TALKS.items())
        if knows(style, talk)
    ),
    ("chatml", {"conversations": LLAVA, **SAYS_NOTHING}, BOTH),
    ("chatml", {"messages": ITEMS}, [said("user", "a  b"), said("assistant", "a  b")]),
    ("items", {"messages": ITEMS}, ITEMS),
    ("items of results", {"messages": RESULTS}, RESULTS),
    ("dated", {"messages": TWICE, "chat_template_kwargs": {"date": "1 May"}}, TWICE),
    (
        "nemotron",
        {"messages": TWICE, "chat_template_kwargs": {"truncate_history_thinking": False}},
        TWICE,
    ),
]
"""A template, a sample's json, and the same conversation as transformers takes it."""


def record_of(content: dict) -> Record:
    return read_record(CrudeSample(decode_text({"json": json.dumps(content).encode()})), "?")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Tokenizers with each template, with marks and without."""
    made = {}
    for name, template in TEMPLATES.items():
        path = tmp_path_factory.mktemp("tokenizers")
        marked = AutoTokenizer.from_pretrained(
            digits_data.byte_tokenizer(path / "a", template, SPECIAL)
        )
        plain = digits_data.byte_tokenizer(path / "b", without_marks(template), SPECIAL)
        made[name] = marked, Chat(path / "a"), Chat(plain)
    return made


@pytest.mark.parametrize(("template", "content", "messages"), CASES)
def test_tokens_and_loss_are_transformers(chats, template, content, messages):
    """Theirs have a loss on all answers; it is taken from those that are to bear none."""
    tokenizer, *both = chats[template]
    bare = [{k: v for k, v in m.items() if k not in ("loss", "weight")} for m in messages]
    how = {"tools": content.get("tools"), **content.get("chat_template_kwargs", {})}
    made = tokenizer.apply_chat_template(
        bare, return_dict=True, return_assistant_tokens_mask=True, **how
    )
    mask = list(made["assistant_masks"])
    runs = [
        list(run) for bears, run in itertools.groupby(range(len(mask)), mask.__getitem__) if bears
    ]
    answers = [m for m in messages if m["role"] == "assistant"]
    for run, answer in zip(runs, answers, strict=True):
        for place in run:
            mask[place] = int(bool(answer.get("loss", answer.get("weight", 1))))
    record = record_of(content)
    for chat in both:
        found, bears = chat.encode(record.turns, (), record.arguments)
        assert found.tolist() == made["input_ids"]
        assert bears.astype(int).tolist() == mask


def test_without_a_template_a_plain_one_is_taken(tmp_path):
    chat = Chat(digits_data.byte_tokenizer(tmp_path, None, ["<image>"]))
    turns = [Turn("user", "is it 3 ?"), Turn("assistant", "3")]
    ids, bears = chat.encode([*turns, *turns])
    assert chat.words(ids) == "user: is it 3 ?\nassistant: 3\n" * 2
    assert chat._tokenizer.decode(ids[bears]) == " 3</s> 3</s>"


QUESTIONS = ["ask", "Wie heißt das Mädchen? ", "名前は何ですか？", "3 + 4 = ", "a:\n", "\n\n", "e"]
REPLIES = ["yo", " yo", "\nyo", "Größe: 12", "画像", "7", "  12 34", "é", ": :", "assistant: e"]
PAIRS = list(itertools.product(QUESTIONS, REPLIES))
CORPUS = [f"user: {q}\nassistant: {a}\n" for q, a in PAIRS] + [f"\n\n{a}" for a in REPLIES]
"""Each question precedes each answer, so that they may be merged."""

TOKENS = ["<unk>", "</s>", "<|im_start|>", "<|im_end|>", *SPECIAL]
BYTES = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": TOKENS}
SPACES = {"prepend_scheme": "first"}
TRAINED = {
    "bytes": (
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        trainers.BpeTrainer(vocab_size=300, **BYTES),
    ),
    "bytes over words": (
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
        trainers.BpeTrainer(**BYTES),
    ),
    "unigram": (
        models.Unigram(),
        pre_tokenizers.Metaspace(split=False, **SPACES),
        decoders.Metaspace(**SPACES),
        trainers.UnigramTrainer(unk_token="<unk>", special_tokens=TOKENS),
    ),
}
APART = {("bytes", "chatml"): False, ("bytes over words", "chatml"): True}
"""Whether tokens of the whole text differ, which are taken apart where an answer begins."""


@pytest.mark.parametrize("style", ["none", "chatml", "mistral"])
@pytest.mark.parametrize("kind", TRAINED)
def test_the_prompt_begins_what_trains_and_the_next_token_bears_a_loss(kind, style, tmp_path):
    model, before, after, trainer = TRAINED[kind]
    made = Tokenizer(model)
    made.pre_tokenizer, made.decoder = before, after
    made.train_from_iterator(CORPUS, trainer)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    template = None if style == "none" else without_marks(TEMPLATES[style])
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **names)
    theirs.save_pretrained(tmp_path)
    chat, is_apart = Chat(tmp_path), False
    for question, reply in PAIRS:
        messages = [said("user", question), said("assistant", reply), said("user", reply)]
        messages.append(said("assistant", REPLIES[QUESTIONS.index(question)]))
        turns = [Turn(each["role"], each["content"]) for each in messages]
        ids, bears = chat.encode(turns)
        for asked in (turns[:1], turns[:3]):
            prompt = chat.prompt(asked)
            assert ids[: len(prompt)].tolist() == prompt.tolist()
            assert bears[len(prompt)] and not bears[len(prompt) - 1]
        if style == "chatml":  # it has a prompt
            how = {"add_generation_prompt": True, "return_dict": False}
            asked = theirs.apply_chat_template(messages[:1], **how)
            assert asked == chat.prompt(turns[:1]).tolist()
            is_apart |= theirs.apply_chat_template(messages, return_dict=False) != ids.tolist()
    assert is_apart == APART.get((kind, style), is_apart)


@pytest.mark.parametrize(
    ("names", "ways", "asked"),
    [
        (["plain", "plain"], [MODES[1]] * 2, MODES[1]),
        (["plain", "reasoning"], [MODES[1], {}], {}),
        (["tags alone"], [{}], {}),
        (["again, reasoning"], [{}], {}),
    ],
)
def test_a_run_asks_as_all_its_samples_do(chats, tmp_path, names, ways, asked):
    tokenizer = chats["nemotron"][1].path
    talks = [json.dumps({"messages": TALKS[name]}).encode() for name in names]
    digits_data.make_shard(tmp_path, [{"json": talk} for talk in talks], digits_data.CRUDE)
    digits_data.survey(tmp_path, tokenizer, splits=["train"])
    opened = digits_data.source(tmp_path, tokenizer, seq_length=200)
    assert opened.asked == asked
    found = [opened.shown("train", number).asked for number in range(len(names))]
    assert sorted(map(str, found)) == sorted(map(str, ways))
    assert (opened.question("train", 0) is None) == ("again" in names[0])


@pytest.mark.parametrize(
    ("template", "answer", "more", "reason"),
    [
        ("comments", THOUGHTS["reasoning"], {}, "does not know reasoning_content"),
        ("mistral", ANSWERS["plain"], {"chat_template_kwargs": {"deep": 1}}, "does not know deep"),
        ("shouting", ANSWERS["plain"], {}, "template changes answer 1"),
        ("refusing", ANSWERS["plain"], {}, "refuses it: roles must alternate"),
        ("dated", ANSWERS["plain"], {}, "refuses it: it writes today's date; say which by"),
    ],
)
def test_what_a_template_does_not_take_is_named(chats, template, answer, more, reason):
    record = record_of({"messages": [said("user", "ask"), answer], **more})
    with pytest.raises(BadConversation, match=reason):
        chats[template][2].encode(record.turns, (), record.arguments)


def test_media_are_ordered_by_number_and_captions_are_answers_to_a_prompt():
    files = {name: MediaFile(name) for name in ("10.png", "2.jpg")}
    caption = {"json": {"caption": " a cat ", "prompt": "ask"}}
    asked = read_record(CrudeSample(files | caption), "?")
    assert asked.media == [Medium(IMAGES, ("2.jpg",)), Medium(IMAGES, ("10.png",))]
    assert asked.turns == [Turn("user", "<image>\n<image>\nask"), Turn("assistant", "a cat")]
    asked = read_record(CrudeSample({"txt": "a dog"}), "what?")
    assert asked.turns == [Turn("user", "what?"), Turn("assistant", "a dog")]


def test_a_tokenizer_has_its_own_image_token_and_what_it_lacks_is_named(chats, tmp_path):
    path = digits_data.byte_tokenizer(tmp_path / "t", TEMPLATES["chatml"], ["<|image_pad|>"])
    chat, turns = Chat(path, "<|image_pad|>"), [Turn("user", "?"), Turn("assistant", "3")]
    ids, _ = chat.encode(place_media(turns, {IMAGES: 1})[0])
    assert (ids == chat.ids[IMAGES]).sum() == 1
    for given, text in (
        ((tmp_path / "none",), "no such directory"),
        ((tmp_path,), "^tokenizer .*$"),
        ((path,), "no token <image> for images"),
        ((path, "<|image_pad|>", True), "no token <so_embedding> for sound"),
    ):
        with pytest.raises(ValueError, match=text):
            Chat(*given)
    prints = [chats[name][1].fingerprint for name in ("chatml", "shouting")]
    assert prints[0] != prints[1] and prints[0] == Chat(chats["chatml"][1].path).fingerprint
