"""Donated arrays: which arguments a call gives away, and what a second use says."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from ._arguments import Leaf, Parameters


def note_deleted(
    error: RuntimeError,
    parameters: Parameters,
    donated: tuple[int, ...],
    args: tuple,
    kwargs: dict,
) -> None:
    """Adds to JAX's "Array has been deleted" which argument that was, and why."""
    if not str(error).startswith("Array has been deleted"):
        return
    deleted = [x for x in parameters.leaves(args, kwargs) if _is_deleted(x.value)]
    if not deleted:  # an array of the function's own, not an argument
        return
    roots = [_root(parameters, position) for position in donated if position >= 0]
    given_away = [x for x in deleted if any(x.steps[: len(r)] == r for r in roots)]
    names = [leaf.name for leaf in given_away or deleted]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    cause = _BY_THIS if given_away else _BY_ANOTHER
    positions = ", ".join(map(str, donated))
    text = cause.format(
        who=f"{parameters.owner}: argument `{names[0]}`{more}", at=positions
    )
    error.add_note(text)


def are_donated(
    parameters: Parameters, donated: tuple[int, ...], leaves: Sequence[Leaf]
) -> list[bool]:
    """Which arguments the user gives away."""
    roots = [_root(parameters, position) for position in donated if position >= 0]
    return [any(leaf.steps[: len(r)] == r for r in roots) for leaf in leaves]


def delete(leaves: Sequence[Any], numbers: Sequence[int]) -> None:
    """Deletes donated arrays that a call copied into buckets and did not use up."""
    for i in numbers:
        if isinstance(leaves[i], jax.Array):
            leaves[i].delete()


_BY_THIS = (
    "{who} cannot be read again: donate_argnums ({at}) gave it away at an earlier "
    "call.\nUse what that call returned, or take the position out of donate_argnums."
)
_BY_ANOTHER = (
    "{who} cannot be read again: an earlier call gave it away through donate_argnums, "
    "or .delete() was called.\nUse what that call returned, or do not donate it there."
)


def _root(parameters: Parameters, position: int) -> tuple[str, ...]:
    """The path of the argument at a position, as the leaves below it begin."""
    return parameters.by_place(position)[1]


def _is_deleted(value: Any) -> bool:
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return False
    return value.is_deleted()
