"""What the makers of masks and mods were given, checked: contents may be traced.

An integer of Python is part of the program that is made, an array is its data; so only
ranks and dtypes of arrays are looked at.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .arguments import brief, check_positional, integer, kind_of


type Shapes = tuple[tuple[str, ...], ...]

SCALAR: Shapes = ((),)
PER_SEQUENCE: Shapes = ((), ("B",))
PER_HEAD: Shapes = ((), ("H",))


def check_mod(function: str, role: str, mod: Any) -> None:
    """Refuse, under the name of the function, what is no mask_mod or score_mod."""
    try:
        check_positional(mod, role, 4 if role == "mask_mod" else 5)
    except TypeError as error:
        raise TypeError(f"{function}: {error}") from None


def static_integer(function: str, name: str, x: Any, least: int | None) -> int:
    """A Python integer, part of the mask's program."""
    remedy = "Pass an integer" + ("." if least is None else f" of at least {least}.")
    number = integer(function, name, x, remedy)
    if least is not None and number < least:
        raise ValueError(
            f"{function}: {name} must be at least {least}, found {number}.\n{remedy}"
        )
    return number


def integer_or_array(
    function: str, name: str, x: Any, least: int | None, shapes: Shapes
) -> int | Array:
    """A Python integer, or an array of them as data."""
    if not is_array(x):
        return static_integer(function, name, x, least)
    return array_of(function, name, x, jnp.integer, shapes).astype(jnp.int32)


def array_of(function: str, name: str, x: Any, kind: Any, shapes: Shapes) -> Array:
    """An array of the right kind and rank; its contents may be traced."""
    wanted = " or ".join(f"({', '.join(axes)})" for axes in shapes)
    what = f"{'an integer' if kind is jnp.integer else 'a floating'} array {wanted}"
    if not is_array(x):
        raise TypeError(
            f"{function}: {name} must be {what}, found {kind_of(x)}.\n"
            f"Make one with jnp.asarray({name})."
        )
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, kind):
        dtype = "int32" if kind is jnp.integer else "float32"
        raise TypeError(
            f"{function}: {name} must be {what}, found {brief(array)}.\n"
            f"Cast it with {name}.astype(jnp.{dtype})."
        )
    if array.ndim not in map(len, shapes):
        raise ValueError(
            f"{function}: {name} must be {what}, found {brief(array)}.\n"
            "Map over further axes with jax.vmap."
        )
    return array


def is_array(x: Any) -> bool:
    """Of JAX, of NumPy, or a wrapper of one as modules keep for their parameters."""
    return isinstance(x, jax.Array | np.ndarray) or hasattr(x, "__jax_array__")


def pick(x: int | Array, index: Any) -> Any:
    """One number for all, or one for each."""
    return x if isinstance(x, int) or x.ndim == 0 else x[index]
