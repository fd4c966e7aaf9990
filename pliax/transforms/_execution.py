"""One executable: a trace in one bucket, and the arrays on their way in and out."""

import contextlib
import dataclasses
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ref import AbstractRef

from pliax.core._jax import is_tracing, with_first
from pliax.core.unbacked import most, raise_failed, with_unbacked

from ._buffers import Padding, cut_array, padder
from ._donation import delete
from ._entries import Entry
from ._families import Reading, sizes_of_leaves
from ._kinds import unmarked
from ._ledger import Calls
from .padding.interpreter import run_whole
from .padding.layouts import Bucket, Padded, UnboundedSizeError, physical_shape
from .tracing import SymbolicTrace


class Unvetted(Exception):  # noqa: N818  (no user sees it)
    """JAX is about to trace an executable for arguments nobody has looked at."""


class _Vetting(threading.local):
    depth: int = 0  # while it is not 0 this thread may trace the executable


@dataclasses.dataclass(eq=False, slots=True)
class Plan:
    """An entry in a bucket: one executable, or several that differ in placement.

    Attributes:
        entry: the trace.
        ranges: the sizes it serves.
        group: the same, for statistics.
        reason: why it was built.
        facts: of the call it was built for; None until it can be found.
        tally: where its costs are counted.
        jitted: the function that JAX compiles.
        called: what calls its executables.
        plain: the function without padding, in which JAX may look for NaN.
        name: the one that JAX gives its executables.
        checks: the errors of what it checks at run time.
    """

    entry: Entry
    ranges: dict[str, tuple[int, int]]
    group: str
    reason: str
    facts: Any = None
    tally: Any = None
    jitted: Any = None
    called: Any = None
    plain: Any = None
    name: str = ""
    checks: tuple[str, ...] = ()
    _vetting: _Vetting = dataclasses.field(default_factory=_Vetting)

    @property
    def is_checked(self) -> bool:
        """Whether it returns what it checks at run time beside its results."""
        return self.entry.trace is not None and self.entry.trace.is_checked

    @contextlib.contextmanager
    def vetted(self) -> Iterator[None]:
        """Lets this thread trace the executable, as arguments have been looked at."""
        self._vetting.depth += 1
        try:
            yield
        finally:
            self._vetting.depth -= 1

    @property
    def unknown(self) -> list[str]:
        """The named sizes that calls differ in, in the order of the packed vector."""
        return [name for name, (low, high) in self.ranges.items() if low < high]

    @property
    def lengths(self) -> dict[str, int]:
        """How long each named size can become."""
        return {name: high for name, (_, high) in self.ranges.items()}

    def bucket(self, values: Mapping[str, Any]) -> Bucket:
        """The sizes it serves, as the padding transform takes them."""
        trace = self.entry.trace
        if trace is None:
            return Bucket(self.ranges, values)
        ranges = with_unbacked(trace.assumptions, self.ranges)
        return Bucket(ranges, values, trace.equal)

    def compile_as(
        self, f: Callable[..., Any], donated: Sequence[int], plain: Callable[..., Any]
    ) -> None:
        """Makes what JAX compiles, under the name and signature of f.

        Args:
            f: the function.
            donated: the positions of arguments that are given away.
            plain: f as `jax.jit` has it.
        """

        def body(vector: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self._vetting.depth:
                raise Unvetted
            return self._run(vector, args, kwargs)

        body.__name__, body.__qualname__ = f.__name__, f.__qualname__
        body.__signature__ = _signature(f)  # type: ignore[attr-defined]
        body.__wrapped__ = f  # type: ignore[attr-defined]  # for JAX, which tells where
        behind = tuple(p + 1 if p >= 0 else p for p in donated)
        self.jitted = jax.jit(body, donate_argnums=behind)
        self.called = with_first(self.jitted, refusal=Unvetted)
        self.plain = plain

    def _run(self, sizes: Any, args: tuple, kwargs: dict) -> Any:
        """The executable's body, under JAX's trace."""
        leaves = jax.tree.leaves((args, kwargs))
        entry = self.entry
        if entry.trace is None:
            leaves = _with_constants(leaves, entry.reading)
            args, kwargs = jax.tree.unflatten(entry.tree, leaves)
            return entry.function(*args, **kwargs)
        values = {name: sizes[i] for i, name in enumerate(self.unknown)}
        bucket, trace = self.bucket(values), entry.trace
        arrays = _inputs(bucket, trace, leaves)
        data = run_whole(bucket, trace.jaxpr, trace.consts, arrays)
        result = jax.tree.unflatten(trace.out_tree, data)
        self.checks, held = bucket.checked()
        return (result, held) if self.is_checked else result

    def bind(self, values: Mapping[str, int], args: tuple, kwargs: dict) -> "Bound":
        """The plan for exact sizes: what has to be padded and cut."""
        paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
        paddings, cuts, trace = [], {}, self.entry.trace
        if trace is not None:
            bucket = self.bucket({})
            for i, v in zip(trace.inputs, trace.jaxpr.invars, strict=True):
                exact, physical = np.shape(paths[i][1]), bucket.shape(v.aval.shape)
                if exact != physical:
                    paddings.append(Padding(i, exact, physical))
            cuts = self._cuts(bucket, trace, values)
        vector = np.asarray([values[name] for name in self.unknown], np.int32)
        packed = jax.device_put(vector) if len(vector) else None
        return Bound(
            plan=self,
            packed=packed,
            values=dict(values),
            sizes=sizes_of_leaves([leaf for _, leaf in paths]),
            calls=self._calls(values),
            paddings=tuple(paddings),
            pad=padder((args, kwargs), [path for path, _ in paths], paddings),
            cuts=cuts,
        )

    def _cuts(
        self, bucket: Bucket, trace: SymbolicTrace, values: Mapping[str, int]
    ) -> dict[int, tuple[int, ...]]:
        """The valid shapes of results that are longer."""
        found = {}
        for i, v in enumerate(trace.jaxpr.outvars):
            try:
                physical = physical_shape(bucket, v.aval.shape)
            except UnboundedSizeError:  # to be refused with the line it comes from
                continue
            shape = tuple(most(n, trace.assumptions, values) for n in v.aval.shape)
            if shape != physical:
                found[i] = shape
        return found

    def _calls(self, values: Mapping[str, int]) -> Calls:
        """What counts calls, and their elements along the dynamic sizes."""
        trace, lengths = self.entry.trace, self.lengths
        names = trace.shaped_by - trace.equal.keys() if trace else frozenset()
        # Of those born from data nobody knows how many there are.
        shaped = {name: values[name] for name in sorted(names & lengths.keys())}
        valid = math.prod(shaped.values()) if shaped else 0
        held = math.prod(lengths[name] for name in shaped) if shaped else 0
        return self.tally.part(tuple(shaped.values()), valid, held)


@dataclasses.dataclass(eq=False, slots=True)
class Bound:
    """A plan at exact sizes. What a call of a known size reads lies in one cache line.

    Attributes:
        run: the executable at these sizes, or what pads, runs it and cuts.
        execute: the executable, given these sizes with each call.
        packed: the named sizes; None where there are none.
        calls: what counts its calls.
        plan: the executable's.
        values: the named sizes.
        sizes: all, in the order of the flat arguments.
        paddings: the arguments that have to be padded.
        pad: what does that, given those by position and those by name.
        cuts: the valid shapes of results that have to be cut, by number.
        donated: the numbers of padded arguments which the user gave away.
        is_checked: as the plan's, whose question takes 0.1 us.
    """

    run: Callable[..., Any] = dataclasses.field(init=False)
    execute: Callable[..., Any] = dataclasses.field(init=False)
    packed: Any
    calls: Calls
    plan: Plan
    values: dict[str, int]
    sizes: tuple[int, ...]
    paddings: tuple[Padding, ...]
    pad: Callable[[tuple, dict], tuple[tuple, dict]]
    cuts: dict[int, tuple[int, ...]]
    donated: tuple[int, ...] = ()
    is_checked: bool = dataclasses.field(init=False)

    def __post_init__(self):
        self.is_checked = self.plan.is_checked
        # For one of many sizes: JAX knows the executable by then.
        self.execute = functools.partial(self.plan.called, self.packed)
        self.run = self._run
        if self.tells_sizes:
            jitted, packed = self.plan.jitted, self.packed
            self.run = with_first(jitted, packed, refusal=Unvetted, fits=self._fits)

    @property
    def tells_sizes(self) -> bool:
        """Whether `run` is JAX's own, and refuses arrays of other sizes."""
        return not (self.paddings or self.cuts or self.is_checked)

    def _fits(self, args: tuple, kwargs: dict) -> bool:
        try:
            return sizes_of_leaves(jax.tree.leaves((args, kwargs))) == self.sizes
        except Exception:  # no arrays: the long way tells the user so
            return False

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """What the dispatcher calls as it calls the executable."""
        if is_tracing():
            raise Unvetted
        return self.call(args, kwargs)

    def call(self, args: tuple, kwargs: dict) -> Any:
        """The results of one call, whose arguments are of these sizes."""
        given, named = self.pad(args, kwargs)
        try:
            results = self.execute(*given, **named)
        except FloatingPointError:  # jax_debug_nans looks at padding, too
            args, kwargs = unmarked(args, kwargs)
            return self.plan.plain(*args, **kwargs)
        if self.is_checked:  # the only wait for the device in a call
            results, held = results
            raise_failed(self.plan.checks, held)
        if self.cuts:
            leaves, tree = jax.tree.flatten(results)
            for i, shape in self.cuts.items():
                leaves[i] = cut_array(leaves[i], shape)
            results = jax.tree.unflatten(tree, leaves)
        if self.donated:
            delete(jax.tree.leaves((args, kwargs)), self.donated)
        return results


def _signature(f: Callable[..., Any]) -> inspect.Signature:
    """The user's, behind an argument of ours: JAX finds donated names in it.

    It has a name that nobody gives to one of `**kwargs`: JAX wants all to differ.
    """
    kind, ours = inspect.Parameter, "_pliax_sizes"
    try:
        theirs = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        theirs = [kind("args", kind.VAR_POSITIONAL), kind("kwargs", kind.VAR_KEYWORD)]
    while any(ours == parameter.name for parameter in theirs):
        ours = f"_{ours}"
    return inspect.Signature([kind(ours, kind.POSITIONAL_ONLY), *theirs])


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
    return [bucket.simple(_as_array(leaves[i]), v.aval.shape) for i, v in pairs]


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(jax.typeof(leaf), AbstractRef) else jnp.asarray(leaf)
