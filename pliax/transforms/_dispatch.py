"""Finding the executable of a call without flattening its arguments.

A call's form is how many arguments come by position and which by name. For each form a
small function is generated that reads the sizes which may differ between executables,
``(args[0]['tokens'].shape[1],)``; everything else is JAX's own cache's to tell apart.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._families import Position


_LIMIT = 4096  # exact sizes remembered for one form


@dataclasses.dataclass(eq=False)
class Form:
    """The calls of one form: how to read their sizes, and what serves them.

    Attributes:
        accessors: Python expressions of the sizes that matter.
        table: from those sizes to a bound plan; None where several kinds of calls
            share the sizes and only the whole key tells them apart.
        read: from (args, kwargs) to the sizes, as a tuple.
        find: from (args, kwargs) to what the table has for them, or None.
    """

    accessors: frozenset[str]
    table: dict[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)
    read: Callable[[tuple, dict], tuple[int, ...]] = dataclasses.field(init=False)
    find: Callable[[tuple, dict], Any] = dataclasses.field(init=False)

    def __post_init__(self):
        sizes = f"({''.join(f'{a}, ' for a in sorted(self.accessors))})"
        self.read = _function(sizes)
        self.find = _function(f"get({sizes})", get=self.table.get)

    def remember(self, args: tuple, kwargs: dict, bound: Any) -> None:
        """Notes which plan serves such a call."""
        try:
            key = self.read(args, kwargs)
            known = self.table.setdefault(key, bound)
        except Exception:  # this call has no such argument; the slow way serves it
            return
        if known is not bound:
            self.table[key] = None
        if len(self.table) > _LIMIT:
            self.table.clear()


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


def _function(expression: str, **names: Any) -> Callable[[tuple, dict], Any]:
    return eval(f"lambda args, kwargs: {expression}", names)
