"""One executable: a trace in one bucket, and the arrays on their way in and out."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pliax.core.dims import evaluate

from ._families import Reading
from ._ledger import Calls
from .padding.interpreter import run
from .padding.layouts import Bucket, Padded
from .tracing import SymbolicTrace


@dataclasses.dataclass(eq=False)
class Entry:
    """One trace of the function, and what it is right for.

    Attributes:
        reading: which sizes of a call are symbols.
        trace: the program; None where no size is a symbol, so that JAX traces it.
        function: the user's function, for that case.
        tree: the structure of the arguments.
        refusal: why it is not padded; None while it may be.
        reason: why it was traced.
        tally: the cost of tracing it, until its first plan takes that over.
    """

    reading: Reading
    trace: SymbolicTrace | None
    function: Callable[..., Any]
    tree: Any
    refusal: str | None = None
    reason: str = ""
    tally: Any = None

    def match(self, sizes: Sequence[int]) -> dict[str, int] | None:
        """The symbols' values in a call that this entry serves."""
        values = self.reading.bind(sizes)
        if values is None or self.trace is None:
            return values
        holds = all(guard.holds(values) for guard in self.trace.guards)
        return values if holds else None

    def failed_guard(self, sizes: Sequence[int]) -> str | None:
        """The first guard that a call breaks."""
        values = self.reading.bind(sizes)
        guards = self.trace.guards if self.trace and values is not None else ()
        return next((str(g) for g in guards if not g.holds(values or {})), None)


@dataclasses.dataclass(eq=False)
class Plan:
    """An entry in a bucket: what one executable computes.

    Attributes:
        number: what tells JAX's cache this executable from others.
        entry: the trace.
        ranges: the sizes it serves.
        group: the same, for statistics.
        reason: why it was built.
    """

    number: int
    entry: Entry
    ranges: dict[str, tuple[int, int]]
    group: str
    reason: str
    facts: Any = None
    tally: Any = None
    out_sizes: tuple[tuple[Any, ...], ...] = ()

    @property
    def lengths(self) -> dict[str, int]:
        """How long each named size can become."""
        return {name: high for name, (_, high) in self.ranges.items()}

    def bucket(self, values: Mapping[str, Any]) -> Bucket:
        """The sizes it serves, as the padding transform takes them."""
        trace = self.entry.trace
        return Bucket(self.ranges, values, trace.equal if trace else {})

    def run(self, sizes: Any, args: tuple, kwargs: dict) -> Any:
        """The executable's body, under JAX's trace."""
        leaves = jax.tree.leaves((args, kwargs))
        entry = self.entry
        if entry.trace is None:
            leaves = _with_constants(leaves, entry.reading)
            args, kwargs = jax.tree.unflatten(entry.tree, leaves)
            return entry.function(*args, **kwargs)
        values = {name: sizes[i] for i, name in enumerate(self.ranges)}
        bucket = self.bucket(values)
        results = run(
            bucket,
            entry.trace.jaxpr,
            entry.trace.consts,
            _inputs(bucket, entry.trace, leaves),
        )
        self.out_sizes = tuple(v.aval.shape for v in entry.trace.jaxpr.outvars)
        data = [bucket.simplified(x).data for x in results]
        return jax.tree.unflatten(entry.trace.out_tree, data)

    def bind(self, values: Mapping[str, int], leaves: Sequence[Any]) -> "Bound":
        """The plan for exact sizes: what has to be padded and cut."""
        vector = np.asarray([values[name] for name in self.ranges], np.int32)
        packed = jax.device_put(vector) if len(vector) else None
        inputs: dict[int, tuple[int, ...]] = {}
        trace = self.entry.trace
        if trace is not None:
            bucket = self.bucket({})
            for i, v in zip(trace.inputs, trace.jaxpr.invars, strict=True):
                shape = bucket.shape(v.aval.shape)
                if shape != np.shape(leaves[i]):
                    inputs[i] = shape
        calls = self.tally.part(*self._elements(values))
        return Bound(self, packed, dict(values), inputs, calls)

    def _elements(self, values: Mapping[str, int]) -> tuple[int, int]:
        """Valid elements along the dynamic sizes, and those of their bucket."""
        trace = self.entry.trace
        names = trace.shaped_by - trace.equal.keys() if trace else ()
        if not names:
            return 0, 0
        lengths = self.lengths
        return (
            math.prod(values[name] for name in names),
            math.prod(lengths[name] for name in names),
        )


@dataclasses.dataclass(eq=False)
class Bound:
    """A plan at exact sizes.

    Attributes:
        plan: the executable.
        vector: the named sizes as one array on the device.
        values: the same as integers.
        inputs: the physical shapes of arguments that need padding.
        calls: what counts its calls.
        outputs: the valid shapes of results that need cutting.
    """

    plan: Plan
    vector: Any
    values: dict[str, int]
    inputs: dict[int, tuple[int, ...]]
    calls: Calls
    outputs: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether arrays go in and come out as they are."""
        return not self.inputs and not self.outputs

    def read_outputs(self) -> None:
        """Notes what has to be cut, once the plan has been traced."""
        bucket = self.plan.bucket({})
        for i, sizes in enumerate(self.plan.out_sizes):
            shape = tuple(evaluate(n, self.values) for n in sizes)
            if shape != bucket.shape(sizes):
                self.outputs[i] = shape

    def pad(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments in their buckets."""
        if not self.inputs:
            return args, kwargs
        leaves, tree = jax.tree.flatten((args, kwargs))
        for i, shape in self.inputs.items():
            leaves[i] = pad_array(leaves[i], shape)
        return jax.tree.unflatten(tree, leaves)

    def cut(self, results: Any) -> Any:
        """The valid part of the results."""
        if not self.outputs:
            return results
        leaves, tree = jax.tree.flatten(results)
        for i, shape in self.outputs.items():
            leaves[i] = cut_array(leaves[i], shape)
        return jax.tree.unflatten(tree, leaves)


def _with_constants(leaves: Sequence[Any], reading: Reading) -> list[Any]:
    """Python integers in place of the tracers that jit makes of them."""
    leaves = list(leaves)
    for position, wanted in zip(reading.positions, reading.wanted, strict=True):
        if position.axis is None:
            leaves[position.leaf] = wanted
    return leaves


def _inputs(
    bucket: Bucket, trace: SymbolicTrace, leaves: Sequence[Any]
) -> list[Padded]:
    pairs = zip(trace.inputs, trace.jaxpr.invars, strict=True)
    return [bucket.simple(jnp.asarray(leaves[i]), v.aval.shape) for i, v in pairs]


# --- arrays in and out ----------------------------------------------------------------


def pad_array(x: Any, shape: tuple[int, ...]) -> Any:
    """An array at the start of a longer one, without a compilation for its size."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # keys know no zero to pad with
        index = [
            np.minimum(np.arange(n), m - 1) for n, m in zip(shape, x.shape, strict=True)
        ]
        return x[np.ix_(*index)]
    if _is_spread(x, shape):
        return _by_device(pad_array, x, shape)
    if isinstance(x, jax.Array) and not _is_on_host(x):
        widths = [(0, n - m, 0) for n, m in zip(shape, x.shape, strict=True)]
        longer = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
        return jax.device_put(longer, x.sharding) if x.committed else longer
    longer = np.zeros(shape, x.dtype)
    longer[tuple(slice(n) for n in np.shape(x))] = x
    is_placed = isinstance(x, jax.Array) and x.committed
    return jax.device_put(longer, x.sharding) if is_placed else longer


def cut_array(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The first elements along each axis, without a compilation for their number."""
    if _is_spread(x, shape):
        return _by_device(cut_array, x, shape)
    part = tuple(slice(n) for n in shape)
    if not _is_on_host(x):
        return x[part]
    cut = np.ascontiguousarray(np.asarray(x)[part])
    return jax.device_put(cut, x.sharding if x.committed else None)


def _is_spread(x: Any, shape: tuple[int, ...]) -> bool:
    """Whether several devices have parts of an array, whole along axes that change."""
    if not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
        return False
    local = x.sharding.shard_shape(x.shape)
    return all(a in (b, c) for a, b, c in zip(x.shape, shape, local, strict=True))


def _by_device(change: Callable[..., Any], x: jax.Array, shape: tuple[int, ...]) -> Any:
    local = x.sharding.shard_shape(shape)
    parts = [change(shard.data, local) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, x.sharding, parts)


def _is_on_host(x: jax.Array) -> bool:
    """Whether NumPy can read an array in place."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or x.weak_type:
        return False
    devices = x.sharding.device_set
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"
