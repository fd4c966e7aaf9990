"""Finding the executable of a call without flattening its arguments.

A call's form is how many arguments come by position and which by name. A function is
generated that tells the forms apart, reads the sizes which may differ between
executables, such as ``args[0]['tokens'].shape[1]``, and calls what serves them;
everything else is JAX's own cache's to tell apart. It is generated because ``jax.jit``
takes 4 us for a call with two arrays, of which two Python calls are a tenth.

``jax.jit`` builds an executable by itself where arguments lie elsewhere than before. To
look for that after each call took about 0.15 us in a race of dispatchers, no more than
a whole benchmark varies by; so whoever hears of an executable looks for the call.
"""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.monitoring

from pliax.core._jax import (
    Array,
    aval_of,
    compile_event,
    no_trace,
    trace_of,
    trace_state,
)

from ._buffers import Unlike
from ._builds import builds
from ._execution import Unvetted
from ._families import Position


_LIMIT = 4096  # exact sizes remembered for one form
_FEW = 8  # arguments that have parameters of their own
_FORMS = 8  # the latest, that are told apart in one expression


class Accessor(NamedTuple):
    """Where a size is read.

    Attributes:
        argument: a Python expression, such as ``args[0]['tokens']``.
        axis: of that array; None where the argument itself is the size.
    """

    argument: str
    axis: int | None

    @property
    def expression(self) -> str:
        """The Python expression of the size.

        To read the shape of a `jax.Array` as `x.shape` takes 0.3 us more where a call
        has 500 arrays, between which what that attribute runs has left the caches.
        """
        if self.axis is None:
            return self.argument
        described = f"aval_of(x) if type(x := {self.argument}) is Array else x"
        return f"({described}).shape[{self.axis}]"

    @property
    def by_position(self) -> "Accessor":
        """The same where each argument by position has a name of its own."""
        named = re.sub(r"^args\[(\d+)\]", r"a\1", self.argument)
        return Accessor(named, self.axis)


@dataclasses.dataclass(eq=False)
class Form:
    """The calls of one form: how to read their sizes, and what serves them.

    Attributes:
        count: how many arguments come by position.
        names: those that come by name, in their order.
        accessors: where the sizes that matter are read.
        table: from those sizes to a bound plan; None where several kinds of calls
            share the sizes and only the whole key tells them apart.
    """

    count: int
    names: tuple[str, ...]
    accessors: frozenset[Accessor] = frozenset()
    table: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def sizes(self) -> str:
        """The expression of what the table is asked for."""
        return _together(self.accessors)

    @property
    def is_by_position(self) -> bool:
        """Whether its calls have a few arguments, and none by name."""
        return 0 < self.count <= _FEW and not self.names

    @property
    def condition(self) -> str:
        """The expression that tells its calls from those of other forms."""
        names = f"tuple(kwargs) == {self.names!r}" if self.names else "not kwargs"
        return f"{names} and len(args) == {self.count}"

    def remember(self, args: tuple, kwargs: dict, bound: Any) -> None:
        """Notes which plan serves such a call."""
        try:
            key = eval(self.sizes, _NAMES | {"args": args, "kwargs": kwargs})
            known = self.table.setdefault(key, bound)
        except Exception:  # this call has no such argument; the slow way serves it
            return
        if known is not bound:
            self.table[key] = None
        if len(self.table) > _LIMIT:
            self.table.clear()


def _together(accessors: Collection[Accessor]) -> str:
    """One expression of several; the value itself where there is one."""
    texts = sorted(accessor.expression for accessor in accessors)
    return texts[0] if len(texts) == 1 else f"({''.join(f'{x}, ' for x in texts)})"


class Dispatched(functools.partial):
    """An object whose calls go to a function of its own, which may be replaced.

    Python calls a `functools.partial` as directly as a function. To call an object of
    another class takes 0.2 us more, and ``jax.jit`` takes 4 us for two arrays in all.
    """

    def dispatch_by(self, function: Callable[..., Any]) -> None:
        """Hands calls to a function from now on."""
        state = function, (), {}, self.__dict__
        self.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


_SOURCE = """
def __call__({parameters}):
    {mark}
    try:
        try:
            bound = {search} if trace_of(trace_state) is no_trace else None
        except Exception:  # not in the table, no such argument, or one without a hash
            bound = None
        if bound is not None:
            try:
                calls = bound.calls
                if calls.untimed > 0:
                    result = {call}
                    calls.untimed -= 1
                    return result
                return timed(bound, {known_args}, kwargs)
            except (Unvetted, Unlike, TypeError):  # the sizes agree, something else not
                bound = None
        return unknown({args}, kwargs)
    except RuntimeError as error:
        failed(error, {args}, kwargs)
        raise
"""


def dispatcher(forms: Sequence[Form], **ways: Any) -> Callable[..., Any]:
    """The function that calls what serves a call.

    Args:
        forms: the forms seen so far.
        ways: what it hands calls to: `mark`, which wraps static arguments (None where
          there are none), `unknown` for what no form knows, `grown` for calls in which
          XLA has built an executable, and `failed` for errors.
    """
    forms = forms[-_FORMS:]
    tables = {f"table{i}": form.table for i, form in enumerate(forms)}
    if ways["mark"] is None and len(forms) == 1 and forms[0].is_by_position:
        parts = _by_position(*forms)
    else:
        parts = _in_general(forms)
    mark = "args, kwargs = mark(args, kwargs)" if ways["mark"] else ""
    source = _SOURCE.format(mark=mark, **parts)
    names: dict[str, Any] = tables | _NAMES | ways | {"known_args": parts["known_args"]}
    exec(compile(source, _FILE, "exec"), names)
    return names["__call__"]


_FILE = f"{__file__} (generated)"


def _notice_growth(event: str, duration_secs: float, **_: Any) -> None:
    """Tells the function in whose short call XLA has just built an executable."""
    frame = sys._getframe(1) if event == compile_event else None
    while frame is not None and frame.f_code.co_filename != _FILE:
        frame = frame.f_back
    if frame is None or frame.f_locals.get("bound") is None:
        return
    found, ways = frame.f_locals, frame.f_globals
    args = eval(ways["known_args"], ways, found)
    ways["grown"](found["bound"], args, found["kwargs"])


jax.monitoring.register_event_duration_secs_listener(_notice_growth)


def _in_general(forms: Sequence[Form]) -> dict[str, str]:
    """The parts of a function that tells any forms apart."""
    search = "None"
    for i, form in enumerate(forms):
        search = f"(table{i}[{form.sizes}] if {form.condition} else {search})"
    run = "bound.run(bound.packed, *args"
    return {
        "parameters": "*args, **kwargs",
        "search": search,
        "call": f"({run}, **kwargs) if kwargs else {run}))",
        "args": "args",
        "known_args": "args",
    }


def _by_position(form: Form) -> dict[str, str]:
    """The parts of one for a few positional arguments: 0.1 us without their tuple."""
    names = [f"a{i}" for i in range(form.count)]
    condition = f"{names[-1]} is not missing and not rest and not kwargs"
    named = [accessor.by_position for accessor in form.accessors]
    listed = ", ".join(names)
    return {
        "parameters": f"{'=missing, '.join(names)}=missing, /, *rest, **kwargs",
        "search": f"(table0[{_together(named)}] if {condition} else None)",
        "call": f"bound.run(bound.packed, {listed})",
        "args": f"given({listed}, *rest)",
        "known_args": f"({listed},)",
    }


_MISSING = object()


def _given(*args: Any) -> tuple[Any, ...]:
    """The arguments that a call has."""
    return tuple(x for x in args if x is not _MISSING)


def timed(bound: Any, args: tuple, kwargs: dict) -> Any:
    """The results of a call, whose seconds count where XLA built nothing in it."""
    before, start = builds.count, perf_counter()
    results = bound.call(args, kwargs)
    seconds = perf_counter() - start
    if builds.count == before:
        bound.calls.timed_one(seconds)
    else:
        bound.calls.due += 1
    return results


_NAMES = {
    "Array": Array,
    "__name__": __name__,  # by which the user's line is told from ours
    "Unlike": Unlike,
    "Unvetted": Unvetted,
    "aval_of": aval_of,
    "given": _given,
    "missing": _MISSING,
    "no_trace": no_trace,
    "timed": timed,
    "trace_of": trace_of,
    "trace_state": trace_state,
}


def accessor(path: Sequence[Any], position: Position) -> Accessor | None:
    """Where a size is read, from the path of its argument."""
    text = ""
    for key in path:
        step = _step(key)
        if step is None:
            return None
        text += step
    roots = {"[0]": "args", "[1]": "kwargs"}
    return Accessor(roots[text[:3]] + text[3:], position.axis)


def _step(key: Any) -> str | None:
    if isinstance(key, jax.tree_util.SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, jax.tree_util.GetAttrKey):
        return f".{key.name}"
    if isinstance(key, jax.tree_util.DictKey) and type(key.key) in (str, int):
        return f"[{key.key!r}]"
    return None
