# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens: templates, image tokens, and the loss on answers only."""

import json
from itertools import groupby
from pathlib import Path

import pytest

from examples.mimo.nemotron_vlm.data.sample import IMAGES
from examples.mimo.nemotron_vlm.energon.conversation import Chat, Turn, place_media
from examples.mimo.nemotron_vlm.energon.encoding import Encoder, File
from examples.mimo.nemotron_vlm.energon.errors import BadConversation, BadImage
from examples.mimo.nemotron_vlm.energon.images import Tiling
from examples.mimo.nemotron_vlm.energon.records import MediaFile, Medium, decode_text, read_record
from megatron.energon import CrudeSample
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import byte_tokenizer, image

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
)
SHOUTING = CHATML.replace("message['content'] }}", "message['content'] | upper }}")
ASKED = [Turn("user", "is it 3 ?"), Turn("assistant", "3")]
TWICE = [*ASKED, Turn("user", "assistant 3 : twice ?"), Turn("assistant", "3 3 . assistant")]


@pytest.fixture
def tokenizer(tmp_path: Path):
    """Writes a byte-level tokenizer with a template."""
    return lambda template, image="<image>": byte_tokenizer(tmp_path / "t", template, [image])


def answered(chat: Chat, turns: list[Turn]) -> str:
    """Return the text that the loss is on, with a bar between its runs."""
    runs = groupby(zip(*chat.encode(turns), strict=True), key=lambda token: token[1])
    return "|".join(
        chat._tokenizer.decode([i for i, _ in run]) for bears_loss, run in runs if bears_loss
    )


class TestAnswers:
    @pytest.mark.parametrize(
        ("template", "turns", "answers"),
        [
            (CHATML, TWICE, "3<|im_end|>|3 3 . assistant<|im_end|>"),
            (None, TWICE, " 3</s>| 3 3 . assistant</s>"),
            (CHATML, [Turn("user", "名前は？"), Turn("assistant", "画像 é")], "画像 é<|im_end|>"),
        ],
        ids=["a-template", "no-template", "several-bytes-a-letter"],
    )
    def test_end_with_the_turn(self, tokenizer, template, turns, answers):
        assert answered(Chat(tokenizer(template)), turns) == answers

    def test_without_a_template_follow_a_plain_one(self, tokenizer):
        chat = Chat(tokenizer(None))
        assert chat.words(chat.encode(ASKED)[0]) == "user: is it 3 ?\nassistant: 3\n"

    @pytest.mark.parametrize(
        ("template", "text"),
        [
            (SHOUTING, "template changes answer 1"),
            ("{{ raise_exception('roles must alternate') }}", "refuses it: roles must alternate"),
        ],
    )
    def test_that_the_template_changes_or_refuses_are_refused(self, tokenizer, template, text):
        with pytest.raises(BadConversation, match=text):
            Chat(tokenizer(template)).encode([Turn("user", "a"), Turn("assistant", "b")])


class TestImages:
    def test_stand_where_the_text_has_them_or_before_the_first_question(self):
        placed, _ = place_media([Turn("system", "s"), *ASKED], {IMAGES: 2})
        assert placed[1].text == "<image>\n<image>\nis it 3 ?"
        turns = [Turn("user", "this <image> and <image>"), Turn("assistant", "yes")]
        assert place_media(turns, {IMAGES: 2}) == (turns, [IMAGES] * 2)

    @pytest.mark.parametrize(
        ("turns", "images", "text"),
        [
            ([Turn("user", "<image>"), Turn("assistant", "a")], 2, "1 <image> for 2 images"),
            ([Turn("user", "<image>"), Turn("assistant", "a")], 0, "1 <image> for 0 images"),
            ([Turn("user", "b"), Turn("assistant", "<image>")], 1, "outside of the user's"),
            ([Turn("user", "b")], 0, "an assistant's answer"),
            ([Turn("assistant", "b")], 1, "needs a user's turn"),
            ([Turn("user", "b"), Turn("assistant", "")], 0, "an answer is empty"),
            ([*ASKED, Turn("user", "b")], 0, "ends with a turn of user, which has no answer"),
        ],
    )
    def test_that_do_not_add_up_are_refused(self, turns, images, text):
        with pytest.raises(BadConversation, match=text):
            place_media(turns, {IMAGES: images})

    def test_have_the_tokenizers_own_token(self, tokenizer):
        chat = Chat(tokenizer(CHATML, "<|image_pad|>"), "<|image_pad|>")
        ids, _ = chat.encode(place_media(ASKED, {IMAGES: 1})[0])
        assert (ids == chat.ids[IMAGES]).sum() == 1
        with pytest.raises(BadConversation, match="has the token <|image_pad|>"):
            chat.encode([Turn("user", "say it"), Turn("assistant", "<|image_pad|>")])

    def test_in_items_are_text_for_a_template_that_knows_none(self, tokenizer):
        chat = Chat(tokenizer(CHATML))
        (ids, _), (wanted, _) = (
            chat.encode([Turn("user", "is <image> 3 ?", items), *ASKED[1:]])
            for items in (("is ", "<image>", " 3 ?"), ())
        )
        assert ids.tolist() == wanted.tolist()

    def test_that_are_damaged_are_named(self, tokenizer):
        encoder = Encoder(Chat(tokenizer(CHATML)), Tiling(16), tokens_per_tile=4)
        with pytest.raises(BadImage, match="image 2: damaged, or not what its name says"):
            encoder.read([File(IMAGES, (image(16, 16),)), File(IMAGES, (b"nothing",))])


def test_tokenizers_that_lack_something_are_refused_and_others_told_apart(tokenizer, tmp_path):
    for path, text in ((tmp_path / "none", "no such directory"), (tmp_path, "^tokenizer .*$")):
        with pytest.raises(ValueError, match=text):
            Chat(path)
    with pytest.raises(ValueError, match="no token <picture> for images"):
        Chat(tokenizer(CHATML), "<picture>")
    with pytest.raises(ValueError, match="no token <so_embedding> for sound"):
        Chat(tokenizer(CHATML), sound=True)
    one, same, other = (Chat(tokenizer(t)).fingerprint for t in (CHATML, CHATML, SHOUTING))
    assert one == same != other


def turns(who: str = "role", what: str = "content", **more) -> bytes:
    """Return the json of a question and an answer with more keys."""
    first, second = {who: "user", what: "a"}, {who: "assistant", what: "b"}
    key = "messages" if who == "role" else "conversations"
    return json.dumps({key: [first, second | more]}).encode()


class TestRecords:
    def test_files_are_ordered_by_number_and_captions_are_answers_to_a_prompt(self):
        files = {name: MediaFile(name) for name in ("10.png", "2.jpg")}
        caption = {"json": {"caption": " a cat ", "prompt": "ask"}}
        asked = read_record(CrudeSample(files | caption), "?")
        assert asked.media == [Medium(IMAGES, ("2.jpg",)), Medium(IMAGES, ("10.png",))]
        assert asked.turns == [Turn("user", "<image>\n<image>\nask"), Turn("assistant", "a cat")]
        asked = read_record(CrudeSample({"txt": "a dog"}), "what?")
        assert asked.turns == [Turn("user", "what?"), Turn("assistant", "a dog")]

    def test_keep_what_a_template_takes_and_ignore_what_says_nothing(self):
        talk = {"id": 7, "image": "a.png", "source": "x", "metadata": {"a": 1}, "model": None}
        talk |= {"tools": [{"name": "f"}], "chat_template_kwargs": {"thinking": True}, "y": None}
        answer = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
        more = {"name": None, "loss": True, "weight": 1}
        result = {"role": "tool", "content": "1", "tool_call_id": "a"}
        talk["messages"] = [{"role": "user", "content": "a"}, answer | more, result]
        talk["messages"].append({"role": "assistant", "content": "b", "weight": 0, "loss": False})
        asked = read_record(CrudeSample({"json": talk}), "?")
        assert asked.arguments == {"tools": [{"name": "f"}], "thinking": True}
        assert [turn.fields for turn in asked.turns] == [
            {},
            {"tool_calls": [{"name": "f"}], "content": None},
            {"tool_call_id": "a"},
            {},
        ]
        assert [turn.loss for turn in asked.turns] == [True, True, True, False]

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b"{", "its json is damaged"),
            (b"[]", "is no object"),
            (b"{}", "neither conversations, messages nor a caption"),
            (json.dumps({"conversations": "hello"}).encode(), "is no list of"),
            (
                json.dumps({"conversations": [{"from": "x", "value": ""}]}).encode(),
                'unknown role "x";',
            ),
            (b'{"conversations": [{"from": {"a": 1}, "value": ""}]}', 'unknown role {"a": 1};'),
            (json.dumps({"caption": 3}).encode(), "a content is no text, and no list"),
            (b'{"caption": "a", "mood": 1}', 'its json has "mood", which is not understood'),
            (b'{"caption": "a", "messages": []}', 'its json has "caption"'),
            (b'{"caption": "a", "tools": "[]"}', "its tools are no list of objects"),
            (b'{"caption": "a", "chat_template_kwargs": []}', "chat_template_kwargs are no object"),
            (
                turns("from", "value", loss=0.5),
                r"message 2: a loss or weight of \[0.5\], not of 0 or 1",
            ),
            (turns("from", "value", tone="x"), 'message 2 has "tone", which is not understood'),
            (turns(weight=2), r"message 2: a loss or weight of \[2\]"),
            (turns(weight=0, loss=True), r"a loss or weight of \[true, 0\]"),
            (turns(mood="x"), 'message 2 has "mood", which is not understood'),
            (turns(tool_call_id="x"), 'message 2 has "tool_call_id"'),
            (turns(tool_calls={}), "message 2: its tool_calls are no list of objects"),
            (turns(reasoning="a", thinking="b"), "message 2: its reasoning is no one text"),
            (turns(reasoning_content=["a"]), "message 2: its reasoning is no one text"),
            (turns(content=None), "a content is no text, and no list of items of type text"),
            (turns(content=[{"type": "text", "text": "a", "mood": 1}]), 'type text has "mood"'),
            (turns(content=[{"type": "image", "detail": "low"}]), 'type image has "detail"'),
            (turns(role="critic"), 'unknown role "critic"; known: system, user, assistant, tool'),
            (turns(role="user", loss=True), "the loss is on the assistant's turns alone"),
        ],
    )
    def test_that_are_none_are_refused(self, content, text):
        with pytest.raises(BadConversation, match=text):
            read_record(CrudeSample(decode_text({"json": content})), "?")
