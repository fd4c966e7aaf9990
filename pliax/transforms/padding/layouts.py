"""Arrays in buckets: how a padded array lies in memory, and which part of it is valid.

A logical axis of symbolic size t lies in a physical axis at least as long as t can
become; its valid elements come first. Reshapes merge axes: the rows of (b, t, d) as
(b * t, d) are not the first b * t rows of the bucket. So a logical axis is a list of
factors, here (b, t), each with a physical axis of its own, in row-major order. Merging
and splitting are then bookkeeping; whoever needs one contiguous axis packs it.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from pliax.core.dims import Size
from pliax.core.size_expressions import (
    bounds,
    evaluate,
    magnitude,
    substitute,
    variables,
)
from pliax.core.unbacked import with_unbacked


Factors = tuple[Any, ...]  # sizes whose product is the size of one logical axis


class UnboundedSizeError(ValueError):
    """A size that no bucket can hold: nothing bounds it from above."""


@dataclasses.dataclass(frozen=True, eq=False)
class Padded:
    """An array in its bucket.

    Attributes:
        data: the physical array, one axis for each factor.
        axes: the factors of each logical axis.
        fill: what all the padding holds, where that is known.
    """

    data: Any
    axes: tuple[Factors, ...]
    fill: Any = None

    @property
    def rank(self) -> int:
        """The number of logical axes."""
        return len(self.axes)

    @property
    def dtype(self) -> Any:
        """The dtype of its elements."""
        return self.data.dtype

    @property
    def factors(self) -> Factors:
        """All factors, one for each physical axis."""
        return tuple(f for axis in self.axes for f in axis)

    @property
    def is_exact(self) -> bool:
        """Whether it has no padding."""
        return not any(isinstance(f, Size) for f in self.factors)

    def places(self, axis: int) -> tuple[int, ...]:
        """The physical axes of a logical axis."""
        start = sum(len(a) for a in self.axes[:axis])
        return tuple(range(start, start + len(self.axes[axis])))


class ScopeError(ValueError):
    """Something of a loop or a branch that is needed outside of it."""


class UnrepresentableError(ValueError):
    """Padding that would have to hold what a dtype cannot."""


class Bucket:
    """The sizes one executable serves: how long arrays are, and what is valid.

    Args:
        ranges: the smallest and largest value of each named size.
        values: the named sizes at run time, int32 scalars.
        equal: named sizes that equal others, or a constant, under the guards.

    Attributes:
        checks: what is asserted at run time, and whether it held; None in the body of a
            loop, from which no such thing gets out.
        may_have_cases: whether sizes born from data may be specialised; not where one
            is.
        again: sizes born from data that got a value more than once.
        recomputes: whether what gets a value again gets the same one.
    """

    def __init__(
        self,
        ranges: Mapping[str, tuple[int, int]],
        values: Mapping[str, Any],
        equal: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.equal = dict(equal)
        self.ranges = dict(ranges)
        self.values = dict(values)
        self._known: dict[str, int] = {
            name: low for name, (low, high) in ranges.items() if low == high
        }
        self._lengths: dict[Size, int] = {}
        self._canonical: dict[Size, Any] = {}
        self._forms: dict[Any, Any] = {}
        self._equal_forms: dict[Any, frozenset[Any]] = {}
        self._scalars: dict[Size, Any] = {}
        self._masks: dict[Any, Any] = {}
        self.checks: list[tuple[str, Any]] | None = []
        self.may_have_cases = True
        self.again: set[str] = set()
        self.recomputes = False
        self._outside: Bucket | None = None

    def inner(self) -> "Bucket":
        """The same bucket for the body of a loop, whose values must not get out.

        It reads what was computed outside; what it computes is its own.
        """
        scope = copy.copy(self)
        scope._scalars, scope._masks = dict(self._scalars), dict(self._masks)
        scope.values, scope.checks = dict(self.values), None
        return scope

    def case(self, size: Size, low: int, high: int) -> "Bucket":
        """The same bucket where a size born from data is known to lie in a range.

        What could be longer than 0 stays so: not everything can be asked of an empty
        array that can be asked of one whose elements are all padding.
        """
        ranges = {**self.ranges, str(size): (low, high)}
        ranges = with_unbacked(size.assumptions, ranges)
        scope = Bucket(ranges, self.values, self.equal)
        scope._forms, scope._equal_forms = self._forms, self._equal_forms
        scope.checks = None if self.checks is None else []
        scope.again, scope._outside = self.again, self
        scope.recomputes = self.recomputes
        return scope

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """While a program is run for the second time, on the same arguments."""
        before, self.recomputes = self.recomputes, True
        try:
            yield
        finally:
            self.recomputes = before

    def count(self, name: str, value: Any) -> None:
        """Gives a size born from data its value, also where it had one before."""
        if name in self.values:
            self.again.add(name)
        for known in (self._scalars, self._masks):
            for key in [key for key in known if name in _names(key)]:
                del known[key]
        self.values[name] = value

    def check(self, text: str, holds: Any) -> None:
        """Asserts something at run time.

        Raises:
            ScopeError: in the body of a loop.
        """
        if self.checks is None:
            raise ScopeError(
                "what is checked at run time cannot get out of the body of a loop or a "
                f"branch ({text.partition(chr(10))[0]})"
            )
        self.checks.append((text, holds))

    def checked(self) -> tuple[tuple[str, ...], Any]:
        """What was asserted, and one array that says what of it holds."""
        texts = tuple(text for text, _ in self.checks or ())
        return texts, jnp.stack([h for _, h in self.checks or ()]) if texts else ()

    # --- sizes ------------------------------------------------------------------------

    def size(self, size: Any) -> Any:
        """An integer where the bucket leaves one value, else the size itself."""
        if not isinstance(size, Size):
            return int(size)
        if (found := self._canonical.get(size)) is None:
            found = self._simplest(substitute(size, self.equal))
            if isinstance(found, Size):
                found = self._representative(found)
            self._canonical[size] = found
        return found

    def _representative(self, size: Size) -> Size:
        """The first size seen that equals one, as an expression or under the guards.

        The program may take (t + 1) // 2 for -(-t // 2), which agree.
        """
        assumptions = size.assumptions
        form = assumptions.known.same_form(size)
        if form in self._forms:
            return self._forms[form]
        zero = self._zeros(assumptions)
        for other, found in self._forms.items():
            if zero and not zero.isdisjoint((form - other, other - form)):
                self._forms[form] = found
                return found
        self._forms[form] = size
        return size

    def _zeros(self, assumptions: Any) -> frozenset[Any]:
        """The differences that guards say are 0, which no substitution makes so."""
        if (found := self._equal_forms.get(assumptions)) is None:
            known = assumptions.known
            zeros = [
                substitute(a, self.equal) - substitute(b, self.equal)
                for a, b in known.equalities
            ]
            forms = (known.same_form(d) for d in zeros if isinstance(d, Size))
            found = frozenset(d for d in forms if isinstance(d, Size))
            self._equal_forms[assumptions] = found
        return found

    def _simplest(self, size: Any) -> Any:
        if variables(size) <= self._known.keys():
            found = evaluate(size, self._known)
        else:
            low, high = bounds(size, self.ranges)
            found = low if low == high else size
        if not isinstance(found, Size) and found <= 0 and self._may_be_long(size):
            return size
        return found

    def _may_be_long(self, size: Any) -> bool:
        """Whether a size is not always 0, also where it is in this case."""
        return self._outside is not None and bool(self._outside.length(size))

    def may_be_empty(self, size: Any) -> bool:
        """Whether a size is 0 for some that are born from data or may be 0 themselves.

        Of all others the trace has asked, where it matters.
        """
        names = variables(size)
        asked = not any(
            name in size.assumptions.known.unbacked or self.ranges[name][0] < 1
            for name in names
        )
        return not asked and bounds(size, self.ranges)[0] < 1

    def length(self, size: Any) -> int:
        """How many elements a physical axis has: as many as the size can become."""
        size = self.size(size)
        if not isinstance(size, Size):
            return size
        if (found := self._lengths.get(size)) is None:
            _, high = bounds(size, self.ranges)
            if not np.isfinite(high):
                raise UnboundedSizeError(f"nothing bounds the size {size} from above")
            found = self._lengths[size] = max(int(high), int(self._may_be_long(size)))
        return found

    def shape(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        """The physical shape of sizes that are one factor each."""
        return tuple(self.length(size) for size in sizes)

    def scalar(self, size: Any) -> Any:
        """The value of a size at run time."""
        size = self.size(size)
        if not isinstance(size, Size):
            return np.int32(_fitting(size, size, np.int32))
        if (found := self._scalars.get(size)) is None:
            found = self._scalars[size] = self.counted(size)
        return found

    def require(self, size: Any) -> None:
        """Raises a ScopeError where a size has no value here."""
        missing = variables(size) - self._known.keys() - self.values.keys()
        if missing:
            raise ScopeError(
                f"the size {min(missing)} is born from data in the body of a loop or a "
                "branch and has no value outside of it; reduce there what has this size"
            )

    def counted(self, size: Any) -> Any:
        """The value of a size at run time, whatever is known of it otherwise."""
        self.require(size)
        for end in bounds(size, self.ranges):
            _fitting(end, size, np.int32)
        if magnitude(size, self.ranges) > np.iinfo(np.int32).max:
            return self.wide(size, np.int32)
        values = {**self._known, **self.values}
        found = evaluate(size, values, {"max": jnp.maximum, "min": jnp.minimum})
        return lax.convert_element_type(found, jnp.int32)

    def wide(self, size: Any, dtype: Any = np.int64) -> Any:
        """The value of a size at run time, by way of int64."""
        size = self.size(size)
        if not isinstance(size, Size):
            with jax.enable_x64(True):
                return jnp.asarray(_fitting(size, size, np.int64), np.int64)
        _fitting(magnitude(size, self.ranges), size, np.int64)
        with jax.enable_x64(True):
            known = {**self._known, **self.values}
            values = {
                n: lax.convert_element_type(x, np.int64) for n, x in known.items()
            }
            found = evaluate(size, values, {"max": jnp.maximum, "min": jnp.minimum})
            return lax.convert_element_type(found, dtype)

    # --- arrays -----------------------------------------------------------------------

    def exact(self, data: Any) -> Padded:
        """An array without padding."""
        return Padded(data, tuple((int(n),) for n in np.shape(data)))

    def simple(self, data: Any, sizes: Sequence[Any], fill: Any = None) -> Padded:
        """An array whose logical axes have one factor each."""
        return Padded(data, tuple((self.size(n),) for n in sizes), fill)

    def valid(self, axes: Sequence[Factors]) -> Any:
        """Which elements of a physical array are valid; None if all are."""
        key = tuple(axes)
        if key not in self._masks:
            factors = [f for axis in axes for f in axis]
            self._masks[key] = self._outer(factors)
        return self._masks[key]

    def _outer(self, factors: Sequence[Any]) -> Any:
        shape = self.shape(factors)
        masks = [
            lax.broadcast_in_dim(self._first(f), shape, (place,))
            for place, f in enumerate(factors)
            if isinstance(f, Size)
        ]
        result = None
        for mask in masks:
            result = mask if result is None else lax.bitwise_and(result, mask)
        return result

    def _first(self, size: Size) -> Any:
        """[True] * size, then False."""
        if size not in self._masks:
            iota = lax.iota(jnp.int32, self.length(size))
            count = lax.broadcast(self.scalar(size), iota.shape)
            self._masks[size] = lax.lt(iota, count)
        return self._masks[size]

    def filled(self, x: Padded, fill: Any) -> Padded:
        """The same array with a scalar in all its padding."""
        if x.is_exact or _is_same(x.fill, fill):
            return x
        if not _is_in(x.dtype, fill):
            raise UnrepresentableError(
                f"padding would have to hold {fill}, which is no {x.dtype}"
            )
        mask = self.valid(x.axes)
        constant = lax.full_like(x.data, fill)
        return Padded(choose(mask, x.data, constant), x.axes, fill)

    # --- packing ----------------------------------------------------------------------

    def packed(self, x: Padded, axis: int) -> Padded:
        """The array with one factor, so one contiguous physical axis, at an axis."""
        factors = x.axes[axis]
        if len(factors) == 1:
            return x
        if not factors:
            start = sum(map(len, x.axes[:axis]))
            axes = (*x.axes[:axis], (1,), *x.axes[axis + 1 :])
            return Padded(lax.expand_dims(x.data, (start,)), axes, x.fill)
        places = x.places(axis)
        size = self.size(product(factors))
        start, lengths = places[0], self.shape(factors)
        shape = x.data.shape
        flat = (*shape[:start], int(np.prod(lengths)), *shape[places[-1] + 1 :])
        data = lax.reshape(x.data, flat)
        axes = (*x.axes[:axis], (size,), *x.axes[axis + 1 :])
        if _come_first(factors):
            return Padded(data, axes, x.fill)
        index = self._rows(factors, self.length(size))
        return Padded(_take(data, index, start), axes)

    def _rows(self, factors: Factors, count: int) -> Any:
        """Where in the flat physical axis the n-th valid element lies."""
        rest, index, stride = lax.iota(jnp.int32, count), np.int32(0), 1
        for f in reversed(factors[1:]):
            n = lax.broadcast(jnp.asarray(self.scalar(f)), (count,))
            n = lax.max(n, lax.full_like(n, 1))
            index = index + lax.rem(rest, n) * np.int32(stride)
            rest = lax.div(rest, n)
            stride *= self.length(f)
        return index + rest * np.int32(stride)

    def split(self, x: Padded, axis: int, factors: Factors) -> Padded:
        """The array with these factors at an axis that has one."""
        factors = tuple(self.size(f) for f in factors)
        if same_factors(x.axes[axis], factors):
            return x
        x = self.packed(x, axis)
        (place,) = x.places(axis)
        lengths, shape = self.shape(factors), x.data.shape
        data, count = x.data, int(np.prod(lengths))
        fill = x.fill
        if not _come_first(factors) or count != shape[place]:
            data, fill = _take(data, self._positions(factors), place), None
        data = lax.reshape(data, (*shape[:place], *lengths, *shape[place + 1 :]))
        return Padded(data, (*x.axes[:axis], factors, *x.axes[axis + 1 :]), fill)

    def _positions(self, factors: Factors) -> Any:
        """The row-major position of each physical element among the valid ones."""
        lengths, stride, index = self.shape(factors), np.int32(1), 0
        for place in reversed(range(len(factors))):
            step = lax.iota(jnp.int32, lengths[place]) * stride
            index = index + lax.broadcast_in_dim(step, lengths, (place,))
            stride = stride * self.scalar(factors[place])
        return lax.reshape(index, (int(np.prod(lengths)),))

    def simplified(self, x: Padded) -> Padded:
        """The array with one factor at every axis."""
        for axis in range(x.rank):
            x = self.packed(x, axis)
        return x

    def aligned(self, xs: Sequence[Padded]) -> list[Padded]:
        """Arrays of one logical shape with one choice of factors."""
        axes = [self.common([x.axes[i] for x in xs]) for i in range(xs[0].rank)]
        return [self.arranged(x, axes) for x in xs]

    def arranged(self, x: Padded, axes: Sequence[Factors]) -> Padded:
        """The array with the given factors at each axis."""
        for axis, factors in enumerate(axes):
            if not same_factors(x.axes[axis], factors):
                x = self.split(self.packed(x, axis), axis, factors)
        return x

    def common(self, choices: Sequence[Factors]) -> Factors:
        """The factors that arrays of one size can most cheaply agree on."""
        finest = max(choices, key=len)
        if len(finest) == 1 or all(
            len(c) == 1 or same_factors(c, finest) for c in choices
        ):
            return finest
        return (self.size(product(finest)),)


def physical_shape(bucket: Bucket, sizes: Sequence[Any]) -> tuple[int, ...]:
    """The shape of a bucket's argument or result, whatever else it computes."""
    alone = Bucket(bucket.ranges, {}, bucket.equal)
    return tuple(alone.length(size) for size in sizes)


def _names(key: Any) -> frozenset[str]:
    """The named sizes in a size, or in axes."""
    if isinstance(key, tuple):
        return frozenset().union(*map(_names, key))
    return variables(key)


def choose(mask: Any, x: Any, other: Any) -> Any:
    """X where a mask says so, placed as x is: masks know no devices."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        mask = jax.sharding.reshard(mask, sharding)
    return lax.select(mask, x, other)


def product(factors: Factors) -> Any:
    """The size of a logical axis."""
    result = 1
    for f in factors:
        result = f * result
    return result


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are the same expression; nothing is asked or assumed."""
    if isinstance(a, Size) or isinstance(b, Size):
        return a is b
    return a == b


def same_factors(a: Factors, b: Factors) -> bool:
    """Whether two axes have the same factors."""
    return len(a) == len(b) and all(map(same, a, b))


def _is_same(a: Any, b: Any) -> bool:
    return a is not None and type(a) is type(b) and (a == b)


def _fitting(value: Any, size: Any, dtype: Any) -> Any:
    """A value of a size, which must be in a dtype's range."""
    if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        name = np.dtype(dtype).name
        raise UnrepresentableError(
            f"{size} may be {value} here, which is too large for {name}"
        )
    return value


@functools.lru_cache(maxsize=1 << 10)
def _is_in(dtype: Any, fill: Any) -> bool:
    """Whether a dtype has a value."""
    try:
        found = np.asarray(fill).astype(dtype).astype(np.asarray(fill).dtype)
    except OverflowError:
        return False
    return bool(found == fill) or fill != fill  # NaN is asked of no dtype without one


def _come_first(factors: Factors) -> bool:
    """Whether the valid elements of merged factors are the first ones.

    They are where nothing is padded but the slowest factor that is not 1.
    """
    others = [f for f in factors if isinstance(f, Size) or f != 1][1:]
    return not any(isinstance(f, Size) for f in others)


def _take(data: Any, index: Any, axis: int) -> Any:
    """Rows along an axis; positions beyond the end give its last row, or zeros."""
    if data.shape[axis] == 0:
        shape = (*data.shape[:axis], len(index), *data.shape[axis + 1 :])
        return jnp.zeros(shape, data.dtype)
    return jnp.take(data, index, axis=axis, mode="clip")
