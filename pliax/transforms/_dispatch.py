"""Finding the executable of a call without flattening its arguments.

A call's form is how many arguments come by position and which by name. A function is
generated that tells the forms apart, reads the sizes which may differ between
executables, such as ``args[0]['tokens'].shape[1]``, and calls what serves them;
everything else is JAX's own cache's to tell apart. It is generated because ``jax.jit``
takes 4 us for a call with two arrays, of which two Python calls are a tenth.

What has served many calls is tried first, without reading sizes: an executable's own
cache in JAX compares the shapes of all arrays, and refuses others. That takes 0.2 us
less where a call has two arrays, and 0.4 us where it has 500.

``jax.jit`` builds an executable by itself where arguments lie elsewhere than before. To
look for that after each call took about 0.15 us in a race of dispatchers, no more than
a whole benchmark varies by; so whoever hears of an executable looks for the call.
"""

import dataclasses
import functools
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.monitoring

from pliax.core._jax import Array, aval_of, compile_event

from ._arguments import describe_callable
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
        leaf, found = "leaf", f"leaf := {self.argument}"
        if self.argument.isidentifier():
            leaf = found = self.argument
        described = f"aval_of({leaf}) if type({found}) is Array else {leaf}"
        return f"({described}).shape[{self.axis}]"

    def as_parameter(self, names: Sequence[str]) -> "Accessor":
        """The same where each argument by position has a name of its own."""
        named = re.sub(r"^args\[(\d+)\]", lambda at: names[int(at[1])], self.argument)
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
    def has_arrays_alone(self) -> bool:
        """Whether no size is an integer, of which JAX's dispatcher sees no value."""
        return all(accessor.axis is not None for accessor in self.accessors)

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
        {guess}
        try:
            bound = {search}
        except Exception:  # not in the table, no such argument, or without a hash
            bound = None
        if bound is not None:
            _run, _untimed = bound.run, bound.calls.untimed
            try:
                {serve}
            except (Unvetted, Unlike, TypeError):  # sizes alone agree
                bound = None
        return unknown({given})
    except RuntimeError as error:
        failed(error, {given})
        raise
"""

# What has served many calls comes with what it runs and counts: to ask it takes 0.1 us
# more where a call has two arrays.
_GUESS = """
        if latest is not None and {has_all}:
            bound, _run, _untimed = latest
            try:
                {serve}
            except (Unvetted, Unlike, TypeError):  # a wrong guess
                pass
            return again({known}, globals())
"""

_SERVE = """
                if _untimed:
                    result = {call}
                    if _untimed:
                        _untimed.pop()
                    else:  # another thread took the last
                        bound.calls.due += 1
                    return result
                return timed(bound, {known}, globals())
"""


def dispatcher(forms: Sequence[Form], f: Any, **ways: Any) -> Callable[..., Any]:
    """The function that calls what serves a call.

    Args:
        forms: the forms seen so far.
        f: the user's function.
        ways: what it hands calls to: `mark`, which wraps static arguments (None where
          there are none), `unknown` for what no form knows, `grown` for calls in which
          XLA has built an executable, and `failed` for errors.
    """
    forms = forms[-_FORMS:]
    tables = {f"table{i}": form.table for i, form in enumerate(forms)}
    parts = _in_general(forms)
    if ways["mark"] is None and len(forms) == 1:
        parts = _by_name(forms[0], _parameters(f)) or parts
    mark = "args, kwargs = mark(args, kwargs)" if ways["mark"] else ""
    serve = _SERVE.format(**parts).strip()
    guess = _GUESS.format(serve=serve, **parts).strip() if parts["guesses"] else ""
    source = _SOURCE.format(mark=mark, guess=guess, serve=serve, **parts)
    names: dict[str, Any] = {"latest": None, "known": parts["known"]}
    names |= tables | _NAMES | ways
    exec(compile(source, _FILE, "exec"), names)
    function = names["__call__"]
    function.__name__ = function.__qualname__ = describe_callable(f)
    return function


_FILE = f"{__file__} (generated)"


def _notice_growth(event: str, duration_secs: float, **_: Any) -> None:
    """Tells the function in whose short call XLA has just built an executable."""
    frame = sys._getframe(1) if event == compile_event else None
    while frame is not None and frame.f_code.co_filename != _FILE:
        frame = frame.f_back
    if frame is None or frame.f_locals.get("bound") is None:
        return
    found, ways = frame.f_locals, frame.f_globals
    ways["grown"](found["bound"], *eval(ways["known"], ways, found))


jax.monitoring.register_event_duration_secs_listener(_notice_growth)


def _in_general(forms: Sequence[Form]) -> dict[str, Any]:
    """The parts of a function that tells any forms apart."""
    search = "None"
    for i, form in enumerate(forms):
        search = f"(table{i}[{form.sizes}] if {form.condition} else {search})"
    return {
        "parameters": "*args, **kwargs",
        "guesses": False,
        "search": search,
        "call": "(_run(*args, **kwargs) if kwargs else _run(*args))",
        "known": "args, kwargs",
        "given": "args, kwargs",
    }


def _by_name(form: Form, parameters: Sequence[Any]) -> dict[str, Any] | None:
    """The parts of one with the user's parameters, where such a call has all of them.

    It takes 0.3 us less than one that is given a tuple and a dictionary.
    """
    names = tuple(p.name for p in parameters)
    fits = 0 < len(names) == form.count <= _FEW and not form.names
    if not fits or not _TAKEN.isdisjoint(names):
        return None
    has_all = "True"
    if parameters[-1].default is not inspect.Parameter.empty:
        has_all = f"{names[-1]} is not missing"
    by_name = [accessor.as_parameter(names) for accessor in form.accessors]
    listed = ", ".join(names)
    return {
        "parameters": ", ".join(map(_written, parameters)),
        "guesses": form.has_arrays_alone,
        "has_all": has_all,
        "search": f"table0[{_together(by_name)}] if {has_all} else None",
        "call": f"_run({listed})",
        "known": f"({listed},), {{}}",
        "given": f"*given({names!r}, ({listed},))",
    }


def _written(parameter: inspect.Parameter) -> str:
    has_default = parameter.default is not inspect.Parameter.empty
    return f"{parameter.name}=missing" if has_default else parameter.name


def _parameters(f: Any) -> tuple[inspect.Parameter, ...]:
    """What a function takes, if it can take all by position and by name."""
    if not isinstance(f, types.FunctionType) or hasattr(f, "__wrapped__"):
        return ()
    parameters = tuple(inspect.signature(f).parameters.values())
    kinds = {p.kind for p in parameters}
    return parameters if kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD} else ()


_MISSING = object()


def _given(names: Sequence[str], values: Sequence[Any]) -> tuple[tuple, dict]:
    """The arguments that a call has: by name those behind a missing one."""
    found = {n: x for n, x in zip(names, values, strict=True) if x is not _MISSING}
    first = [*itertools.takewhile(found.__contains__, names)]
    return tuple(found.pop(name) for name in first), found


def timed(bound: Any, args: tuple, kwargs: dict, names: dict[str, Any]) -> Any:
    """The results of a call, whose seconds count where XLA built nothing in it.

    What has served a thousand calls becomes the next guess: where sizes take turns, one
    in a thousand is wrong.
    """
    before, start = builds.count, perf_counter()
    results = bound.run(*args, **kwargs)
    seconds = perf_counter() - start
    if builds.count == before:
        bound.calls.timed_one(seconds)
    else:
        bound.calls.due += 1
    if bound.calls.are_many and bound.tells_sizes:
        names["latest"] = bound, bound.run, bound.calls.untimed
    return results


def _again(args: tuple, kwargs: dict, names: dict[str, Any]) -> Any:
    """The same call after a wrong guess."""
    names["latest"] = None
    return names["__call__"](*args, **kwargs)


_NAMES = {
    "Array": Array,
    "__name__": __name__,  # by which the user's line is told from ours
    "Unlike": Unlike,
    "Unvetted": Unvetted,
    "again": _again,
    "aval_of": aval_of,
    "given": _given,
    "missing": _MISSING,
    "timed": timed,
}
_TAKEN = frozenset(
    {*re.findall(r"[A-Za-z_]\w*", _SOURCE + _GUESS + _SERVE), *_NAMES, "leaf", "table0"}
)


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
