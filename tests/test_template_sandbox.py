"""Hostile templates: none reaches Python's internals, makes text or works without bound."""

import re
import threading
import time

import pytest

from minfer_jax import template_meter
from minfer_jax.chat_template import ChatTemplate, ChatTemplateError


def render(source: str) -> str:
    return ChatTemplate(source).render([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "''['__class__']['__mro__']",
        "(''|attr('__class__')).__mro__",
        "raise_exception.__globals__['x']",
        "strftime_now['__globals__']['x']",
        "'{0.__class__.__mro__}'.format(messages)",
        "(['{0.__class__.__mro__}']|map(attribute='format')|list)[0](messages)",
        "cycler.__init__.__globals__",
        "namespace.__init__.__globals__",
        "namespace(__call__=raise_exception)()",
        "dict.update(messages[0], role='x')",
        "self.__init__.__globals__",
        "lipsum.__globals__",
        "('x'.encode()).hex()",
    ],
)
def test_no_way_to_python(expression):
    try:
        text = render("{{ " + expression + " }}")
    except ChatTemplateError as error:
        assert re.search("unsafe|undefined|private|no attribute", str(error))
    else:
        assert text == ""  # undefined


DOUBLING = (
    "{% set ns = namespace(a='ab') %}{% for i in range(70) %}BODY{% endfor %}{{ ns.a | length }}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**12 }}",
        "{{ 10**12 * 'a' }}",
        "{{ [1] * 10**12 }}",
        "{{ 9**9**9**9**9 }}",
        "{{ 'a' | center(999999999999) }}",
        "{{ 'a'.center(999999999999) }}",
        "{{ 'a'.ljust(999999999999) }}",
        "{{ 'a'.rjust(999999999999) }}",
        "{{ 'a'.zfill(999999999999) }}",
        "{{ 'a\nb' | indent(999999999999) }}",
        "{{ [1] | tojson(indent=999999999999) }}",
        "{{ [1] | batch(999999999999, 0) | list }}",
        "{{ [1] | slice(999999999999) | list }}",
        "{{ 1 | round(999999999999, 'ceil') }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ '%*d' % (999999999999, 1) }}",
        "{{ '%999999999999d' | format(1) }}",
        "{{ '{:999999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999999) }}",
        "{% set x = 'a' * 10**6 %}{{ x | replace('a', x) }}",
        "{% set x = 'a' * 10**6 %}{{ x.replace('', x) }}",
        "{% set x = 'a' * 10**4 %}{{ x.join(x * 2) }}",
        "{% set x = 'a' * 10**5 %}{{ x | list | join(x) }}",
        "{% set x = 'a' * 10**6 %}{{ [x] * 10**6 }}",
        "{% set x = 'a' * 10**6 %}{{ '%s' % ([x] * 10**6) }}",
        "{% set x = 'a' * 10**6 %}{{ '{}'.format([x] * 10**6) }}",
        "{% set x = 'a' * 10**6 %}{{ ([x] * 10**6) | tojson }}",
        "{% set x = 'a' * 10**6 %}{{ ([x] * 10**6) | string }}",
        "{% set x = 'a' * 10**7 %}{% for i in range(99) %}{% set y = x[i:] %}{% endfor %}",
        "{% set x = 'a' * 10**7 %}{% for i in range(99) %}{{ x }}{% endfor %}",
        "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
        DOUBLING.replace("BODY", "{% set ns.a = ns.a + ns.a %}"),
        DOUBLING.replace("BODY", "{% set ns.a = ns.a ~ ns.a %}"),
        DOUBLING.replace("BODY", "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}"),
        DOUBLING.replace("BODY", "{% set ns.a = [ns.a, ns.a] | join %}"),
    ],
)
def test_text_without_bound(source):
    refusal = r"makes more than 134217728 characters|more than 4096 bits|unbounded width|no numbers"
    with pytest.raises(ChatTemplateError, match=refusal):
        render(source)


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set l = range(99999) | list %}{% for i in l %}{% if 'x' in l %}{% endif %}{% endfor %}",
    "{% set l = range(99999) | list %}{{ l | select('in', l) | list }}",
    "{% set l = range(99999) | list %}" + "{% if 'x' in l %}{% endif %}" * 5000,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(70) }}",
    "{% for i in range(99999) %}" + "{% if i %}{% endif %}" * 5000 + "{% endfor %}",
    "{% for x in range(99999) recursive %}{% if loop.depth < 9 %}{{ loop(range(999)) }}{% endif %}"
    "{% endfor %}",
    DOUBLING.replace("BODY", "{% set ns.a = [ns.a, ns.a] %}"),
    DOUBLING.replace("BODY", "{% set ns.a = {'x': ns.a, 'y': ns.a} %}"),
    DOUBLING.replace("BODY", "{% set ns.a = ([ns.a] * 2) | batch(9) | list %}"),
    "{% set ns = namespace(a=[1]) %}{% macro f() %}{% set ns.a = varargs %}{% endmacro %}"
    "{% for i in range(70) %}{{ f(ns.a, ns.a) }}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_work_without_bound(source, monkeypatch):
    monkeypatch.setattr(template_meter, "MAX_SECONDS", 0.2)
    before = time.thread_time()
    with pytest.raises(ChatTemplateError, match=r"more than (0\.2 seconds|134217728 characters)"):
        render(source)
    assert time.thread_time() - before < 3


def test_one_rendering_does_not_pay_for_another(monkeypatch):
    """Each rendering, in each thread, has a meter of its own."""
    monkeypatch.setattr(template_meter, "MAX_CHARACTERS", 10_000)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "x" * 3000}]
    texts: list[str] = []

    def work():
        texts.extend(template.render(messages) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["x" * 3000] * 200
    with pytest.raises(ChatTemplateError, match="more than 10000 characters"):
        template.render(messages * 4)
