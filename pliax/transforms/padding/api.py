"""``px.pad``: a function of arrays as a function of arrays in buckets."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr

from pliax.core.constraints import in_python
from pliax.core.dims import Size
from pliax.core.guards import Guard
from pliax.core.marks import holds
from pliax.core.provenance import calling_place
from pliax.core.symbolic_jaxprs import is_symbolic, shapes_of, with_sizes
from pliax.core.symbols import Symbol
from pliax.core.unbacked import most, raise_failed, with_unbacked
from pliax.transforms._arguments import (
    Leaf,
    Parameters,
    check_call,
    describe_callable,
    read_parameters,
)
from pliax.transforms._options import read_where
from pliax.transforms._shape_specs import names_in
from pliax.transforms._sizes import Sizes, origins_of, read_sizes
from pliax.transforms._trace_errors import NotSymbolicError
from pliax.transforms.tracing import SymbolicTrace, trace, validate_if_asked

from .interpreter import run_whole
from .layouts import Bucket
from .rules import PaddingRefused


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PaddedFunction:
    """A function of padded arrays, made by :func:`pad`.

    Attributes:
        __wrapped__: the function as it was given.
    """

    __wrapped__: Callable[..., Any]
    _parameters: Parameters
    _sizes: Sizes
    _constraints: tuple[str, ...]
    _least: Mapping[str, int]

    def __call__(self, *args: Any, sizes: Any, **kwargs: Any) -> Any:
        """The padded results for arrays of which the first `sizes` are valid.

        Args:
            *args: arrays; an axis named t may be longer than `sizes["t"]`, and what
              it holds beyond has no influence on what is valid of the result.
            sizes: the true sizes, integers or int32 scalars.
            **kwargs: further arrays, by name.

        Returns:
            What the function returns, each array as long as its sizes can become.

        Raises:
            PaddingRefused: where an operation cannot be padded exactly.
            ValueError: where sizes are missing, too large, or break a guard.
        """
        lengths, traced = self._trace(args, kwargs, sizes)
        leaves = jax.tree.leaves((args, kwargs))
        values = {n: jnp.asarray(sizes[n], jnp.int32) for n in lengths}
        ranges = {name: (self._least[name], lengths[name]) for name in lengths}
        ranges = with_unbacked(traced.assumptions, ranges)
        bucket = Bucket(ranges, values, traced.equal_if_unbacked)
        shapes = [v.aval.shape for v in traced.jaxpr.invars]
        pairs = zip(map(jnp.asarray, leaves), shapes, strict=True)
        padded = [bucket.simple(x, shape) for x, shape in pairs]
        data = run_whole(bucket, traced.jaxpr, traced.consts, padded)
        validate_if_asked(traced)  # the rules have asked more
        self._raise_failed(bucket)
        return jax.tree.unflatten(traced.out_tree, data)

    def _raise_failed(self, bucket: Bucket) -> None:
        """What is checked at run time; that is now, unless the call is traced."""
        texts, held = bucket.checked()
        if isinstance(held, Tracer):
            raise PaddingRefused(
                "check",
                "inside jax.jit nobody can raise what is checked at run time; call the "
                "padded function outside or use px.compile, or say with where= what "
                f"holds of sizes that are traced ({texts[0]})",
                calling_place(),
            )
        raise_failed(texts, held)

    def out_shapes(self, *args: Any, sizes: Any, **kwargs: Any) -> Any:
        """The valid shape of each result, for the same arguments as a call.

        For sizes born from data it has their bounds.
        """
        _, traced = self._trace(args, kwargs, sizes)
        shapes = [
            tuple(most(n, traced.assumptions, sizes) for n in v.aval.shape)
            for v in traced.jaxpr.outvars
        ]
        return jax.tree.unflatten(traced.out_tree, shapes)

    def guards(self, *args: Any, sizes: Any, **kwargs: Any) -> Any:
        """The conditions on sizes under which the padded program is right."""
        return self._trace(args, kwargs, sizes)[1].guards

    def _trace(
        self, args: tuple, kwargs: dict, sizes: Any
    ) -> tuple[dict[str, int], SymbolicTrace]:
        check_call(self.__wrapped__, args, kwargs, self._parameters.owner)
        leaves = self._parameters.leaves(args, kwargs)
        bound = self._sizes.read(leaves)
        lengths = {name: length for name, (length, _) in bound.items()}
        self._check(lengths, sizes)
        shapes = self._sizes.shapes(leaves)
        origins = origins_of(shapes)
        symbols = [
            Symbol(
                name,
                _hint(sizes[name], length),
                origins[name],
                is_strong=True,
                low=self._least[name],
                high=length,
                is_traced=not _is_known(sizes[name]),
            )
            for name, length in lengths.items()
        ]

        def make(assumptions: Any) -> Any:
            avals = [_abstract(x, s, assumptions) for x, s in shapes]
            tree = jax.tree.structure((args, kwargs))
            return jax.tree.unflatten(tree, avals)

        owner = self._parameters.owner
        f, known = self.__wrapped__, self._constraints
        try:
            found = trace(f, make, symbols, known, owner=owner)
        except NotSymbolicError as error:
            raise PaddingRefused("trace", error.reason, error.place) from error
        for guard in found.guards:
            self._require(guard, sizes)
        return lengths, found

    def _check(self, lengths: Mapping[str, int], sizes: Any) -> None:
        owner = self._parameters.owner
        if not isinstance(sizes, Mapping):
            raise TypeError(
                f"{owner}: sizes is {sizes!r}, which is no dictionary.\n"
                'Pass the true sizes by name, sizes={"t": 5}.'
            )
        for name, size in sizes.items():
            _check_integer(owner, name, size)
        missing, unknown = lengths.keys() - sizes.keys(), sizes.keys() - lengths.keys()
        if missing or unknown:
            raise ValueError(
                f"{owner}: sizes names {_list(sizes)}, but dims names "
                f"{_list(lengths)}.\nPass the true size of each: "
                f"sizes={{{', '.join(f'{n!r}: …' for n in sorted(lengths))}}}."
            )
        known = {n: int(sizes[n]) for n in lengths if _is_known(sizes[n])}
        for text in self._constraints:
            if names_in(text) <= known.keys() and not holds(text, known):
                raise ValueError(
                    f"{owner}: {in_python(text)} was declared, but sizes is {known}.\n"
                    "Pass other sizes, or drop the condition."
                )
        for name, size in known.items():
            dim = self._sizes.dims.get(name)
            if dim is not None and not dim.holds(size):
                raise ValueError(
                    f"{owner}: sizes says {name} = {size}, but Dim({name!r}) says "
                    f"{dim.description}.\nPass another size, or widen the Dim."
                )
            low, length = self._least[name], lengths[name]
            if not low <= size <= length:
                raise ValueError(
                    f"{owner}: sizes says {name} = {size}, but the arrays have room "
                    f"for {low} to {length}.\nPass longer arrays, or min=."
                )

    def _require(self, guard: Guard, sizes: Mapping[str, Any]) -> None:
        known = {n: int(s) for n, s in sizes.items() if _is_known(s)}
        if unknown := sorted(guard.names - known.keys()):
            raise PaddingRefused(
                "guard",
                f"the program holds where {guard.condition}, which nobody can check "
                f"while {unknown[0]} is traced; say so with where=, or pass integers",
                guard.place,
            )
        if not guard.holds(known):
            raise ValueError(
                f"{self._parameters.owner}: the program holds where "
                f"{guard.condition}, which {known} does not satisfy.\n"
                f"  at {guard.place}"
            )

    def __repr__(self) -> str:
        return f"<px.pad of {self.__wrapped__!r}>"


def pad(
    f: Any,
    *,
    dims: Mapping[str, Any] | None = None,
    where: Any = (),
    min: Any = None,  # noqa: A002  (as in Dim)
) -> PaddedFunction:
    """Makes a function exact on arrays that are longer than their contents.

    The result computes on whole buckets what `f` computes on the valid part of them.
    Valid results do not depend on what the padding holds, bit for bit (NaN included),
    and every reduction sees valid elements and its identity only: results equal those
    of `f` up to the order of float additions. Where an operation cannot be padded so,
    it raises `PaddingRefused` with the user's line.

    Args:
        f: a function of pytrees of arrays; derivatives belong inside of it. Or a jaxpr
            that was traced for symbolic shapes,
            ``jax.make_jaxpr(f)(jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t"),
            jnp.float32))``.
        dims: names of sizes, from a parameter name or path to a shape ("b, t, _"), as
            in :func:`compile`. The length an array has is the most its size can become.
            A jaxpr has names of its own.
        where: what else is known of the sizes, "t % 8 == 0" or "a <= b".
        min: the smallest value of a size, 1 where neither it nor a :class:`Dim` says
            more.

    Returns:
        A :class:`PaddedFunction`; call it with the true sizes, `sizes={"t": 5}`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> mean = px.pad(lambda x: x.mean(), dims={"x": "t"})
        >>> float(mean(jnp.array([1.0, 2.0, 6.0, jnp.nan]), sizes={"t": 3}))
        3.0
    """
    if hasattr(f, "eqns"):
        f, dims = _of_jaxpr(f, dims)
    owner = f"px.pad({describe_callable(f)})"
    if not callable(f):
        raise TypeError(f"{owner}: {f!r} is not callable.\nPass the function first.")
    if dims is None:
        raise TypeError(
            f"{owner}: dims is missing: which sizes may be padded?\n"
            'Pass for example dims={"x": "b, t"}.'
        )
    parameters, _ = read_parameters(f, (), (), owner)
    sizes = read_sizes(dims, parameters)
    known = read_where(where, sizes, owner)
    known += tuple(c for dim in sizes.dims.values() for c in dim.constraints)
    _check_least(owner, min or {}, sizes)
    return PaddedFunction(f, parameters, sizes, known, _least(min or {}, sizes))


def _least(given: Mapping[str, int], sizes: Sizes) -> dict[str, int]:
    """The smallest value of each size."""
    said = {name: dim.min for name, dim in sizes.dims.items()}
    return {n: max(given.get(n, 1), said.get(n, 0)) for n in sizes.names}


def _check_least(owner: str, least: Any, sizes: Sizes) -> None:
    is_read = isinstance(least, Mapping)
    if not is_read or any(type(n) is not int for n in least.values()):
        raise TypeError(
            f"{owner}: min is {least!r}, which gives no integers by name.\n"
            'Pass the smallest values of sizes, min={"t": 2}.'
        )
    if unknown := sorted(map(str, least.keys() - sizes.names)):
        raise ValueError(
            f"{owner}: min names {_list(unknown)}, but dims names "
            f"{_list(sizes.names)}.\nName sizes of dims."
        )


def _check_integer(owner: str, name: str, size: Any) -> None:
    is_array = hasattr(size, "dtype") and np.ndim(size) == 0
    is_integer = is_array and np.issubdtype(size.dtype, np.integer)
    if not is_integer and type(size) is not int:
        raise TypeError(
            f"{owner}: sizes says {name} = {size!r}, which is no integer.\n"
            "Pass an int, or an integer scalar of NumPy or JAX."
        )


def _of_jaxpr(closed: Any, dims: Any) -> tuple[Callable[..., Any], dict[str, str]]:
    """A jaxpr as a function of its flat arguments, and their symbolic shapes."""
    jaxpr = getattr(closed, "jaxpr", closed)
    if dims is not None or not is_symbolic(jaxpr):
        found = "dims was given" if dims is not None else "its shapes are numbers"
        raise TypeError(
            f"px.pad: a jaxpr must name its sizes itself, but {found}.\n"
            "Trace it for symbolic shapes, jax.make_jaxpr(f)(jax.ShapeDtypeStruct("
            'jax.export.symbolic_shape("b, t"), dtype)), or pass the function.'
        )

    def function(*args: Any) -> list[Any]:
        sizes = [n for x in args for n in x.shape if isinstance(n, Size)]
        assumptions = sizes[0].assumptions
        found = with_sizes(jaxpr, lambda n: assumptions.known.parse(str(n))[0])
        return eval_jaxpr(found, closed.consts, *args)

    function.__name__ = "jaxpr"
    shapes = enumerate(shapes_of(jaxpr))
    return function, {f"args[{i}]": shape for i, shape in shapes if shape}


def _abstract(leaf: Leaf, sizes: tuple[Any, ...], assumptions: Any) -> Any:
    """An abstract array with symbolic sizes where dims names them."""
    aval: Any = jax.typeof(leaf.value)
    if not any(isinstance(n, str) for n in sizes):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
    shape = assumptions.known.parse(", ".join(map(str, sizes)))
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def _hint(size: Any, length: int) -> int:
    return int(size) if _is_known(size) else length


def _is_known(size: Any) -> bool:
    return isinstance(size, int | np.integer) or (
        isinstance(size, jax.Array | np.ndarray) and not isinstance(size, Tracer)
    )


def _list(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
