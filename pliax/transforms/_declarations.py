"""What the user says of the sizes of one function, and whether a call agrees.

Declarations : the sizes of a kind of call  ->  Declared, what the user says of each
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pliax.core.constraints import in_python
from pliax.core.dims import Size
from pliax.core.marks import holds
from pliax.core.size_expressions import at_hand
from pliax.core.symbols import Symbol

from ._arguments import Leaf, Parameters
from ._families import Declared, Position
from ._kinds import marks
from ._options import Options
from ._size_conditions import bounds_of
from ._sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Declarations:
    """What the user says of sizes: by dims, by Dims, by conditions, by marks.

    Attributes:
        parameters: the function's signature.
        sizes: the names of its sizes.
        options: what else the user asked.
    """

    parameters: Parameters
    sizes: Sizes
    options: Options

    @property
    def symbols(self) -> list[Symbol]:
        """Of all names, in their order."""
        return [self.symbol(name) for name in sorted(self.sizes.names)]

    @property
    def constraints(self) -> tuple[str, ...]:
        """All conditions, those of Dims among them."""
        of_dims = (c for d in self.sizes.dims.values() for c in d.constraints)
        return (*self.options.constraints, *of_dims)

    def of(
        self, positions: list[Position], leaves: list[Leaf], args: tuple, kwargs: dict
    ) -> Declared:
        """What the user says of the sizes of one kind of call."""
        names: dict[Position, str] = {}
        is_dynamic = self.options.dynamic is not False
        shapes = self.sizes.shapes(leaves)
        for position in positions:
            if position.axis is not None:
                wanted = shapes[position.leaf][1][position.axis]
                if isinstance(wanted, str) and is_dynamic:
                    names[position] = wanted
        marked = marks(positions, args, kwargs)
        self._refuse_static(marked, names)
        used = {p: kind for p, kind in marked.items() if p not in names}
        symbols = {symbol.name: symbol for symbol in self.symbols}
        return Declared(
            names=names,
            symbols=symbols,
            constraints=self.options.constraints,
            dynamic=frozenset(p for p, k in used.items() if k != "static"),
            static=frozenset(p for p, k in used.items() if k == "static"),
            strong=frozenset(p for p, k in used.items() if k == "dynamic"),
            everything=self.options.dynamic,
        )

    def _refuse_static(
        self, marked: Mapping[Position, str], names: Mapping[Position, str]
    ) -> None:
        """A size cannot be a constant and have a name."""
        for position, kind in marked.items():
            if kind == "static" and position in names:
                raise ValueError(
                    f"{self.parameters.owner}: {position.name} is marked by px.static, "
                    f"but dims names it {names[position]!r}.\nTake one of them away."
                )

    def symbol(self, name: str) -> Symbol:
        """A named size, within what Dim and conditions say."""
        dim = self.sizes.dims.get(name)
        symbol = dim.symbol if dim else Symbol(name, None, "", is_strong=True)
        low, high = bounds_of(name, self.options.constraints)
        high = min((h for h in (symbol.high, high) if h is not None), default=None)
        return dataclasses.replace(symbol, low=max(symbol.low, low), high=high)

    def check(self, leaves: Sequence[Leaf]) -> Mapping[str, tuple[Any, Leaf]]:
        """The named sizes of a call, each with the argument that it was read off.

        Those of an outer px.compile leave guards there.

        Raises:
            ValueError: for sizes that the user's Dims and conditions exclude.
        """
        found = self.sizes.read(leaves)
        sizes = {name: n for name, (n, _) in found.items() if isinstance(n, int | Size)}
        for name, size in sizes.items():
            dim = self.sizes.dims.get(name)
            if dim is not None and not dim.holds(size):
                argument = found[name][1].name
                raise ValueError(
                    f"{self.parameters.owner}: {name} is {at_hand(size)} in "
                    f"`{argument}`, but Dim({name!r}) says {dim.description}.\n"
                    "Pass another size, or widen the Dim."
                )
        for text in self.options.constraints:
            if not holds(text, sizes):
                values = (
                    f"{name} = {at_hand(size)} in `{found[name][1].name}`"
                    for name, size in sorted(sizes.items())
                )
                raise ValueError(
                    f"{self.parameters.owner}: where says {in_python(text)}, but "
                    f"{', '.join(values)}.\nPass other sizes, or drop the condition."
                )
        return found
