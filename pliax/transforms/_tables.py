"""Tables as plain text."""

import io
from typing import Any


def table(right: tuple[str, ...], left: tuple[str, ...]) -> Any:
    """An empty table, with columns of numbers and then columns of texts."""
    from rich import box
    from rich.table import Table  # imported late: rich costs 50 ms

    grid = Table(box=box.SIMPLE)
    for name in right:
        grid.add_column(name, justify="right", no_wrap=True)
    for name in left:
        grid.add_column(name, no_wrap=True)
    return grid


def lines_of(grid: Any) -> list[str]:
    """A table, so wide that nothing is folded: a report is searched as well as read."""
    from rich.console import Console

    text = io.StringIO()
    page = Console(
        file=text, width=10_000, color_system=None, markup=False, highlight=False
    )
    page.print(grid)
    return [line.rstrip() for line in text.getvalue().splitlines()]
