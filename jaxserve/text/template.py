"""Runs the chat template of a model.

A template is a program from a file that somebody downloaded, fed with what somebody else typed: it
runs in Jinja's sandbox, with a bounded number of loop turns, a deadline, and a bound on what
operators and loops build (a single method or filter, such as `replace`, is not bounded).  What it
may use is what `transformers.apply_chat_template` gives it, so that templates written for that
render the same text.
"""

import datetime
import functools
import json
import re
import time
from collections.abc import Mapping, Sized
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

# Of the rendered text, and of what any operator makes on the way.
MAX_CHARS = 4 * 1024 * 1024
MAX_TURNS = 200_000  # of all loops and macros of one rendering
MAX_SECONDS = 5.0
_TICK = "jaxserve_tick"  # the call that is put into every loop and macro
_JOIN = "jaxserve_join"  # what stands for the operator ~
_WIDE = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)")  # a width or precision


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Raises ValueError when the template fails, is no template, or goes past a bound."""
    limits = _Limits()
    parts: list[str] = []
    length = 0
    try:
        for part in _compiled(source).generate({**variables, _TICK: limits.tick}):
            length += len(part)
            limits.check_length(length)
            parts.append(part)
    except (RecursionError, MemoryError):
        raise ValueError(
            "the model's chat template needs too much memory for these messages"
        ) from None
    except Exception as error:  # a template can raise whatever its expressions raise
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    return "".join(parts)


class _Limits:
    def __init__(self) -> None:
        self._turns = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> str:
        self._turns += 1
        if self._turns > MAX_TURNS or time.monotonic() > self._deadline:
            raise jinja2.TemplateError(
                f"it takes more than {MAX_TURNS} loop turns or {MAX_SECONDS} s"
            )
        return ""

    @staticmethod
    def check_length(length: int) -> None:
        if length > MAX_CHARS:
            raise jinja2.TemplateError(f"it makes a text of more than {MAX_CHARS} characters")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _Limits.check_length(_size(left) * _factor(right) + _size(right) * _factor(left))
        if operator == "**" and (abs(left) > MAX_TURNS or abs(right) > 64):
            raise jinja2.TemplateError("it raises a number to a large power")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise jinja2.TemplateError("it formats text with a width of more than 999")
        value = super().call_binop(context, operator, left, right)
        _Limits.check_length(_size(value))
        return value


def _size(value: Any) -> int:
    return len(cast(Sized, value)) if isinstance(value, str | list | tuple) else 0


def _factor(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is all there
    is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not Jinja's own filter, which escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _namespace(**values: Any) -> jinja2.utils.Namespace:
    _refuse_private(values)
    return jinja2.utils.Namespace(**values)


def _refuse_private(names: Any) -> None:
    for name in names:
        if name.startswith("_"):
            raise jinja2.TemplateError(f"it stores the private name {name!r} in a namespace")


def _join(*values: Any) -> str:
    texts = [str(value) for value in values]
    _Limits.check_length(sum(map(len, texts)))
    return "".join(texts)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    globals_: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _namespace,
        _JOIN: _join,
    }
    environment.globals.update(globals_)
    return environment


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = _environment()
    tree = environment.parse(source)
    _refuse_private(node.attr for node in tree.find_all(jinja2.nodes.NSRef))
    for loop in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
        loop.body.insert(0, jinja2.nodes.ExprStmt(_call(_TICK, []), lineno=loop.lineno))
    return environment.from_string(_bounded_joins(tree))


def _bounded_joins[N: jinja2.nodes.Node](node: N) -> N:
    """The tree with every `a ~ b` made a call that checks its length."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_replaced(item) for item in cast(list[Any], value)])
        else:
            setattr(node, name, _replaced(value))
    return node


def _replaced(value: Any) -> Any:
    if not isinstance(value, jinja2.nodes.Node):
        return value
    _bounded_joins(value)
    return _call(_JOIN, value.nodes) if isinstance(value, jinja2.nodes.Concat) else value


def _call(name: str, args: list[jinja2.nodes.Expr]) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.Name(name, "load"), args, [], None, None)
