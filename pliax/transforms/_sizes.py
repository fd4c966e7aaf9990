"""Names for sizes: ``dims={"tokens": "b, t"}`` reads b and t off each call.

The notation is that of ``jax.export.symbolic_args_specs``: one entry a dimension, a
name or an expression of names such as ``2*b``, ``_`` for any size, an integer for
exactly that size, a trailing ``...`` for any further dimensions.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from pliax.core.marks import Dim
from pliax.core.size_expressions import evaluate_text

from ._arguments import Leaf, Parameters, describe_type
from ._shape_specs import ShapeSpec, names_in, read_spec


_flatten = jax.tree_util.tree_flatten_with_path
_PATH = re.compile(r"""[^\W\d]\w*(\.\w+|\[\d+\]|\['[^']*'\]|\["[^"]*"\])*""")
_STEP = re.compile(r"""\['([^']*)'\]|\["([^"]*)"\]|\[(\d+)\]|\.?(\w+)""")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The parsed ``dims`` of one function: a shape for each argument path."""

    owner: str
    specs: tuple[tuple[tuple[str, ...], ShapeSpec], ...] = ()
    tuples: Mapping[tuple[str, ...], tuple[Any, str]] = MappingProxyType({})
    dims: Mapping[str, Dim] = MappingProxyType({})

    @property
    def names(self) -> frozenset[str]:
        """Every named size."""
        texts = (n for _, spec in self.specs for n in (*spec.sizes, *spec.last))
        texts = (text for text in texts if isinstance(text, str))
        return frozenset(name for text in texts for name in names_in(text))

    def read(self, leaves: Iterable[Leaf]) -> dict[str, tuple[Any, Leaf]]:
        """The named sizes of a call, each with the array that it was read off first.

        Raises:
            ValueError: where the arguments do not have the shapes that dims says.
        """
        leaves, bound = list(leaves), {}
        self._refuse_tuples(leaves)
        named = [
            (spec, leaf)
            for steps, spec in self.specs
            for leaf in self._named_by(steps, leaves)
        ]
        for spec, leaf in named:
            self._bind(spec, leaf, bound)
        for spec, leaf in named:
            self._solve(spec, leaf, bound)
        return bound

    def shapes(self, leaves: list[Leaf]) -> list[tuple[Leaf, tuple[str | int, ...]]]:
        """Each array with its shape, names and expressions where dims has them."""
        named: dict[tuple[str, ...], tuple[str | int, ...]] = {}
        for steps, spec in self.specs:
            for leaf in self._named_by(steps, leaves):
                shape = np.shape(leaf.value)
                pairs = zip(spec.of(len(shape)), shape, strict=True)
                named[leaf.steps] = tuple(n if w is None else w for w, n in pairs)
        return [(x, named.get(x.steps, np.shape(x.value))) for x in leaves]

    def _refuse_tuples(self, leaves: list[Leaf]) -> None:
        """A tuple of names is a pytree of shapes: wrong where one array stands."""
        for leaf in leaves if self.tuples else ():
            if leaf.steps in self.tuples:
                given, text = self.tuples[leaf.steps]
                raise ValueError(
                    f"{self.owner}: dims gives {leaf.name} the {type(given).__name__} "
                    f"{given!r}, one shape for each of its arrays, but it is one array "
                    f"({_describe(leaf)}).\n{text}"
                )

    def _named_by(self, steps: tuple[str, ...], leaves: list[Leaf]) -> list[Leaf]:
        found = [leaf for leaf in leaves if leaf.steps[: len(steps)] == steps]
        siblings = [leaf.name for leaf in leaves if leaf.steps[0] == steps[0]]
        if not found and len(steps) > 1 and siblings:
            raise ValueError(
                f"{self.owner}: dims names {'.'.join(steps)!r}, but this call has no "
                f"array there.\nThe arrays of {steps[0]!r} are {', '.join(siblings)}."
            )
        return found

    def _bind(self, spec: ShapeSpec, leaf: Leaf, bound: dict) -> None:
        shape = np.shape(leaf.value)
        self._check_rank(spec, leaf, len(shape))
        pairs = zip(spec.of(len(shape)), shape, strict=True)
        for place, (wanted, size) in enumerate(pairs):
            if isinstance(wanted, int) and wanted != size:
                raise ValueError(
                    f"{self.owner}: dims says that dimension {place} of {leaf.name} "
                    f"is {wanted}, but it is {size} ({_describe(leaf)}).\nPass an "
                    f'array of that size, or write a name or "_" in dims.'
                )
            if isinstance(wanted, str) and wanted.isidentifier():
                self._bind_name(wanted, size, leaf, bound)

    def _check_rank(self, spec: ShapeSpec, leaf: Leaf, rank: int) -> None:
        """Refuses an array that has not the dimensions which are named."""
        what = f"{self.owner}: dims gives {leaf.name} the shape {spec.text!r}, but it"
        if not spec.fits(rank):
            remedy = "Write one entry a dimension, or end the shape with "
            remedy += '"..." to leave the rest open.'
            if spec.last and rank == 0:
                remedy = "Leave it out: it has no axis to name."
            elif spec.last:
                remedy = f"Count axes from 0 to {rank - 1}, or from -1 to {-rank}."
            raise ValueError(
                f"{what} has {rank} dimensions ({_describe(leaf)}).\n{remedy}"
            )
        twice = spec.twice(rank)
        if twice is not None:
            raise ValueError(
                f"{what} has {rank} dimensions ({_describe(leaf)}), of which the axis "
                f"{twice} is {twice - rank} as well.\nName it once."
            )

    def _solve(self, spec: ShapeSpec, leaf: Leaf, bound: dict) -> None:
        """The names that appear in expressions only, and what expressions must be."""
        shape = np.shape(leaf.value)
        pairs = zip(spec.of(len(shape)), shape, strict=True)
        for place, (wanted, size) in enumerate(pairs):
            if not isinstance(wanted, str) or wanted.isidentifier():
                continue
            unknown = names_in(wanted) - bound.keys()
            known = {name: value for name, (value, _) in bound.items()}
            if len(unknown) > 1 or not all(_is_line(wanted, n, known) for n in unknown):
                raise ValueError(
                    f"{self.owner}: dims gives dimension {place} of {leaf.name} as "
                    f"{wanted!r}, from which {' and '.join(sorted(unknown))} cannot be "
                    f"read.\nName each of them alone in another dimension."
                )
            for name in unknown:
                value = solution(wanted, name, size, known)
                if value is not None:
                    bound[name], known[name] = (value, leaf), value
            if names_in(wanted) - known.keys() or _value(wanted, known) != size:
                raise ValueError(
                    f"{self.owner}: dims says that dimension {place} of {leaf.name} "
                    f"is {wanted}, but it is {size} ({_describe(leaf)})"
                    f"{_where(wanted, bound)}.\nPass arrays whose sizes agree, or "
                    f"write another expression."
                )

    def _bind_name(self, name: str, size: Any, leaf: Leaf, bound: dict) -> None:
        known, where = bound.setdefault(name, (size, leaf))
        if known != size:
            raise ValueError(
                f"{self.owner}: dims binds {name!r} to {known} in {_describe(where)} "
                f"and to {size} in {_describe(leaf)}.\nPass arrays whose sizes agree, "
                f"or give the two sizes different names."
            )


def origins_of(shapes: Iterable[tuple[Leaf, tuple[Any, ...]]]) -> dict[str, str]:
    """For each named size, the first axis that it is read off: "x.shape[0]"."""
    found: dict[str, str] = {}
    for leaf, shape in shapes:
        for axis, text in enumerate(shape):
            for name in names_in(text) if isinstance(text, str) else ():
                found.setdefault(name, f"{leaf.name}.shape[{axis}]")
    return found


def group_of(sizes: Mapping[str, tuple[Any, Any]]) -> str:
    """The size class of a call, such as ``b=8, t=128``; "" without names."""
    return ", ".join(f"{name}={size}" for name, (size, _) in sizes.items())


def read_sizes(dims: Mapping[str, Any] | None, parameters: Parameters) -> Sizes:
    """Parses ``dims`` and checks its paths against the signature.

    Raises:
        TypeError: where dims is not a mapping, or a shape is not a string.
        ValueError: for an unknown parameter or a shape that cannot be read.
    """
    owner = parameters.owner
    if dims is None:
        return Sizes(owner)
    if not isinstance(dims, Mapping):
        raise TypeError(
            f"{owner}: dims is {dims!r} of type {type(dims).__name__}.\n"
            'Pass a mapping from parameter names to shapes, {"x": "b, t, _"}.'
        )
    specs, tuples, named = [], {}, {}
    for path, shapes in dims.items():
        steps, where = _read_path(path, parameters), f"{owner}: dims[{path!r}]"
        for inner, given in _flatten(shapes, is_leaf=_is_by_axis)[0]:
            for dim in _dims_in(given):
                if named.setdefault(dim.name, dim) != dim:
                    raise ValueError(
                        f"{where} has another Dim({dim.name!r}) than was given before."
                        "\nUse one Dim object for one name."
                    )
            specs.append((steps + _keys(inner), read_spec(given, where)))
        for inner, node in _flatten(shapes, is_leaf=_is_like_a_shape)[0]:
            if _is_like_a_shape(node):
                tuples[steps + _keys(inner)] = node, _as_one_shape(node)
    return Sizes(owner, tuple(specs), tuples, named)


def _is_by_axis(node: Any) -> bool:
    """Whether a node gives single axes: {1: Dim("t")}."""
    return isinstance(node, dict) and any(type(k) is int for k in node)


def _dims_in(given: Any) -> list[Dim]:
    values = given.values() if isinstance(given, dict) else [given]
    return [x for x in values if isinstance(x, Dim)]


def _keys(path: tuple) -> tuple[str, ...]:
    kinds = ("key", "idx", "name")  # of a dictionary, a sequence, a dataclass
    found = (next(getattr(k, n) for n in kinds if hasattr(k, n)) for k in path)
    return tuple(map(str, found))


def _is_like_a_shape(node: Any) -> bool:
    """Whether a pytree of shapes may be meant as one, ("b", "t") as "b, t"."""
    if type(node) not in (tuple, list):
        return False
    kinds = Dim | None
    return all(
        (isinstance(e, str) and "," not in e) or isinstance(e, kinds) for e in node
    )


def _as_one_shape(entries: Any) -> str:
    """What to write for entries of a pytree that were meant as one shape."""
    dims = [(i, e.name) for i, e in enumerate(entries) if isinstance(e, Dim)]
    if not dims:
        text = ", ".join("_" if entry is None else entry for entry in entries)
        return f'Write its shape as one string, "{text}".'
    by_axis = ", ".join(f'{i}: Dim("{name}", …)' for i, name in dims)
    return f"Write which axis is which, {{{by_axis}}}."


def _read_path(path: Any, parameters: Parameters) -> tuple[str, ...]:
    owner = parameters.owner
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ValueError(
            f"{owner}: dims has the key {path!r}, which is not an argument path.\n"
            "Write a parameter name, or a path such as \"batch['tokens'][0]\"."
        )
    steps = tuple(next(filter(None, m.groups()), "") for m in _STEP.finditer(path))
    known = parameters.named | {parameters.rest, parameters.extra} - {None}
    if steps[0] in parameters.static:
        raise ValueError(
            f"{owner}: dims names {steps[0]!r}, which is static and has no size."
            "\nTake it out of dims, or let it be no static argument."
        )
    if parameters.is_known and steps[0] not in known:
        names = ", ".join(sorted(map(str, known))) or "none"
        raise ValueError(
            f"{owner}: dims names {steps[0]!r}, which is not a parameter.\n"
            f"Its parameters are {names}."
        )
    return steps


def _value(expression: str, sizes: Mapping[str, int]) -> int:
    return evaluate_text(_in_order(expression), sizes)


@functools.lru_cache(maxsize=1024)  # half of what a call of a new integer takes
def _in_order(expression: str) -> str:
    """An expression as `jax.export` writes it."""
    (found,) = jax.export.symbolic_shape(expression)
    return str(found)


def solution(
    expression: str, name: str, size: int, known: Mapping[str, int]
) -> int | None:
    """The value of a name under which a linear expression has a size."""
    at = [_value(expression, {**known, name: n}) for n in (1, 2)]
    slope = at[1] - at[0]
    if slope == 0 or (size - at[0]) % slope:
        return None
    return 1 + (size - at[0]) // slope


def _is_line(expression: str, name: str, known: Mapping[str, int]) -> bool:
    """Whether an expression is linear in a name: not t**2, t // 2 or max(t, 2)."""
    places = (1, 2, 3, 4, _FAR)
    at = [_value(expression, {**known, name: n}) for n in places]
    return at[1] != at[0] and all(
        x - at[0] == (at[1] - at[0]) * (n - 1) for n, x in zip(places, at, strict=True)
    )


_FAR = 2**31 - 1  # where nothing that is no line lies on that of its first values


def _where(expression: str, bound: Mapping[str, tuple[int, Leaf]]) -> str:
    known = [f"{n} = {bound[n][0]}" for n in sorted(names_in(expression)) if n in bound]
    return f" where {', '.join(known)}" if known else ""


def _describe(leaf: Leaf) -> str:
    return f"{leaf.name}: {describe_type(leaf.value)}"
