"""What a program is, and the one-line spelling that the tables use."""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export


@dataclass(frozen=True)
class Argument:
    """One array: its shape in jax.export's notation, its dtype, how its values are drawn."""

    shape: str
    dtype: str = "float32"
    values: str = "normal"


@dataclass(frozen=True)
class Program:
    """A small JAX function whose arrays have sizes named by letters.

    ``where`` holds what JAX itself asks of the sizes, as Python comparisons.
    ``tolerance`` is by how much floats may differ from those of plain JAX, relatively
    and absolutely; 0 where padding may not change a single bit of the result.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    where: tuple[str, ...] = ()
    tolerance: float = 2e-3  # additions in another order, through inverses and roots

    def __repr__(self) -> str:
        return self.name


_DTYPE_OF_VALUES = {
    "index": "int32",
    "integer": "int32",
    "permutation": "int32",
    "boolean": "bool",
    "key": "key",
}
_DTYPE = re.compile(r"(float|int|uint|complex)\d+|bfloat16|bool")


def argument(text: str) -> Argument:
    """``"b, t; int32; index:s"``: shape, then dtype and values in any order.

    Example:
        >>> argument("b, t; index:s")
        Argument(shape='b, t', dtype='int32', values='index:s')
    """
    shape, *rest = (part.strip() for part in text.split(";"))
    dtypes = [part for part in rest if _DTYPE.fullmatch(part)]
    values = [part for part in rest if not _DTYPE.fullmatch(part)] or ["normal"]
    natural = _DTYPE_OF_VALUES.get(values[0].partition(":")[0], "float32")
    return Argument(shape, (dtypes or [natural])[0], values[0])


def program(
    name: str,
    function: Callable[..., Any],
    *arguments: str,
    where: str | tuple[str, ...] = (),
    exact: bool = False,
    tolerance: float = Program.tolerance,
) -> Program:
    """A program from the short spelling; ``exact`` says that no float is accumulated."""
    where = (where,) if isinstance(where, str) else where
    tolerance = 0.0 if exact else tolerance
    return Program(name, function, tuple(map(argument, arguments)), where, tolerance)


def named(
    prefix: str, module: Any, names: str, *arguments: str, **options: Any
) -> list[Program]:
    """One program for each function of ``names``, all called on the same arguments.

    A name that this JAX does not have is left out (the table serves 0.11 and 0.12).
    """
    variant = " & ".join(text.replace("; ", ":") for text in arguments)
    return [
        program(
            f"{prefix}.{name}[{variant}]", getattr(module, name), *arguments, **options
        )
        for name in names.split()
        if hasattr(module, name)
    ]


def table(
    prefix: str, rows: Iterable[tuple], *, exact: bool | tuple[str, ...] = False
) -> list[Program]:
    """Programs ``(name, function, *arguments and assumptions)`` sharing a prefix.

    A text with ``>=``, ``<=`` or ``==`` is an assumption on sizes. ``exact`` may name
    those rows that are, with or without their variant in brackets.
    """
    return [_row(prefix, *row, exact=exact) for row in rows]


def _row(
    prefix: str,
    name: str,
    function: Callable,
    *texts: str,
    exact: bool | tuple[str, ...],
) -> Program:
    assumptions = tuple(text for text in texts if re.search("[<>=]=", text))
    arguments = [text for text in texts if text not in assumptions]
    if not isinstance(exact, bool):
        exact = name in exact or name.partition("[")[0] in exact
    full = f"{prefix}{name}"
    return program(full, function, *arguments, where=assumptions, exact=exact)


def letters(program: Program) -> tuple[str, ...]:
    """The size letters of a program, sorted."""
    texts = (" ".join((a.shape, a.values.partition(":")[2])) for a in program.arguments)
    words = re.findall(r"[a-z]+", " ".join(texts))
    return tuple(sorted({word for word in words if len(word) == 1}))


def admits(program: Program, sizes: dict[str, int]) -> bool:
    """Whether the sizes satisfy every assumption of the program."""
    return all(eval(text, {"__builtins__": {}}, dict(sizes)) for text in program.where)


def choose_sizes(program: Program, *candidates: Sequence[int]) -> dict[str, int]:
    """The first admissible sizes, in the order of the candidates.

    The i-th letter takes its values from the i-th sequence, the last letters from the
    last: ``choose_sizes(p, range(1, 20))`` are the smallest sizes of a program.
    """
    names = letters(program)
    rest = [candidates[-1]] * len(names)
    for values in itertools.product(*[*candidates, *rest][: len(names)]):
        sizes = dict(zip(names, values, strict=True))
        if admits(program, sizes):
            return sizes
    raise ValueError(f"{program.name}: no candidate sizes satisfy {program.where}")


def abstract_arguments(program: Program) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments with jax.export's symbolic sizes, under the assumptions of ``where``."""
    constraints = [re.sub(r"(\w+) % (\w+)", r"mod(\1, \2)", c) for c in program.where]
    scope = jax.export.SymbolicScope(constraints)
    return tuple(
        jax.ShapeDtypeStruct(
            jax.export.symbolic_shape(a.shape, scope=scope),
            jax.random.key(0).dtype if a.dtype == "key" else a.dtype,
        )
        for a in program.arguments
    )
