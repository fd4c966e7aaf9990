"""``px.infer_sizes``: all classes of input sizes that a function distinguishes.

A trace at some sizes gives the branches that they take, and with them all sizes that go
the same way (`_size_cells.py`). Z3 finds the smallest sizes that are in none of the
cells found so far, the function is traced there, and so on until no sizes are left.
Cells that differ in nothing the user could see are joined (`_size_trees.py`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pliax.core.constraints import in_python
from pliax.core.provenance import NOWHERE, Place
from pliax.core.symbols import Symbol

from ._arguments import Leaf, check_call, describe_callable, read_parameters
from ._options import read_where
from ._proofs import Facts, Prover, Undecided, every, holds
from ._size_cells import Cell, Program, cell_at
from ._size_conditions import bounds_of
from ._size_trees import merge, shorten
from ._sizes import Sizes, origins_of, read_sizes
from ._tables import lines_of, table


_TIMEOUT = 2000  # ms for one question to Z3
_SHOWN = 100  # letters of the results in a table; `SizeClass.results` has all


@dataclasses.dataclass(frozen=True)
class SizeClass:
    """Sizes with which a function does the same.

    Attributes:
        conditions: what holds of these sizes, and of no others; none if of all.
        example: the smallest of them: of least sum, then of least first name.
        outcome: "ok" or "error".
        results: the types of what the function returns, "f32[b, 2 * t]".
        error: the type and the first line of what it raises for the example.
        place: the line of the user's code that raises.
    """

    conditions: tuple[str, ...]
    example: Mapping[str, int]
    outcome: str
    results: str = ""
    error: str = ""
    place: Place = NOWHERE

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether sizes are in the class, if they are in the range of all."""
        return all(holds(text, dict(sizes)) for text in self.conditions)


@dataclasses.dataclass(frozen=True)
class SizeClasses:
    """What :func:`infer_sizes` found; printed as a table.

    Attributes:
        owner: the name of the function.
        classes: by their examples, the smallest first. They do not overlap.
        is_complete: whether all sizes are in one of them.
        note: why not, and what had to be traced size by size.
        traces: how often the function was traced.
    """

    owner: str
    classes: tuple[SizeClass, ...]
    is_complete: bool
    note: str
    traces: int

    def find(self, sizes: Mapping[str, int]) -> SizeClass | None:
        """The class of given sizes."""
        return next((c for c in self.classes if c.holds(sizes)), None)

    def __str__(self) -> str:
        from rich.text import Text  # rich would read the brackets of f32[8] as markup

        grid = table(("#",), ("sizes", "smallest", "outcome"))
        for number, found in enumerate(self.classes, 1):
            parts = (f"({c})" if " or " in c else c for c in found.conditions)
            conditions = " and ".join(parts) or "all"
            line = f"{found.error}\nat {found.place}" if found.error else _short(found)
            row = (conditions, _values(found.example), line)
            grid.add_row(str(number), *map(Text, row))
        count = len(self.classes)
        title = f"{self.owner}: {count} {'class' if count == 1 else 'classes'} of sizes"
        return "\n".join([title, *lines_of(grid), *filter(None, [self.note])])


def infer_sizes(
    f: Callable[..., Any],
    *args: Any,
    dims: Mapping[str, Any] | None = None,
    where: Any = (),
    limit: int = 64,
    **kwargs: Any,
) -> SizeClasses:
    """Finds all classes of input sizes that a function distinguishes.

    Two classes differ in the shapes of the results, in the error that is raised, or in
    an answer that the function's own code got about sizes. Nothing is compiled or run.
    All named sizes are at least 1.

    Args:
        f: the function. It is traced once, or more often, for each class.
        *args: arguments, arrays or `jax.ShapeDtypeStruct`s, as an example of a call;
            any sizes that fit `dims` will do. Python numbers are
            part of the function.
        dims: names of sizes, from a parameter name or path to a shape ("b, t, _"), as
            in :func:`compile`. A `Dim` says which sizes there are.
        where: what is known of the sizes, "t <= 4096" or "b % 8 == 0".
        limit: the most traces. JAX distinguishes more sizes than the result shows, so
            there are more traces than classes; a function that reads a size as a number
            (`range(n)`) has a class for each value.
        **kwargs: further arguments, by name.

    Returns:
        :class:`SizeClasses`. They are complete, or `note` says what may be missing.

    Raises:
        ImportError: where Z3 is missing: `pip install "pliax[verify]"`.
        TypeError: where an argument is missing, or one too many, or dims is.
        ValueError: where dims does not fit the arguments, or no sizes satisfy `where`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> def f(x, y):
        ...     return x + y
        >>> dims = {"x": "a", "y": "b"}
        >>> found = px.infer_sizes(f, jnp.ones(3), jnp.ones(3), dims=dims)
        >>> for c in found.classes:
        ...     print(" and ".join(c.conditions), c.example, c.results or c.error)
        a == 1 {'a': 1, 'b': 1} f32[b]
        a != 1 and b == 1 {'a': 2, 'b': 1} f32[a]
        b != 1 and a == b {'a': 2, 'b': 2} f32[a]
        a != 1 and b != 1 and a != b {'a': 2, 'b': 3} TypeError: add got incompatible...
    """
    owner = f"px.infer_sizes({describe_callable(f)})"
    if not callable(f):
        raise TypeError(f"{owner}: {f!r} is not callable.\nPass the function first.")
    if dims is None:
        raise TypeError(
            f"{owner}: there are no dims, which name sizes.\nPass a shape for each "
            'parameter whose sizes may change, dims={"x": "b, _"} for example.'
        )
    if type(limit) is not int or limit < 1:
        raise ValueError(f"{owner}: limit is {limit!r}.\nPass an integer, at least 1.")
    check_call(f, args, kwargs, owner)
    program = _program(f, (args, kwargs), dims, where, owner)
    facts = Facts.of(program.assumptions(dict.fromkeys(_names(program), 1)))
    cells, gap = _explore(program, Prover(facts, _TIMEOUT, owner), limit)
    if not cells and not gap:
        raise ValueError(
            f"{owner}: no sizes satisfy "
            f"{', '.join(map(in_python, program.constraints))}.\n"
            "Drop a condition, or widen a Dim."
        )
    prover = Prover(facts, _TIMEOUT, owner)
    classes = [_class_of(cell, program, prover) for cell in merge(cells, prover)]
    classes.sort(key=lambda c: (sum(c.example.values()), *c.example.values()))
    notes = dict.fromkeys(filter(None, [*(cell.note for cell in cells), gap]))
    return SizeClasses(owner, tuple(classes), not gap, "\n".join(notes), len(cells))


def _program(
    f: Callable[..., Any], given: tuple[tuple, dict], dims: Any, where: Any, owner: str
) -> Program:
    parameters, _ = read_parameters(f, (), (), owner)
    sizes = read_sizes(dims, parameters)
    leaves = parameters.leaves(*given)
    for leaf in leaves:
        if not isinstance(leaf.value, int | float | complex | jax.ShapeDtypeStruct):
            _check_array(leaf, owner)
    sizes.read(leaves)
    known = read_where(where, sizes, owner)
    of_dims = (c for dim in sizes.dims.values() for c in dim.constraints)
    shapes = tuple(shape for _, shape in sizes.shapes(leaves))
    expressions = {n for shape in shapes for n in shape if isinstance(n, str)}
    derived = sorted(n for n in expressions if not n.isidentifier())
    constraints = (*known, *of_dims, *(f"{n} >= 0" for n in derived))
    origins = dict(sorted(origins_of(sizes.shapes(leaves)).items()))
    symbols = [_symbol(n, sizes, known, origin) for n, origin in origins.items()]
    return Program(f, given, shapes, tuple(symbols), constraints, owner)


def _check_array(leaf: Leaf, owner: str) -> None:
    try:
        jax.typeof(leaf.value)
    except TypeError:
        raise TypeError(
            f"{owner}: {leaf.name} is {leaf.value!r} of type "
            f"{type(leaf.value).__name__}.\n"
            "Pass an array, a jax.ShapeDtypeStruct or a number."
        ) from None


def _symbol(name: str, sizes: Sizes, known: tuple[str, ...], origin: str) -> Symbol:
    dim = sizes.dims.get(name)
    low, high = bounds_of(name, known)
    if dim is not None:
        low = max(low, dim.min)
        high = min((n for n in (high, dim.largest) if n is not None), default=None)
    return Symbol(name, None, origin, low=low, high=high)


def _names(program: Program) -> list[str]:
    return [symbol.name for symbol in program.symbols]


def _explore(program: Program, prover: Prover, limit: int) -> tuple[list[Cell], str]:
    """The cells of a program, and why there may be more."""
    cells: list[Cell] = []
    try:
        while (sizes := prover.smallest()) is not None:
            if len(cells) == limit:
                return cells, (
                    f"Incomplete: after {limit} traces other sizes remain, such as "
                    f"{_values(sizes)}. Raise limit, or bound sizes with where."
                )
            cells.append(cell_at(program, sizes))
            prover.exclude(every(cells[-1].conditions))
    except Undecided:
        return cells, "Incomplete: Z3 could not tell whether other sizes remain."
    return cells, ""


def _class_of(cell: Cell, program: Program, prover: Prover) -> SizeClass:
    conditions, outcome = shorten(cell.path, prover), cell.outcome
    try:
        example = prover.smallest(*conditions) or cell.example
    except Undecided:
        example = cell.example
    if outcome.error and example != cell.example:
        outcome = cell_at(program, example).outcome  # its text may be about sizes
    return SizeClass(
        conditions,
        example,
        outcome="error" if outcome.error else "ok",
        results="" if outcome.error else str(outcome.results),
        error=outcome.error,
        place=outcome.place,
    )


def _short(found: SizeClass) -> str:
    text = found.results
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _values(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
