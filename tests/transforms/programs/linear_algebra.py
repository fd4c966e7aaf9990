"""Matrices: products with a symbolic size, factorizations in batches and over the size."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg as sl
from jax import lax

from ._program import Program, program, table


_SQUARE, _SPD = "t, t; well_conditioned", "t, t; spd"
_BATCH, _SPD_BATCH = "b, 3, 3; well_conditioned", "b, 3, 3; spd"

# fmt: off
_JNP = [
    ("cholesky[b, 3, 3]", jnp.linalg.cholesky, _SPD_BATCH),
    ("cholesky[t, t]", jnp.linalg.cholesky, _SPD),
    ("cond[t, t]", jnp.linalg.cond, _SQUARE),
    ("cross[t, 3]", jnp.linalg.cross, "t, 3", "t, 3"),
    ("det[b, 3, 3]", jnp.linalg.det, _BATCH),
    ("det[t, t]", jnp.linalg.det, _SQUARE),
    ("diagonal[b, t, t]", jnp.linalg.diagonal, "b, t, t"),
    ("eigh[b, 3, 3]", lambda x: jnp.linalg.eigh(x)[0], _SPD_BATCH),
    ("eigh[t, t]", lambda x: jnp.linalg.eigh(x)[0], _SPD),
    ("eigh[reconstruction]", lambda x: _from_eigh(x), _SPD),
    ("eigvalsh[t, t]", jnp.linalg.eigvalsh, _SPD),
    ("inv[b, 3, 3]", jnp.linalg.inv, _BATCH),
    ("inv[t, t]", jnp.linalg.inv, _SQUARE),
    ("inv[b, t, t]", jnp.linalg.inv, "b, t, t; well_conditioned"),
    ("lstsq[t, 3]", lambda x, y: jnp.linalg.lstsq(x, y)[0], "t, 3", "t", "t >= 4"),
    ("matmul[a, b, c]", jnp.linalg.matmul, "a, b", "b, c"),
    ("matrix_norm[b, t, s]", jnp.linalg.matrix_norm, "b, t, s"),
    ("matrix_power[3]", lambda x: jnp.linalg.matrix_power(x, 3), "t, t; unit"),
    ("matrix_power[-1]", lambda x: jnp.linalg.matrix_power(x, -1), _SQUARE),
    ("matrix_rank[t, 3]", jnp.linalg.matrix_rank, "t, 3"),
    ("matrix_transpose[b, t, s]", jnp.linalg.matrix_transpose, "b, t, s"),
    ("multi_dot[three]", lambda x, y, z: jnp.linalg.multi_dot([x, y, z]), "a, t", "t, 3", "3, b"),
    ("norm[t]", jnp.linalg.norm, "t"),
    ("norm[frobenius]", jnp.linalg.norm, "b, t"),
    ("norm[axis=-1]", lambda x: jnp.linalg.norm(x, axis=-1), "b, t"),
    ("norm[ord=1 of a matrix]", lambda x: jnp.linalg.norm(x, 1), "b, t"),
    ("norm[ord=inf]", lambda x: jnp.linalg.norm(x, jnp.inf), "t"),
    ("norm[nuclear]", lambda x: jnp.linalg.norm(x, "nuc"), "b, t"),
    ("outer[b, t]", jnp.linalg.outer, "b", "t"),
    ("pinv[t, 3]", jnp.linalg.pinv, "t, 3", "t >= 3"),
    ("qr[t, 3]", lambda x: jnp.abs(jnp.linalg.qr(x)[1]), "t, 3"),
    ("qr[b, 4, 3]", lambda x: jnp.linalg.qr(x), "b, 4, 3"),
    ("slogdet[b, 3, 3]", jnp.linalg.slogdet, _BATCH),
    ("slogdet[t, t]", jnp.linalg.slogdet, _SQUARE),
    ("solve[b, 3, 3]", jnp.linalg.solve, _BATCH, "b, 3, 2"),
    ("solve[t, t]", jnp.linalg.solve, _SQUARE, "t"),
    ("solve[t, t and s right sides]", jnp.linalg.solve, _SQUARE, "t, s"),
    ("solve[regularized normal equations]", lambda x, y: _ridge(x, y), "t, 3", "t"),
    ("svd[t, 3]", lambda x: jnp.linalg.svd(x, full_matrices=False)[1], "t, 3"),
    ("svd[b, 3, 2]", lambda x: jnp.linalg.svd(x, compute_uv=False), "b, 3, 2"),
    ("svd[low rank]", lambda x: _low_rank(x), "b, t", "b >= 2", "t >= 2"),
    ("svdvals[b, t]", jnp.linalg.svdvals, "b, t"),
    ("tensordot[t]", lambda x, y: jnp.linalg.tensordot(x, y, axes=1), "b, t", "t, s"),
    ("tensorinv[t]", lambda x: jnp.linalg.tensorinv(x[None, :, :], 2)[..., 0], _SQUARE),
    ("tensorsolve[t]", lambda x, y: jnp.linalg.tensorsolve(x, y), _SQUARE, "t"),
    ("trace[b, t, t]", jnp.linalg.trace, "b, t, t"),
    ("vecdot[b, t]", jnp.linalg.vecdot, "b, t", "b, t"),
    ("vector_norm[axis=0]", lambda x: jnp.linalg.vector_norm(x, axis=0), "t, 3"),
    ("vector_norm[ord=3]", lambda x: jnp.linalg.vector_norm(x, ord=3), "b, t"),
    ("eig[3, 3 batch]", lambda x: _sorted_real(jnp.linalg.eig(x)[0]), _SPD_BATCH),
    ("eig[t, t]", lambda x: _sorted_real(jnp.linalg.eig(x)[0]), _SPD),
    ("eigvals[t, t]", lambda x: _sorted_real(jnp.linalg.eigvals(x)), _SPD),
]
_SCIPY = [
    ("block_diag[b, t]", sl.block_diag, "a, b", "s, t"),
    ("cho_factor & scipy.linalg.cho_solve[t, t]", lambda a, y: sl.cho_solve(sl.cho_factor(a), y), _SPD, "t"),
    ("cholesky[lower]", lambda a: sl.cholesky(a, lower=True), _SPD),
    ("circulant[t]", sl.circulant, "t"),
    ("companion[t]", lambda x: sl.companion(x + 4.0), "t", "t >= 2"),
    ("convolution_matrix[t]", lambda x: sl.convolution_matrix(x, 4), "t"),
    ("convolution_matrix[symbolic n]", lambda x, y: sl.convolution_matrix(x, y.shape[0]), "3", "t"),
    ("det[t, t]", sl.det, _SQUARE),
    ("dft[t]", lambda x: sl.dft(x.shape[0]), "t"),
    ("eigh[t, t]", lambda a: sl.eigh(a, eigvals_only=True), _SPD),
    ("eigh_tridiagonal[t]", lambda d, e: sl.eigh_tridiagonal(d, e, eigvals_only=True), "t + 1", "t"),
    ("expm[t, t]", sl.expm, "t, t; unit"),
    ("expm[b, 3, 3]", sl.expm, "b, 3, 3; unit"),
    ("expm_frechet[t, t]", sl.expm_frechet, "t, t; unit", "t, t; unit"),
    ("fiedler[t]", sl.fiedler, "t"),
    ("fiedler_companion[t]", lambda x: sl.fiedler_companion(x + 4.0), "t", "t >= 3"),
    ("funm[t, t]", lambda a: jnp.real(sl.funm(a, jnp.sin, disp=False)[0]), _SPD),
    ("hankel[s, t]", sl.hankel, "s", "t"),
    ("helmert[t]", lambda x: sl.helmert(x.shape[0]), "t", "t >= 2"),
    ("hessenberg[t, t]", sl.hessenberg, _SQUARE, "t >= 3"),
    ("hilbert[t]", lambda x: sl.hilbert(x.shape[0]), "t"),
    ("inv[t, t]", sl.inv, _SQUARE),
    ("invhilbert[t]", lambda x: sl.invhilbert(x.shape[0]), "t", "t <= 8"),
    ("invpascal[t]", lambda x: sl.invpascal(x.shape[0]), "t", "t <= 8"),
    ("leslie[t]", sl.leslie, "t + 1; positive", "t; probability"),
    ("lu[t, t]", sl.lu, _SQUARE),
    ("lu_factor & scipy.linalg.lu_solve[t, t]", lambda a, y: sl.lu_solve(sl.lu_factor(a), y), _SQUARE, "t"),
    ("pascal[t]", lambda x: sl.pascal(x.shape[0]), "t", "t <= 8"),
    ("polar[t, 3]", sl.polar, "t, 3", "t >= 3"),
    ("qr[t, t]", lambda a: jnp.abs(sl.qr(a)[-1]), _SQUARE),
    ("qr_multiply[t, t]", lambda a, c: sl.qr_multiply(a, c)[0], _SQUARE, "s, t"),
    ("rsf2csf[t, t]", lambda a: sl.rsf2csf(*sl.schur(a))[0], _SPD),
    ("schur[t, t]", lambda a: jnp.sort(jnp.diagonal(sl.schur(a)[0])), _SPD),
    ("solve[t, t, assume pos]", lambda a, y: sl.solve(a, y, assume_a="pos"), _SPD, "t"),
    ("solve_sylvester[t, 3]", sl.solve_sylvester, _SQUARE, "3, 3; spd", "t, 3"),
    ("solve_triangular[t, t]", lambda a, y: sl.solve_triangular(a, y, lower=True), _SQUARE, "t"),
    ("solve_triangular[transposed]", lambda a, y: sl.solve_triangular(a, y, trans=1), _SQUARE, "t, s"),
    ("sqrtm[t, t]", lambda a: jnp.real(sl.sqrtm(a)), _SPD),
    ("svd[t, 3]", lambda a: sl.svd(a, compute_uv=False), "t, 3"),
    ("toeplitz[t]", sl.toeplitz, "t"),
    ("toeplitz[s, t]", sl.toeplitz, "s", "t"),
]
_LAX = [
    ("cholesky[t, t]", lax.linalg.cholesky, _SPD),
    ("cholesky_update[t]", lax.linalg.cholesky_update, _SQUARE, "t"),
    ("eig[t, t]", lambda a: _sorted_real(lax.linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]), _SPD),
    ("eigh[t, t]", lambda a: lax.linalg.eigh(a)[-1], _SPD),
    ("hessenberg[t, t]", lambda a: lax.linalg.hessenberg(a), _SQUARE, "t >= 3"),
    ("householder_product[t, 3]", lambda a, c: lax.linalg.householder_product(a, c), "t, 3", "3", "t >= 3"),
    ("lu[t, t]", lambda a: lax.linalg.lu(a)[0], _SQUARE),
    ("lu_pivots_to_permutation[t]", lambda a: lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(a)[1], a.shape[0]), _SQUARE),
    ("ormqr[t, 3]", lambda a, c, y: lax.linalg.ormqr(a, c, y), "t, 3", "3", "t, 2", "t >= 3"),
    ("qdwh[t, 3]", lambda a: lax.linalg.qdwh(a)[:2], "t, 3", "t >= 3"),
    ("qr[t, 3]", lambda a: jnp.abs(lax.linalg.qr(a, full_matrices=False)[1]), "t, 3", "t >= 3"),
    ("schur[t, t]", lambda a: lax.linalg.schur(a, compute_schur_vectors=False), _SPD),
    ("svd[b, t]", lambda a: lax.linalg.svd(a, compute_uv=False), "b, t"),
    ("symmetric_product[t, 3]", lambda a, c: lax.linalg.symmetric_product(a, c), "t, 3", "t, t; spd"),
    ("triangular_solve[t, t]", lambda a, y: lax.linalg.triangular_solve(a, y, left_side=True, lower=True), _SQUARE, "t, s"),
    ("triangular_solve[batch]", lambda a, y: lax.linalg.triangular_solve(a, y, left_side=True), _BATCH, "b, 3, 2"),
    ("tridiagonal[t, t]", lambda a: lax.linalg.tridiagonal(a)[1], _SPD, "t >= 3"),
    ("tridiagonal_solve[t]", lambda d, y: _second_difference(d, y), "t; positive", "t, 2", "t >= 3"),
]
_POLYNOMIALS = [
    ("poly[roots]", jnp.poly, "t; unit"),
    ("polyadd[s, t]", jnp.polyadd, "s", "t"),
    ("polysub[s, t]", jnp.polysub, "s", "t"),
    ("polymul[s, t]", jnp.polymul, "s", "t"),
    ("polydiv[t, 3]", lambda x, y: jnp.polydiv(x, y + 4.0), "t", "3", "t >= 3"),
    ("polyder[t]", jnp.polyder, "t", "t >= 2"),
    ("polyint[t]", jnp.polyint, "t"),
    ("polyfit[deg=2]", lambda x, y: jnp.polyfit(x, y, 2), "t; sorted", "t", "t >= 5"),
    ("polyval[t coefficients]", jnp.polyval, "t", "s; unit"),
    ("roots[t coefficients]", lambda x: _magnitudes(x), "t", "t >= 2"),
]
# fmt: on


def _from_eigh(a: jax.Array) -> jax.Array:
    w, v = jnp.linalg.eigh(a)
    return (v * jnp.sqrt(w)[None, :]) @ v.T


def _sorted_real(w: jax.Array) -> jax.Array:
    return jnp.sort(jnp.real(w), axis=-1)


def _magnitudes(x: jax.Array) -> jax.Array:
    return jnp.sort(jnp.abs(jnp.roots(x.at[0].add(4.0), strip_zeros=False)))


def _ridge(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.linalg.solve(x.T @ x + 0.1 * jnp.eye(3), x.T @ y)


def _low_rank(x: jax.Array) -> jax.Array:
    u, s, v = jnp.linalg.svd(x, full_matrices=False)
    return (u[:, :1] * s[None, :1]) @ v[:1]


def _second_difference(d: jax.Array, y: jax.Array) -> jax.Array:
    lower = jnp.full_like(d, -0.1).at[0].set(0.0)
    return lax.linalg.tridiagonal_solve(lower, d + 2.0, lower[::-1], y)


def _gaussian_process(x: jax.Array, y: jax.Array, new: jax.Array) -> jax.Array:
    """The posterior mean of a Gaussian process at new points."""
    k = jnp.exp(-((x[:, None] - x[None, :]) ** 2)) + 0.1 * jnp.eye(x.shape[0])
    return jnp.exp(-((new[:, None] - x[None, :]) ** 2)) @ jnp.linalg.solve(k, y)


def _kalman(ys: jax.Array) -> jax.Array:
    """The filtered means of a two-dimensional random walk seen through noise."""

    def step(state, y):
        m, p = state
        p = p + 0.1 * jnp.eye(2)
        gain = jnp.linalg.solve(p + jnp.eye(2), p).T
        m = m + gain @ (y - m)
        return (m, p - gain @ p), m

    return lax.scan(step, (jnp.zeros(2), jnp.eye(2)), ys)[1]


def _whiten(x: jax.Array) -> jax.Array:
    centred = x - x.mean(0, keepdims=True)
    w, v = jnp.linalg.eigh(centred.T @ centred / x.shape[0] + 0.1 * jnp.eye(3))
    return centred @ (v / jnp.sqrt(w)[None, :]) @ v.T


# Those that move elements or multiply two of them, and add nothing.
_MOVES = (
    *("diagonal", "matrix_transpose", "outer", "block_diag", "circulant"),
    *("convolution_matrix", "fiedler", "hankel", "toeplitz"),
)

PROGRAMS: tuple[Program, ...] = (
    *table("jnp.linalg.", _JNP, exact=_MOVES),
    *table("scipy.linalg.", _SCIPY, exact=_MOVES),
    *table("lax.linalg.", _LAX),
    *table("jnp.", _POLYNOMIALS),
    program("jnp.linalg.solve[Gaussian process]", _gaussian_process, "t", "t", "s"),
    program("jnp.linalg.solve[Kalman filter]", _kalman, "t, 2"),
    program("jnp.linalg.eigh[whitening]", _whiten, "t, 3"),
)
