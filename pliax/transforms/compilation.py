"""``px.compile``: jit that counts, times and explains what it compiles.

The type is ``(a -> b) -> (a -> b)``: the function means what it meant. On a new key
(structure, shapes, dtypes, weak types, shardings, static values, ambient settings)
the three stages of ``jax.jit`` (trace, lower, compile) run ahead of time, one by one
and timed. The call itself always goes through ``jax.jit``, which finds the executable
in its own cache: so an answer never depends on the key here, and donation, effects,
``jax_debug_nans`` and layouts behave as they do in JAX.

Sharp edges: sizes are static, so each new size compiles once; inside another
transformation (jit, grad, vmap) the call belongs to that transformation and only its
traces are counted here.
"""

import dataclasses
import functools
import threading
import time
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from pliax.core._jax import call_context, trace_state_clean

from ._arguments import (
    Parameters,
    check_callable,
    describe_callable,
    read_parameters,
    unmark_static,
)
from ._donation import note_deleted
from ._keys import leaf_key
from ._ledger import Ledger, Stats
from ._reasons import Entry, explain_miss, read_facts, write_report
from ._sizes import Sizes, group_of, read_sizes


_NAMES = ("__module__", "__name__", "__qualname__", "__doc__")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CompiledFunction:
    """A function that compiles once for each kind of arguments.

    Made by :func:`compile`. It composes with jit, grad, vmap and scan, may be called
    from several threads (one compilation a key), and binds as a method.

    What it knows of a key (structure, types, static values, counters) lives as long as
    the object does, as the executables in JAX's cache live until ``jax.clear_caches``:
    a static argument that takes ever new values, or holds large ones, keeps them all.

    Attributes:
        __wrapped__: the function as it was given.
    """

    __wrapped__: Callable[..., Any]
    _parameters: Parameters
    _sizes: Sizes
    _dynamic: bool | None
    _donated: tuple[int, ...]
    _ledger: Ledger
    _jitted: Any
    _entries: dict = dataclasses.field(init=False, default_factory=dict)
    _building: dict = dataclasses.field(init=False, default_factory=dict)
    _lock: Any = dataclasses.field(init=False, default_factory=threading.Lock)

    def __post_init__(self):
        for name in _NAMES:
            object.__setattr__(self, name, getattr(self._jitted, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, compiling it first where this kind of call is new."""
        args, kwargs = self._parameters.mark_static(args, kwargs)
        try:
            return self._call(args, kwargs)
        except RuntimeError as error:
            note_deleted(error, self._parameters, self._donated, args, kwargs)
            raise

    def _call(self, args: tuple, kwargs: dict) -> Any:
        if not trace_state_clean():
            return self._call_uncached(args, kwargs)
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        try:
            key = (structure, call_context(), *map(leaf_key, leaves))
        except (TypeError, OverflowError):  # no array, or a leaked tracer
            return self._call_uncached(args, kwargs)
        entry = self._entries.get(key)
        if entry is None:
            if jax.config.jax_disable_jit:
                return self._call_uncached(args, kwargs)
            entry = self._build_once(key, args, kwargs)
        start = time.perf_counter()
        result = self._jitted(*args, **kwargs)
        entry.tally.called(time.perf_counter() - start)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds as a method: the instance becomes the first argument, as in jax.jit."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<px.compile of {self.__wrapped__!r}>"

    def __copy__(self) -> "CompiledFunction":
        return self  # as functions do: a copied model keeps one cache

    def __deepcopy__(self, memo: dict) -> "CompiledFunction":
        return self

    @property
    def stats(self) -> Stats:
        """What has happened so far: a snapshot of counters and seconds."""
        return self._ledger.read()

    def explain(self) -> str:
        """A table of the executables: why each was built, its calls, its times."""
        stats = self.stats
        title = (
            f"{self._parameters.owner}: {stats.calls} calls, {stats.traces} traces, "
            f"{stats.compilations} compilations"
        )
        entries, outside = list(self._entries.values()), self._ledger.outside()
        return write_report(title, entries, outside, self._notes())

    def _notes(self) -> list[str]:
        notes = []
        if self._dynamic:
            notes.append(
                "dynamic=True: sizes are not dynamic yet, each size compiles once."
            )
        if self._sizes.specs:
            notes.append(
                "dims groups the statistics; arrays are not padded, each size compiles "
                "once."
            )
        return notes

    def _call_uncached(self, args: tuple, kwargs: dict) -> Any:
        group = group_of(self._sizes.read(self._check_leaves(args, kwargs)))
        with self._ledger.calling(self._ledger.uncached(group)):
            return self._jitted(*args, **kwargs)

    def _build_once(self, key: Hashable, args: tuple, kwargs: dict) -> Entry:
        with self._lock:
            building = self._building.setdefault(key, threading.RLock())
        with building:
            if (entry := self._entries.get(key)) is not None:
                return entry  # another thread built it while this one waited
            try:
                entry = self._entries[key] = self._build(args, kwargs)
            finally:
                self._building.pop(key, None)
            return entry

    def _build(self, args: tuple, kwargs: dict) -> Entry:
        sizes = self._sizes.read(self._check_leaves(args, kwargs))
        group = group_of(sizes)
        facts = read_facts(self._parameters, args, kwargs, sizes)
        with self._ledger.building(group) as tally:
            with self._ledger.tracing(tally):
                traced = self._jitted.trace(*args, **kwargs)
            lowered, seconds = _timed(traced.lower)
            tally.add(lower_seconds=seconds)
            _, seconds = _timed(lowered.compile)
            tally.add(compile_seconds=seconds, compilations=1)
        earlier = [entry.facts for entry in list(self._entries.values())]
        return Entry(group, explain_miss(facts, earlier), facts, tally)

    def _check_leaves(self, args: tuple, kwargs: dict) -> list:
        leaves = self._parameters.leaves(args, kwargs)
        for leaf in leaves:
            try:
                jax.typeof(leaf.value)
            except (TypeError, OverflowError) as error:
                text = _not_an_array(self._parameters, leaf, error)
                raise type(error)(text) from None
        return leaves


def compile(
    f: Callable[..., Any] | None = None,
    *,
    dims: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    donate_argnums: int | Sequence[int] | None = (),
    static_argnames: str | Iterable[str] | None = (),
) -> Any:
    """Compiles a function of pytrees once for each kind of arguments.

    The result is called like ``f`` and gives what ``jax.jit(f)`` gives. It also says
    what it did: ``.stats`` counts calls, traces and compilations and the seconds in
    each, and ``.explain()`` tells why each executable was built.

    Args:
        f: the function; arguments and results are pytrees of arrays. Without it, a
          decorator is returned.
        dims: names for sizes, from a parameter name (or a path such as
          ``"batch['tokens']"``) to a shape such as ``"b, t, _"`` or ``"b, ..."``, or to
          a pytree of shapes. One shape holds for every array below the path. Sizes of
          one name must agree. The names group ``.stats`` and shorten ``.explain()``:
          nothing is padded, since padding that is not known to be exact would change
          answers.
        dynamic: None, True or False. Sizes are static for now, whatever is said here:
          each size compiles once, and ``.explain()`` says so.
        donate_argnums: positions of arguments whose buffers the result may reuse; they
          are deleted by the call. None (or ``()``) by default, because a donated
          argument cannot be read again.
        static_argnames: names of hashable arguments that are part of the function: each
          value, with its type, compiles on its own. None (or ``()``) by default.

    Returns:
        A :class:`CompiledFunction`, or a decorator that makes one.

    Raises:
        TypeError: if f is not callable, or an option has the wrong type.
        ValueError: if dims, donate_argnums or static_argnames do not fit the signature.

    Example:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> @px.compile(dims={"x": "b, _"})
        ... def double(x):
        ...     return 2 * x
        >>> for batch in (8, 8, 6):
        ...     y = double(jnp.ones((batch, 4)))
        >>> stats = double.stats
        >>> stats.calls, stats.traces, stats.compilations
        (3, 2, 2)
        >>> stats.groups["b=8"].calls
        2
        >>> "new size: b: 8 -> 6 in x" in double.explain()
        True
    """
    if f is None:
        options = {"dims": dims, "dynamic": dynamic, "donate_argnums": donate_argnums}
        return functools.partial(compile, static_argnames=static_argnames, **options)
    check_callable(f)
    owner = f"px.compile({describe_callable(f)})"
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(
            f"{owner}: dynamic is {dynamic!r} of type {type(dynamic).__name__}.\n"
            "Pass None, True or False; name sizes with dims."
        )
    parameters, donated = read_parameters(f, static_argnames, donate_argnums, owner)
    sizes, ledger = read_sizes(dims, parameters), Ledger()
    jitted = jax.jit(_count_traces(f, ledger), donate_argnums=donated)
    return CompiledFunction(f, parameters, sizes, dynamic, donated, ledger, jitted)


def _count_traces(f: Callable[..., Any], ledger: Ledger) -> Callable[..., Any]:
    """F as JAX sees it: under its own name and signature, counting its traces."""

    def body(*args, **kwargs):
        args, kwargs = unmark_static(args, kwargs)
        if jax.config.jax_disable_jit:
            return f(*args, **kwargs)
        with ledger.tracing() as tally:
            tally.add(traces=1)
            return f(*args, **kwargs)

    body.__module__ = getattr(f, "__module__", None) or __name__
    body.__name__ = describe_callable(f)
    body.__qualname__ = getattr(f, "__qualname__", body.__name__)
    body.__doc__ = f.__doc__
    body.__wrapped__ = f  # pyright: ignore[reportFunctionMemberAccess]
    return body


def _timed(stage: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return stage(), time.perf_counter() - start


def _not_an_array(parameters: Parameters, leaf: Any, error: Exception) -> str:
    root, kind = leaf.steps[0], type(leaf.value).__name__
    if isinstance(error, OverflowError):
        return f"{parameters.owner}: argument `{leaf.name}`: {error}."
    return (
        f"{parameters.owner}: argument `{leaf.name}` has type {kind}, which is not an "
        f"array, a NumPy array of numbers or a Python number ({error}).\nPass "
        f'static_argnames="{root}" if `{root}` is hashable and part of the function, '
        f"or register {kind} as a pytree (jax.tree_util.register_dataclass)."
    )
