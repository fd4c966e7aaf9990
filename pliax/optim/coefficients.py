"""Coefficients of Newton-Schulz steps: sets with names, and what users pass."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike


# Jordan et al. (2024): the quintic with the steepest slope at zero among those that
# keep the singular values in about [0.7, 1.2]; torch.optim.Muon has the same.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# Amsel et al. (2025), listing 1: the best quintic of each step for what the steps
# before leave of [1e-3, 1]; the last is Newton-Schulz's own.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01  # theirs: rounding may lift a singular value beyond the interval


def _scaled(abc: tuple[float, float, float], factor: float) -> tuple[float, ...]:
    """The polynomial of a number that many times smaller."""
    a, b, c = abc
    return a / factor, b / factor**3, c / factor**5


NAMED_COEFFICIENTS: dict[str, tuple[tuple[float, ...], ...]] = {
    "quintic": (COEFFICIENTS,),
    "polar_express": (
        _scaled(_POLAR_EXPRESS[0], _SAFETY**2),  # they divide the norm by it, too
        *(_scaled(abc, _SAFETY) for abc in _POLAR_EXPRESS[1:-1]),
        _POLAR_EXPRESS[-1],
    ),
}


def check_coefficients(coefficients: Any) -> tuple[tuple[ArrayLike, ...], ...]:
    """Triples, one a step, or torch's ValueError."""
    if isinstance(coefficients, str):
        if coefficients not in NAMED_COEFFICIENTS:
            raise ValueError(
                f"ns_coefficients has no set named {coefficients!r}. Choose one of "
                f"{', '.join(NAMED_COEFFICIENTS)}, or pass (a, b, c)."
            )
        return NAMED_COEFFICIENTS[coefficients]
    try:
        found = tuple(coefficients)
    except TypeError:
        raise ValueError(
            "ns_coefficients should be (a, b, c), one such triple for each step, or a "
            f"name but is: {coefficients!r}"
        ) from None
    several = any(isinstance(x, tuple | list) or jnp.ndim(x) for x in found)
    triples = (
        [tuple(x) if np.iterable(x) else (x,) for x in found] if several else [found]
    )
    for triple in triples or [()]:
        if len(triple) != 3:
            raise ValueError(
                "Coefficients must be a tuple of exactly 3 values but has "
                f"{len(triple)}."
            )
    return tuple(triples)
