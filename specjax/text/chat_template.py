"""Renders chat templates, which come with the weights and are not trusted.

A template runs inside jinja2's sandbox, which keeps it from reaching the program. The
sandbox does not limit time and memory, so this module counts them: every value that a
template makes, every iteration and every call passes through a `_Budget`, and an operation
that would exceed it is refused before it runs. Only operations whose cost is known from
their arguments are allowed, so that none has to be interrupted.

    source -> parse -> wrap loops, literals, `~`, comparisons -> compile (kept) -> render
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import functools
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

MAX_SOURCE_CHARS = 128 * 1024
MAX_OUTPUT_CHARS = 1_000_000
MAX_CPU_S = 1.5  # processor time of the rendering thread
# Most bytes of one value with its content, on top of the caller's own values.
MAX_VALUE_BYTES = 4 * 2**20
# Most bytes of all values made by one rendering, freed ones included.
MAX_TOTAL_BYTES = 512 * 2**20
_MAX_CALL_DEPTH = 100
_MAX_WIDTH = 10_000  # of a padded field, in characters
_MAX_INT_BITS = 20_000
_MAX_COMPARISONS = 200_000_000  # of characters, in one search
_MAX_ERROR_CHARS = 500
_ADVICE = "use the template that the model's authors published, or pass the prompt as text."
# Smaller values are not inspected: numbers, roles, separators.
_SMALL_BYTES = 4096

_FILTERS = """
    abs attr batch capitalize center count d default dictsort e escape first float
    forceescape format groupby indent int items join last length list lower map max min
    reject rejectattr replace reverse round safe select selectattr slice sort string sum
    title tojson trim truncate unique upper urlencode wordcount
"""
# Methods whose result is hardly larger than their object.
_TEXT_METHODS = """
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal
    isdigit isidentifier islower isnumeric isprintable isspace istitle isupper lower
    lstrip partition removeprefix removesuffix rfind rindex rpartition rsplit rstrip
    split splitlines startswith strip swapcase title upper
"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    float: frozenset(("is_integer",)),
}
_BUILTIN_TYPES = (
    str, bytes, bytearray, memoryview, int, float, complex, list, tuple, dict, set,
    frozenset, range, type, type(json), type({}.keys()), type({}.values()),
    type({}.items()),
)  # fmt: skip
_CONTAINERS = frozenset((list, tuple, dict))
# Methods that take time proportional to the product of the lengths of text and argument.
_SLOW_SEARCHES = frozenset(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit"))
_PADDING = frozenset(("center", "ljust", "rjust", "zfill"))
_PRINTF = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


class TemplateLimitError(jinja2.TemplateError):
    """A template would take more time or memory than a chat template may."""


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Returns the text of a conversation.

    Args:
      source: the template, from any model's folder.
      messages: dicts with "role" and "content".
      variables: other variables of the template.

    Raises:
      ValueError: the template is not valid, fails on the messages, uses a forbidden
        operation, or exceeds MAX_OUTPUT_CHARS, MAX_CPU_S or a limit of memory.
    """
    template = _template(source)
    try:
        with _budget({"messages": messages, **variables}) as budget:
            pieces = template.generate(messages=messages, **variables)
            return budget.output(pieces)
    except TemplateLimitError as error:
        raise ValueError(
            f"the chat template was stopped: {_short(error)}. It may be broken or "
            f"hostile; {_ADVICE}"
        ) from error
    except jinja2.sandbox.SecurityError as error:
        raise ValueError(
            f"the chat template is unsafe and was stopped: {_short(error)}; {_ADVICE}"
        ) from error
    except Exception as error:  # A template is a program, and can raise any.
        raise ValueError(
            f"the chat template failed on {len(messages)} messages: "
            f"{type(error).__name__}: {_short(error)}. Change the messages (roles, "
            "order) to what the model's template takes."
        ) from error


def _template(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(
            f"the chat template has {len(source)} characters, and at most "
            f"{MAX_SOURCE_CHARS} are compiled; {_ADVICE}"
        )
    try:
        return _compiled(source)
    except Exception as error:  # From jinja, or from Python for the code that jinja generated.
        raise ValueError(
            f"the chat template failed to compile: {type(error).__name__}: "
            f"{_short(error)}; {_ADVICE}"
        ) from error


class _Budget:
    """Time and memory that one rendering has used, checked against the limits."""

    def __init__(self, variables: Mapping[str, Any]):
        self.variables = variables
        self.depth = 0  # of calls
        self._num_bytes = 0  # of all values made
        self._cpu_limit = time.thread_time() + MAX_CPU_S
        # Reading this clock is ten times as cheap, and thread time is never ahead of it.
        self._look_at = time.perf_counter() + MAX_CPU_S
        # Containers seen inside others, with their bytes; held so that ids stay theirs.
        self._inner: dict[int, tuple[Any, int]] = {}

    def tick(self) -> None:
        """Raises TemplateLimitError once the time is used up."""
        if time.perf_counter() < self._look_at:
            return
        left_s = self._cpu_limit - time.thread_time()
        if left_s <= 0:
            raise TemplateLimitError(f"it computes for more than {MAX_CPU_S:g} s")
        self._look_at = time.perf_counter() + left_s

    def check_size(self, num_bytes: int) -> None:
        """Raises TemplateLimitError unless a value of this many bytes may be made."""
        if num_bytes > MAX_VALUE_BYTES and num_bytes > self._most_bytes:
            raise TemplateLimitError(
                f"it makes a value of {num_bytes} bytes or more, and at most "
                f"{self._most_bytes} are allowed"
            )

    def check_width(self, width: Any) -> None:
        if isinstance(width, int) and abs(width) > _MAX_WIDTH:
            raise TemplateLimitError(
                f"it pads to {abs(width)} characters, and at most {_MAX_WIDTH} are allowed"
            )

    def made(self, value: Any, *, is_deep: bool = False) -> Any:
        """Returns a value that the template made, after counting it.

        Args:
          is_deep: whether the values inside it are new as well.
        """
        self.tick()
        kind = type(value)
        if kind is bool or value is None:
            return value
        own = total = sys.getsizeof(value)
        if kind in _CONTAINERS:
            total = self.size(value)
            own = total if is_deep else own
        elif kind is int and own > _MAX_INT_BITS // 4:
            raise TemplateLimitError("it makes a number of too many digits")
        if total > _SMALL_BYTES:
            self.check_size(total)
        self._num_bytes += own
        if self._num_bytes > MAX_TOTAL_BYTES:
            raise TemplateLimitError(
                f"it makes values of more than {MAX_TOTAL_BYTES} bytes together"
            )
        return value

    def size(self, value: Any) -> int:
        """Returns the bytes of a value written out, counting shared parts each time."""
        total = sys.getsizeof(value)
        if type(value) not in _CONTAINERS:
            return total
        parts = value
        if isinstance(value, Mapping):
            parts = [*value.keys(), *value.values()]
        for part in parts:
            if type(part) not in _CONTAINERS:
                total += sys.getsizeof(part, 64)
                continue
            known = self._inner.get(id(part))
            if known is None:
                known = self._inner[id(part)] = (part, self.size(part))
            total += known[1]
        return total

    def output(self, pieces: Iterable[str]) -> str:
        """Returns all that a template writes."""
        kept, num_chars = [], 0
        for piece in pieces:
            self.tick()
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS:
                raise TemplateLimitError(f"it writes more than {MAX_OUTPUT_CHARS} characters")
            kept.append(piece)
        return "".join(kept)

    @functools.cached_property
    def _most_bytes(self) -> int:
        """Most bytes of one value: the limit plus the size of the caller's own values."""
        return MAX_VALUE_BYTES + 2 * self.size(dict(self.variables))


_current: contextvars.ContextVar[_Budget] = contextvars.ContextVar("budget")


@contextlib.contextmanager
def _budget(variables: Mapping[str, Any]) -> Iterator[_Budget]:
    token = _current.set(_Budget(variables))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


class _Each:
    """An iterable that a template loops over: every turn is counted."""

    def __init__(self, iterable: Iterable[Any]):
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        budget = _current.get()
        for item in self._iterable:
            budget.tick()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace, but of few characters when it is written out.

    It can hold other namespaces, itself included, after its size was counted.
    """

    def __repr__(self) -> str:
        return "<namespace>"


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """str.format without fields of any width."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        for number in re.findall(r"\d+", format_spec):
            _current.get().check_width(_int(number))
        return super().format_field(value, format_spec)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with every operation counted."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _current.get()
        if operator == "+" and type(left) is str and type(right) is str:
            if len(left) + len(right) > _SMALL_BYTES:
                budget.check_size(sys.getsizeof(left) + sys.getsizeof(right))
        elif operator in _CHECKED_BINOPS:
            _CHECKED_BINOPS[operator](budget, left, right)
        return budget.made(self.binop_table[operator](left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern = str(value.__self__)
        is_map = value.__name__ == "format_map"

        def format(*args: Any, **kwargs: Any) -> str:
            if is_map and len(args) == 1:
                args, kwargs = (), args[0]
            _check_fields(_current.get(), pattern.count("{"), pattern, (args, kwargs))
            return _Formatter(self).vformat(pattern, args, kwargs)

        format.__self__ = value.__self__  # type: ignore[attr-defined]
        return format

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _current.get()
        budget.tick()
        if isinstance(__obj, jinja2.runtime.LoopContext) and args:
            args = (_Each(args[0]), *args[1:])  # a recursive loop
        budget.depth += 1
        if budget.depth > _MAX_CALL_DEPTH:
            raise TemplateLimitError(f"its calls are nested {_MAX_CALL_DEPTH} deep")
        try:
            arguments = _checked_arguments(budget, __obj, args, kwargs)
            result = super().call(__context, __obj, *arguments, **kwargs)
        finally:
            budget.depth -= 1
        return budget.made(result, is_deep=not _is_getter(__obj))

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        """Joins what a macro or a block wrote."""
        pieces = list(pieces)
        budget = _current.get()
        budget.check_size(sum(map(len, pieces)))
        return budget.made("".join(pieces))


class _Wrapper(jinja2.visitor.NodeTransformer):
    """Passes operations that jinja compiles to plain Python through the budget."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_each")
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        parts.environment = node.environment
        return _filtered(parts, "_concat")

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Expr:
        self.generic_visit(node)
        is_slice = isinstance(node.arg, jinja2.nodes.Slice)
        return _filtered(node, "_made") if is_slice else node

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_made") if node.ctx == "load" else node

    def visit_List(self, node: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "_made")

    def visit_ScopedEvalContextModifier(self, node: jinja2.nodes.Node) -> NoReturn:
        raise jinja2.TemplateSyntaxError("autoescape is for HTML, not for prompts", node.lineno)

    visit_Dict = visit_Compare = visit_Test = visit_List


def _filtered(node: Any, name: str) -> jinja2.nodes.Filter:
    """Returns `node | name`."""
    filtered = jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    filtered.environment = node.environment
    return filtered


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` only renders its body.

    Templates mark with it what a model is trained to reply.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, because the body must not leak its assignments.
        return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    environment = _environment()
    tree = _Wrapper().visit(environment.parse(source))
    return environment.from_string(tree)


@functools.cache
def _environment() -> _Environment:
    """Returns the environment of templates, which may neither write nor call out."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        # Nothing is computed while compiling, where nothing is counted.
        optimized=False,
        finalize=_finalize,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    filters = {name: environment.filters[name] for name in _FILTERS.split()}
    filters |= {"join": _join, "sum": _sum, "tojson": _to_json}
    environment.filters = {name: _counted(name, function) for name, function in filters.items()}
    environment.filters |= {"_each": _each, "_made": _made, "_concat": _concat}
    environment.globals = {
        "range": jinja2.sandbox.safe_range,
        "dict": dict,
        "namespace": _Namespace,
        "cycler": jinja2.utils.Cycler,
        "joiner": jinja2.utils.Joiner,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> Any:
    """Returns the text of an output value.

    It takes the context so that jinja computes no output while compiling.
    """
    del context
    budget = _current.get()
    if type(value) is str:
        budget.tick()
        return value
    return budget.made(str(value))


@jinja2.pass_context
def _each(context: Any, iterable: Any) -> _Each:
    del context
    return _Each(iterable)


@jinja2.pass_context
def _made(context: Any, value: Any) -> Any:
    del context
    return _current.get().made(value)


@jinja2.pass_context
def _concat(context: Any, parts: Sequence[Any]) -> str:
    """Implements `~`, the concatenation of values as text."""
    del context
    budget = _current.get()
    texts = [part if type(part) is str else str(part) for part in parts]
    budget.check_size(sum(map(len, texts)))
    return budget.made("".join(texts))


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter of jinja's that checks its arguments and counts its result."""
    num_given = 1 if hasattr(function, "jinja_pass_arg") else 0  # context, environment
    check = _CHECKED_FILTERS.get(name)

    @functools.wraps(function)  # keeps what jinja passes first
    def filter(*args: Any, **kwargs: Any) -> Any:
        budget = _current.get()
        budget.tick()
        if check is not None:
            check(budget, *args[num_given:], **kwargs)
        result = function(*args, **kwargs)
        if inspect.isgenerator(result):
            return iter(_Each(result))
        return budget.made(result)

    return filter


def _checked_arguments(
    budget: _Budget, obj: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Returns the arguments of a call; SecurityError where it may not be made."""
    owner = getattr(obj, "__self__", None)
    if owner is None or not isinstance(owner, _BUILTIN_TYPES):
        # A function of jinja, of this module, or of the caller.
        return args
    if any(value is obj for value in budget.variables.values()):
        return args
    name = obj.__name__
    if isinstance(owner, str):
        if name in _PADDING:
            budget.check_width(args[0] if args else None)
            return args
        if name == "join" and len(args) == 1:
            return (_joinable(budget, owner, args[0]),)
        if name == "replace":
            _check_replace(budget, owner, *args, **kwargs)
            return args
        if name in _SLOW_SEARCHES:
            _check_search(budget, owner, *args)
        if name in ("format", "format_map"):  # wrapped by the environment
            return args
    if not any(isinstance(owner, kind) and name in names for kind, names in _METHODS.items()):
        raise jinja2.sandbox.SecurityError(
            f"{type(owner).__name__}.{name} may not be called by a chat template"
        )
    return args


def _is_getter(obj: Any) -> bool:
    """Returns whether a call returns an existing value."""
    return getattr(obj, "__name__", "") in ("get", "copy", "keys", "values", "dict")


def _joinable(budget: _Budget, separator: str, items: Iterable[Any]) -> list[Any]:
    items = list(_Each(items))
    size = sum(sys.getsizeof(item, 64) for item in items)
    budget.check_size(size + len(items) * len(separator))
    return items


def _check_replace(
    budget: _Budget, text: Any, old: Any, new: Any, count: Any = -1, **_: Any
) -> None:
    text, old, new = str(text), str(old), str(new)
    found = text.count(old) if old else len(text) + 1
    if isinstance(count, int) and count >= 0:
        found = min(found, count)
    budget.check_size(len(text) + found * len(new))


def _check_search(budget: _Budget, text: Any, sought: Any = "", *_: Any) -> None:
    del budget
    if isinstance(sought, str) and len(str(text)) * len(sought) > _MAX_COMPARISONS:
        raise TemplateLimitError(f"it looks for a text of {len(sought)} characters")


def _check_printf(budget: _Budget, pattern: str, args: Any) -> None:
    fields = _PRINTF.findall(pattern)
    for number in (number for field in fields for number in field):
        if number == "*":
            raise TemplateLimitError("it pads to a width that is not written out")
        budget.check_width(_int(number))
    _check_fields(budget, len(fields), pattern, args)


def _check_fields(budget: _Budget, num_fields: int, pattern: str, args: Any) -> None:
    """Checks the size of a format: each field may hold the largest argument at full padding."""
    width = _MAX_WIDTH if re.search(r"\d", pattern) or num_fields > 20 else 0
    budget.check_size(len(pattern) + num_fields * (width + budget.size(args)))


def _check_add(budget: _Budget, left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple):
        budget.check_size(sys.getsizeof(left) + sys.getsizeof(right, 64))


def _check_multiply(budget: _Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
            own = sys.getsizeof(value) - sys.getsizeof(type(value)())
            budget.check_size(own * times)


def _check_power(budget: _Budget, left: Any, right: Any) -> None:
    del budget
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_INT_BITS:
        raise TemplateLimitError(f"it makes a number of more than {_MAX_INT_BITS} binary digits")


def _check_modulo(budget: _Budget, left: Any, right: Any) -> None:
    if isinstance(left, str):
        _check_printf(budget, left, right)


def _check_indent(budget: _Budget, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    budget.check_width(width)
    size = len(width) if isinstance(width, str) else int(width)
    text = str(text)
    budget.check_size(len(text) + size * (len(text.splitlines()) + 1))


def _check_number_of(budget: _Budget, value: Any, number: Any = 0, *_: Any, **__: Any) -> None:
    del value
    budget.check_width(number)


def _check_round(budget: _Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    del budget, value
    if isinstance(precision, int) and abs(precision) > 300:
        raise TemplateLimitError(f"it rounds to {precision} digits")


def _check_json(
    budget: _Budget,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    **_: Any,
) -> None:
    del ensure_ascii
    for each in (indent, *(separators or ())):
        size = each if isinstance(each, int) else len(each or "")
        if size > 16:
            raise TemplateLimitError(f"it indents JSON by {size} characters")
    budget.check_size(budget.size(value))


_CHECKED_BINOPS: dict[str, Callable[[_Budget, Any, Any], None]] = {
    "+": _check_add,
    "*": _check_multiply,
    "**": _check_power,
    "%": _check_modulo,
}
_CHECKED_FILTERS: dict[str, Callable[..., None]] = {
    "batch": _check_number_of,
    "center": lambda budget, text, width=80: budget.check_width(width),
    "format": lambda budget, pattern, *args, **kwargs: _check_printf(
        budget, str(pattern), kwargs or args
    ),
    "indent": _check_indent,
    "replace": lambda budget, text, old, new, count=None: _check_replace(
        budget, text, old, new, -1 if count is None else count
    ),
    "round": _check_round,
    "slice": _check_number_of,
    "tojson": _check_json,
    "trim": _check_search,
}


@jinja2.pass_environment
def _join(environment: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    """Implements jinja's filter without its rules for HTML."""
    if attribute is not None:
        get = jinja2.filters.make_attrgetter(environment, attribute)
        value = map(get, value)
    texts = [str(item) for item in _Each(value)]
    return str(d).join(_joinable(_current.get(), str(d), texts))


@jinja2.pass_environment
def _sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None:
        iterable = map(jinja2.filters.make_attrgetter(environment, attribute), iterable)
    for item in _Each(iterable):
        start = environment.call_binop(None, "+", start, item)
    return start


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON; jinja's own filter escapes HTML."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if indent is None:
        return encoder.encode(value)
    # Indentation grows with depth: counted piece by piece.
    return _current.get().output(encoder.iterencode(value))


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(_short(message))


def _strftime_now(format: str) -> str:
    # The C library pads to any width that is asked for.
    if len(format) > 1000 or re.search(r"\d{3}", format):
        raise TemplateLimitError("it asks for a date of any width")
    return datetime.datetime.now().strftime(format)


def _int(digits: str) -> int:
    """Returns a number of few digits, and a large one for many."""
    return int(digits or 0) if len(digits) < 10 else 10**9


def _short(message: object) -> str:
    text = str(message)
    cut = len(text) > _MAX_ERROR_CHARS
    return f"{text[:_MAX_ERROR_CHARS]}..." if cut else text.removesuffix(".")
