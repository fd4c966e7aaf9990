"""A function of pytrees as a function of some of their leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def on_leaves(
    f: Callable[..., Any], leaves: Sequence[Any], tree: Any, places: Sequence[int]
) -> Callable[..., Any]:
    """F as a function of the leaves in some places; the others stay what they are.

    Args:
        f: called with the pair (args, kwargs) that the leaves make.
        leaves: of that pair.
        tree: its structure.
        places: of the leaves that become arguments, in their order.
    """

    def call(*given: Any) -> Any:
        values = list(leaves)
        for i, x in zip(places, given, strict=True):
            values[i] = x
        args, kwargs = jax.tree.unflatten(tree, values)
        return f(*args, **kwargs)

    return call
