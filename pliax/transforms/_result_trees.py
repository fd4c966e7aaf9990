"""Sizes in the structure of a result: lengths kept as metadata, pullbacks of `jax.vjp`.

An executable serves many sizes, and its result has one structure. A size in it becomes
a constant where it can be replaced; else the trace ends, and each size has its own.
"""

import functools
import sys
import types
from typing import Any

import jax
import numpy as np

from pliax.core.callers import is_inside
from pliax.core.dims import Size
from pliax.core.guards import Assumptions


_MOST = 10_000  # objects that are looked at
_OPAQUE = (type, types.ModuleType, str, bytes, int, float, np.ndarray, jax.Array)
_CONTAINERS = (tuple, list, set, frozenset)


def without_sizes(tree: Any, assumptions: Assumptions) -> Any:
    """The structure of a result, with the values of sizes that its nodes hold.

    Args:
        tree: as `jax.tree.structure` gives it.
        assumptions: of the trace, which is from now on for those values.

    Raises:
        ConstraintViolationError: where a size is declared dynamic.
        TypeError: where a node holds one out of reach, in a closure.
    """
    node = tree.node_data()
    if node is None:
        return tree
    kind, data = node
    given = tree.children()
    children = [without_sizes(child, assumptions) for child in given]
    holds_a_size = _holds_a_size(data)
    if holds_a_size:
        data = _replaced(data, assumptions)
    elif all(a is b for a, b in zip(children, given, strict=True)):
        return tree
    if holds_a_size and _holds_a_size(data):
        raise TypeError(f"a result, {kind.__name__}, holds a size where no array is")
    registry = jax.tree_util.default_registry
    return type(tree).from_node_data_and_children(registry, (kind, data), children)


def _replaced(data: Any, assumptions: Assumptions) -> Any:
    """The same with integers for sizes in tuples, lists and dictionaries."""
    if isinstance(data, Size):
        use = "as static data of a result"
        return assumptions.values.as_integer(data, use, _caller())
    if type(data) in (tuple, list):
        return type(data)(_replaced(x, assumptions) for x in data)
    if type(data) is dict:
        return {k: _replaced(x, assumptions) for k, x in data.items()}
    return data


def _caller() -> types.FrameType:
    """The frame that called the function whose result it is."""
    frame = sys._getframe()
    while is_inside(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _holds_a_size(data: Any) -> bool:
    """Whether a size can be reached from an object."""
    waiting, seen = [data], {id(data)}
    while waiting and len(seen) < _MOST:
        x = waiting.pop()
        if isinstance(x, Size):
            return True
        new = [y for y in _parts(x) if id(y) not in seen]
        seen.update(map(id, new))
        waiting += new
    return False


def _parts(x: Any) -> list[Any]:
    """What an object consists of."""
    if isinstance(x, _OPAQUE):
        return []
    if isinstance(x, _CONTAINERS):
        return list(x)
    if isinstance(x, dict):
        return [*x, *x.values()]
    if isinstance(x, functools.partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if _is_full(cell)]
        return [*cells, x.__defaults__, x.__kwdefaults__]
    slots = [s for kind in type(x).__mro__ for s in getattr(kind, "__slots__", ())]
    values = [getattr(x, s) for s in slots if isinstance(s, str) and hasattr(x, s)]
    return [*values, getattr(x, "__dict__", None)]


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
