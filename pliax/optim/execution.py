"""How the matrices of a whole tree are orthogonalised: singly, in stacks, by owners.

All three compute the same. They differ in how many products there are, of what size,
and in what travels between devices::

    per_matrix   one product after another: a CPU gains nothing from stacks
    stacked      matrices of one shape are one stack: few large products
    owner        each device of a mesh axis orthogonalises a share of each stack

"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from pliax.core.manual_axes import may_be_partitioned, varying_axes
from pliax.kernels import look_ahead
from pliax.kernels._hopper import refused_counting, refused_device

from .matrix_axes import MatrixAxes, matrices
from .momentum import Momentum
from .newton_schulz import NewtonSchulz, squares
from .ownership import Local, by_owners
from .stacks import (
    Stack,
    apply_to_stacks,
    cut,
    grouped,
    joined,
    portions,
    whole_pieces,
)


EXECUTIONS = ("auto", "per_matrix", "stacked", "owner")

type Given = tuple[Array, Array, MatrixAxes]  # a gradient, its momentum, what they are


@dataclasses.dataclass(frozen=True)
class Execution:
    """How matrices are orthogonalised.

    Attributes:
        name: what one device does with stacks of matrices: "per_matrix", "stacked", or
            "auto", which goes by the default backend.
        owners: the mesh axes whose devices own matrices; None where each device has
            its part in every product, or there is one.
    """

    name: str
    owners: tuple[str, ...] | None = None

    def __call__(
        self,
        gradients: Sequence[Array],
        momenta: Sequence[Array],
        axes: Sequence[MatrixAxes],
        how: NewtonSchulz,
        rule: Momentum,
    ) -> tuple[list[Array], list[Array]]:
        """Each leaf's direction orthogonalised, in the working dtype; the momenta."""
        results: list[Any] = [None] * len(gradients)
        buffers = list(results)
        given = list(zip(gradients, momenta, axes, strict=True))
        is_one_pass = [self._is_one_pass(*x, how) for x in given]
        at_once = [i for i, is_one in enumerate(is_one_pass) if is_one]
        rest = [i for i, is_one in enumerate(is_one_pass) if not is_one]
        for numbers, run in ((at_once, in_one_pass), (rest, self._in_two)):
            done = run([given[i] for i in numbers], how, rule)
            for i, x, buffer in zip(numbers, *done, strict=True):
                results[i], buffers[i] = x, buffer
        return results, buffers

    def _is_one_pass(self, G: Array, M: Array, axes: MatrixAxes, how: Any) -> bool:
        """Whether momentum, rounding and stacking are one kernel."""
        if self.owners is not None or self._local is not in_stacks:
            return False
        recipe = matrices(axes, G.shape)
        if not recipe.is_stack or how.dtype != jnp.bfloat16:
            return False
        sides = recipe.stack_shape[1:]
        if look_ahead.refused(G, M, sides) is not None:
            return False
        return padded_sides(sides, how) == sides

    def _in_two(
        self, given: Sequence[Given], how: NewtonSchulz, rule: Momentum
    ) -> tuple[list[Array], list[Array]]:
        """Momentum leaf by leaf, then what it orthogonalises."""
        buffers, leaves = [], []
        for G, M, _ in given:
            buffer, ahead = rule(G, M)
            buffers.append(buffer)
            leaves.append(ahead)
        return self.orthogonalised(leaves, [axes for *_, axes in given], how), buffers

    def orthogonalised(
        self, leaves: Sequence[Array], axes: Sequence[MatrixAxes], how: NewtonSchulz
    ) -> list[Array]:
        """Each leaf orthogonalised, in the working dtype."""
        results: list[Any] = [None] * len(leaves)
        shardings = [jax.typeof(leaf).sharding for leaf in leaves]
        meshes = [s.mesh if s.mesh.explicit_axes else None for s in shardings]
        for numbers in grouped(meshes):
            run: Any = functools.partial(self._run, [axes[i] for i in numbers], how)
            if meshes[numbers[0]] is not None:
                # JAX refuses products over dimensions that Explicit axes shard.
                wanted = tuple(shardings[i] for i in numbers)
                run = jax.sharding.auto_axes(run, out_sharding=wanted)
            done = run(*(leaves[i] for i in numbers))
            for i, x in zip(numbers, done, strict=True):
                results[i] = x
        return results

    def _run(
        self, axes: Sequence[MatrixAxes], how: NewtonSchulz, *leaves: Array
    ) -> tuple[Array, ...]:
        rounded = [how.round(leaf) for leaf in leaves]
        if self.owners is not None:
            return by_owners(rounded, how, axes, self.owners, self._local)
        recipes = [matrices(a, x.shape) for a, x in zip(axes, leaves, strict=True)]
        return apply_to_stacks(recipes, rounded, lambda x: self._local(x, how))

    @property
    def _local(self) -> Local:
        on_cpu = self.name == "auto" and jax.default_backend() == "cpu"
        return one_by_one if on_cpu or self.name == "per_matrix" else in_stacks


def choose_execution(name: str, mesh: Any, axis: Any) -> Execution:
    """The execution of that name; "auto" goes by the mesh and the default backend.

    Raises:
        ValueError: for another name, owners without a mesh, a mesh without owners, or
            an axis that the mesh does not have.
    """
    if name not in EXECUTIONS:
        raise ValueError(
            f"execution should be one of {', '.join(map(repr, EXECUTIONS))} but is: "
            f"{name!r}"
        )
    if name == "owner" or (name == "auto" and mesh is not None):
        return Execution("auto", _owners(mesh, axis))
    if mesh is not None or axis is not None:
        raise ValueError(
            f"mesh and axis are for execution='owner', but execution is {name!r}. "
            "Leave them out, or name that."
        )
    return Execution(name)


def _owners(mesh: Any, axis: Any) -> tuple[str, ...]:
    if mesh is None:
        raise ValueError(
            "execution='owner' needs to know whose devices own matrices: pass mesh= "
            "and, if it has several axes, axis=."
        )
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise ValueError(
            f"mesh should be a jax.sharding.Mesh but is: {mesh!r}. Under "
            "optax.inject_hyperparams name it: static_args=('mesh',)."
        )
    names = tuple(mesh.axis_names)
    if axis is None and len(names) > 1:
        raise ValueError(
            f"mesh has the axes {names}: say with axis= over which of them matrices "
            "are owned, which is that over which parameters are sharded."
        )
    chosen = names if axis is None else axis
    chosen = tuple(chosen) if isinstance(chosen, tuple | list) else (chosen,)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"axis should name one or more of {names}, each once, but is: {axis!r}"
        )
    missing = [name for name in chosen if name not in names]
    if missing:
        raise ValueError(
            f"axis names {missing[0]!r}, but the mesh has the axes {names}."
        )
    return chosen


# --- on one device --------------------------------------------------------------------


def _what_stacks_together(x: Stack) -> tuple[Any, ...]:
    """The shape, and where, or over what, an array varies."""
    return *x.shape[1:], _devices(x), varying_axes(x)


def _devices(x: Any) -> frozenset[Any] | None:
    is_somewhere = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return frozenset(x.devices()) if is_somewhere else None


def one_by_one(stacks: Sequence[Stack], how: NewtonSchulz) -> list[Stack]:
    """Matrix after matrix: batched products are slow on a CPU, even those of one."""
    return [how(x[0])[None] if len(x) == 1 else lax.map(how, x) for x in stacks]


def in_stacks(stacks: Sequence[Stack], how: NewtonSchulz) -> list[Stack]:
    """Matrices of a shape together: few large products.

    Leaves of a shape make portions that each fill a device, one after the other, so
    that the intermediates of one portion of it are alive.
    """
    results: list[Any] = [None] * len(stacks)
    for numbers in grouped(map(_what_stacks_together, stacks)):
        done = None
        for portion in portions(numbers, [stacks[i].shape for i in numbers]):
            taken = [stacks[i] for i in portion]
            lengths, sides = [len(x) for x in taken], taken[0].shape[1:]
            sums = [squares(x) for x in taken]
            # Made by then, so that each reads its gradient and momentum once.
            taken, sums, done = lax.optimization_barrier((taken, sums, done))
            norms = cut(how.norms(jnp.concatenate(sums)), lengths)
            normalised = list(map(how.normalised, taken, norms))
            done = how.iterate(joined(normalised, padded_sides(sides, how)))
            parts = cut(done, lengths, *sides)
            for i, part in zip(portion, parts, strict=True):
                results[i] = part
    return results


def in_one_pass(
    given: Sequence[Given], how: NewtonSchulz, rule: Momentum
) -> tuple[list[Array], list[Array]]:
    """The same, where one kernel makes of gradients and momenta what is stacked."""
    recipes = [matrices(axes, G.shape) for G, _, axes in given]
    shapes = [recipe.stack_shape for recipe in recipes]
    results: list[Any] = [None] * len(given)
    buffers = list(results)
    together = [
        (shape[1:], _devices(G), _devices(M))
        for shape, (G, M, _) in zip(shapes, given, strict=True)
    ]
    for numbers in grouped(together):
        done, sides = None, shapes[numbers[0]][1:]
        static = look_ahead.Static(sides, bool(rule.nesterov))
        factors = jnp.stack(rule.factors(jnp.float32))
        for portion in portions(numbers, [shapes[i] for i in numbers]):
            # Not before the last portion's steps are done, whose stack it may take.
            factors, done = lax.optimization_barrier((factors, done))
            kept, X, sums = look_ahead.stacked(
                static,
                factors,
                [given[i][0].reshape(shapes[i]) for i in portion],
                [given[i][1].reshape(shapes[i]) for i in portion],
            )
            done = how.of_squares(X, sums)
            parts = cut(done, [shapes[i][0] for i in portion])
            for i, part, buffer in zip(portion, parts, kept, strict=True):
                results[i] = recipes[i].put_together([part])
                buffers[i] = buffer.reshape(given[i][1].shape)
    return results, buffers


def padded_sides(sides: tuple[int, ...], how: NewtonSchulz) -> tuple[int, ...]:
    """Of matrices in a stack, filled with zeros where products gain by that."""
    may_be_fused = how.bears_zeros and how.dtype == jnp.bfloat16
    if not may_be_fused or may_be_partitioned():
        return sides
    is_refused = refused_device() or refused_counting()
    return sides if is_refused else whole_pieces(sides)
