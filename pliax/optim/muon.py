"""Muon: momentum, orthogonalised by Newton-Schulz, for the matrices of a network.

The arithmetic is that of ``torch.optim.Muon``; the interface is optax's. Muon serves
the hidden matrices; embeddings, heads, norms and biases take AdamW, and
`pliax.optim.labels` tells the two apart::

    tx = optax.partition(
        {"muon": px.optim.muon(2e-2), "adamw": optax.adamw(3e-4)}, px.optim.labels
    )

Sharp edges. A NaN in a gradient makes that parameter's whole update NaN, and its
momentum keeps it, as in torch; guard with `optax.apply_if_finite`. With bfloat16
parameters the returned update is rounded to bfloat16 before it is applied.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Int32

from .coefficients import COEFFICIENTS
from .execution import choose_execution
from .matrix_axes import MatrixAxes, axes_of, layout_axes, matrices
from .momentum import Momentum, widen
from .newton_schulz import EPSILON, STEPS, choose_iteration


if TYPE_CHECKING:  # importing optax takes as long as the rest of pliax
    import optax


# Rows A and columns B of torch's (out, in) matrix -> the factor of its update.
_RATIOS: dict[str, Callable[[int, int], float]] = {
    "original": lambda A, B: math.sqrt(max(1.0, A / B)),  # Jordan et al. 2024
    "match_rms_adamw": lambda A, B: 0.2 * math.sqrt(max(A, B)),  # Liu et al. 2025
    "spectral_unclamped": lambda A, B: math.sqrt(A / B),
}


class MuonState(NamedTuple):
    """The momentum of every matrix, in the dtype of its parameter."""

    momentum: Any


class StepState(NamedTuple):
    """How many updates were made: the argument of a learning rate schedule."""

    count: Int32[Array, ""]


def muon(
    learning_rate: Any = 1e-3,
    weight_decay: ArrayLike = 0.1,
    momentum: ArrayLike = 0.95,
    nesterov: bool = True,
    ns_coefficients: Any = COEFFICIENTS,
    eps: ArrayLike = EPSILON,
    ns_steps: ArrayLike = STEPS,
    adjust_lr_fn: str | None = None,
    *,
    layout: str = "in_out",
    axes: Any = None,
    execution: str = "auto",
    mesh: Any = None,
    axis: Any = None,
    ns_method: Any = "standard",
    ns_dtype: Any = "bfloat16",
) -> "optax.GradientTransformation":
    r"""Muon with decoupled weight decay, as `torch.optim.Muon`.

    .. math::
        M &\leftarrow \mu M + (1 - \mu) G \\
        O &= \mathrm{NewtonSchulz}((1 - \mu) G + \mu M) \\
        W &\leftarrow (1 - \eta \lambda) W - \eta\, r(A, B)\, O

    The decay uses the unadjusted learning rate. Every leaf must be a real matrix, or
    hold several as ``axes`` says: give the others to another optimizer with
    `pliax.optim.labels` and `optax.partition`.

    Args:
        learning_rate: :math:`\eta >= 0`: a number, an array of one element, or a
            schedule from the step count, which starts at 0. 1e-3 is torch's default;
            with "original", 2e-2 is usual.
        weight_decay: :math:`\lambda >= 0`; torch's default.
        momentum: :math:`\mu >= 0`, of an exponential average that starts at zero
            and is not corrected for it: the orthogonalisation ignores the scale.
        nesterov: Orthogonalise the look-ahead :math:`(1-\mu) G + \mu M`, not ``M``.
        ns_coefficients: ``(a, b, c)`` of the Newton-Schulz quintic, such a triple for
            each step, "quintic" (torch's), or "polar_express" (Amsel et al., 2025).
        eps: Lower bound of the norm that Newton-Schulz divides by.
        ns_steps: Newton-Schulz steps, below 100.
        adjust_lr_fn: The shape factor ``r(A, B)``. None or "original":
            ``sqrt(max(1, A/B))``; "match_rms_adamw": ``0.2 sqrt(max(A, B))``, so
            that AdamW's learning rate and decay can be kept; "spectral_unclamped":
            ``sqrt(A/B)``.
        layout: "in_out" if matrices are (inputs, outputs), as JAX's kernels are:
            ``A`` counts columns. "out_in" for torch's weights: ``A`` counts rows.
            It changes the shape factor and nothing else.
        axes: Which axes of a leaf are rows and columns: a `MatrixAxes`, a tree of them
            that is a prefix of the parameters', or a function from parameters to one.
            None, or None in the tree, means ``layout``, for two-dimensional leaves.
        execution: "per_matrix": one product after another, which suits a CPU.
            "stacked": matrices of one shape together, in few large products.
            "owner": stacked, and each device of a mesh axis orthogonalises a share of
            every stack. "auto": "owner" if ``mesh`` is given, else "per_matrix" where
            the default backend is a CPU, else "stacked".
        mesh: Whose devices own matrices.
        axis: Over which of its axes: that over which the parameters are sharded, if
            they are. Not needed for a mesh of one axis.
        ns_method: "standard"; "gram", the same polynomials with fewer operations for
            oblong matrices, rounded elsewhere; or a function of normalised matrices
            ``[*L, M, N]`` with ``M <= N`` and of the iteration, whose ``steps``,
            ``step(i)`` (the coefficients) and ``round`` it may use.
        ns_dtype: What the matrices of Newton-Schulz are rounded to.

    Under `optax.inject_hyperparams` whatever can be called passes for a schedule:
    name a ``mesh``, and functions, in its ``static_args``.

    Returns:
        A `GradientTransformation` whose updates have the gradients' dtypes.

    Raises:
        ValueError: For a bad argument, in torch's words; at `init` and `update` for
            a leaf that is not a real matrix; at `update` without ``params`` if
            there is weight decay.

    Examples:
        >>> import jax.numpy as jnp
        >>> params = {"kernel": jnp.eye(4)}
        >>> tx = muon(learning_rate=0.02)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> updates["kernel"].shape
        (4, 4)

        The kernels of three scanned layers, [layer, in, out]:

        >>> tx = muon(0.02, axes=MatrixAxes(rows=2, columns=1, batch=0))
        >>> tx.init(jnp.ones((3, 4, 8)))[0].momentum.shape
        (3, 4, 8)

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
        2024. Liu et al., "Muon is scalable for LLM training", 2025,
        arXiv:2502.16982, eq. 4. `torch.optim.Muon`.
    """
    import optax

    _check_learning_rate(learning_rate)
    _check_at_least_zero("momentum", momentum)  # torch's order of complaints
    _check_at_least_zero("weight decay", weight_decay)
    return optax.chain(
        scale_by_muon(
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
            layout=layout,
            axes=axes,
            execution=execution,
            mesh=mesh,
            axis=axis,
            ns_method=ns_method,
            ns_dtype=ns_dtype,
        ),
        _descend(learning_rate, weight_decay),
    )


def scale_by_muon(
    momentum: ArrayLike = 0.95,
    nesterov: bool = True,
    ns_coefficients: Any = COEFFICIENTS,
    eps: ArrayLike = EPSILON,
    ns_steps: ArrayLike = STEPS,
    adjust_lr_fn: str | None = None,
    *,
    layout: str = "in_out",
    axes: Any = None,
    execution: str = "auto",
    mesh: Any = None,
    axis: Any = None,
    ns_method: Any = "standard",
    ns_dtype: Any = "bfloat16",
) -> "optax.GradientTransformation":
    r"""Replace gradients by :math:`r(A, B)\, O`: Muon without learning rate or decay.

    Args and formulas are those of `muon`. The result is not negated, as everywhere
    in optax.

    Returns:
        A `GradientTransformation` with the state `MuonState`.

    Raises:
        ValueError: As `muon`.

    Examples:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_muon(adjust_lr_fn="match_rms_adamw")
        >>> updates, _ = tx.update(jnp.zeros((2, 3)), tx.init(jnp.zeros((2, 3))))
        >>> updates.tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    import optax

    _check_at_least_zero("momentum", momentum)
    _check_at_least_zero("epsilon", eps)
    iteration = choose_iteration(
        ns_coefficients, ns_steps, eps, method=ns_method, dtype=ns_dtype
    )
    ratio, default = shape_ratio(adjust_lr_fn), layout_axes(layout)
    run, rule = choose_execution(execution, mesh, axis), Momentum(momentum, nesterov)

    def init(params: Any) -> MuonState:
        _axes_of_leaves(axes, default, params, "")
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        del params
        found = _axes_of_leaves(
            axes, default, updates, "Param gradient must be a 2D matrix: "
        )
        gradients, structure = jax.tree.flatten(updates)
        momenta = jax.tree.leaves(jax.tree.map(lambda _, M: M, updates, state.momentum))
        orthogonal, buffers = run(gradients, momenta, found, iteration, rule)
        directions = [
            _scaled(X, G, matrices(a, G.shape).factors(ratio))
            for X, G, a in zip(orthogonal, gradients, found, strict=True)
        ]
        buffers = jax.tree.structure(state.momentum).unflatten(buffers)
        return structure.unflatten(directions), MuonState(buffers)

    return optax.GradientTransformation(init, update)


def _scaled(X: Array, G: Array, factor: Any) -> Array:
    """An orthogonalised matrix times the factor of its shape, in the dtype of G."""
    X = widen(X, G)
    return (jnp.asarray(factor, X.dtype) * X).astype(G.dtype)


def _descend(
    learning_rate: Any, weight_decay: ArrayLike
) -> "optax.GradientTransformation":
    """``U -> -lr (U + decay W)``, in float32 or wider, rounded once.

    optax's own pieces promote a bfloat16 update to float32 where the learning rate
    or the decay is a float32 array, as it is under `optax.inject_hyperparams`.
    """
    import optax

    decays = isinstance(weight_decay, jax.Array) or weight_decay != 0

    def update(updates, state, params=None):
        if decays and params is None:
            raise ValueError(
                "muon: weight decay needs the parameters. Call "
                "update(gradients, state, params), or pass weight_decay=0."
            )
        rate: Any = learning_rate
        if callable(learning_rate):
            rate = learning_rate(state.count)

        def step(U: Array, W: Array) -> Array:
            total = widen(U, U)
            if decays:
                total += _scalar(weight_decay, total) * W.astype(total.dtype)
            return (-_scalar(rate, total) * total).astype(U.dtype)

        stepped = jax.tree.map(step, updates, params if decays else updates)
        return stepped, StepState(jnp.asarray(optax.safe_increment(state.count)))

    def init(params: Any) -> StepState:
        del params
        return StepState(jnp.zeros((), jnp.int32))

    return optax.GradientTransformation(init, update)


def _scalar(value: ArrayLike, like: Array) -> Array:
    return jnp.reshape(jnp.asarray(value), ()).astype(like.dtype)


def shape_ratio(adjust_lr_fn: str | None) -> Callable[[int, int], float]:
    """The factor of an update by the rows A and columns B of its matrix."""
    if adjust_lr_fn is not None and adjust_lr_fn not in _RATIOS:
        raise ValueError(
            f"Adjust learning rate function {adjust_lr_fn} is not supported. "
            f"Choose None or one of {', '.join(_RATIOS)}."
        )
    ratio = _RATIOS[adjust_lr_fn or "original"]
    return lambda A, B: ratio(A, B) if A and B else 1.0


def _check_learning_rate(learning_rate: Any) -> None:
    if callable(learning_rate):
        return
    if jnp.size(learning_rate) != 1:
        raise ValueError(
            f"Tensor lr must be 1-element but has shape {jnp.shape(learning_rate)}."
        )
    _check_at_least_zero("Learning rate", learning_rate)


def _check_at_least_zero(name: str, value: Any) -> None:
    """Torch's wording; NaN fails the comparison, a tracer has no value to check."""
    if not isinstance(value, Tracer) and not value >= 0:
        raise ValueError(f"{name} should be >= 0 but is: {value}")


def _axes_of_leaves(
    axes: Any, default: MatrixAxes, tree: Any, prefix: str
) -> list[MatrixAxes]:
    """The axes of each leaf, which must be real and of their rank."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        _checked_axes(path, leaf, a, default, prefix)
        for (path, leaf), a in zip(leaves, axes_of(axes, tree), strict=True)
    ]


def _checked_axes(
    path: Any, leaf: Any, axes: Any, default: MatrixAxes, prefix: str
) -> MatrixAxes:
    """The axes of one leaf, or torch's errors."""
    shape, where = jnp.shape(leaf), jax.tree_util.keystr(path) or "the root"
    dtype = jnp.result_type(leaf)
    if axes is None and len(shape) != 2:
        raise ValueError(
            f"{prefix}Muon only supports 2D parameters whereas we found a "
            f"parameter with size: {shape} at {where}. Give it to another "
            'optimizer: optax.partition({"muon": muon(...), "adamw": '
            "optax.adamw(...)}, pliax.optim.labels)"
            + (
                ", or say with axes= which of its axes are matrices."
                if shape[2:]
                else "."
            )
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"Muon does not support complex parameters: found {dtype} at {where}."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"Muon only supports floating-point parameters: found {dtype} at {where}."
        )
    try:
        matrices(axes or default, shape)
    except ValueError as error:
        raise ValueError(f"muon: at {where}, {error}") from None
    return axes or default
