"""The table of padding rules, and how a rule says no.

A rule computes an equation on padded arrays:

    rule(bucket, eqn, *operands) -> the padded result, or a list of them

It has four obligations. The result's axes are those of JAX's shape rule. Valid elements
depend on valid elements only, bit for bit, whatever the padding holds. A physical axis
is as long as its size can become (`Bucket.length` sees to that). Nothing is clamped or
wrapped at the physical size where JAX clamps at the logical one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pliax.core._jax import bind_equation
from pliax.core.dims import Size
from pliax.core.manual_axes import vary, varying_axes
from pliax.core.provenance import NOWHERE, Place, equation_place

from .layouts import Bucket, Factors, Padded, UnrepresentableError


Rule = Callable[..., Padded | Sequence[Padded]]

RULES: dict[str, Rule] = {}


class PaddingRefused(Exception):  # noqa: N818  (a refusal is no mistake of anybody's)
    """A program that cannot be padded exactly.

    Attributes:
        primitive: the operation.
        reason: why it cannot.
        place: the line of the user's code.
    """

    def __init__(self, primitive: str, reason: str, place: Place = NOWHERE):
        self.primitive, self.reason, self.place = primitive, reason, place
        super().__init__(f"{primitive}: {reason}\n  at {place}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it was made: a process hands it to another."""
        return type(self), (self.primitive, self.reason, self.place)

    @property
    def is_about_range(self) -> bool:
        """Whether it is a size that may become too large; not if it may not."""
        return isinstance(self.__cause__, UnrepresentableError)


def rule[R: Rule](*primitives: str) -> Callable[[R], R]:
    """Enters a rule into the table, for one or more primitives."""

    def enter(function: R) -> R:
        for primitive in primitives:
            RULES[primitive] = function
        return function

    return enter


def refuse(eqn: Any, reason: str) -> PaddingRefused:
    """The refusal of one equation, with the user's line."""
    return PaddingRefused(eqn.primitive.name, reason, equation_place(eqn))


def bind(eqn: Any, *values: Any, **changes: Any) -> Any:
    """The same equation on physical arrays, with some parameters changed.

    It keeps the settings it was traced under: they decide which bits are drawn.
    """
    changed = eqn.replace(params={**eqn.params, **changes}) if changes else eqn
    for name, value in changed.params.items():
        if isinstance(value, Size):  # which no array can be
            raise refuse(eqn, f"its {name} is the size {value}")
    results = bind_equation(changed, vary(values, varying_axes(values)))
    return results if eqn.primitive.multiple_results else results[0]


def sizes_of(variable: Any) -> tuple[Any, ...]:
    """The logical shape of a variable or a literal."""
    return tuple(variable.aval.shape)


def static(bucket: Bucket, value: Any) -> Any:
    """A parameter with integers for the sizes that the bucket fixes.

    Raises:
        KeyError: where a size stays symbolic, or a program mentions one.
    """
    if isinstance(value, Size):
        size = bucket.size(value)
        if isinstance(size, Size):
            raise KeyError(size)
        return size
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(static(bucket, x) for x in value))
    if isinstance(value, list | tuple):
        return type(value)(static(bucket, x) for x in value)
    if isinstance(value, dict):
        return {k: static(bucket, v) for k, v in value.items()}
    if hasattr(value, "eqns") and has_size(value):
        raise KeyError(value)
    if hasattr(value, "shape") and hasattr(value, "update") and has_size(value):
        return value.update(shape=static(bucket, value.shape))
    return value


def explicit_sharding(eqn: Any, given: Any, axes: Sequence[Factors]) -> Any:
    """Where an Explicit mesh is to have a new array, an axis by its first factor.

    Args:
        eqn: the equation, which is refused where such an axis is padded.
        given: the sharding of the logical array; None anywhere else.
        axes: the factors of each of its axes, symbolic where they are padded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if given is None or given.mesh != mesh or AxisType.Explicit not in mesh.axis_types:
        return None
    pairs = list(zip((*given.spec, *(None,) * len(axes)), axes, strict=False))
    for names, factors in pairs:
        if names and any(isinstance(f, Size) for f in factors):
            raise refuse(eqn, f"the size {factors[0]} is divided among devices")
    places = [names if i == 0 else None for names, f in pairs for i in range(len(f))]
    return NamedSharding(mesh, PartitionSpec(*places))


def has_size(value: Any) -> bool:
    """Whether a parameter is a symbolic size or has one in a shape or a program."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(map(has_size, value))
    if hasattr(value, "eqns"):
        ends = (*value.invars, *value.outvars, *value.constvars)
        return any(has_size(x.aval) for x in ends) or any(
            has_size(eqn.params) or any(has_size(x.aval) for x in eqn.outvars)
            for eqn in value.eqns
        )
    shape = getattr(value, "shape", ())
    return isinstance(value, Size) or (isinstance(shape, tuple) and has_size(shape))
