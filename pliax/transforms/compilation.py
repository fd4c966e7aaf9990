"""``px.compile``: a jit for changing sizes, which can be asked what it did.

The type is ``(a -> b) -> (a -> b)``: the function means what it meant. Sizes that stay
are constants, as in ``jax.jit``. Sizes that change (named by ``dims``, marked, or seen
to change) are symbols: the function is traced once for all of them, under guards, and
runs in buckets where the padding transform proves itself exact, else at exact sizes.

A call takes one of two ways. The short one, generated for the forms of calls seen so
far, reads the few sizes that matter and calls JAX's compiled function, whose own cache
tells everything else apart. The long one, for
what the short one does not know, flattens the arguments, finds or traces the entry that
serves them, picks its bucket, and compiles, stage by stage and timed. An executable
that JAX would trace without the long way having vetted the arguments stops at once
(`Unvetted`): an answer never depends on the short way's table.

Inside another transformation (jit, grad, vmap) the call belongs to that transformation:
the function itself is traced, and only its traces are counted here.
"""

import dataclasses
import functools
import operator
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import jax

from pliax.core._jax import call_context, is_tracing
from pliax.core.provenance import calling_place
from pliax.core.ragged import with_constants

from ._arguments import (
    Parameters,
    check_callable,
    describe_callable,
    read_parameters,
    unmark_static,
)
from ._buffers import Unlike
from ._builds import builds
from ._catalog import Catalog, RecompileLimitError as RecompileLimitError
from ._decisions import function_name, read_decisions
from ._dispatch import Dispatched, Form, accessor, dispatcher
from ._donation import note_deleted
from ._executables import Call, Executables
from ._execution import Bound
from ._families import sizes_of_leaves
from ._garbage import garbage_left_alone
from ._kinds import hold_descriptions, kind
from ._known_calls import KnownCalls
from ._ledger import Ledger, Stats
from ._options import Options, check_options, read_where
from ._plain_calls import call_plainly
from ._profiles import save_decisions
from ._reports import write_report
from ._sizes import read_sizes
from .padding import PaddingRefused
from .tracing import SymbolicTrace


_CONVERTS = (
    "among them is a class whose constructor converts what it is given, so that only "
    "arrays can be in it. Let what rebuilds it for jax.tree_util keep what it is given"
)
_NAMES = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CompiledFunction(Dispatched):
    """A function that compiles for kinds of arguments and for buckets of sizes.

    Made by :func:`compile`. It composes with jit, grad, vmap and scan, may be called
    from several threads (one compilation a key), and binds as a method.

    What it knows of a key (structure, types, static values, counters) lives as long as
    the object does, as the executables in JAX's cache live until ``jax.clear_caches``:
    a static argument that takes ever new values, or holds large ones, keeps them all.
    Of the sizes and Python integers of calls it knows the latest thousands.

    Attributes:
        __wrapped__: the function as it was given.
    """

    __wrapped__: Callable[..., Any]
    _parameters: Parameters
    _options: Options
    _ledger: Ledger
    _catalog: Catalog
    _plain: Any = dataclasses.field(init=False)
    _executables: Executables = dataclasses.field(init=False)
    _forms: dict = dataclasses.field(init=False, default_factory=dict)
    _known: KnownCalls = dataclasses.field(init=False, default_factory=KnownCalls)
    _building: dict = dataclasses.field(init=False, default_factory=dict)
    _lock: Any = dataclasses.field(init=False, default_factory=threading.RLock)

    def __post_init__(self):
        function, donated = self._catalog.function, self._options.donated
        plain = jax.jit(function, donate_argnums=donated)
        object.__setattr__(self, "_plain", plain)
        object.__setattr__(self, "_executables", Executables(self._catalog, plain))
        self._generate_dispatch()
        for name in _NAMES:
            object.__setattr__(self, name, getattr(plain, name))

    # --- the short way ----------------------------------------------------------------

    def _notice(self, bound: Bound, args: tuple, kwargs: dict) -> None:
        """Counts an executable that JAX built for itself: one trace, placed anew."""
        plan = bound.plan
        if builds.name != plan.name:  # it was built for somebody else
            return
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        key = (structure, call_context(), tuple(map(kind, leaves)))
        sizes = sizes_of_leaves(leaves)
        if self._known.get((key, sizes)) is not None:
            return
        self._know(Call(key, sizes, args, kwargs), bound)
        self._executables.notice(plan, args, kwargs)

    def _remember(self, args: tuple, kwargs: dict, bound: Bound) -> None:
        """Lets the short way find this plan."""
        paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
        reading = bound.plan.entry.reading
        pairs = zip(reading.positions, reading.wanted, strict=True)
        found = set()
        for position, wanted in pairs:
            if isinstance(wanted, str) or position.axis is None:
                text = accessor(paths[position.leaf][0], position)
                if text is None:  # only JAX can find it
                    return
                found.add(text)
        key = (len(args), *kwargs)
        with self._lock:
            form = self._forms.get(key) or Form(len(args), tuple(kwargs))
            is_known = key in self._forms and found <= form.accessors
            if not is_known:
                form = Form(form.count, form.names, form.accessors | found)
            form.remember(args, kwargs, bound)
            self._forms[key] = form
            if not is_known:
                self._generate_dispatch()

    def _generate_dispatch(self) -> None:
        parameters = self._parameters
        donated = self._options.donated
        dispatch = dispatcher(
            tuple(self._forms.values()),
            self.__wrapped__,
            mark=parameters.mark_static if parameters.static else None,
            unknown=self._call,
            grown=self._notice,
            failed=lambda error, *call: note_deleted(error, parameters, donated, *call),
        )
        dispatch.__wrapped__ = self.__wrapped__  # for JAX, which names the function
        self.dispatch_by(dispatch)

    # --- the long way -----------------------------------------------------------------

    def _call(self, args: tuple, kwargs: dict) -> Any:
        if is_tracing():
            return call_plainly(self._catalog, self._plain, args, kwargs)
        self._parameters.check_keywords(kwargs)
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        try:
            kinds = tuple(map(kind, leaves))
        except (TypeError, OverflowError):  # no array, or a leaked tracer
            return call_plainly(self._catalog, self._plain, args, kwargs)
        sizes = sizes_of_leaves(leaves)
        key = (structure, call_context(), kinds)
        bound = self._known.get((key, sizes))
        if bound is None:
            if jax.config.jax_disable_jit:
                return call_plainly(self._catalog, self._plain, args, kwargs)
            if not hold_descriptions(structure, leaves):
                self._refuse_if_required(_CONVERTS)
                return call_plainly(self._catalog, self._plain, args, kwargs)
            bound = self._bind_once(Call(key, sizes, args, kwargs))
        try:
            return self._timed_call(bound, args, kwargs)
        except Unlike:  # the same sizes, but devices cannot divide their bucket
            bound = self._bind_anew(Call(key, sizes, args, kwargs))
            return self._timed_call(bound, args, kwargs)

    def _refuse_if_required(self, reason: str) -> None:
        if self._options.padding == "require":
            raise PaddingRefused("arguments", reason, calling_place())

    def _timed_call(self, bound: Bound, args: tuple, kwargs: dict) -> Any:
        start = perf_counter()
        with bound.plan.vetted():
            result = bound.call(args, kwargs)
        bound.calls.called(perf_counter() - start)
        return result

    def _bind_once(self, call: Call) -> Bound:
        """What serves a call; threads that ask for one kind of call wait in line."""
        with self._lock:
            building = self._building.setdefault(call.key, threading.RLock())
        with building:
            bound = self._known.get((call.key, call.sizes))
            if bound is None:  # else another thread built it while this one waited
                bound = self._bind_anew(call)
            return bound

    def _bind_anew(self, call: Call) -> Bound:
        """What serves a call, and from now on those of its key and sizes."""
        with garbage_left_alone():
            bound = self._executables.bind(call)
        self._know(call, bound)
        self._remember(call.args, call.kwargs, bound)
        return bound

    def _know(self, call: Call, bound: Bound) -> None:
        """Lets later calls of the same sizes find this, until there are too many."""
        with self._lock:
            if self._known.are_too_many:
                self._known.forget()
                for form in self._forms.values():
                    form.table.clear()
                self._generate_dispatch()
            self._known.add((call.key, call.sizes), bound)

    # --- an object like a function ----------------------------------------------------

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds as a method: the instance becomes the first argument, as in jax.jit."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<px.compile of {self.__wrapped__!r}>"

    def __copy__(self) -> "CompiledFunction":
        return self  # as functions do: a copied model keeps one cache

    def __deepcopy__(self, memo: dict) -> "CompiledFunction":
        return self

    def __reduce__(self) -> str:
        """By name, as functions are pickled: the other process compiles its own."""
        module, name = self.__module__, vars(self)["__qualname__"]
        try:
            is_found = operator.attrgetter(name)(sys.modules[module]) is self
        except (AttributeError, KeyError):
            is_found = False
        if not is_found:
            raise pickle.PicklingError(
                f"{self._parameters.owner}: a compiled function is pickled by its name,"
                f" but {module}.{name} is not this one.\nPickle the function itself, "
                "f.__wrapped__, and compile what is loaded, or decorate a function of "
                "the module."
            )
        return name

    # --- what is known ----------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """What has happened so far: a snapshot of counters and seconds."""
        return self._ledger.read()

    @property
    def guards(self) -> tuple[Any, ...]:
        """The conditions of all traces, with the lines that asked."""
        return tuple(guard for trace in self.traces for guard in trace.guards)

    @property
    def traces(self) -> tuple[SymbolicTrace, ...]:
        """The programs for many sizes, each with what it assumes of them."""
        return tuple(e.trace for e in self._catalog.entries if e.trace)

    def explain(self) -> str:
        """A table of the executables: why each was built, its calls, its times."""
        return write_report(self._executables)

    def save_decisions(self, path: Any = None) -> None:
        """Saves which sizes were found to change, for `px.compile(..., decisions=)`.

        What the file holds already is kept and joined with this; it is replaced at
        once, so that several processes may save to it one after the other.

        Args:
            path: of a JSON file, which is made where there is none. By default the
                file that `decisions` named.

        Raises:
            ValueError: where no path is known, or the file holds something else.

        Examples:
            >>> import jax.numpy as jnp, pathlib, tempfile
            >>> import pliax as px
            >>> path = pathlib.Path(tempfile.mkdtemp(), "decisions.json")
            >>> for run in range(2):
            ...     total = px.compile(jnp.sum, decisions=path)
            ...     for size in (3, 4, 5):
            ...         _ = total(jnp.ones(size))
            ...     total.save_decisions()
            ...     print(total.stats.traces)
            2
            1
        """
        save_decisions(path, self._catalog, self._known.counted())


def compile(
    f: Callable[..., Any] | None = None,
    *,
    dims: Mapping[str, Any] | None = None,
    where: Any = (),
    dynamic: Any = None,
    padding: str = "auto",
    recompile_limit: int = 32,
    on_limit: str = "warn",
    donate_argnums: int | Sequence[int] | None = (),
    donate_argnames: str | Iterable[str] | None = (),
    static_argnums: int | Sequence[int] | None = (),
    static_argnames: str | Iterable[str] | None = (),
    decisions: Any = None,
) -> Any:
    """Compiles a function of pytrees once for all sizes that are dynamic.

    The result is called like ``f`` and gives what ``jax.jit(f)`` gives. Dynamic sizes
    are symbols in one trace: what the program asks of them becomes guards, and a call
    that breaks a guard is traced on its own. Executables are for buckets of sizes where
    the padding transform is exact (`px.pad`), else for exact sizes. ``.stats`` counts
    calls, traces and compilations and the seconds in each, ``.guards`` lists guards,
    and ``.explain()`` tells why each executable was built.

    Args:
        f: the function; arguments and results are pytrees of arrays. Without it, a
            decorator is returned.
        dims: names for dynamic sizes, from a parameter name (or a path such as
            ``"batch['tokens']"``) to a shape such as ``"b, t, _"``, ``"2*b, ..."``, to
            ``{axis: Dim(...)}``, or to a pytree of those. One shape holds for every
            array below the path. A named size must not become a constant.
        where: conditions on named sizes, ``"t <= 4096"`` or ``"b % 8 == 0"``.
        dynamic: which other sizes, and Python integers, are dynamic. None (default):
            those that change from call to call; True: all at once; False: none, those
            of `dims` neither, which are names alone then: one program for each shape.
        padding: "auto" (default) pads where that is exact; "require" makes a refusal an
            error; "never" compiles each size from the one trace.
        recompile_limit: how many traces are normal. More give a warning, once.
        on_limit: "warn", or "raise" a RecompileLimitError.
        donate_argnums: positions of arguments whose buffers the result may reuse; they
            are deleted by the call. None (or ``()``) by default, because a donated
            argument cannot be read again.
        donate_argnames: names of such arguments.
        static_argnums: positions of hashable arguments that are part of the function:
            each value, with its type, compiles on its own. None (or ``()``) by default.
        static_argnames: names of such arguments.
        decisions: the path of a file that `save_decisions` wrote in an earlier run, or
            will write: the sizes that changed then are dynamic from the first call on,
            as if marked by `px.maybe_dynamic`, and buckets between a smallest and a
            largest size are placed by the sizes seen. None (default): every process
            finds out for itself.

    Returns:
        A :class:`CompiledFunction`, or a decorator that makes one.

    Raises:
        TypeError: if f is not callable, or an option has the wrong type.
        ValueError: if dims, where, or what names arguments does not fit, or the file of
            decisions is none.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> @px.compile(dims={"x": "b, _"})
        ... def center(x):
        ...     return x - x.mean(axis=0, keepdims=True)
        >>> for batch in (8, 7, 6, 5):
        ...     y = center(jnp.ones((batch, 4)))
        >>> y.shape
        (5, 4)
        >>> stats = center.stats
        >>> stats.calls, stats.traces, stats.compilations
        (4, 1, 3)
        >>> sorted(stats.groups)
        ['b<=5', 'b<=7', 'b<=9']
    """
    if f is None:
        return functools.partial(
            compile,
            dims=dims,
            where=where,
            dynamic=dynamic,
            padding=padding,
            recompile_limit=recompile_limit,
            on_limit=on_limit,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            decisions=decisions,
        )
    check_callable(f)
    owner = f"px.compile({describe_callable(f)})"
    by_other = {"static_argnums": static_argnums, "donate_argnames": donate_argnames}
    parameters, donated = read_parameters(
        f, static_argnames, donate_argnums, owner, **by_other
    )
    sizes, ledger = read_sizes(dims, parameters), Ledger()
    constraints = read_where(where, sizes, owner)
    options = Options(dynamic, constraints, padding, recompile_limit, on_limit, donated)
    check_options(options, owner)
    counted = _count_traces(f, ledger)
    known = read_decisions(decisions, function_name(counted), owner)
    catalog = Catalog(parameters, sizes, options, ledger, counted, known)
    return CompiledFunction(f, parameters, options, ledger, catalog)


def _count_traces(f: Callable[..., Any], ledger: Ledger) -> Callable[..., Any]:
    """F as JAX sees it: under its own name and signature, counting its traces."""

    def body(*args, **kwargs):
        args, kwargs = unmark_static(args, kwargs)
        if jax.config.jax_disable_jit:
            return with_constants(f, args, kwargs)
        with ledger.tracing() as tally:
            tally.add(traces=1)
            return with_constants(f, args, kwargs)

    body.__module__ = getattr(f, "__module__", None) or __name__
    body.__name__ = describe_callable(f)
    body.__qualname__ = getattr(f, "__qualname__", body.__name__)
    body.__doc__ = f.__doc__
    body.__annotations__ = getattr(f, "__annotations__", {})
    body.__wrapped__ = f  # pyright: ignore[reportFunctionMemberAccess]
    return body
