"""What the calls of one function have shown, gathered to be saved."""

from collections import Counter
from collections.abc import Iterable
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
        calls = [(sizes, b.calls.count) for (k, sizes), b in known if k == key]
        learned = _learned(family, calls)
        if learned:
            found = merged(found, Decisions({family.kind: learned}))
    return merged(found, Decisions(sizes=_named_sizes(catalog, known)))


def _learned(family: Family, calls: list[Any]) -> dict[str, Learned]:
    """The sizes of one kind of call that changed, with how often each was seen."""
    labels = family.labels()
    places = {p: i for i, p in enumerate(family.positions)}
    found = {}
    for position, label in labels.items():
        seen: Counter[int] = Counter()
        for sizes, count in calls:
            seen[sizes[places[position]]] += count
        found[position.name] = Learned(label, dict(seen))
    return found


def _named_sizes(catalog: Catalog, known: list[Any]) -> dict[str, dict[int, int]]:
    """How many calls had which value of each size that the user named."""
    seen: dict[str, Counter[int]] = {n: Counter() for n in sorted(catalog.sizes.names)}
    for bound in {id(bound): bound for _, bound in known}.values():
        for name, value in bound.values.items():
            if name in seen:
                seen[name][value] += bound.calls.count
    return {name: dict(counts) for name, counts in seen.items() if counts}
