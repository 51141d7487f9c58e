# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates of three styles. Each template marks what the model is to produce."""

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
_ITEMS = "{% for i in m.content %}[{{ i.text | default('') }}]{% endfor %}"
_RESULTS = "{% elif m.role == 'tool' %}" + _ITEMS + "<|im_end|>{% else %}{{ m.content }}"
_CONTENTS = "{{- m.content | default('') }}", "{{ m.content }}"

TEMPLATES = {
    "nemotron": NEMOTRON,
    "chatml": CHATML,
    "mistral": MISTRAL,
    "items": CHATML.replace(_CONTENTS[0], _ITEMS).replace(_CONTENTS[1], _ITEMS),
    "items of results": CHATML.replace("{% else %}{{ m.content }}", _RESULTS),
    "dated": "{{ date if date is defined else strftime_now('%d %B') }}" + CHATML,
    "shouting": "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}",
    "comments": "{# no tools #}thinking by reasoning_content: {{ 'its thinking is deep' }}"
    + MISTRAL,
    "refusing": "{{ raise_exception('roles must alternate') }}",
}
SPECIAL = ["<s>", "<image>", "<think>", "</think>", "[INST]", "[/INST]"]
"""Tokens of the templates beside those of every test's tokenizer."""


def without_marks(template: str) -> str:
    """Return a template without its marks; what they strip is stripped all the same."""
    for mark in ("generation", "endgeneration"):
        template = template.replace(f"{{%- {mark} %}}", "{{- '' }}")
        template = template.replace(f"{{% {mark} %}}", "{{ '' }}")
    return template
