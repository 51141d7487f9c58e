# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's chat template: conversations as text, and where the answers are in it.

The text is that of ``apply_chat_template`` on the whole conversation. An answer begins where the
template's prompt for it ends, and includes the end of its turn. A template that marks generation
says so itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from examples.mimo.common.errors import one_line
from examples.mimo.nemotron_vlm.energon.errors import BadConversation

Message = Mapping[str, Any]

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Chat template for tokenizers without one: ``user: …\\nassistant: …</s>\\n``."""

MODES: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""Arguments with which templates ask for answers with thinking, or without; the first that fits."""

REASONING = "reasoning_content", "thinking", "reasoning"
"""Names of an answer's reasoning; transformers gives it to templates under the first two."""

KEPT = 64
"""Rendered texts that are kept: finding answers renders a conversation in the same way again."""

_MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
_ANSWER = "\u27e8answer\u27e9"
"""Stands in for an answer, to find what the template puts before and after it."""


class ChatTemplate:
    """The chat template of a tokenizer of transformers; `DEFAULT_TEMPLATE` if it has none.

    All methods raise BadConversation if the template refuses a conversation. Their ``arguments``
    are tools and whatever else the template takes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._specials = {**tokenizer.special_tokens_map, "strftime_now": None}
        self._rendered: dict[str, tuple[str, list[range]]] = {}

    def render(
        self, messages: Sequence[Message], arguments: Mapping[str, Any], ask: bool = False
    ) -> tuple[str, list[range]]:
        """Return a conversation as text, and the characters that the template marks as generated.

        Args:
            ask: whether to add what asks for the next answer.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        key = repr((messages, sorted(arguments.items()), ask))
        if key in self._rendered:
            return self._rendered[key]
        if not messages:
            raise BadConversation("there are no turns")
        try:
            source = self._source(arguments)
            known = {name: self._specials[name] for name in self._specials.keys() & _names(source)}
            texts, marks = render_jinja_template(
                [list(messages)],
                chat_template=source,
                return_assistant_tokens_mask=bool(_MARKED.search(source)),
                add_generation_prompt=ask,
                **{**known, **arguments},
            )
        except Exception as error:  # a template raises what it likes
            why = one_line(error)
            if "'NoneType' object is not callable" in why and "strftime_now" in source:
                why = "it writes today's date; say which by its argument in chat_template_kwargs"
            raise BadConversation(f"the chat template refuses it: {why}") from error
        if len(self._rendered) == KEPT:
            self._rendered.clear()
        self._rendered[key] = texts[0], [range(*mark) for each in marks for mark in each]
        return self._rendered[key]

    def _source(self, arguments: Mapping[str, Any]) -> str:
        """Return the template as Jinja; a tokenizer may have another one for tools."""
        own = self._tokenizer.chat_template
        chosen = own and self._tokenizer.get_chat_template(tools=arguments.get("tools"))
        return chosen or DEFAULT_TEMPLATE

    def check(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> None:
        """Raise BadConversation if the template does not know an argument or a key of a message."""
        keys = {*arguments, *(key for message in messages for key in message)}
        for key in sorted(keys - {"role", "content", "name", "tool_call_id"}):
            names = {key, *REASONING[:2]} if key in REASONING else {key}
            if not names & _names(self._source(arguments)):
                raise BadConversation(f"the chat template does not know {key}")

    def prompts(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> Iterator[str]:
        """Yield the texts that ask for the next answer: the template's own, then other `MODES`.

        A template that knows no prompt is asked by what it puts before an answer, without spaces.
        """
        plain, _ = self.render(messages, arguments)
        for mode in MODES:
            if mode.keys() & arguments.keys() or mode.keys() - _names(self._source(arguments)):
                continue
            text, _ = self.render(messages, {**arguments, **mode}, ask=True)
            if text == plain:
                answered = [*messages, {"role": "assistant", "content": _ANSWER}]
                text, found, _ = self.render(answered, arguments)[0].rpartition(_ANSWER)
                text = text.rstrip(" ")
                if not found:
                    raise BadConversation("the chat template changes answers")
            yield text

    def answers(
        self, messages: Sequence[Message], arguments: Mapping[str, Any], loss: Sequence[bool]
    ) -> tuple[str, list[range]]:
        """Return a conversation as text, and the characters of each answer with a loss.

        Args:
            loss: whether each message bears a loss if it is an answer.

        Raises:
            BadConversation: the template changes an answer beyond recognition.
        """
        text, marks = self.render(messages, arguments)
        places = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
        if not _MARKED.search(self._source(arguments)):
            chosen = [place for place in places if loss[place]]
            return text, [self._answer(messages, place, arguments, text) for place in chosen]
        if not all(loss[place] for place in places):
            ends = [len(self.render(messages[: p + 1], arguments)[1]) for p in places]
            if ends[-1] != len(marks):
                raise BadConversation("the chat template does not mark each answer on its own")
            bounds = zip(places, [0, *ends], ends, strict=False)
            marks = [each for p, first, end in bounds if loss[p] for each in marks[first:end]]
        return text, marks

    def _answer(
        self, messages: Sequence[Message], place: int, arguments: Mapping[str, Any], text: str
    ) -> range:
        """Return the characters of the answer at a place of a conversation.

        Up to its end, the text may be that of the conversation up to there. Where what follows
        changes it, as histories lose their reasoning, a stand-in shows the answer's neighbours.
        """
        before, after = messages[:place], messages[place + 1 :]

        def tried(*more: Message) -> str:
            try:
                return self.render([*before, *more], arguments)[0]
            except BadConversation:
                return ""

        def prompts() -> Iterator[str]:
            found = []
            with suppress(BadConversation):  # a conversation without turns has no prompt
                for prompt in self.prompts(before, arguments):
                    found.append(prompt)
                    yield prompt
            yield from (prompt.rstrip() for prompt in found)  # "<think>" without its new line

        whole = tried(messages[place]).rstrip()
        start = next((len(prompt) for prompt in prompts() if text.startswith(prompt)), None)
        if start is not None and whole and text.startswith(whole):
            return range(start, len(whole))
        for probe in _probes(messages[place]):
            alone, is_there, end = tried(probe).rpartition(_ANSWER)
            lead, is_here, rest = tried(probe, *after).rpartition(_ANSWER)
            produced = [alone[len(p) :] for p in prompts() if alone.startswith(p)]
            first = next((len(lead) - len(p) for p in produced if lead.endswith(p)), None)
            if first is None and probe.get("content") == _ANSWER:
                first = len(lead.rstrip(" "))
            first, end = first if start is None else start, end.rstrip()
            is_found = is_there and is_here and first is not None and rest.startswith(end)
            if is_found and text.startswith(lead[:first]) and text.endswith(rest):
                return range(first, len(text) - len(rest) + len(end))
        number = sum(each["role"] == "assistant" for each in messages[: place + 1])
        raise BadConversation(f"the chat template changes answer {number} beyond recognition")


@lru_cache
def _names(source: str) -> set[str]:
    """Return the names and strings in a template's code, without its text and comments."""
    from jinja2 import Environment

    tokens = Environment().lex(source)
    return {word.strip("'\"") for _, kind, word in tokens if kind in ("name", "string")}


def _probes(message: Message) -> Iterator[Message]:
    """Yield an answer with the stand-in as its content, or as the name of its first tool."""
    plain = {key: value for key, value in message.items() if key not in REASONING}
    yield plain | {"content": _ANSWER}
    for call in message.get("tool_calls", [])[:1]:
        name = {"name": _ANSWER}
        named = call | ({"function": call["function"] | name} if "function" in call else name)
        yield plain | {"tool_calls": [named, *message["tool_calls"][1:]]}
