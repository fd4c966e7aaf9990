"""Why an executable was built: what this call has that no earlier call had."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ._arguments import Parameters, Static, describe_type
from ._keys import trim
from ._kinds import checked_leaves, marks_of, unmarked
from ._sizes import Sizes


# The ambient settings users change, in the order in which they are reported.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_device",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_debug_infs",
)
_SHOWN = 3  # differences written out for one executable; the rest are counted


@dataclasses.dataclass(frozen=True)
class ArrayFacts:
    """What an executable depends on in one array argument."""

    text: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    placement: str


@dataclasses.dataclass(frozen=True)
class CallFacts:
    """What an executable depends on in one call; holds no arrays.

    Attributes:
        arrays: by the name of the argument.
        statics: by the name of the argument.
        structure: the pytree of the arguments.
        ambient: settings of JAX.
        sizes: the sizes that dims names, each with the array it was read off.
        marks: on the arguments that px.dynamic and its like wrap.
        keywords: the arguments that come by name.
    """

    arrays: Mapping[str, ArrayFacts]
    statics: Mapping[str, Static]
    structure: str
    ambient: Mapping[str, str]
    sizes: Mapping[str, tuple[int, str]]
    marks: Mapping[str, str]
    keywords: frozenset[str]


def read_facts(
    parameters: Parameters, sizes: Sizes, args: tuple, kwargs: dict
) -> CallFacts:
    """The facts of one call, arguments named after the signature."""
    bare = unmarked(args, kwargs)
    leaves = checked_leaves(parameters, *bare)
    marks = marks_of([leaf.name for leaf in leaves], args, kwargs)
    named = sizes.read(leaves)
    ambient = {name: str(getattr(jax.config, name)) for name in _SETTINGS}
    return CallFacts(
        arrays={x.name: _read_array(x.value) for x in leaves},
        statics=parameters.statics(*bare),
        structure=str(jax.tree.structure(_without_statics(*bare))),
        ambient=ambient | {"mesh": str(jax.sharding.get_abstract_mesh())},
        sizes={name: (size, leaf.name) for name, (size, leaf) in named.items()},
        marks=marks,
        keywords=frozenset(kwargs),
    )


def _without_statics(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return (
        tuple(a for a in args if not isinstance(a, Static)),
        {k: a for k, a in kwargs.items() if not isinstance(a, Static)},
    )


def explain_miss(facts: CallFacts, earlier: Sequence[CallFacts]) -> str:
    """How a call differs from the earlier call that it is most like."""
    if not earlier:
        return "first call"
    candidates = [_differences(facts, old) for old in reversed(earlier)]
    found = min(candidates, key=_Differences.count).lines()
    if not found:
        return "new configuration: an ambient JAX setting changed"
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "\n".join(found[:_SHOWN] + more)


class _Differences(NamedTuple):
    """How one call differs from another: named sizes, where they show, the rest."""

    sizes: list[str]
    resized: list[str]
    others: list[str]

    def count(self) -> int:
        return len(self.sizes) + len(self.others)

    def lines(self) -> list[str]:
        if not self.sizes:
            return self.others
        first, *more = self.resized
        where = f"{first} and {len(more)} more" if more else first
        return [f"new size: {', '.join(self.sizes)} in {where}", *self.others]


def _differences(new: CallFacts, old: CallFacts) -> _Differences:
    both = {n: (new.arrays[n], old.arrays[n]) for n in new.arrays if n in old.arrays}
    named = _size_changes(new, old)
    resized = dict.fromkeys(
        n for n, pair in both.items() if _is_resized(*pair, named.values())
    )
    seen = {change for n in resized for change in _axis_changes(*both[n])}
    named = {name: change for name, change in named.items() if change in seen}
    first = next((new.sizes[n][1] for n in named if new.sizes[n][1] in resized), None)
    others = [
        *_structure_change(new, old),
        *(
            c
            for n, pair in both.items()
            for c in _array_changes(n, *pair, n in resized)
        ),
        *_static_changes(new.statics, old.statics),
        *_way_changes(new, old),
        *_mark_changes(new.marks, old.marks),
        *_setting_changes(new.ambient, old.ambient),
    ]
    texts = [f"{name}: {was} -> {now}" for name, (was, now) in named.items()]
    return _Differences(texts, sorted(resized, key=lambda n: n != first), others)


def _size_changes(new: CallFacts, old: CallFacts) -> dict[str, tuple[int, int]]:
    """The named sizes that differ, from what to what."""
    return {
        name: (old.sizes[name][0], size)
        for name, (size, _) in new.sizes.items()
        if name in old.sizes and old.sizes[name][0] != size
    }


def _axis_changes(new: ArrayFacts, old: ArrayFacts) -> set[tuple[int, int]]:
    pairs = zip(old.shape, new.shape, strict=True)
    return {(was, now) for was, now in pairs if was != now}


def _is_resized(
    new: ArrayFacts, old: ArrayFacts, changes: Collection[tuple[int, int]]
) -> bool:
    """Whether every axis that changed did so as one of the named sizes did."""
    if new.shape == old.shape or len(new.shape) != len(old.shape):
        return False
    return _axis_changes(new, old) <= set(changes)


def _array_changes(
    name: str, new: ArrayFacts, old: ArrayFacts, is_resized: bool
) -> list[str]:
    typed = f"`{name}`: {_typed(old)} -> {_typed(new)}"
    lines = []
    if new.shape != old.shape and not is_resized:
        kind = "size" if len(new.shape) == len(old.shape) else "rank"
        lines.append(f"new {kind}: {typed}")
    if new.dtype != old.dtype:
        lines.append(f"new dtype: {typed}")
    if new.weak_type != old.weak_type:
        lines.append(f"new weak type: {typed}")
    if new.placement != old.placement:
        lines.append(f"new sharding: `{name}`: {old.placement} -> {new.placement}")
    if (
        not lines and not is_resized and new.text != old.text
    ):  # a type that names its mesh axes
        lines.append(f"new sharding: {typed}")
    return lines


def _structure_change(new: CallFacts, old: CallFacts) -> list[str]:
    if new.structure == old.structure:
        return []
    added = [f"`{name}` added" for name in new.arrays if name not in old.arrays]
    removed = [f"`{name}` removed" for name in old.arrays if name not in new.arrays]
    containers = [f"{_shorten(old.structure)} -> {_shorten(new.structure)}"]
    return [f"new structure: {change}" for change in added + removed or containers]


def _static_changes(new: Mapping, old: Mapping) -> list[str]:
    lines = []
    for name in {**new, **old}:
        before, after = old.get(name), new.get(name)
        if before != after:
            texts = (repr(x.value) if x else "the default" for x in (before, after))
            was, now = map(_shorten, texts)
            lines.append(f"new static value: `{name}`: {was} -> {now}")
    return lines


def _way_changes(new: CallFacts, old: CallFacts) -> list[str]:
    """Static arguments that come another way, which JAX's cache tells apart."""
    ways = "by position", "by name"
    return [
        f"new structure: `{n}` {ways[n in new.keywords]}, not {ways[n in old.keywords]}"
        for n in new.statics
        if n in old.statics and (n in new.keywords) != (n in old.keywords)
    ]


def _mark_changes(new: Mapping[str, str], old: Mapping[str, str]) -> list[str]:
    return [
        f"new mark: `{n}`: {old.get(n, 'none')} -> {new.get(n, 'none')}"
        for n in {**new, **old}
        if new.get(n) != old.get(n)
    ]


def _setting_changes(new: Mapping, old: Mapping) -> list[str]:
    return [
        f"new configuration: {name}: {old[name]} -> {value}"
        for name, value in new.items()
        if value != old[name]
    ]


def _read_array(value: Any) -> ArrayFacts:
    aval: Any = jax.typeof(value)
    return ArrayFacts(
        text=describe_type(value),
        shape=getattr(aval, "shape", ()),
        dtype=getattr(aval, "dtype", None),
        weak_type=getattr(aval, "weak_type", False),
        placement=_placement(value),
    )


def _placement(value: Any) -> str:
    if not getattr(value, "committed", False):
        return "uncommitted"
    sharding = value.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = ", ".join(f"{k}={v}" for k, v in sharding.mesh.shape.items())
        spec = ", ".join(map(repr, trim(tuple(sharding.spec))))
        return f"P({spec}) on mesh {axes}{_memory(sharding)}"
    if len(sharding.device_set) == 1:
        return f"{next(iter(sharding.device_set))}{_memory(sharding)}"
    return repr(sharding)


def _memory(sharding: Any) -> str:
    kind = sharding.memory_kind
    return "" if kind in (None, "device", "unpinned_host") else f" in {kind}"


def _typed(array: ArrayFacts) -> str:
    return f"weak {array.text}" if array.weak_type else array.text


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
