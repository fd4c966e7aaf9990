"""What a compiled function tells of itself: its executables, guards and constants."""

from typing import Any

from ._catalog import Catalog
from ._executables import Executables
from ._execution import Plan
from ._ledger import Stats
from ._tables import lines_of, table


def write_report(executables: Executables) -> str:
    """The table of executables as plain text, and what is to be said of the traces."""
    catalog = executables.catalog
    # Before anything else: another thread may build more, which have no row then.
    title, plans = _title(catalog), executables.all
    grid = table(
        ("#", "calls", "trace ms", "lower ms", "compile ms", "waste"),
        ("sizes", "compiled because"),
    )
    for number, plan in enumerate(plans, 1):
        grid.add_row(*_row(number, plan))
    outside = _outside(catalog.ledger.outside())
    return "\n".join([title, *lines_of(grid), *outside, *_notes(catalog)])


def _title(catalog: Catalog) -> str:
    stats = catalog.ledger.read()
    return (
        f"{catalog.parameters.owner}: {stats.calls} calls, {stats.traces} traces, "
        f"{stats.compilations} compilations"
    )


def _row(number: int, plan: Plan) -> tuple[Any, ...]:
    from rich.text import Text

    tally = plan.tally.read()
    stages = (tally[f"{stage}_seconds"] for stage in ("trace", "lower", "compile"))
    times = (f"{1e3 * seconds:.1f}" for seconds in stages)
    # Text, because rich would read the brackets of f32[8,4] as markup.
    texts = Text(plan.group or "-"), Text(plan.reason)
    waste = f"{plan.tally.waste:.1%}" if tally["held"] else "-"
    return str(number), str(tally["calls"]), *times, waste, *texts


def _outside(outside: Stats) -> list[str]:
    if not outside.calls and not outside.traces:
        return []
    return [
        f"Without an executable of their own (inside other transformations, under "
        f"disable_jit, of classes that hold nothing but arrays, or failed): "
        f"{outside.calls} calls, {outside.traces} traces."
    ]


def _notes(catalog: Catalog) -> list[str]:
    """What is no executable's affair: waste to expect, guards, constants, refusals."""
    entries = catalog.entries
    traces = [e.trace for e in entries if e.trace]
    notes = catalog.expected_waste()
    notes += dict.fromkeys(text for e in entries for text in e.reading.legend)
    guards = (str(guard) for trace in traces for guard in trace.guards)
    notes += [f"guard: {text}" for text in dict.fromkeys(guards)]
    collapsed = (x for t in traces for x in t.assumptions.collapses.notes)
    notes += [f"specialised: {text}" for text in dict.fromkeys(collapsed)]
    notes += [f"constant: {text}" for text in dict.fromkeys(catalog.fixed)]
    born = (text for trace in traces for text in trace.born_from_data)
    notes += [f"born from data: {text}" for text in dict.fromkeys(born)]
    exact = (f"{name}: {why}" for e in entries for name, why in e.exact.items())
    notes += [f"exact sizes of {text}" for text in dict.fromkeys(exact)]
    refusals = dict.fromkeys(e.refusal for e in entries if e.refusal)
    return notes + [f"not padded: {text}" for text in refusals]
