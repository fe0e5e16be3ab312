"""Chat templates: what templates in the wild use, the fallback, and errors.

The templates below are written for these tests, after the constructs of the families they are named
for. Where an expected text is not plain from the template, jinja2 with transformers' settings gave
the same (`render_jinja_template` of transformers 5.24).
"""

import json
import logging
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.chat_template import ChatTemplate, ChatTemplateError

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "in Köln, <b>"}}


def render(source: str, messages=(USER,), **kwargs) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(list(messages), **kwargs)


# --- the families ---------------------------------------------------------------------------------

CHATML_WITH_DEFAULT_SYSTEM = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helper.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a helper.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != "system" or not tools %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def test_smollm2_and_qwen2():
    head, tail = "<|im_start|>system\n", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    template = CHATML_WITH_DEFAULT_SYSTEM
    assert render(template) == head + "You are a helper.<|im_end|>\n" + tail
    assert render(template, [SYSTEM, USER]) == head + "Be brief.<|im_end|>\n" + tail
    assert render(template, [SYSTEM, USER], tools=[WEATHER]) == (
        head + 'Be brief.\n\n# Tools\n<tools>\n{"type": "function", "function": {"name": "weather",'
        ' "description": "in Köln, <b>"}}\n</tools><|im_end|>\n' + tail
    )
    assert render(template, add_generation_prompt=False).endswith("Hi<|im_end|>\n")


QWEN3 = """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')
                and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n') %}
            {%- set reasoning_content = reasoning_content.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') + '\\n' }}
        {%- else %}
            {{- message.role + '\\n' + content + '\\n' }}
        {%- endif %}
    {%- else %}
        {{- message.role + '\\n' + message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def test_qwen3_drops_the_reasoning_of_earlier_turns():
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}
    assert render(QWEN3, [USER, thought, USER]) == (
        "user\nHi\nassistant\nHello\nuser\nHi\nassistant\n"
    )
    assert render(QWEN3, [USER, thought], add_generation_prompt=False) == (
        "user\nHi\nassistant\n<think>\nhm\n</think>\n\nHello\n"
    )
    given_apart = {**ASSISTANT, "reasoning_content": "\nhm\n"}
    assert render(QWEN3, [USER, given_apart], add_generation_prompt=False) == (
        "user\nHi\nassistant\n<think>\nhm\n</think>\n\nHello\n"
    )


def test_qwen3_extra_keyword():
    assert render(QWEN3).endswith("assistant\n")
    assert render(QWEN3, enable_thinking=True).endswith("assistant\n")
    assert render(QWEN3, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")


LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{{- "Today: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<' + message['role'] + '>' + message['content'] | trim + '</s>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
"""


def test_llama3_dates_and_tools():
    dated = render(LLAMA3, date_string="1 Jan 2025")
    assert dated == "<s>Today: 1 Jan 2025\n<user>Hi</s>"
    before = datetime.now().strftime("%d %b %Y")
    today = render(LLAMA3).splitlines()[0].removeprefix("<s>Today: ")
    assert today in (before, datetime.now().strftime("%d %b %Y"))

    calls = [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}]
    messages = [
        {"role": "user", "content": "  Hi\n"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": {"sky": "<clear>"}},
    ]
    assert render(LLAMA3, messages, tools=[{"a": [1]}], date_string="x") == (
        '<s>Today: x\n{\n    "a": [\n        1\n    ]\n}\n<user>Hi</s>'
        '{"name": "weather", "parameters": {"city": "Köln"}}{"sky": "<clear>"}'
    )
    with pytest.raises(ChatTemplateError, match=r"^This model only supports single tool-calls"):
        render(LLAMA3, [{"role": "assistant", "tool_calls": calls * 2}])


MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == "user" %}
        {%- if message == user_messages[-1] and system_message is defined %}
            {{- "[INST]" ~ system_message ~ "\\n\\n" ~ message.content ~ "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message.content + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- message.content|trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def test_mistral_alternation():
    last = {"role": "user", "content": "Bye"}
    assert render(MISTRAL, [SYSTEM, USER, ASSISTANT, last]) == (
        "<s>[INST]Hi[/INST]Hello</s>[INST]Be brief.\n\nBye[/INST]"
    )
    with pytest.raises(ChatTemplateError, match=r"^Roles must alternate user/assistant$"):
        render(MISTRAL, [USER, USER])


GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}\
{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""


def test_gemma_refuses_a_system_message():
    assert render(GEMMA, [USER, ASSISTANT]) == (
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    with pytest.raises(ChatTemplateError, match=r"^System role not supported$"):
        render(GEMMA, [SYSTEM, USER])


# --- what transformers offers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"),  # lstrip_blocks, trim_blocks
        ("{{ 'x' }}\n\n", "x\n"),  # one newline at the end of the file is dropped
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
         "{% if i == 3 %}{% break %}{% endif %}{% endfor %}", "023"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{{ nothing }}{{ messages[0].nothing }}{% if nothing %}x{% endif %}", ""),
        ("{{ tools is none }} {{ documents is none }} {{ tools is defined }}", "True True True"),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ none }} {{ true }} {{ 1.5 }} {{ [1, 'a'] }} {{ {'a': none} }}",
         "None True 1.5 [1, 'a'] {'a': None}"),
        ("{{ 'a' ~ 1 ~ none ~ nothing ~ [2] }}", "a1None[2]"),
        ("{{ 'ab'[::-1] }}{{ messages[0:1]|length }}{{ 'abc'[1:] }}", "ba1bc"),
        ("{% macro f(x, y='!') %}<{{ x }}{{ y }}>{% endmacro %}{{ f('a') }}{{ f(1, y=2) }}",
         "<a!><12>"),
        ("{% macro f(x) %}[{{ caller(x) }}]{% endmacro %}{% call(y) f(3) %}{{ y }}{% endcall %}",
         "[3]"),
        ("{% set x %}a{{ 1 }}{% endset %}{% filter upper %}{{ x }}b{% endfilter %}", "A1B"),
        ("{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
         "role=user;content=Hi;"),
        ("{% for x in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}",
         "1/2False2/2True"),
        ("{% for x in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for x in [1, [2, [3]]] recursive %}{% if x is number %}{{ x }}{% else %}"
         "({{ loop(x) }}){% endif %}{% endfor %}", "1(2(3))"),
        ("{{ ['a', 'b']|join(', ') }} {{ ', '.join(['c', 'd']) }}", "a, b c, d"),
        ("{{ '{}-{x}'.format(1, x=2) }} {{ '%s-%03d' % ('a', 7) }} {{ '%s!'|format('b') }}",
         "1-2 a-007 b!"),
        ("{{ 2 ** 10 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 'ab' * 2 }} {{ [1] + [2] }}",
         "1024 3 3 abab [1, 2]"),
        ("{{ messages|map(attribute='role')|list }}{{ 'A b'|lower|replace(' ', '_') }}",
         "['user']a_b"),
        ("{{ 'a\nb'|indent(2) }}|{{ 'x'|center(3) }}|{{ 'x'.ljust(3) }}|{{ '7'.zfill(3) }}",
         "a\n  b| x |x  |007"),
        ("{{ dict(a=1)|tojson }}{% set ns = namespace(a=1) %}{% set ns.b = ns.a %}{{ ns.b }}",
         '{"a": 1}1'),
        ("{{ '<&>' }}{{ '<&>'|e }}{{ '<'|safe }}", "<&>&lt;&amp;&gt;<"),
    ],
)  # fmt: skip
def test_constructs(source, expected):
    assert render(source) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", '{"b": "é<>&\'你", "a": [1, null]}'),
        ("(sort_keys=true)", '{"a": [1, null], "b": "é<>&\'你"}'),
        ("(separators=(',', ':'))", '{"b":"é<>&\'你","a":[1,null]}'),
        ("(ensure_ascii=true)", '{"b": "\\u00e9<>&\'\\u4f60", "a": [1, null]}'),
        ("(indent=1)", '{\n "b": "é<>&\'你",\n "a": [\n  1,\n  null\n ]\n}'),
        ("(indent='\t')", '{\n\t"b": "é<>&\'你",\n\t"a": [\n\t\t1,\n\t\tnull\n\t]\n}'),
    ],
)
def test_tojson_is_json_dumps(arguments, expected):
    assert (
        render("{{ x | tojson" + arguments + " }}", x={"b": "é<>&'你", "a": [1, None]}) == expected
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_tojson_of_anything(value):
    assert render("{{ x | tojson }}", x=value) == json.dumps(value, ensure_ascii=False)


@given(st.lists(st.text(), max_size=6))
def test_content_is_written_as_it_is(texts):
    messages = [{"role": "user", "content": text} for text in texts]
    assert render("{% for m in messages %}{{ m.content }}{% endfor %}", messages) == "".join(texts)


def test_tools_none_and_empty_are_told_apart():
    source = "{{ tools is none }}{{ tools is iterable }}"
    assert render(source) == "TrueFalse"
    assert render(source, tools=[]) == "FalseTrue"


def test_keywords_override_the_tokens_but_not_the_messages():
    assert render("{{ bos_token }}", bos_token="<b>") == "<b>"
    assert render("{{ documents[0].text }}", documents=[{"text": "d"}]) == "d"
    assert render("{{ strftime_now('%Y') }}", strftime_now=lambda _: "1999") == "1999"


def test_parts_pass_through_and_objects_do_not():
    class Image:
        secret = "no"

    parts = [{"type": "text", "text": "look"}, {"type": "image", "image": Image()}]
    messages = [{"role": "user", "content": parts}]
    source = "{% for p in messages[0].content %}{{ p.type }}:{{ p.text }}{{ p.image }};{% endfor %}"
    assert render(source, messages) == "text:look;image:<Image>;"
    assert render("{{ messages[0].content[1].image.secret }}", messages) == ""


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": ["a"]}]
    for source in ("{{ messages[0].content.append('b') }}", "{{ messages[0].update(role='x') }}"):
        with pytest.raises(ChatTemplateError, match="unsafe"):
            render(source, messages)
    assert messages == [{"role": "user", "content": ["a"]}]


# --- files without a template ---------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, "", "\n"])
def test_fallback_is_chatml_with_one_warning(source, caplog):
    with caplog.at_level(logging.WARNING, logger="minfer_jax"):
        template = ChatTemplate(source)
        text = template.render([SYSTEM, USER, ASSISTANT, USER])
        template.render([USER])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [record.name for record in caplog.records] == ["minfer_jax"]
    assert "no chat template" in caplog.text


def test_a_template_of_the_file_gives_no_warning(caplog):
    ChatTemplate("{{ messages }}").render([USER])
    assert not caplog.records


def test_fallback_contents():
    template = ChatTemplate(None)
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "<b> {{ 1 }}\n "},
    ]
    assert template.render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\n<b> {{ 1 }}\n <|im_end|>\n"
    )
    assert template.render([], tools=[]) == "<|im_start|>assistant\n"
    with pytest.raises(ChatTemplateError, match=r"no chat template, so .* tools"):
        template.render([USER], tools=[WEATHER])


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% fi x %}", r'template, line 2, in "{% fi x %}": Encountered unknown tag \'fi\'.'),
        ("\n\n{% if x %}", r"line 3, in .*Unexpected end of template"),
        ("{{ x | nofilter }}", r'line 1, in "{{ x \| nofilter }}": No filter named \'nofilter\''),
        ("{{ 'a' 'b }}", r"line 1, in "),
        ("{% for x in y %}{% endif %}", r"line 1, .*'endif'"),
        ("{# never closed", r"Missing end of comment"),
        ("{% break %}", r"cannot be compiled: 'break' outside loop"),
        ("{{ " + "(" * 3000 + " }}", r"cannot be compiled: maximum recursion depth"),
        ("{% if 1 %}" * 300 + "{% endif %}" * 300, r"cannot be compiled: "),
        ("{{ " + "9" * 5000 + " }}", r"cannot be compiled: .*digits"),
        ("x" * (1 << 18) + "x", r"it has 262145 characters; at most 262144"),
    ],
)  # fmt: skip
def test_what_does_not_compile(source, message):
    with pytest.raises(ChatTemplateError, match=message) as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 500


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{{ 'a' + 1 }}", r'^chat template, line 2, in "{{ \'a\' \+ 1 }}": TypeError: can only'),
        ("{{ nothing.x }}", r"line 1, in .*: 'nothing' is undefined"),
        ("{{ messages[5].x }}", r"list object has no element 5"),
        ("{% macro f() %}\n\n{{ 1 / 0 }}{% endmacro %}{{ f() }}", r'line 3, .*ZeroDivisionError'),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"RecursionError"),
        ("{{ messages[0] | tojson(indent={}) }}", r"TypeError"),
        ("{% include 'other' %}", r"no loader"),
        ("{{ raise_exception('two\n  lines') }}", r"^two lines$"),
        ("{{ raise_exception('') }}", r"refuses this conversation"),
        ("{{ raise_exception('x' * 9999) }}", r"^x{497}\.\.\.$"),
    ],
)  # fmt: skip
def test_what_does_not_render(source, message):
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"messages": "Hi"}, "messages is a str; a list of dicts is expected"),
        ({"messages": None}, "messages is a NoneType"),
        ({"messages": [USER, "Hi"]}, r"messages\[1\] is a str; a dict is expected"),
        ({"messages": [USER], "tools": [print]}, r"tools\[0\] is a builtin_function_or_method"),
    ],
)
def test_what_is_no_conversation(kwargs, message):
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate("x").render(**kwargs)


def test_a_long_conversation_is_far_below_the_bounds():
    messages = [{"role": "user", "content": "word " * 1000}, ASSISTANT] * 100  # 500,000 characters
    text = render(QWEN3, messages)
    assert text.count("Hello") == 100 and len(text) > 500_000
