"""Names for sizes: ``dims={"tokens": "b, t"}`` reads b and t off each call.

The notation is that of ``jax.export.symbolic_args_specs``: one entry a dimension,
``_`` for any size, an integer for exactly that size, a trailing ``...`` for any
further dimensions.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from ._arguments import Leaf, Parameters, describe_type


_flatten = jax.tree_util.tree_flatten_with_path
_PATH = re.compile(r"""[^\W\d]\w*(\.\w+|\[\d+\]|\['[^']*'\]|\["[^"]*"\])*""")
_STEP = re.compile(r"""\['([^']*)'\]|\["([^"]*)"\]|\[(\d+)\]|\.?(\w+)""")


@dataclasses.dataclass(frozen=True)
class ShapeSpec:
    """One parsed shape: a name, an integer or None (any) per dimension."""

    text: str
    sizes: tuple[str | int | None, ...]
    is_prefix: bool

    def fits(self, rank: int) -> bool:
        """Whether an array of this rank can have such a shape."""
        if self.is_prefix:
            return rank >= len(self.sizes)
        return rank == len(self.sizes)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The parsed ``dims`` of one function: a shape for each argument path."""

    owner: str
    specs: tuple[tuple[tuple[str, ...], ShapeSpec], ...] = ()
    tuples: Mapping[tuple[str, ...], tuple[Any, str]] = MappingProxyType({})

    def read(self, leaves: Iterable[Leaf]) -> dict[str, tuple[int, Leaf]]:
        """The named sizes of a call, each with the array that it was read off first.

        Raises:
            ValueError: where the arguments do not have the shapes that dims says.
        """
        leaves, bound = list(leaves), {}
        self._refuse_tuples(leaves)
        for steps, spec in self.specs:
            for leaf in self._named_by(steps, leaves):
                self._bind(spec, leaf, bound)
        return bound

    def _refuse_tuples(self, leaves: list[Leaf]) -> None:
        """A tuple of names is a pytree of shapes: wrong where one array stands."""
        for leaf in leaves if self.tuples else ():
            if leaf.steps in self.tuples:
                given, text = self.tuples[leaf.steps]
                raise ValueError(
                    f"{self.owner}: dims gives {leaf.name} the {type(given).__name__} "
                    f"{given!r}, one shape for each of its arrays, but it is one array "
                    f'({_describe(leaf)}).\nWrite its shape as one string, "{text}".'
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
        if not spec.fits(len(shape)):
            raise ValueError(
                f"{self.owner}: dims gives {leaf.name} the shape {spec.text!r}, but it "
                f"has {len(shape)} dimensions ({_describe(leaf)}).\nWrite one entry a "
                f'dimension, or end the shape with "..." to leave the rest open.'
            )
        for place, (wanted, size) in enumerate(zip(spec.sizes, shape, strict=False)):
            if isinstance(wanted, int) and wanted != size:
                raise ValueError(
                    f"{self.owner}: dims says that dimension {place} of {leaf.name} "
                    f"is {wanted}, but it is {size} ({_describe(leaf)}).\nPass an "
                    f'array of that size, or write a name or "_" in dims.'
                )
            if isinstance(wanted, str):
                self._bind_name(wanted, size, leaf, bound)

    def _bind_name(self, name: str, size: int, leaf: Leaf, bound: dict) -> None:
        known, where = bound.setdefault(name, (size, leaf))
        if known != size:
            raise ValueError(
                f"{self.owner}: dims binds {name!r} to {known} in {_describe(where)} "
                f"and to {size} in {_describe(leaf)}.\nPass arrays whose sizes agree, "
                f"or give the two sizes different names."
            )


def group_of(sizes: Mapping[str, tuple[int, Any]]) -> str:
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
    specs, tuples = [], {}
    for path, shapes in dims.items():
        steps = _read_path(path, parameters)
        for inner, text in _flatten(shapes)[0]:
            spec = _read_shape(text, f"{owner}: dims[{path!r}]")
            specs.append((steps + _keys(inner), spec))
        for inner, node in _flatten(shapes, is_leaf=_is_like_a_shape)[0]:
            if _is_like_a_shape(node):
                text = ", ".join("_" if entry is None else entry for entry in node)
                tuples[steps + _keys(inner)] = node, text
    return Sizes(owner, tuple(specs), tuples)


def _keys(path: tuple) -> tuple[str, ...]:
    keys = (getattr(k, "key", getattr(k, "idx", None)) for k in path)
    return tuple(map(str, keys))


def _is_like_a_shape(node: Any) -> bool:
    """Whether a pytree of shapes may be meant as one, ("b", "t") as "b, t"."""
    if type(node) not in (tuple, list):
        return False
    return all(e is None or (isinstance(e, str) and "," not in e) for e in node)


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
            "\nTake it out of dims, or out of static_argnames."
        )
    if parameters.is_known and steps[0] not in known:
        names = ", ".join(sorted(map(str, known))) or "none"
        raise ValueError(
            f"{owner}: dims names {steps[0]!r}, which is not a parameter.\n"
            f"Its parameters are {names}."
        )
    return steps


def _read_shape(text: Any, where: str) -> ShapeSpec:
    if not isinstance(text, str):
        raise TypeError(
            f"{where} is {text!r} of type {type(text).__name__}.\n"
            'Write the shape as a string such as "b, t, _" or "b, ...".'
        )
    inner = text.strip()
    inner = inner[1:-1] if inner.startswith("(") and inner.endswith(")") else inner
    entries = [entry.strip() for entry in inner.split(",")]
    entries = entries[:-1] if entries[-1] == "" else entries
    is_prefix = bool(entries) and entries[-1] == "..."
    entries = entries[:-1] if is_prefix else entries
    sizes = tuple(_read_size(entry, text, where) for entry in entries)
    return ShapeSpec(text, sizes, is_prefix)


def _read_size(entry: str, text: str, where: str) -> str | int | None:
    if entry == "_":
        return None
    if entry.isdecimal() and entry.isascii():
        return int(entry)
    if entry.isidentifier():
        return entry
    raise ValueError(
        f"{where} is {text!r}, where {entry!r} cannot be read.\nAn entry is a name, an "
        f'integer or "_" (any size), and "..." may stand last; expressions of names '
        f"are not read."
    )


def _describe(leaf: Leaf) -> str:
    return f"{leaf.name}: {describe_type(leaf.value)}"
