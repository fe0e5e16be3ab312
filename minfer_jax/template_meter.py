"""What a chat template may cost: a meter, and the price of each operation.

jinja2's sandbox keeps a template from Python's internals, but not from asking for terabytes of text
in a few characters. So every operation that makes text or walks data is charged to the meter of the
rendering it belongs to, and where the result can be much larger than what went in, it is charged
before it is done. `template_sandbox.py` sees to it that nothing bypasses these functions.

An operation inside Python's C code cannot be interrupted: it stays short because what it is given
is small.
"""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_CHARACTERS = 1 << 27  # text that one rendering may make in all, intermediate values included
MAX_SECONDS = 10.0  # of this thread's CPU time, for one rendering
MAX_INT_BITS = 1 << 12  # of a number that takes part in arithmetic

_ELEMENT = 8  # the price of one element of a list: the bytes of its slot
_DEEPEST = 1000  # levels of a nested value, by Python's recursion limit

# A width or precision of five digits or more, or one that is itself a value
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")  # "%99999d" and "%*d"
_WIDE_BRACES = re.compile(r"\{[^{}]*(\{|\d{5})")  # "{:99999}" and "{:{}}"


class _Meter:
    """What one rendering has left."""

    def __init__(self):
        self.characters = MAX_CHARACTERS
        self.until = time.thread_time() + MAX_SECONDS


_METER: ContextVar[_Meter] = ContextVar("template_meter")  # each thread renders on its own meter


@contextmanager
def metered() -> Iterator[None]:
    """Opens a new meter for the block; the functions below charge it."""
    token = _METER.set(_Meter())
    try:
        yield
    finally:
        _METER.reset(token)


def spend(characters: int) -> None:
    """Charges some characters of text, or as many steps of work.

    Args:
        characters: How many.

    Raises:
        SecurityError: When more than `MAX_CHARACTERS` or `MAX_SECONDS` are used up.
    """
    meter = _METER.get()
    meter.characters -= characters
    if meter.characters < 0:
        raise SecurityError(f"the template makes more than {MAX_CHARACTERS} characters of text")
    if time.thread_time() > meter.until:
        raise SecurityError(f"the template takes more than {MAX_SECONDS:g} seconds")


def spend_size(value: Any) -> Any:
    """Charges a value for its own length, that of a part of another or of a loop; returns it."""
    if isinstance(value, str):
        spend(len(value))
    elif isinstance(value, (list, tuple, dict, set)):
        spend(len(value) * _ELEMENT)
    else:
        spend(1)
    return value


def spend_value(value: Any) -> Any:
    """Charges a new value with all the elements that it holds, and returns it.

    Else `{% set x = [x, x] %}` in a loop nests 2**n elements, and comparing those never ends.
    """
    spend_size(value)
    if isinstance(value, (list, tuple, dict)):
        for element in value.values() if isinstance(value, dict) else value:
            if isinstance(element, (list, tuple, dict)):
                spend_value(element)
    return value


def spend_text(value: Any) -> Any:
    """Charges about what `str(value)` would have, before it is made, and returns the value."""
    if isinstance(value, str):
        spend(len(value))
    elif isinstance(value, Namespace):
        raise SecurityError("the template turns a namespace into text")
    elif isinstance(value, Mapping):
        for key, element in value.items():
            spend_text(key)
            spend_text(element)
    elif isinstance(value, Collection) and not isinstance(value, range):
        for element in value:
            spend_text(element)
    else:
        spend(_ELEMENT)
    return value


def concat(pieces: Iterable[str]) -> str:
    """Joins pieces of text, charged before it is done."""
    pieces = list(pieces)
    spend(sum(map(len, pieces)))
    return "".join(pieces)


def _spend_join(separator: Any, items: Iterable[Any]) -> list[Any]:
    items = [spend_text(item) for item in items]
    spend(len(str(separator)) * len(items))
    return items


def check_braces(template: str) -> None:
    """Refuses `str.format` with a field whose width is huge or comes from a value."""
    _check_format(template, _WIDE_BRACES)


def _check_format(template: str, wide: re.Pattern[str]) -> None:
    if wide.search(template):
        raise SecurityError("the template formats with a field of unbounded width")


def _length(of: Any) -> int:
    return len(of) if isinstance(of, str) else of


# By how many characters a result can exceed its input: of str's methods, and of filters
_GROWTH: dict[str, Callable[..., int]] = {
    "batch": lambda _, linecount, *__, **___: linecount,
    "center": lambda _, width=80, *__: width,
    "indent": lambda s, width=4, *_, **__: (len(str(s).splitlines()) + 1) * _length(width),
    "ljust": lambda _, width, *__: width,
    "replace": lambda s, old, new, *_, **__: str(s).count(str(old)) * len(str(new)),
    "rjust": lambda _, width, *__: width,
    "round": lambda _, precision=0, *__, **___: precision * precision,  # the work of 10**precision
    "slice": lambda _, slices, *__, **___: slices,
    "tojson": lambda _, ascii=0, indent=0, *__, **___: _length(indent or 0) * _DEEPEST,
    "zfill": lambda _, width: width,
}

# Filters that take a container as one; every other filter makes text of it first
_STRUCTURAL = frozenset(
    "attr batch count d default dictsort first groupby items join last length list map max min"
    " random reject rejectattr reverse select selectattr slice sort sum tojson unique".split()
)


def metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a price on a filter.

    Args:
        name: What templates call it; it chooses the price.
        function: What it does. Filters that jinja2 hands the context or environment first keep it.

    Returns:
        The filter to put in its place.
    """
    before = getattr(function, "jinja_pass_arg", None) is not None

    @wraps(function)
    def priced(*args: Any, **kwargs: Any) -> Any:
        passed, value, rest = args[:before], args[before], args[before + 1 :]
        if name == "join":
            value = _spend_join(rest[0] if rest else kwargs.get("d", ""), value)
        elif name == "format":
            _check_format(str(spend_text(value)), _WIDE_PERCENT)
        elif name == "sum" and not isinstance(kwargs.get("start", (*rest, 0, 0)[1]), (int, float)):
            raise SecurityError("the template sums up what are no numbers")
        if name not in _STRUCTURAL:
            spend_text((value, rest, kwargs))
        if name in _GROWTH:
            spend(_GROWTH[name](value, *rest, **kwargs))
        return spend_value(function(*passed, value, *rest, **kwargs))

    return priced


def metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a price on a test such as `is in`; `select` runs it once an element."""

    @wraps(function)
    def priced(*args: Any, **kwargs: Any) -> Any:
        spend(1)
        return function(*args, **kwargs)

    return priced


def price_call(callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charges a call before it is made.

    Args:
        callee: What the template calls: a macro, a global, a method.
        args: Its arguments.
        kwargs: Its named arguments.

    Returns:
        The arguments to call it with: those of `str.join` are a list now, as they had to be walked.
    """
    spend_value((args, kwargs))  # so a macro that calls itself twice comes to an end
    # the sandbox hands out `str.format` wrapped
    owner = getattr(getattr(callee, "__wrapped__", callee), "__self__", None)
    if isinstance(owner, str):
        if callee.__name__ == "join" and args:
            return (_spend_join(owner, args[0]), *args[1:])
        if callee.__name__ == "format":
            spend_text((args, kwargs))
        elif callee.__name__ in _GROWTH:
            spend(_GROWTH[callee.__name__](owner, *args, **kwargs))
    return args


def price_operator(operator: str, left: Any, right: Any) -> None:
    """Charges a binary operator before it is applied.

    Args:
        operator: As the template writes it.
        left: What stands left of it.
        right: What stands right of it.
    """
    power = isinstance(left, int) and isinstance(right, int) and operator == "**"
    for number, other in ((left, right), (right, left)):
        if not isinstance(number, int):
            continue
        if number.bit_length() * (max(1, right) if power else 1) > MAX_INT_BITS:
            raise SecurityError(f"the template calculates with more than {MAX_INT_BITS} bits")
        if operator == "*" and isinstance(other, (str, list, tuple)):
            spend(len(other) * _ELEMENT * max(0, number))
    if operator == "%" and isinstance(left, str):
        _check_format(left, _WIDE_PERCENT)
        spend_text(right)
