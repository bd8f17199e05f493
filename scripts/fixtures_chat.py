"""Writes internal/chat/testdata/renderings.json: conversations rendered by transformers.

Run: python scripts/fixtures_chat.py [OUT CONFIG...]   (needs transformers, jinja2)

With OUT and tokenizer_config.json files, the renderings of their templates are written to OUT instead: whole templates
belong to their models and are not committed (KVPROFILE_CHAT_CASES=OUT go test).
"""

import datetime
import json
import pathlib
import sys

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

TEMPLATES = {
    "smollm2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # In the manner of Llama 3.1: a date, namespaces, slices, trimmed contents.
    "llama3": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral": "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    # In the manner of Qwen 3: a namespace set inside a loop, string methods, reversed iteration.
    "qwen3": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    # In the manner of Gemma 3: whitespace control on both sides, a conditional expression, content in parts.
    "gemma3": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '
' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
""",
    # In the manner of Mistral Nemo: filters over attributes, comparison of messages, a slice from the end.
    "nemo": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- for message in loop_messages | rejectattr("role", "equalto", "tool") | selectattr("tool_calls", "undefined") %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Roles must alternate") }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}{{- "[TOOLS]" }}{%- endif %}
        {%- if message == user_messages[-1] and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
""",
    # In the manner of Llama 2: a list joined to another, methods of strings, tests with `and false`.
    "llama2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    # Macros, calls with keywords, blocks of white space, break, continue, filters with arguments.
    "macros": """{%- macro turn(role, text='', end='\\n') -%}
<{{ role|upper }}>{{ text|replace('{{', '[')|trim }}{{ end }}
{%- endmacro -%}
{%- for m in messages if m.role != 'tool' %}
{% if m.content|length > 400 %}{% continue %}{% endif %}
    {% generation %}{{ turn(m.role, text=m.content) }}{% endgeneration %}
{%- if loop.index > 7 %}{% break %}{% endif %}
{%- endfor %}
{# a comment #}
{{ messages[-1].content.split('\\n')[0] ~ '|' ~ messages|length ~ '|' ~ loop is defined }}
{{- messages|map(attribute='role')|join(',') }}
""",
}
# Small constructs, each rendered alone.
SNIPPETS = [
    "{{ messages | tojson }}", "{{ messages[0] | tojson(indent=2) }}", "{{ {'a': [1, 2.5, true, none], 'b': 'é\"<'} | tojson }}", "{{ messages[0].content | length }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in messages[0] | dictsort %}{{ k }};{% endfor %}",
    "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% set ns.s = ns.s ~ m.role[0] %}{% endfor %}{{ ns.n }}{{ ns.s }}",
    "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem is defined }}{{ loop.nextitem.role }}{{ loop.cycle('a', 'b') }}|{% endfor %}",
    "{% for i in range(3) %}{{ i }}{% else %}none{% endfor %}{% for i in range(5, 0, -2) %}{{ i }}{% endfor %}{% for i in [] %}{% else %}empty{% endfor %}",
    "{{ 'a' in 'abc' }} {{ 'x' not in ['x'] }} {{ 'role' in messages[0] }} {{ 1 if false }}|{{ none }}|{{ true }}|{{ 1.0 }}|{{ 7 // 2 }}|{{ 7 / 2 }}|{{ 2 ** 3 }}|{{ -7 % 3 }}",
    "{{ missing }}|{{ missing is defined }}|{{ messages[0].missing is defined }}|{{ messages[0]['missing'] }}|{{ missing | default('d') }}|{{ '' | default('e', true) }}",
    "{{ '  a b '.strip() }}|{{ 'xxaxx'.lstrip('x') }}|{{ 'xxaxx'.rstrip('x') }}|{{ 'a-b-c'.split('-', 1) }}|{{ 'a b'.split() }}|{{ 'abc'.upper() }}|{{ 'a b'.title() }}|{{ 'abc'.startswith('ab') }}|{{ 'abc'.replace('b', 'x') }}",
    "{{ 'abcdef'[1:3] }}{{ 'abcdef'[-2:] }}{{ 'abcdef'[::-1] }}{{ 'abc'[0] }}{{ messages[::-1][0].role }}{{ messages[-1:] | length }}", "{{ [1, 2] + [3] }}{{ ['a', 'b'] }}{{ (1, 2) }}{{ {'a': 1} }}",
    "{{ 'a' is string }}{{ 1 is number }}{{ {} is mapping }}{{ [] is iterable }}{{ [] is sequence }}{{ none is none }}{{ 1 is integer }}{{ true is boolean }}{{ 'a' is iterable }}{{ false is false }}{{ 3 is odd }}{{ 3 is divisibleby 3 }}",
    "{{ 'a' ~ 1 ~ true ~ none }}{{ 'x' * 3 }}{{ '%s-%d' | format('a', 3) }}{{ '%02d' % 5 }}", "{{ ['b', 'a'] | sort | join(', ') }}{{ [1, 2, 3] | sum }}{{ [3, 1] | max }}{{ 'abc' | reverse }}{{ [1, 2] | first }}{{ [1, 2] | last }}{{ ['a', 'a'] | unique | list }}",
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  {%- if true %}\n  b\n  {%- endif -%}\n\nc\n\n", "  {% set x = 1 %}  {{ x }}  \n", "  {# comment #}  \nx", "{% raw %}{{ x }}{% endraw %}", "{{ '\\n' }}{{ '\\t|\\\\' }}{{ \"it's\" }}{{ '\\u00e9' }}",
    "{%+ if true %} a {%+ endif %} b", "{% if messages and messages[0] and not missing %}yes{% endif %}", "{% if 1 < 2 <= 2 %}yes{% endif %}{% if 'a' == 'a' and 1 != 2 or false %}yes{% endif %}", "{% set x %}block {{ messages[0].role }}{% endset %}{{ x | upper }}",
    "{% filter upper %}abc{% endfilter %}", "{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ varargs }}{% endmacro %}{{ f(1) }}{{ f(1, y=3) }}",
    "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}", "{{ strftime_now('%d %B %Y %H:%M') }}{{ strftime_now('%Y-%m-%d') }}", "{{ raise_exception('x') }}", "{% if false %}{{ raise_exception('x') }}{% endif %}ok", "{{ tools is none }}{{ tools is defined }}{{ documents is none }}",
    "{{ messages | map(attribute='content') | map('length') | list }}", "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('role', 'in', ['user']) | list | length }}{{ messages | selectattr('role') | list | length }}",
    "{{ 'a,b' | replace(',', ';') }}{{ ' x ' | trim }}{{ 'A' | lower }}{{ 'hello world' | capitalize }}{{ 'x' | indent(2, true) }}{{ 'a\nb' | indent }}{{ 3.7 | int }}{{ '5' | int + 1 }}{{ 2 | string + 'x' }}{{ 2.5 | round }}{{ -1 | abs }}",
    "{{ messages[0]['content'][:4] }}{{ messages[0].get('content')[:2] }}{{ messages[0].get('x', 'y') }}{{ messages[5] is defined }}{{ messages[0].content is defined }}", "{{ [messages[0].role, 'x'] | join('-') }}{{ dict(a=1).a }}{{ ['a'] == ['a'] }}{{ {'a': 1} == {'a': 1} }}", "{{ x.y.z }}",
    "{{ messages[0].content + 1 }}", "{{ 1 + 'a' }}", "{{ unknown_function() }}", "{% for m in messages %}{% if loop.changed(m.role) %}{{ m.role }}{% endif %}{% endfor %}", "{{ 10 | tojson }}{{ 'é' | tojson }}{{ none | tojson }}{{ 1e20 | tojson }}{{ 0.1 | tojson }}",
    "{{ 'a' if messages | length > 1 else 'b' }}{{ not true }}{{ (1 + 2) * 3 }}{{ 1 + 2 * 3 }}{{ 'a' < 'b' }}", "{{ messages[0].content.splitlines() }}{{ '<b>' }}{{ '<b>' | safe }}", "{% with a = 1 %}{{ a }}{% endwith %}{{ 'x' | list }}{{ 'abc' | batch(2) | list }}",
    "{%- set ns = namespace() -%}{%- set ns.found = false -%}{{ ns.found }}{% if not ns.found %}no{% endif %}", "{{ messages|selectattr('role', 'eq', 'user')|map(attribute='role')|list }}{{ 'a'.join(['b', 'c']) }}{{ 'abc'.find('c') }}{{ 'abc'.index('b') }}{{ 'a.b'.rsplit('.', 1) }}{{ 'abc'.endswith(('b', 'c')) }}",
]
CONVERSATIONS = [
    [("user", "What is in the text?\n\nA {{ brace }} and a % sign.")],
    [("system", " Be brief. "), ("user", "Hi  ")],
    [("user", "One"), ("assistant", "\nTwo"), ("user", "Three — ünïcode 日本")],
    [("system", "S"), ("user", "U\n1 "), ("assistant", "<think>\nhm\n</think>\n\nA"), ("user", "'quoted' \"twice\" \\n"), ("assistant", " B ")],
    [("assistant", "first"), ("tool", "x")],
]


class Day(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def render(source, messages, generate):
    template = _compile_jinja_template(source)
    template.globals["strftime_now"] = lambda f: Day.now().strftime(f)
    return template.render(messages=messages, tools=None, documents=None, add_generation_prompt=generate, bos_token="<s>", eos_token="</s>")


def main():
    path = pathlib.Path(__file__).parent.parent / "internal/chat/testdata/renderings.json"
    cases = [(name, source, turns, generate) for name, source in TEMPLATES.items() for turns in CONVERSATIONS for generate in (False, True)]
    cases += [(f"snippet {n}", source, CONVERSATIONS[2], True) for n, source in enumerate(SNIPPETS)]
    if len(sys.argv) > 1:
        path = pathlib.Path(sys.argv[1])
        sources = {p: json.loads(pathlib.Path(p).read_text())["chat_template"] for p in sys.argv[2:]}
        cases = [(name, source, turns, generate) for name, source in sources.items() for turns in CONVERSATIONS for generate in (False, True)]
    out = []
    for name, source, turns, generate in cases:
        messages = [{"role": r, "content": c} for r, c in turns]
        try:
            text = render(source, messages, generate)
        except (TemplateError, TypeError):
            text = None
        out.append({"name": f"{name} {len(out)}", "template": source, "bos": "<s>", "eos": "</s>", "messages": messages, "generate": generate, "text": text})
    path.write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")


main()
