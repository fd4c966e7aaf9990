"""How users say which sizes may change: named dimensions, and marks on arguments."""

import dataclasses
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .conditions import guard_or_true
from .constraints import is_name
from .dims import larger, smaller
from .symbols import Symbol


@dataclasses.dataclass(frozen=True)
class Dim:
    """A size with a name that may change from call to call.

    Attributes:
        name: as in `dims` and in guards.
        min: the smallest size. By default arrays may be empty, in a trace of their own.
        max: the largest size, where it is not the largest in a list of `buckets`;
            without either buckets grow without an end.
        multiple_of: what every size is a multiple of.
        hint: the size to decide branches by, where it is not that of the first call.
        buckets: the lengths that arrays get: "geometric" (at most 14 from min to max),
            a list, a function of the size, or None for an executable of each size.
        specialize_on: conditions on the size that get an executable of their own.
        histogram: how often each size occurs; places geometric buckets.

    The checks of types are its own (hence Any), so that its errors come first.

    Raises:
        ValueError: where the numbers contradict each other.
        TypeError: where one has the wrong type.

    Examples:
        >>> Dim("t", max=4096, multiple_of=8).constraints
        ('mod(t, 8) == 0',)
    """

    name: str
    min: Any = dataclasses.field(default=0, kw_only=True)
    max: Any = dataclasses.field(default=None, kw_only=True)
    multiple_of: Any = dataclasses.field(default=1, kw_only=True)
    hint: Any = dataclasses.field(default=None, kw_only=True)
    buckets: Any = dataclasses.field(default="geometric", kw_only=True)
    specialize_on: Any = dataclasses.field(default=(), kw_only=True)
    histogram: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        if not isinstance(self.name, str) or not is_name(self.name):
            raise ValueError(
                f"Dim: the name {self.name!r} is not an identifier that a size can "
                'have.\nWrite a name such as "t".'
            )
        for field in ("min", "max", "multiple_of", "hint"):
            value = getattr(self, field)
            if value is None and field in ("max", "hint"):
                continue
            if isinstance(value, np.integer):
                object.__setattr__(self, field, int(value))
            elif type(value) is not int:
                raise TypeError(
                    f"Dim({self.name!r}): {field} is {value!r} of type "
                    f"{type(value).__name__}.\nPass an integer."
                )
        self._check_order()
        self._check_buckets()
        self._check_hint()
        self._check_histogram()
        check_conditions(f"Dim({self.name!r})", self.specialize_on)

    def _check_order(self) -> None:
        for field, least in (("min", 0), ("multiple_of", 1), ("hint", 1)):
            if (value := getattr(self, field)) is not None and value < least:
                raise ValueError(
                    f"Dim({self.name!r}): {field} is {value}.\nPass at least {least}."
                )
        if self.max is not None and self.max < self.min:
            raise ValueError(
                f"Dim({self.name!r}): max is {self.max}, less than min {self.min}.\n"
                "Swap them, or leave max out."
            )
        if self.max == 0:
            raise ValueError(
                f"Dim({self.name!r}): max is 0, so that all arrays would be empty.\n"
                "Pass at least 1, or leave max out."
            )
        least, step = max(self.min, 1), self.multiple_of
        if self.max is not None and self.max // step < -(-least // step):
            raise ValueError(
                f"Dim({self.name!r}): no multiple of {step} is at least {least} and at "
                f"most {self.max}.\nWiden them, or drop multiple_of."
            )

    def _check_hint(self) -> None:
        if self.hint is not None and not self.holds(self.hint):
            raise ValueError(
                f"Dim({self.name!r}): hint is {self.hint}, which is not "
                f"{self.description}.\nPass a size that may occur."
            )

    def _check_buckets(self) -> None:
        given = self.buckets
        if callable(given):
            _check_takes_a_size(f"Dim({self.name!r})", "buckets", given)
        if given is None or callable(given):
            return
        if isinstance(given, str) and given == "geometric":
            return
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise TypeError(
                f"Dim({self.name!r}): buckets is {given!r}.\nPass "
                '"geometric", a list of lengths, a function of the size, or None.'
            )
        if not given or any(type(n) is not int or n < 1 for n in given):
            raise ValueError(
                f"Dim({self.name!r}): buckets is {given!r}.\n"
                "Pass at least one length, each an integer of at least 1."
            )
        if max(given) < self.min:
            raise ValueError(
                f"Dim({self.name!r}): the largest bucket is {max(given)}, but min is "
                f"{self.min}.\nAdd a larger bucket, or lower min."
            )
        if self.max is not None and max(given) < self.max:
            raise ValueError(
                f"Dim({self.name!r}): the largest bucket is {max(given)}, but max is "
                f"{self.max}.\nAdd a bucket of {self.max}, or lower max."
            )

    def _check_histogram(self) -> None:
        given = self.histogram
        if given is None:
            return
        is_read = isinstance(given, Mapping) and all(
            isinstance(n, int | np.integer) and _is_count(k) for n, k in given.items()
        )
        if not is_read:
            raise TypeError(
                f"Dim({self.name!r}): histogram is {given!r}.\n"
                "Pass a mapping from sizes to how often each occurs, {16: 3, 32: 1}."
            )
        excluded = sorted(n for n in given if not self.holds(n))
        if excluded:
            raise ValueError(
                f"Dim({self.name!r}): histogram has the size {excluded[0]}, which is "
                f"not {self.description}.\nLeave it out, or widen the Dim."
            )

    @property
    def largest(self) -> int | None:
        """The largest size, which a list of buckets says as well as `max`."""
        if self.max is None and isinstance(self.buckets, Sequence):
            return None if isinstance(self.buckets, str) else max(self.buckets)
        return self.max

    @property
    def description(self) -> str:
        """The sizes it allows, in words."""
        said = [f"at least {self.min}"] if self.min else []
        if self.largest is not None:
            of = "" if self.largest == self.max else ", its largest bucket"
            said.append(f"at most {self.largest}{of}")
        step = [] if self.multiple_of == 1 else [f"a multiple of {self.multiple_of}"]
        return ", ".join([" and ".join(said), *step] if said else step)

    def holds(self, size: Any) -> bool:
        """Whether a size is allowed; of one that is symbolic this leaves guards."""
        asked = [size >= self.min, size % self.multiple_of == 0]
        if self.largest is not None:
            asked.append(size <= self.largest)
        return all(map(guard_or_true, asked))

    @property
    def symbol(self) -> Symbol:
        """The named size without a hint."""
        low = max(self.min, 1)
        return Symbol(self.name, None, "", is_strong=True, low=low, high=self.largest)

    @property
    def constraints(self) -> tuple[str, ...]:
        """What is known of it beyond its bounds, in `jax.export`'s notation."""
        if self.multiple_of == 1:
            return ()
        return (f"mod({self.name}, {self.multiple_of}) == 0",)


def holds(constraint: str, sizes: Mapping[str, Any]) -> bool:
    """Whether sizes satisfy a condition that `jax.export` reads; unknown names do.

    Symbolic sizes are asked as by an `if` of the user's, under a guard; what only the
    device knows is taken for true.
    """
    functions = {"max": larger, "min": smaller, "mod": operator.mod}
    functions |= {"floordiv": operator.floordiv}
    names = {"__builtins__": {}, "__name__": __name__, **functions, **sizes}
    try:
        return guard_or_true(eval(constraint.replace("^", "**"), names))
    except NameError:
        return True


def _is_count(x: Any) -> bool:
    return isinstance(x, int | float | np.number) and bool(x >= 0)


def answer(
    question: Callable[[int], Any],
    size: int,
    asked: str,
    read: Callable[[Any], Any] = lambda found: found,
) -> Any:
    """What a user's function says of a size; its errors get a note who asked.

    Args:
        question: the function.
        size: the argument.
        asked: what it was passed as, "the buckets of t".
        read: what is made of its answer, which may fail as well.
    """
    try:
        return read(question(size))
    except Exception as error:
        named = f"{asked}{_written_at(question)}"
        error.add_note(f"raised by {named}, asked about the size {size}.")
        raise


def is_special(condition: Callable[[int], Any], size: int, asked: str) -> bool:
    """Whether a condition of the user's holds of a size."""
    return answer(condition, size, asked, bool)


def _written_at(function: Any) -> str:
    """The line of a function that a user passed, as errors add it."""
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _check_takes_a_size(owner: str, option: str, function: Callable) -> None:
    """Refuses a function that cannot be called with one argument."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins and some extension types have none
        return
    try:
        signature.bind(1)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{owner}: {option} is {name}{signature}{_written_at(function)}, which is "
            f"called with one size: {error}.\nPass a function of one argument."
        ) from None


def check_conditions(owner: str, given: Any) -> tuple[Callable[[int], Any], ...]:
    """The conditions that a user passed as `specialize_on`.

    Raises:
        TypeError: if they are no list or tuple of functions of one argument.
    """
    if not isinstance(given, list | tuple) or not all(map(callable, given)):
        raise TypeError(
            f"{owner}: specialize_on is {given!r}.\nPass a list of functions of the "
            "size, [lambda n: n <= 64] for example."
        )
    for i, condition in enumerate(given):
        _check_takes_a_size(owner, f"specialize_on[{i}]", condition)
    return tuple(given)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Marked:
    """An argument with a word about the sizes of its axes.

    Attributes:
        value: the array.
        axes: which axes; negative ones count from the end.
        kind: "dynamic" (must not become a constant), "maybe" (may), or "static".
    """

    value: Any
    axes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    kind: str = dataclasses.field(metadata={"static": True})

    def __str__(self) -> str:
        axes = ", ".join(map(str, self.axes))
        return f"px.{_NAMES.get(self.kind, self.kind)} on axes ({axes})"


_NAMES = {"maybe": "maybe_dynamic"}


def dynamic(x: Any, *axes: Any) -> Marked:
    """Marks axes of an argument as changing: it is an error if the program fixes one.

    Args:
        x: an array, as it is passed to a function of `px.compile`.
        *axes: which axes; all if none is named.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> total = px.compile(jnp.sum)
        >>> float(total(px.dynamic(jnp.ones(3), 0)))
        3.0
    """
    return _mark(x, axes, "dynamic")


def maybe_dynamic(x: Any, *axes: Any) -> Marked:
    """Marks axes of an argument as changing, as long as the program allows it."""
    return _mark(x, axes, "maybe")


def static(x: Any, *axes: Any) -> Marked:
    """Marks axes of an argument as constants: each size gets a trace of its own."""
    return _mark(x, axes, "static")


def _mark(x: Any, axes: tuple[Any, ...], kind: str) -> Marked:
    name = _NAMES.get(kind, kind)
    if isinstance(x, Marked):
        raise TypeError(
            f"px.{name}: the argument is marked already, by {x}.\nAn argument has one "
            "mark, px.dynamic(x, 0, 1) for two axes; name sizes of several kinds with "
            "dims."
        )
    rank = getattr(x, "ndim", None)
    if rank is None:
        raise TypeError(
            f"px.{name}: found {x!r} of type {type(x).__name__}.\nMark arrays, one by "
            "one; Python integers become dynamic by themselves."
        )
    for axis in axes:
        if not isinstance(axis, int | np.integer):
            raise TypeError(
                f"px.{name}: the axis {axis!r} is of type {type(axis).__name__}.\n"
                f"Name axes one by one, px.{name}(x, 0, 1)."
            )
        if not -rank <= axis < rank:
            raise ValueError(
                f"px.{name}: axis {axis} of an array of rank {rank}.\n"
                f"Name axes from {-rank} to {rank - 1}."
            )
    return Marked(x, tuple(a % rank for a in axes) or tuple(range(rank)), kind)
