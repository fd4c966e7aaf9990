"""Small JAX programs with symbolic sizes, one family a module.

Written from the public listing of JAX before any padding rule existed: what is listed
here says what users write, not what is easy to pad.
"""

import importlib
import re

from ._drawing import evaluate as evaluate, make_arguments as make_arguments
from ._program import (
    Argument as Argument,
    Program as Program,
    abstract_arguments as abstract_arguments,
    admits as admits,
    choose_sizes as choose_sizes,
    letters as letters,
)


FAMILIES = (
    "elementwise",
    "reductions",
    "indexing",
    "shapes",
    "sorting",
    "linear_algebra",
    "contractions",
    "control_flow",
    "randomness",
    "neural",
    "gradients",
    "special",
    "transforms",
)
MODULES = {
    "jnp": "jax.numpy",
    "jnp.linalg": "jax.numpy.linalg",
    "jnp.fft": "jax.numpy.fft",
    "lax": "jax.lax",
    "lax.linalg": "jax.lax.linalg",
    "nn": "jax.nn",
    "random": "jax.random",
    "ops": "jax.ops",
    "image": "jax.image",
    "special": "jax.scipy.special",
    "scipy.linalg": "jax.scipy.linalg",
    "scipy.signal": "jax.scipy.signal",
    "scipy.stats": "jax.scipy.stats",
}


def functions_named(name: str) -> set[tuple[str, str]]:
    """The (module, function) pairs that a program's name announces.

    Example:
        >>> sorted(functions_named("grad of jnp.linalg.norm & nn.relu[t]"))
        [('jnp.linalg', 'norm'), ('nn', 'relu')]
    """
    prefixes = "|".join(sorted(map(re.escape, MODULES), key=len, reverse=True))
    return set(re.findall(rf"\b(?<!\.)({prefixes})\.(\w+)", name))


def inventory(*families: str) -> tuple[Program, ...]:
    """Every program, or those of the given families.

    A program whose name announces a function that this JAX lacks is left out.
    """
    return tuple(p for f in families or FAMILIES for p in _family(f) if _available(p))


def _family(family: str) -> tuple[Program, ...]:
    return importlib.import_module(f".{family}", __name__).PROGRAMS


def _available(program: Program) -> bool:
    return all(
        hasattr(importlib.import_module(MODULES[module]), name)
        for module, name in functions_named(program.name)
    )
