"""What the equations of a jaxpr are computed of.

    is_literal : atom                        ->  whether it is a number in the program
    variables  : atoms                       ->  those that are not
    leading_to : equations, what is wanted   ->  the equations it needs, in order

Who follows these in order asks no more of Python's stack for a long program than for a
short one.
"""

from collections.abc import Iterable, Sequence
from typing import Any


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number in the program."""
    return hasattr(atom, "val")


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The operands that are not numbers in the program."""
    return [x for x in atoms if not is_literal(x)]


def leading_to(equations: Sequence[Any], wanted: Iterable[Any]) -> list[Any]:
    """The equations that what is wanted is made by, in order.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x) * 2, jnp.cos(x)))(1.0)
        >>> found = leading_to(jaxpr.eqns, jaxpr.jaxpr.outvars[:1])
        >>> [eqn.primitive.name for eqn in found]
        ['sin', 'mul']
    """
    needed, found = set(variables(wanted)), list[Any]()
    for eqn in reversed(equations):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
            found.append(eqn)
    return found[::-1]
