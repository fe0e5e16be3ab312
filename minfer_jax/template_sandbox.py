"""The jinja2 sandbox that a model file's chat template runs in.

A template comes with the file, so it is somebody else's program. jinja2's immutable sandbox keeps
it from Python's internals; here its work is metered too (`template_meter.py` has the prices).
The sandbox has hooks for operators and calls, and filters are wrapped. Where it has none, the
parsed template gets a filter:

    source --parse--> tree --_Metering--> tree --compile--> code --run--> pieces of text
                      for x in Y     ->   for x in Y|<part>, each round starting with 0|<step>
                      A == B         ->   A|<step> == B
                      A ~ B          ->   [A, B]|join
                      X[1:]          ->   X[1:]|<part>
                      [A, B]         ->   [A, B]|<value>
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from minfer_jax.template_meter import (
    check_braces,
    concat,
    metered,
    metered_filter,
    metered_test,
    price_call,
    price_operator,
    spend,
    spend_size,
    spend_text,
    spend_value,
)

MAX_SOURCE = 1 << 18  # characters of a template; the longest in use have some 20,000

# jinja2's helpers for HTML and debugging, some of them slow beyond measure; no chat template's use
_LEFT_OUT_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")

# Methods of str and int that make bytes, or grow text in ways that no chat template uses
_LEFT_OUT_METHODS = frozenset(
    "encode expandtabs format_map from_bytes maketrans to_bytes translate".split()
)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`json.dumps` with the arguments that transformers offers; jinja2's own escapes HTML."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return "".join(spend_size(chunk) for chunk in encoder.iterencode(value))


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict` as a function: the type's unbound methods would change dicts behind the sandbox."""
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """A namespace that has no `__call__` and the like: it could pass for an object of jinja2."""

    # no parameter has a name, so that `namespace(self=1)` works
    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"the template stores a private name in a namespace: {name!r}")
        Namespace.__setitem__(self, name, value)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training: here it is just a scope."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


@pass_context  # else jinja2 would run it once, at compile time, for a constant
def _step(context: Context, value: Any) -> Any:
    spend(1)
    return value


class _Metering(NodeTransformer):
    """Puts filters where the sandbox has no hook; a template cannot write their names."""

    def _filtered(self, node: nodes.Node, name: str) -> nodes.Filter:
        place = {"lineno": node.lineno, "environment": node.environment}
        return nodes.Filter(node, name, [], [], None, None, **place)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, "<part>")
        place = {"lineno": node.lineno, "environment": node.environment}
        step = self._filtered(nodes.Const(0, **place), "<step>")
        node.body.insert(0, nodes.ExprStmt(step, **place))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._filtered(node.expr, "<step>")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
        return self._filtered(parts, "join")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(node, "<part>") if isinstance(node.arg, nodes.Slice) else node

    def _visit_literal(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":  # the `a, b` of `for a, b in`
            return node
        return self._filtered(node, "<value>")

    visit_List = visit_Tuple = visit_Dict = _visit_literal


class _Sandbox(ImmutableSandboxedEnvironment):
    """What transformers offers to chat templates, with every operation on the meter."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    concat = staticmethod(concat)  # joins what a macro or a block has written

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
            finalize=lambda value: value if isinstance(value, str) else spend_text(value),
        )
        filters = {**self.filters, "tojson": _tojson}
        self.filters = {
            name: metered_filter(name, function)
            for name, function in filters.items()
            if name not in _LEFT_OUT_FILTERS
        }
        self.filters |= {"<step>": _step, "<part>": spend_size, "<value>": spend_value}
        self.tests = {name: metered_test(function) for name, function in self.tests.items()}
        self.globals |= {
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        left_out = attr in _LEFT_OUT_METHODS and isinstance(obj, (str, int))
        return not left_out and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_braces(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        price_operator(operator, left, right)
        return spend_value(super().call_binop(context, operator, left, right))

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        args = price_call(callee, args, kwargs)
        return spend_value(super().call(context, callee, *args, **kwargs))


_SANDBOX = _Sandbox()


def compile_template(source: str) -> Template:
    """Compiles a chat template for the sandbox.

    Args:
        source: The template's text.

    Returns:
        The template, to be run by `run_template`.

    Raises:
        TemplateSyntaxError: With the line, where the text is no template.
        SecurityError: Where it is too long or too deeply nested, or Python cannot compile it.
    """
    if len(source) > MAX_SOURCE:
        raise SecurityError(f"it has {len(source)} characters; at most {MAX_SOURCE} are taken")
    with metered():  # jinja2 evaluates what is constant while it compiles
        try:
            code = _SANDBOX.compile(_Metering().visit(_SANDBOX.parse(source)))
        except TemplateError:
            raise
        except Exception as error:  # from jinja2's parser, or from Python's for what jinja2 wrote
            what = error.msg if isinstance(error, SyntaxError) else error
            raise SecurityError(f"it cannot be compiled: {what}") from error
    return Template.from_code(_SANDBOX, code, _SANDBOX.make_globals(None))


def run_template(template: Template, variables: Mapping[str, Any]) -> str:
    """Runs a compiled template.

    Args:
        template: From `compile_template`.
        variables: What the template can name: text, numbers, lists, dicts, functions.

    Returns:
        The text that it writes.

    Raises:
        TemplateError: With its own words where it calls `raise_exception`.
        SecurityError: Where it reaches for what the sandbox refuses, or does too much.
        Exception: Whatever else its expressions raise.
    """
    with metered():
        return "".join(spend_size(piece) for piece in template.generate(variables))
