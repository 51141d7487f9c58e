# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens and loss of conversations are those of transformers, for four kinds of templates.

Each template marks what the model is to produce, and transformers' mask of it is the reference,
also for the same template without marks.
"""

import itertools
import json

import pytest
from transformers import AutoTokenizer

from examples.mimo.nemotron_vlm.energon.chat_template import MODES
from examples.mimo.nemotron_vlm.energon.conversation import Chat
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.errors import BadConversation
from examples.mimo.nemotron_vlm.energon.images import Tiling
from examples.mimo.nemotron_vlm.energon.records import decode_text, read_record
from megatron.energon import CrudeSample
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    CRUDE,
    byte_tokenizer,
    make_shard,
    source,
    survey,
)

# Published rules of Nemotron 3: an answer without reasoning gets an empty pair; what is before the
# last question loses its reasoning; answers are trimmed; tools are called in XML, as JSON here.
NEMOTRON = """
{%- set last = namespace(asked=-1) %}
{%- for m in messages if m.role == 'user' %}{% set last.asked = messages.index(m) %}{% endfor %}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|im_start|>system\n' ~ first }}
{%- if tools %}{{ '\n\n# Tools\n' ~ (tools | tojson) }}{% endif %}{{ '<|im_end|>\n' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set said = m.content | default('', true) %}
{%- if m.reasoning_content %}
{%- set said = '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' ~ said %}
{%- elif '<think>' not in said and '</think>' not in said %}
{%- set said = '<think></think>' ~ said %}
{%- endif %}
{%- if loop.index0 < last.asked and truncate_history_thinking | default(true) %}
{%- set said = '<think></think>' ~ said.split('</think>')[-1] %}
{%- endif %}
{%- set said = said | trim %}
{{- '<|im_start|>assistant\n' }}
{%- if said.startswith('<think>\n') %}{{ '<think>\n' }}{% set said = said[8:] %}
{%- elif said.startswith('<think></think>') %}
{{- '<think></think>' }}{% set said = said[15:] %}
{%- elif said.startswith('<think>') %}{{ '<think>' }}{% set said = said[7:] %}{% endif %}
{%- generation %}{{ said }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>' ~ (call.function.arguments | tojson) ~ call.function.name ~ '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user\n' }}{% endif %}
{{- '<tool_response>\n' ~ m.content ~ '\n</tool_response>\n' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif m.role != 'system' or not loop.first %}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{{- '<think>\n' if enable_thinking | default(true) else '<think></think>' }}
{%- endif %}"""

# Qwen 3's kind of ChatML: nothing is trimmed, reasoning is kept, and produced with its tags.
CHATML = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}
{%- if m.reasoning_content %}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{% endif %}
{{- m.content | default('') }}{% for call in m.tool_calls or [] %}
{{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}
{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Llama 3's headers: trimmed; of an answer that calls a tool, the call alone.
HEADERS = """{{ '<s>' }}{% for m in messages %}
{{- '<|start|>' ~ (m.role if m.role != 'tool' else 'ipython') ~ '<|end|>\n\n' }}
{%- if m.role == 'assistant' %}{% generation %}{% if m.tool_calls %}
{{- '{"name": "' ~ m.tool_calls[0].function.name ~ '"}' }}{% else %}
{{- m.content | trim }}{% endif %}{{ '</s>' }}{% endgeneration %}
{%- else %}{% if tools and loop.first %}{{ tools | tojson ~ '\n' }}{% endif %}
{{- m.content | trim ~ '</s>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"""

# Mistral's instructions: no prompt of its own; tools and the system's turn go to the last question.
MISTRAL = """{%- set said = namespace(system='', last=-1) %}{% for m in messages %}
{%- if m.role == 'system' %}{% set said.system = m.content ~ '\n\n' %}{% endif %}
{%- if m.role == 'user' %}{% set said.last = loop.index0 %}{% endif %}{% endfor %}
{{- '<s>' }}{% for m in messages %}{% if m.role == 'user' %}
{%- if loop.index0 == said.last and tools %}
{{- '[TOOLS]' ~ (tools | tojson) ~ '[/TOOLS]' }}{% endif %}
{{- '[INST] ' ~ (said.system if loop.index0 == said.last else '') ~ m.content ~ '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[RESULTS]' ~ m.content ~ '[/RESULTS]' }}
{%- elif m.role == 'assistant' %}{% generation %}{% if m.tool_calls %}
{{- '[CALLS] ' ~ (m.tool_calls | map(attribute='function') | list | tojson) ~ '</s>' }}
{%- else %}{{ ' ' ~ m.content ~ '</s>' }}{% endif %}{% endgeneration %}{% endif %}{% endfor %}"""
TEMPLATES = {"nemotron": NEMOTRON, "chatml": CHATML, "headers": HEADERS, "mistral": MISTRAL}
SPECIAL = ["<s>", "<image>", "<think>", "</think>", "<|start|>", "<|end|>", "[INST]", "[/INST]"]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def said(role: str, content, **more) -> dict:
    return {"role": role, "content": content, **more}


def call(**more) -> dict:
    function = {"name": "look", "arguments": {"at": "Zürich"}}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **more}


ANSWERS = {
    "plain": said("assistant", "yo"),
    "spaces": said("assistant", " \n yo 名前 \n"),
    "same words": said("assistant", "ask me: yo"),
    "no loss": said("assistant", "yo", loss=False),
    "no weight": said("assistant", "yo", weight=0.0),
}
THOUGHTS = {
    "reasoning": said("assistant", "yo", reasoning_content="because"),
    "thinking": said("assistant", "\nyo ", thinking=" because\n\nso "),
    "tags": said("assistant", "<think>\nbecause</think>\nyo"),
    "tags alone": said("assistant", "<think>because</think>yo"),
}
TALKS = {}
for name, answer in (ANSWERS | THOUGHTS).items():
    ask, last = said("user", "ask  me"), said("assistant", "bye")
    TALKS[name] = [ask, answer]
    TALKS[f"system, {name}"] = [said("system", "Be brief."), ask, answer]
    TALKS[f"{name}, again"] = [ask, answer, said("user", " yo "), last]
    TALKS[f"again, {name}"] = [ask, last, ask, answer]
CALLS = {"call": call(), "null": call(content=None), "empty": call(content="")}
CALLS |= {"words": call(content="Let me look.", reasoning_content="because")}
CALLS |= {"no loss": call(content=None, weight=0)}
for name, answer in CALLS.items():
    turns = [said("user", "look"), answer, said("tool", "1", name="look", tool_call_id="a")]
    turns += [said("tool", "2"), said("assistant", "two")]
    TALKS[f"tool, {name}"] = turns
    TALKS[f"tool, {name}, again"] = [*turns, said("user", "so?"), said("assistant", "Yes.")]
GREETING = [said("assistant", "Hi!"), said("user", "yo"), said("assistant", "yo")]
TALKS["greeting"] = GREETING


def knows(template: str, talk: list[dict]) -> bool:
    thinks = any("think" in str(message) or "reasoning" in str(message) for message in talk)
    return template in ("nemotron", "chatml") or not thinks


CASES = [(t, n) for t, n in itertools.product(TEMPLATES, TALKS) if knows(t, TALKS[n])]
assert len(TALKS) >= 30


def without_marks(template: str) -> str:
    """Return a template without its marks; what they strip is stripped all the same."""
    for mark in ("generation", "endgeneration"):
        template = template.replace(f"{{%- {mark} %}}", "{{- '' }}")
        template = template.replace(f"{{% {mark} %}}", "{{ '' }}")
    return template


def reference(tokenizer, messages, tools, **arguments):
    """Return transformers' ids and mask, without answers that are to bear no loss."""
    bare = [{k: v for k, v in m.items() if k not in ("loss", "weight")} for m in messages]
    how = {"tools": tools, "return_dict": True, "return_assistant_tokens_mask": True} | arguments
    made = tokenizer.apply_chat_template(bare, **how)
    ids, mask = made["input_ids"], list(made["assistant_masks"])
    runs = [
        list(run) for bears, run in itertools.groupby(range(len(ids)), lambda n: mask[n]) if bears
    ]
    answers = [m for m in messages if m["role"] == "assistant"]
    for run, answer in zip(runs, answers, strict=True):
        for place in run:
            mask[place] = int(bool(answer.get("loss", answer.get("weight", 1))))
    return ids, mask


def record_of(messages, tools=None, **more):
    content = {"messages": messages, "tools": tools, **more}
    return read_record(CrudeSample(decode_text({"json": json.dumps(content).encode()})), "?")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Tokenizers with each template, with marks and without."""
    made = {}
    for name, template in TEMPLATES.items():
        path = tmp_path_factory.mktemp(name)
        marked = AutoTokenizer.from_pretrained(byte_tokenizer(path / "a", template, SPECIAL))
        plain = byte_tokenizer(path / "b", without_marks(template), SPECIAL)
        made[name] = marked, {"marks": Chat(path / "a"), "no marks": Chat(plain)}
    return made


@pytest.mark.parametrize("marks", ["marks", "no marks"])
@pytest.mark.parametrize(("template", "name"), CASES)
def test_tokens_and_loss_are_transformers(chats, template, name, marks):
    tokenizer, both = chats[template]
    tools = TOOLS if "tool" in name else None
    ids, mask = reference(tokenizer, TALKS[name], tools)
    record = record_of(TALKS[name], tools)
    found, answer = both[marks].encode(record.turns, (), record.arguments)
    assert found.tolist() == ids
    assert answer.astype(int).tolist() == mask


def ways(chat: Chat, messages, **more) -> int:
    """Return which of the template's prompts asks for the last answer."""
    record, encoder = record_of(messages, **more), Encoder(chat, Tiling(16), tokens_per_tile=4)
    return encoder.asked(record, [], encoder.text(record, []))


@pytest.mark.parametrize(
    ("name", "more", "way"),
    [
        ("reasoning", {}, 0),
        ("plain", {}, 1),
        ("plain", {"chat_template_kwargs": {"enable_thinking": False}}, 0),
        ("plain", {"chat_template_kwargs": {"enable_thinking": True}}, 1),
        ("tags alone", {}, len(MODES)),
        ("again, reasoning", {}, 0),
        ("reasoning, again", {}, 1),
        ("tool, call, again", {}, 1),
    ],
)
@pytest.mark.parametrize("marks", ["marks", "no marks"])
def test_what_asks_is_what_trained_or_said_to_differ(chats, marks, name, more, way):
    assert ways(chats["nemotron"][1][marks], TALKS[name], **more) == way
    ways_of = (ways(chats[name][1][marks], TALKS["again, plain"]) for name in TEMPLATES)
    assert list(ways_of) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("template", "talk", "more", "reason"),
    [
        ("headers", THOUGHTS["reasoning"], {}, "does not know reasoning_content"),
        ("headers", THOUGHTS["thinking"], {}, "does not know thinking"),
        ("headers", ANSWERS["plain"], {"chat_template_kwargs": {"deep": 1}}, "does not know deep"),
        ("chatml", said("assistant", "a \ud83d b"), {}, r"half a character, '\\ud83d', is in its"),
        ("nemotron", call(content=["a"]), {}, "a content is no text, and no list of items"),
    ],
)
def test_what_a_template_or_a_tokenizer_does_not_take_is_named(chats, template, talk, more, reason):
    with pytest.raises(BadConversation, match=reason):
        record = record_of([said("user", "ask"), talk], **more)
        chats[template][1]["marks"].encode(record.turns, (), record.arguments)


def test_arguments_of_a_conversation_reach_its_template(chats):
    tokenizer, both = chats["nemotron"]
    kwargs = {"truncate_history_thinking": False}
    record = record_of(TALKS["reasoning, again"], chat_template_kwargs=kwargs)
    ids, mask = reference(tokenizer, TALKS["reasoning, again"], None, **kwargs)
    for chat in both.values():
        found, answer = chat.encode(record.turns, (), record.arguments)
        assert (found.tolist(), answer.astype(int).tolist()) == (ids, mask)
    assert "because" in tokenizer.decode(ids)


def test_contents_of_items_go_to_templates_that_know_them(tmp_path):
    items = "{% for i in m.content %}[{{ i.text | default('') }}]{% endfor %}"
    template = CHATML.replace("{{ m.content }}", items)
    template = template.replace("{{- m.content | default('') }}", items)
    chat = Chat(byte_tokenizer(tmp_path, template, SPECIAL))
    parts = [{"type": "text", "text": each} for each in ("a ", " b")]
    messages = [said("user", parts), said("assistant", parts)]
    ids, mask = reference(AutoTokenizer.from_pretrained(tmp_path), messages, None)
    found, answer = chat.encode(record_of(messages).turns)
    assert (found.tolist(), answer.astype(int).tolist()) == (ids, mask)


@pytest.mark.parametrize("first", ["", '{"type": "text"}\n'], ids=["plain", "quotes-a-type"])
def test_results_of_tools_are_items_for_templates_that_take_no_others(tmp_path, first):
    items = "{% for i in m.content %}[{{ i.text }}]{% endfor %}"
    result = "{% elif m.role == 'tool' %}" + items + "<|im_end|>{% else %}{{ m.content }}"
    template = first + CHATML.replace("{% else %}{{ m.content }}", result)
    chat = Chat(byte_tokenizer(tmp_path, template, SPECIAL))
    parts = [{"type": "text", "text": each} for each in ("a ", "", " b")]
    messages = [said("user", "look"), call(), said("tool", parts), said("assistant", "yo")]
    ids, mask = reference(AutoTokenizer.from_pretrained(tmp_path), messages, None)
    found, answer = chat.encode(record_of(messages).turns)
    assert (found.tolist(), answer.astype(int).tolist()) == (ids, mask)


@pytest.mark.parametrize("parts", [[], [""], ["", ""]])
def test_items_without_text_are_an_empty_text(chats, parts):
    chat = chats["chatml"][1]["marks"]
    parts = [{"type": "text", "text": each} for each in parts]
    (found, _), (wanted, _) = (
        chat.encode(record_of([said("user", content), said("assistant", "yo")]).turns)
        for content in (parts, "")
    )
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", ["conversations", "messages"])
def test_speakers_have_the_same_keys_in_both_kinds_of_talk(chats, kind):
    who, what = ("from", "value") if kind == "conversations" else ("role", "content")
    answer = {who: "assistant", what: "yo", "reasoning_content": "because", "weight": 0}
    talk = [{who: "user", what: "ask"}, answer, {who: "user", what: "so?"}]
    talk.append({who: "assistant", what: None, "tool_calls": call()["tool_calls"]})
    content = {kind: talk}
    record = read_record(CrudeSample(decode_text({"json": json.dumps(content).encode()})), "?")
    messages = [said("user", "ask"), said("assistant", "yo", reasoning_content="because", weight=0)]
    ids, mask = reference(chats["chatml"][0], [*messages, said("user", "so?"), call()], None)
    found, answer = chats["chatml"][1]["marks"].encode(record.turns)
    assert (found.tolist(), answer.astype(int).tolist()) == (ids, mask)


def test_keys_in_comments_and_texts_of_a_template_are_not_known_to_it(tmp_path):
    template = "{# no tools #}thinking by reasoning_content: {{ 'its thinking is deep' }}" + HEADERS
    chat = Chat(byte_tokenizer(tmp_path, template.replace("{{ '<s>' }}", ""), SPECIAL))
    for key in ("thinking", "reasoning_content"):
        with pytest.raises(BadConversation, match=f"does not know {key}"):
            chat.encode(record_of([said("user", "a"), said("assistant", "b", **{key: "c"})]).turns)


def test_templates_that_write_the_date_need_the_samples_own(tmp_path):
    dated = "{{ date if date is defined else strftime_now('%d %B') }}"
    path = byte_tokenizer(tmp_path, dated + CHATML, SPECIAL)
    chat, talk = Chat(path), TALKS["plain"]
    with pytest.raises(BadConversation, match="refuses it: it writes today's date; say which by"):
        chat.encode(record_of(talk).turns)
    record = record_of(talk, chat_template_kwargs={"date": "1 May"})
    ids, mask = reference(AutoTokenizer.from_pretrained(path), talk, None, date="1 May")
    found, answer = chat.encode(record.turns, (), record.arguments)
    assert (found.tolist(), answer.astype(int).tolist()) == (ids, mask)


def test_whatever_a_tokenizer_raises_is_a_bad_text(chats, monkeypatch):
    class Panic(BaseException):
        """As Rust's, which is no Exception."""

    chat = chats["chatml"][1]["marks"]

    def refuse(*_, **__):
        raise Panic("index out of bounds")

    monkeypatch.setattr(chat, "_tokenizer", type("", (), {"eos_token": "", "__call__": refuse})())
    with pytest.raises(BadConversation, match="the tokenizer refuses it: index out of bounds"):
        chat.encode(record_of(TALKS["plain"]).turns)


@pytest.mark.parametrize(
    ("names", "asked"),
    [(["plain", "plain"], MODES[1]), (["plain", "reasoning"], {}), (["tags alone"], {})],
)
def test_a_run_asks_as_all_its_samples_do(tmp_path, names, asked):
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", NEMOTRON, SPECIAL)
    talks = [json.dumps({"messages": TALKS[name]}).encode() for name in names]
    make_shard(tmp_path, [{"json": talk} for talk in talks], CRUDE)
    survey(tmp_path, tokenizer, splits=["train"])
    opened = source(tmp_path, tokenizer, seq_length=200)
    assert opened.asked == asked
    found = [opened.question("train", number).asked for number in range(len(names))]
    wanted = {"plain": MODES[1], "reasoning": {}, "tags alone": {}}
    assert sorted(map(str, found)) == sorted(str(wanted[name]) for name in names)
