"""Why an executable was built: what this call has that no earlier call had."""

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from ._arguments import Parameters, Static, describe_type
from ._keys import trim
from ._ledger import Stats, Tally


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
    """What an executable depends on in one call; holds no arrays."""

    arrays: Mapping[str, ArrayFacts]
    statics: Mapping[str, Static]
    structure: str
    ambient: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One executable of a compiled function."""

    group: str
    reason: str
    facts: CallFacts
    tally: Tally


def read_facts(parameters: Parameters, args: tuple, kwargs: dict) -> CallFacts:
    """The facts of one call, arguments named after the signature."""
    statics = parameters.statics(args, kwargs)
    bare = (
        tuple(a for a in args if not isinstance(a, Static)),
        {k: a for k, a in kwargs.items() if not isinstance(a, Static)},
    )
    ambient = {name: str(getattr(jax.config, name)) for name in _SETTINGS}
    return CallFacts(
        arrays={x.name: _read_array(x.value) for x in parameters.leaves(args, kwargs)},
        statics=statics,
        structure=str(jax.tree.structure(bare)),
        ambient=ambient | {"mesh": str(jax.sharding.get_abstract_mesh())},
    )


def explain_miss(facts: CallFacts, earlier: Sequence[CallFacts]) -> str:
    """How a call differs from the earlier call that it is most like."""
    if not earlier:
        return "first call"
    candidates = [_differences(facts, old) for old in reversed(earlier)]
    found = min(candidates, key=len)
    if not found:
        return "new configuration: an ambient JAX setting changed"
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "\n".join(found[:_SHOWN] + more)


def write_report(
    title: str, entries: Iterable[Entry], outside: Stats, notes: Sequence[str]
) -> str:
    """The table of executables as plain text."""
    from rich import box, console, table  # imported late: rich costs 50 ms

    grid = table.Table(box=box.SIMPLE)
    for name in ("#", "calls", "trace ms", "lower ms", "compile ms"):
        grid.add_column(name, justify="right", no_wrap=True)
    for name in ("sizes", "compiled because"):
        grid.add_column(name, no_wrap=True)
    for number, entry in enumerate(entries, 1):
        grid.add_row(*_row(number, entry))
    # So wide that nothing is folded: a report is searched as well as read.
    text = io.StringIO()
    page = console.Console(
        file=text, width=10_000, color_system=None, markup=False, highlight=False
    )
    page.print(grid)
    table_lines = (line.rstrip() for line in text.getvalue().splitlines())
    return "\n".join([title, *table_lines, *_outside(outside), *notes])


def _row(number: int, entry: Entry) -> tuple[Any, ...]:
    from rich.text import Text

    tally = entry.tally.read()
    stages = (tally[f"{stage}_seconds"] for stage in ("trace", "lower", "compile"))
    times = (f"{1e3 * seconds:.1f}" for seconds in stages)
    # Text, because rich would read the brackets of f32[8,4] as markup.
    texts = Text(entry.group or "-"), Text(entry.reason)
    return str(number), str(tally["calls"]), *times, *texts


def _outside(outside: Stats) -> list[str]:
    if not outside.calls and not outside.traces:
        return []
    return [
        f"Without an executable of their own (inside other transformations, under "
        f"disable_jit, or failed): {outside.calls} calls, {outside.traces} traces."
    ]


def _differences(new: CallFacts, old: CallFacts) -> list[str]:
    both = [name for name in new.arrays if name in old.arrays]
    return [
        *_structure_change(new, old),
        *(c for n in both for c in _array_changes(n, new.arrays[n], old.arrays[n])),
        *_static_changes(new.statics, old.statics),
        *_setting_changes(new.ambient, old.ambient),
    ]


def _array_changes(name: str, new: ArrayFacts, old: ArrayFacts) -> list[str]:
    typed = f"`{name}`: {_typed(old)} -> {_typed(new)}"
    lines = []
    if new.shape != old.shape:
        kind = "size" if len(new.shape) == len(old.shape) else "rank"
        lines.append(f"new {kind}: {typed}")
    if new.dtype != old.dtype:
        lines.append(f"new dtype: {typed}")
    if new.weak_type != old.weak_type:
        lines.append(f"new weak type: {typed}")
    if new.placement != old.placement:
        lines.append(f"new sharding: `{name}`: {old.placement} -> {new.placement}")
    if not lines and new.text != old.text:  # a type that names its mesh axes
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
