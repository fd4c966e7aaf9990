"""Finding the executable of a call without flattening its arguments.

A call's form is how many arguments come by position and which by name. A function is
generated that tells the forms apart, reads the sizes which may differ between
executables, such as ``args[0]['tokens'].shape[1]``, and calls what serves them;
everything else is JAX's own cache's to tell apart. It is generated because ``jax.jit``
takes 4 us for a call with two arrays, of which two Python calls are a tenth.
"""

import dataclasses
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import jax

from pliax.core._jax import no_trace, trace_state

from ._buffers import Unlike
from ._execution import Unvetted
from ._families import Position


_LIMIT = 4096  # exact sizes remembered for one form
_FORMS = 8  # the latest, that are told apart in one expression
_LEAST = 5e-4  # seconds: no executable is built in less; asking takes 0.1 us


@dataclasses.dataclass(eq=False)
class Form:
    """The calls of one form: how to read their sizes, and what serves them.

    Attributes:
        count: how many arguments come by position.
        names: those that come by name, in their order.
        accessors: Python expressions of the sizes that matter.
        table: from those sizes to a bound plan; None where several kinds of calls
            share the sizes and only the whole key tells them apart.
    """

    count: int
    names: tuple[str, ...]
    accessors: frozenset[str] = frozenset()
    table: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def sizes(self) -> str:
        """The expression of what the table is asked for."""
        if len(self.accessors) == 1:
            return min(self.accessors)
        return f"({''.join(f'{a}, ' for a in sorted(self.accessors))})"

    @property
    def condition(self) -> str:
        """The expression that tells its calls from those of other forms."""
        names = f"tuple(kwargs) == {self.names!r}" if self.names else "not kwargs"
        return f"{names} and len(args) == {self.count}"

    def remember(self, args: tuple, kwargs: dict, bound: Any) -> None:
        """Notes which plan serves such a call."""
        try:
            key = eval(self.sizes, {"args": args, "kwargs": kwargs})
            known = self.table.setdefault(key, bound)
        except Exception:  # this call has no such argument; the slow way serves it
            return
        if known is not bound:
            self.table[key] = None
        if len(self.table) > _LIMIT:
            self.table.clear()


class Dispatched:
    """An object that is called by a function of its own.

    Python looks for `__call__` in the type. There it finds the slot, which holds each
    object's own, 0.2 us sooner than a method would call it. So ``type(f).__call__`` is
    no function, and ``f.__call__`` is what it is at that time.
    """

    __slots__ = ("__call__",)
    __call__: Callable[..., Any]


_SOURCE = """
def __call__(*args, **kwargs):
    {mark}
    try:
        try:
            bound = {search} if trace_state.value is no_trace else None
        except Exception:  # not in the table, no such argument, or one without a hash
            bound = None
        if bound is not None:
            try:
                start = perf_counter()
                if bound.fits:
                    run = bound.run
                    result = run(*args, **kwargs) if kwargs else run(*args)
                else:
                    result = bound(args, kwargs)
                seconds = perf_counter() - start
                if seconds > least and bound.plan.size() != bound.plan.built:
                    seconds -= grown(bound, args, kwargs, seconds)
                calls = bound.calls
                calls.count += 1
                calls.seconds += seconds
                return result
            except (Unvetted, Unlike, TypeError):  # the sizes agree, something else not
                pass
        return unknown(args, kwargs)
    except RuntimeError as error:
        failed(error, args, kwargs)
        raise
"""


def dispatcher(forms: Sequence[Form], **ways: Any) -> Callable[..., Any]:
    """The function that calls what serves a call.

    Args:
        forms: the forms seen so far.
        ways: what it hands calls to: `mark`, which wraps static arguments (None where
          there are none), `unknown` for what no form knows, `grown` for calls in which
          JAX may have built an executable, and `failed` for errors.
    """
    mark = "args, kwargs = mark(args, kwargs)" if ways["mark"] else ""
    search = "None"
    for i, form in enumerate(forms[-_FORMS:]):
        search = f"(table{i}[{form.sizes}] if {form.condition} else {search})"
    names: dict[str, Any] = (
        {f"table{i}": form.table for i, form in enumerate(forms[-_FORMS:])}
        | _NAMES
        | ways
    )
    source = _SOURCE.format(mark=mark, search=search)
    exec(compile(source, f"{__file__} (generated)", "exec"), names)
    return names["__call__"]


_NAMES = {
    "__name__": __name__,  # by which the user's line is told from ours
    "Unlike": Unlike,
    "Unvetted": Unvetted,
    "least": _LEAST,
    "no_trace": no_trace,
    "perf_counter": perf_counter,
    "trace_state": trace_state,
}


def accessor(path: Sequence[Any], position: Position) -> str | None:
    """The Python expression of a size, from the path of its argument."""
    text = ""
    for key in path:
        step = _step(key)
        if step is None:
            return None
        text += step
    roots = {"[0]": "args", "[1]": "kwargs"}
    text = roots[text[:3]] + text[3:]
    return text if position.axis is None else f"{text}.shape[{position.axis}]"


def _step(key: Any) -> str | None:
    if isinstance(key, jax.tree_util.SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, jax.tree_util.GetAttrKey):
        return f".{key.name}"
    if isinstance(key, jax.tree_util.DictKey) and type(key.key) in (str, int):
        return f"[{key.key!r}]"
    return None
