"""Matrices: padded batches of any problem, and padded matrices where it is exact."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as sl
import numpy as np
import pytest
from jax import lax
from transforms.padding.checking import check_each

from pliax.transforms.padding.rules import PaddingRefused


HIGH = {"b": 4, "t": 8}
CHOICES = [{"b": b, "t": t} for b, t in ((3, 5), (1, 1), (4, 8), (2, 7))]


def dyadic(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng((seed, *shape))
    return (rng.integers(-8, 9, shape) / 8).astype(np.float32)


def definite(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Symmetric positive definite matrices, well conditioned."""
    a = dyadic(seed, shape)
    eye = shape[-1] * np.eye(shape[-1], dtype=np.float32)
    return a @ np.swapaxes(a, -1, -2) / 4 + eye


def general(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Rows in no good order: pivots matter."""
    a = dyadic(seed, shape) / 2 + 2 * np.eye(*shape[-2:], dtype=np.float32)
    return a[..., ::-1, :].copy()


def law(
    f: Callable[..., Any], *args: tuple[str, Any] | str, tolerance: float = 0.0
) -> None:
    """The law for arrays drawn as (shape, how), numbers of any sort by default."""
    pairs = [x if isinstance(x, tuple) else (x, dyadic) for x in args]

    def draw(sizes: Mapping[str, int]) -> list[Any]:
        shapes = [eval(f"({spec},)", {}, dict(sizes)) for spec, _ in pairs]
        drawn = zip(shapes, pairs, strict=True)
        return [how(i, s) for i, (s, (_, how)) in enumerate(drawn)]

    specs = [spec for spec, _ in pairs]
    check_each(f, specs, draw, CHOICES, HIGH, tolerance=tolerance)


# --- batches --------------------------------------------------------------------------


_MATRICES = ("b, 3, 3", definite)
BATCHES: dict[str, tuple[Callable[..., Any], Any]] = {
    "cholesky": (jnp.linalg.cholesky, _MATRICES),
    "eigh": (jnp.linalg.eigh, _MATRICES),
    "eigvalsh": (jnp.linalg.eigvalsh, _MATRICES),
    "eig": (jnp.linalg.eig, ("b, 3, 3", general)),
    "svd": (lambda a: jnp.linalg.svd(a, full_matrices=False), ("b, 3, 2", dyadic)),
    "singular values": (jnp.linalg.svdvals, ("b, t, 2, 3", dyadic)),
    "qr": (jnp.linalg.qr, ("b, 3, 2", dyadic)),
    "complete qr": (lambda a: jnp.linalg.qr(a, "complete"), ("b, 3, 2", dyadic)),
    "raw qr": (lambda a: jnp.linalg.qr(a, "raw"), ("b, 3, 2", dyadic)),
    "pivoted qr": (lambda a: sl.qr(a, pivoting=True), ("b, 3, 2", dyadic)),
    "lu": (lax.linalg.lu, ("b, 3, 3", general)),
    "tall lu": (lax.linalg.lu, ("b, 4, 2", general)),
    "schur": (lax.linalg.schur, ("b, 3, 3", general)),
    "hessenberg": (lax.linalg.hessenberg, ("b, 4, 4", general)),
    "tridiagonal": (lax.linalg.tridiagonal, ("b, 4, 4", definite)),
    "determinant": (jnp.linalg.det, ("b, 3, 3", general)),
    "merged": (
        lambda a: jnp.linalg.eigvalsh(a.reshape(-1, 3, 3)),
        ("b, t, 3, 3", definite),
    ),
    "fft": (jnp.fft.fft, ("b, t, 6", dyadic)),
    "rfft2": (jnp.fft.rfft2, ("b, 4, 6", dyadic)),
    "irfft": (jnp.fft.irfft, ("b, 4", dyadic)),
    "fft of columns": (lambda a: jnp.fft.fft(a, axis=0), ("6, b, t", dyadic)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BATCHES)
def test_one_problem_does_not_see_another(case: str) -> None:
    f, argument = BATCHES[case]
    law(f, argument)


def test_problems_that_fail_alone() -> None:
    """NaN, no decomposition at all, and a singular matrix, beside good ones."""

    def spoilt(seed: int, shape: tuple[int, ...]) -> np.ndarray:
        a = definite(seed, shape)
        a[0] *= -1
        a[-1, 0, 0] = np.nan
        return a

    for f in (jnp.linalg.cholesky, jnp.linalg.eigvalsh, jnp.linalg.svdvals):
        law(f, ("b, 3, 3", spoilt), tolerance=1e-5)


def test_systems_of_equations() -> None:
    law(jnp.linalg.solve, ("b, 3, 3", general), "b, 3, t", tolerance=1e-5)
    law(jax.vmap(jnp.linalg.solve), ("b, 3, 3", general), "b, 3", tolerance=1e-5)

    def ties(d: Any, y: Any) -> Any:
        return lax.linalg.tridiagonal_solve(0.1 * d, d + 4, 0.2 * d, y)

    law(ties, "b, 4", "b, 4, 2", tolerance=1e-5)


# --- padded matrices ------------------------------------------------------------------


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_triangular_systems(left: bool, lower: bool, transposed: bool) -> None:
    def f(a: Any, y: Any) -> Any:
        options = {"left_side": left, "lower": lower, "transpose_a": transposed}
        unit = lax.linalg.triangular_solve(a, y, unit_diagonal=True, **options)
        return lax.linalg.triangular_solve(a, y, **options), unit.shape[0]

    law(f, ("t, t", definite), "t, b" if left else "b, t", tolerance=1e-5)


def _second_difference(d: Any, y: Any) -> Any:
    low = jnp.full_like(d, -0.25).at[0].set(0.0)
    high = jnp.full_like(d, -0.5).at[-1].set(0.0)
    return lax.linalg.tridiagonal_solve(low, d + 3, high, y)


MATRICES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cholesky": (jnp.linalg.cholesky, (("t, t", definite),)),
    "cholesky of a batch": (jnp.linalg.cholesky, (("b, t, t", definite),)),
    "no cholesky": (lambda a: jnp.linalg.cholesky(-a), (("b, t, t", definite),)),
    "cho_solve": (
        lambda a, y: sl.cho_solve(sl.cho_factor(a), y),
        (("t, t", definite), "t, b"),
    ),
    "lu": (lax.linalg.lu, (("b, t, t", general),)),
    "inverse": (jnp.linalg.inv, (("b, t, t", general),)),
    "determinant": (jnp.linalg.det, (("b, t, t", lambda *a: general(*a) / 4),)),
    "slogdet": (jnp.linalg.slogdet, (("b, t, t", general),)),
    "solve": (jnp.linalg.solve, (("t, t", general), "t")),
    "tridiagonal": (_second_difference, ("t", "t, b")),
    "derivative of cholesky": (
        jax.grad(lambda a: jnp.linalg.cholesky(a).sum()),
        (("t, t", definite),),
    ),
    "derivative of solve": (
        jax.grad(lambda a, y: jnp.linalg.solve(a, y).sum(), (0, 1)),
        (("t, t", definite), "t"),
    ),
    "derivative of slogdet": (
        jax.grad(lambda a: jnp.linalg.slogdet(a)[1].sum()),
        (("b, t, t", definite),),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRICES)
def test_padded_matrices_become_blocks_beside_ones(case: str) -> None:
    f, args = MATRICES[case]
    law(f, *args, tolerance=2e-4)


_REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "eigh": (jnp.linalg.eigh, "t, t", "depend on every row"),
    "eig": (jnp.linalg.eig, "t, t", "depend on every row"),
    "svd": (jnp.linalg.svd, "t, 3", "depend on every row"),
    "qr": (jnp.linalg.qr, "t, 3", "depends on every row"),
    "schur": (lax.linalg.schur, "t, t", "depend on every row"),
    "hessenberg": (lax.linalg.hessenberg, "t, t", "depends on every row"),
    "tridiagonal": (lax.linalg.tridiagonal, "t, t", "depends on every row"),
    "lu": (lax.linalg.lu, "t, 3", "a padded matrix must be square"),
    "fft": (jnp.fft.fft, "b, t", "every frequency depends on its length"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_depends_on_the_number_of_rows_is_refused(case: str) -> None:
    f, spec, reason = _REFUSED[case]
    with pytest.raises(PaddingRefused, match=f'over dimension "t".*{reason}') as error:
        law(lambda a: f(a), spec)
    assert "test_linear_algebra.py" in str(error.value)
