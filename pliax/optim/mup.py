"""Maximal update parametrisation: what is tuned on a narrow model serves a wide one.

With the usual initialisation and one learning rate for all, the outputs of a network
move the more in a step, the wider it is, so that the best learning rate shrinks with
the width. Here the shapes of a narrow model, for which the learning rate was found, and
of a wide one say how much to change for each parameter: the initial scale of the layers
that read a wide vector into a fixed number of outputs, and the learning rates of all
layers that read a wide vector.

========  ====================  ===============  ==================
weights   inputs -> outputs     initial scale    Adam's rate
========  ====================  ===============  ==================
input     fixed -> wide         1                1
hidden    wide -> wide          1 / sqrt(m)      1 / m
output    wide -> fixed         1 / m            1 / m
========  ====================  ===============  ==================

``m`` is how many times as many inputs the wide layer has. An initialisation in
proportion to ``1 / sqrt(inputs)`` has one ``1 / sqrt(m)`` of it already, so that only
output layers are scaled. Vectors (biases, norms) are input weights. Muon's updates have
a spectral norm that is known, so that its rate is that which keeps the norm in
proportion to ``sqrt(outputs / inputs)``.

Sharp edges. A weight that is used twice, as a tied embedding is, has one rate: multiply
the logits by ``1 / m`` yourself. Where heads grow with the width, attention scores are
to be divided by their size, not its root. Names are not looked at: biases of several
axes, (heads, channels), want ``MatrixAxes(rows=(0, 1), columns=())``; with
``layout="out_in"`` an embedding (vocabulary, width) wants ``MatrixAxes(1, 0)``.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .matrix_axes import MatrixAxes, axes_of, layout_axes
from .muon import shape_ratio


if TYPE_CHECKING:  # importing optax takes as long as the rest of pliax
    import optax


@dataclasses.dataclass(frozen=True)
class _Fans:
    """The inputs and outputs of one layer, narrow and wide."""

    narrow: tuple[int, int]
    wide: tuple[int, int]

    @property
    def inputs(self) -> float:
        """How many times as many inputs the wide one has."""
        return self.wide[0] / self.narrow[0]

    @property
    def outputs(self) -> float:
        """How many times as many outputs the wide one has."""
        return self.wide[1] / self.narrow[1]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What to change between two widths; made by `mup`.

    Attributes:
        init_scales: a tree of factors for the initial parameters.
        adam_rates: a tree of factors for the learning rates of Adam and its kin, whose
            updates do not depend on the scale of the gradients.
    """

    init_scales: Any
    adam_rates: Any
    _fans: Any = dataclasses.field(repr=False)

    def rescale(self, params: Any) -> Any:
        """The initial parameters of the wide model, from those of the usual kind."""
        return _scaled(self.init_scales, params)

    def scale_adam(self) -> "optax.GradientTransformation":
        """Multiplies updates by `adam_rates`: to be chained behind Adam.

        Before ``optax.add_decayed_weights`` the decay keeps its rate, behind it the
        decay shrinks with the updates.
        """
        return _scale(self.adam_rates)

    def scale_muon(
        self, adjust_lr_fn: str | None = None
    ) -> "optax.GradientTransformation":
        """Multiplies the updates of `scale_by_muon` or `muon` for the wide model.

        Behind `muon` the weight decay is multiplied, too.

        Args:
            adjust_lr_fn: that of Muon. "spectral_unclamped" needs no change; nor does
                "original" where all layers grow alike.
        """
        ratio = shape_ratio(adjust_lr_fn)

        def rate(fans: _Fans) -> float:
            (narrow_in, narrow_out), (wide_in, wide_out) = fans.narrow, fans.wide
            wanted = math.sqrt(fans.outputs / fans.inputs)
            return wanted * ratio(narrow_out, narrow_in) / ratio(wide_out, wide_in)

        return _scale(jax.tree.map(rate, self._fans))


def mup(
    base: Any,
    params: Any,
    *,
    layout: str = "in_out",
    axes: Any = None,
    initialized: str = "fan_in",
) -> Transfer:
    """How to initialise and train a model as wide as ``params``, tuned as ``base``.

    The two trees have the same structure and differ in sizes. An axis that has the same
    size in both is one of fixed size: a vocabulary, classes, heads.

    Args:
        base: the parameters, or their shapes (`jax.eval_shape`), of the model for which
            the learning rate was found. Of a flax nnx state take ``nnx.as_pure``, whose
            leaves are arrays.
        params: those of the model to be trained.
        layout: whether matrices are (inputs, outputs), "in_out", or "out_in".
        axes: for leaves of three and more axes, as in `muon`: batch axes belong to
            neither inputs nor outputs.
        initialized: how the parameters given to `Transfer.rescale` depend on the width:
            "fan_in" if the standard deviation is in proportion to
            ``1 / sqrt(inputs)``, as LeCun's, He's, and flax's are; "constant" if it
            does not depend on it, as GPT-2's 0.02.

    Raises:
        ValueError: if the trees or ranks differ, a leaf of three and more axes has no
            axes, or an option is none of those above.

    Examples:
        >>> import optax
        >>> import jax.numpy as jnp
        >>> def shapes(width):
        ...     sizes = {"in": (8, width), "hidden": (width, width), "out": (width, 3)}
        ...     return {name: jnp.ones(size) for name, size in sizes.items()}
        >>> transfer = mup(shapes(64), shapes(256))
        >>> transfer.adam_rates
        {'hidden': 0.25, 'in': 1.0, 'out': 0.25}
        >>> transfer.init_scales
        {'hidden': 1.0, 'in': 1.0, 'out': 0.5}
        >>> tx = optax.chain(optax.adam(1e-2), transfer.scale_adam())

    References:
        Yang et al., "Tensor Programs V: Tuning large neural networks via zero-shot
        hyperparameter transfer", 2022, arXiv:2203.03466, table 8. Yang, Simon,
        Bernstein, "A spectral condition for feature learning", 2023,
        arXiv:2310.17813, condition 1.
    """
    if initialized not in ("fan_in", "constant"):
        raise ValueError(
            "mup: initialized should be 'fan_in' (a standard deviation in proportion "
            f"to 1 / sqrt(inputs)) or 'constant' but is: {initialized!r}"
        )
    power = 0.0 if initialized == "fan_in" else -0.5

    def init_scale(fans: _Fans) -> float:
        if fans.inputs == 1:
            return 1.0
        return fans.inputs ** (power if fans.outputs != 1 else power - 0.5)

    fans = _fans_of_leaves(base, params, layout_axes(layout), axes)
    init_scales = jax.tree.map(init_scale, fans)
    return Transfer(init_scales, jax.tree.map(lambda f: 1 / f.inputs, fans), fans)


def _scale(factors: Any) -> "optax.GradientTransformation":
    """Multiplies each update, where there is one, by a factor of its own."""
    import optax

    return optax.stateless(lambda updates, params=None: _scaled(factors, updates))


def _scaled(factors: Any, tree: Any) -> Any:
    """Each leaf, where there is one, times a factor of its own, in its own dtype."""

    def scaled(factor: float, below: Any) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, below)

    return jax.tree.map(scaled, factors, tree)


def _fans_of_leaves(base: Any, params: Any, default: MatrixAxes, axes: Any) -> Any:
    """Inputs and outputs of every leaf; those of scalars and vectors do not grow."""
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    narrow, other = jax.tree.flatten(base)
    if other != structure:
        raise ValueError(
            f"mup: base and params differ in structure: {other} and {structure}. Build "
            "both with one function of the width."
        )
    found = [
        _fans(jax.tree_util.keystr(path), x, W, a or default)
        for (path, W), x, a in zip(paths, narrow, axes_of(axes, params), strict=True)
    ]
    return structure.unflatten(found)


def _fans(where: str, base: Any, leaf: Any, axes: MatrixAxes) -> _Fans:
    narrow, wide = np.shape(base), np.shape(leaf)
    if len(narrow) != len(wide):
        raise ValueError(
            f"mup: {where} has the shape {narrow} in base and {wide} in params. Only "
            "sizes may differ."
        )
    if len(wide) < 2:
        return _Fans((1, 1), (1, 1))
    try:
        (a, b), (c, d) = (_inputs_and_outputs(axes, shape) for shape in (narrow, wide))
    except ValueError as error:
        raise ValueError(
            f"mup: at {where}, {error} Say with axes= which are rows and columns."
        ) from None
    return _Fans((a, b), (c, d))


def _inputs_and_outputs(axes: MatrixAxes, shape: tuple[int, ...]) -> tuple[int, int]:
    _, rows, columns = axes.places(shape)
    if axes.split:
        raise ValueError(
            f"{axes} splits the rows, and the sizes of parts are those of one width: "
            "leave split out if all parts grow alike, or keep them apart."
        )
    if 0 in shape:
        raise ValueError(f"a parameter of size {shape} has no elements.")
    inputs, outputs = (math.prod(shape[a] for a in side) for side in (columns, rows))
    return inputs, outputs
