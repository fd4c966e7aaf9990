"""What the calls of one function have shown, gathered to be saved."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._catalog import Catalog
from ._decisions import (
    Decisions,
    Learned,
    as_path,
    function_name,
    merged,
    write_decisions,
)
from ._families import Family
from ._ledger import Calls


def save_decisions(path: Any, catalog: Catalog, known: Iterable[Any]) -> None:
    """Saves what calls have shown to a file.

    Args:
        path: of the file; None for the one that the decisions were read from.
        catalog: the traces of the function, by kind of call.
        known: ((key of a family, sizes), Bound) of every exact call.
    """
    owner = catalog.parameters.owner
    path = catalog.decisions.path if path is None else path
    if path is None:
        raise ValueError(
            f"{owner}: save_decisions has no path.\nPass one here, or "
            "decisions=path to px.compile."
        )
    target = as_path(path, f"{owner}: the path of save_decisions")
    found = merged(catalog.decisions, _gathered(catalog, list(known)))
    write_decisions(target, function_name(catalog.function), found, owner)


def _gathered(catalog: Catalog, known: list[Any]) -> Decisions:
    found = Decisions()
    for key, family in list(catalog.families.items()):
        calls = {sizes: b.calls for (k, sizes), b in known if k == key}
        learned = _learned(family, calls)
        if learned:
            found = merged(found, Decisions({family.kind: learned}))
    return merged(found, Decisions(sizes=_named_sizes(catalog, known)))


def _shared_out(calls: Sequence[Calls]) -> list[int]:
    """How many each choice of sizes had; those that differ in no shape share them."""
    sharing, before, counts = Counter(map(id, calls)), Counter[int](), []
    for shared in calls:
        counts.append((shared.count + before[id(shared)]) // sharing[id(shared)])
        before[id(shared)] += 1
    return counts


def _learned(
    family: Family, calls: Mapping[tuple[int, ...], Calls]
) -> dict[str, Learned]:
    """The sizes of one kind of call that changed, with how often each was seen."""
    labels = family.labels()
    places = {p: i for i, p in enumerate(family.positions)}
    counts = _shared_out(list(calls.values()))
    found = {}
    for position, label in labels.items():
        seen: Counter[int] = Counter()
        for sizes, count in zip(calls, counts, strict=True):
            seen[sizes[places[position]]] += count
        found[position.name] = Learned(label, dict(seen))
    return found


def _named_sizes(catalog: Catalog, known: list[Any]) -> dict[str, dict[int, int]]:
    """How many calls had which value of each size that the user named."""
    seen: dict[str, Counter[int]] = {n: Counter() for n in sorted(catalog.sizes.names)}
    bounds = list({id(bound): bound for bound in dict(known).values()}.values())
    counts = _shared_out([bound.calls for bound in bounds])
    for bound, count in zip(bounds, counts, strict=True):
        for name, value in bound.values.items():
            if name in seen:
                seen[name][value] += count
    return {name: dict(counts) for name, counts in seen.items() if counts}
