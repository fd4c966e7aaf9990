"""One trace of a compiled function, and the sizes that it is right for.

Entry : sizes  ->  the values of its symbols, or None
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pliax.core.dims import LARGEST
from pliax.core.guards import Guard

from ._families import Reading, magnitudes
from .tracing import SymbolicTrace


@dataclasses.dataclass(eq=False)
class Entry:
    """One trace of the function, and what it is right for.

    Attributes:
        reading: which sizes of a call are symbols.
        trace: the program; None where no size is a symbol, so that JAX traces it.
        function: the user's function, for that case.
        tree: the structure of the arguments.
        refusal: why it is not padded; None while it may be.
        reason: why it was traced.
        tally: the cost of tracing it, until its first plan takes that over.
        shared: the largest Python integer, but for its sign, that has no executable of
            its own; None where all share one, so that what is computed of any of them
            fits an int32.
        exact: sizes that have executables of their own though the rest is padded, and
            why.
    """

    reading: Reading
    trace: SymbolicTrace | None
    function: Callable[..., Any]
    tree: Any
    refusal: str | None = None
    reason: str = ""
    tally: Any = None
    shared: int | None = None
    exact: dict[str, str] = dataclasses.field(default_factory=dict)

    def match(self, sizes: Sequence[int]) -> dict[str, int] | None:
        """The symbols' values in a call that this entry serves."""
        values = self.reading.bind(sizes)
        if values is None or self.trace is None:
            return values
        holds = all(guard.holds(values) for guard in self.trace.guards)
        return values if holds else None

    @property
    def unshaped(self) -> set[str]:
        """The symbols that no shape depends on."""
        if self.trace is None:
            return set()
        shaped = self.trace.shaped_by - self.trace.equal.keys()
        return {s.name for s in self.reading.symbols if s.name not in shaped}

    def narrow(self, values: Mapping[str, int]) -> bool:
        """Lets fewer Python integers share an executable, as something is too large.

        Args:
            values: of the symbols in a call.

        Returns:
            False where those of the call share none anyway.
        """
        own = self.reading.integers(values)
        own = [abs(own[name]) for name in own.keys() & self.unshaped]
        if self.shared is None:
            self.shared = LARGEST
            return bool(own)
        sharing = [n for n in own if n <= self.shared]
        self.shared = magnitudes(max(sharing))[0] if sharing else self.shared
        return bool(sharing)

    def near(self, name: str, value: int, whole: tuple[int, int]) -> tuple[int, int]:
        """The values of a symbol without a bucket that share an executable."""
        number = self.reading.integers({name: value}).get(name)
        if self.shared is None or number is None:
            return whole
        if abs(number) > self.shared:
            return value, value
        most, zero = magnitudes(abs(number))[1], value - number
        return max(whole[0], zero - most), min(whole[1], zero + most)

    def serves_only(self, sizes: Sequence[int]) -> bool:
        """Whether it is for these sizes and no others."""
        return self.reading.wanted == tuple(sizes)

    def failed_guard(self, sizes: Sequence[int]) -> Guard | None:
        """The first guard that a call breaks."""
        values = self.reading.bind(sizes)
        guards = self.trace.guards if self.trace and values is not None else ()
        return next((g for g in guards if not g.holds(values or {})), None)
