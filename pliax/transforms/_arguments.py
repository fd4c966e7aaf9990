"""The arguments of a call: which are static, and what each array is called.

Errors and statistics speak of ``batch['tokens']`` rather than of leaf number 3, so
every leaf of ``(args, kwargs)`` gets the name that the user's signature gives it.
"""

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax

from pliax.core.marks import Marked


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A static argument, as a pytree without leaves: it lives in the tree structure.

    Equal values of different types are different arguments: jax.jit tells 1 from
    True but takes ``(1, 2)`` for ``(1.0, 2.0)``, and 0.0 for -0.0.
    """

    value: Any
    identity: Hashable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


def identity(value: Any) -> Hashable:
    """The value together with its type, into tuples; floats by what they print."""
    if isinstance(value, tuple):
        return type(value), tuple(map(identity, value))
    if isinstance(value, frozenset):
        return type(value), frozenset(map(identity, value))
    if isinstance(value, float | complex):
        return type(value), repr(value)
    return type(value), value


class Leaf(NamedTuple):
    """One array argument: how it is written, its path in steps, its value."""

    name: str
    steps: tuple[str, ...]
    value: Any


def check_call(f: Any, args: tuple, kwargs: dict, owner: str) -> None:
    """Refuses arguments that do not fit the signature, as far as there is one.

    Raises:
        TypeError: where one is missing, one too many, or a word of `px.dynamic`.
    """
    for x in jax.tree.leaves((args, kwargs), is_leaf=_is_marked):
        if _is_marked(x):
            raise TypeError(
                f"{owner}: found {x}, which is for the arguments of px.compile.\n"
                "Pass the array; dims names its sizes here."
            )
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # builtins and some extension types have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{owner}: {error}.\nPass what {describe_callable(f)}{signature} takes."
        ) from None


def _is_marked(x: Any) -> bool:
    return isinstance(x, Marked)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What a signature says about the arguments of a call.

    Attributes:
        owner: how errors name the function, ``px.compile(f)``.
        positional: names of the parameters that can be passed by position.
        named: every name that is a parameter of its own.
        rest: name of ``*args``, or None.
        extra: name of ``**kwargs``, or None.
        is_known: False for a callable whose signature cannot be inspected.
        static: names of the static arguments.
        static_positions: where those stand among the positional ones.
        unnamed: names of the parameters that can be passed by position only.
    """

    owner: str
    positional: tuple[str, ...]
    named: frozenset[str]
    rest: str | None
    extra: str | None
    is_known: bool = True
    static: frozenset[str] = frozenset()
    static_positions: frozenset[int] = frozenset()
    unnamed: frozenset[str] = frozenset()

    def check_keywords(self, kwargs: dict) -> None:
        """Refuses a keyword for **kwargs that is a parameter's name, as JAX cannot."""
        twice = sorted(self.unnamed & kwargs.keys()) if self.extra else ()
        if twice:
            raise ValueError(
                f"{self.owner}: {twice[0]!r} is passed by name, into **{self.extra}, "
                "but a parameter that is passed by position is called so as well, and "
                f"JAX takes one for the other.\nPass {self.extra} as one dictionary, "
                "or rename either."
            )

    def mark_static(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Wraps static arguments, so that they become part of the structure."""
        if not self.static:
            return args, kwargs
        args_out, kwargs_out = list(args), dict(kwargs)
        for i in self._static_at(args):
            args_out[i] = self._static(self.positional[i], args[i])
        for name in self.static & kwargs.keys():
            kwargs_out[name] = self._static(name, kwargs[name])
        return tuple(args_out), kwargs_out

    def _static(self, name: str, value: Any) -> Static:
        marked = Static(value, identity(value))
        try:
            hash(marked)
        except TypeError as error:
            raise ValueError(
                f"{self.owner}: static argument {name!r} is {_short(value)} of type "
                f"{type(value).__name__}, which cannot be hashed ({error}).\n"
                f"Pass a hashable value (a tuple for a list, a frozen dataclass for a "
                f"dict), or let {name!r} be no static argument."
            ) from None
        return marked

    def leaves(self, args: tuple, kwargs: dict) -> list[Leaf]:
        """Every array argument of a call, named after the signature."""
        paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
        return [Leaf(*self._name(path), value) for path, value in paths]

    def statics(self, args: tuple, kwargs: dict) -> dict[str, Static]:
        """The static arguments of a call by name."""
        by_position = {self.positional[i]: args[i] for i in self._static_at(args)}
        return by_position | {k: v for k, v in kwargs.items() if isinstance(v, Static)}

    def _static_at(self, args: tuple) -> list[int]:
        return [i for i in sorted(self.static_positions) if i < len(args)]

    def _name(self, path: tuple) -> tuple[str, tuple[str, ...]]:
        (_, key), inner = path[:2], path[2:]
        is_name = isinstance(key, jax.tree_util.DictKey)
        root, steps = self._by_keyword(key) if is_name else self.by_place(key.idx)
        keys = jax.tree_util.keystr(tuple(map(_by_number, inner)))
        return root + keys, steps + tuple(_step(k) for k in inner)

    def by_place(self, index: int) -> tuple[str, tuple[str, ...]]:
        """Name and steps of the argument passed at a position."""
        if index < len(self.positional):
            return self.positional[index], (self.positional[index],)
        rest, place = self.rest or "args", str(index - len(self.positional))
        return f"{rest}[{place}]", (rest, place)

    def _by_keyword(self, key: Any) -> tuple[str, tuple[str, ...]]:
        if key.key in self.named or self.extra is None:
            return key.key, (key.key,)
        return f"{self.extra}[{key.key!r}]", (self.extra, key.key)


def unmark_static(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments as the user passed them, static ones unwrapped."""
    return (
        tuple(a.value if type(a) is Static else a for a in args),
        {k: a.value if type(a) is Static else a for k, a in kwargs.items()},
    )


def read_parameters(
    f: Callable[..., Any],
    static_argnames: Any,
    donate_argnums: Any,
    owner: str,
    *,
    static_argnums: Any = (),
    donate_argnames: Any = (),
) -> tuple[Parameters, tuple[int, ...]]:
    """Reads the signature of f and checks the options that name its arguments.

    Returns:
        The parameters, and the donated positions, which are not negative.
    """
    found = _read_signature(f, owner)
    static = _as_names(static_argnames, "static_argnames", owner)
    donated = _as_positions(donate_argnums, "donate_argnums", owner)
    static |= _names_at(found, static_argnums, owner)
    donated += _places_of(found, donate_argnames, owner)
    if found is None:
        unknown = Parameters(owner, (), static, "args", None, False, static)
        return unknown, donated
    _check_static(found, static)
    donated = _check_donated(found, donated, static)
    places = frozenset(i for i, n in enumerate(found.positional) if n in static)
    return dataclasses.replace(found, static=static, static_positions=places), donated


def _names_at(
    found: Parameters | None, static_argnums: Any, owner: str
) -> frozenset[str]:
    """The names of static arguments that are given by position."""
    positions = _as_positions(static_argnums, "static_argnums", owner)
    names = found.positional if found else ()
    if found is not None and found.rest is not None and min(positions, default=0) < 0:
        raise ValueError(
            f"{owner}: static_argnums holds {min(positions)}, which counts from the "
            f"end, but how many arguments a call has is open (*{found.rest}).\nGive "
            "the position from the start, or name it by static_argnames."
        )
    for position in positions:
        if not -len(names) <= position < len(names):
            raise ValueError(
                f"{owner}: static_argnums holds {position}, but the parameters with a "
                f"position of their own are {', '.join(names) or 'none'}.\nName a "
                "static argument by static_argnames, or bind it with functools.partial."
            )
    return frozenset(names[position] for position in positions)


def _places_of(
    found: Parameters | None, donate_argnames: Any, owner: str
) -> tuple[int, ...]:
    """The positions of donated arguments that are given by name."""
    names = sorted(_as_names(donate_argnames, "donate_argnames", owner))
    places = found.positional if found else ()
    for name in names:
        if name not in places:
            raise ValueError(
                f"{owner}: donate_argnames names {name!r}, but the parameters that can "
                f"be passed by position are {', '.join(places) or 'none'}.\nName one "
                "of them, or pass a position as donate_argnums."
            )
    return tuple(map(places.index, names))


def _read_signature(f: Callable[..., Any], owner: str) -> Parameters | None:
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # builtins and some extension types have none
        return None
    kinds = {p.kind: p.name for p in parameters}
    kind = inspect.Parameter
    by_place = kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD
    by_name = *by_place, kind.KEYWORD_ONLY
    return Parameters(
        owner=owner,
        positional=tuple(p.name for p in parameters if p.kind in by_place),
        named=frozenset(p.name for p in parameters if p.kind in by_name),
        unnamed=frozenset(p.name for p in parameters if p.kind is kind.POSITIONAL_ONLY),
        rest=kinds.get(kind.VAR_POSITIONAL),
        extra=kinds.get(kind.VAR_KEYWORD),
    )


def _as_names(names: Any, option: str, owner: str) -> frozenset[str]:
    if names is None:
        return frozenset()
    is_many = isinstance(names, Iterable) and not isinstance(names, str)
    static: Any = tuple(names) if is_many else (names,)
    for name in static:
        if not isinstance(name, str):
            raise TypeError(
                f"{owner}: {option} holds {name!r} of type "
                f"{type(name).__name__}.\nName the parameters by strings."
            )
    return frozenset(static)


def _as_positions(positions: Any, option: str, owner: str) -> tuple[int, ...]:
    if positions is None:
        return ()
    is_many = isinstance(positions, Iterable) and not isinstance(positions, str)
    given: Any = tuple(positions) if is_many else (positions,)
    for position in given:
        if isinstance(position, bool) or not hasattr(position, "__index__"):
            raise TypeError(
                f"{owner}: {option} holds {position!r} of type "
                f"{type(position).__name__}.\nGive the positions as integers."
            )
    return tuple(p.__index__() for p in given)


def _check_static(found: Parameters, static: frozenset[str]) -> None:
    unknown = sorted(static - found.named) if found.extra is None else []
    unknown += sorted(static & {found.rest, found.extra})
    if unknown:
        raise ValueError(
            f"{found.owner}: static_argnames names {unknown[0]!r}, which is not a "
            f"parameter that can be passed by name.\nIts parameters are "
            f"{_list(found.named)}."
        )


def _check_donated(
    found: Parameters, donated: tuple[int, ...], static: frozenset[str]
) -> tuple[int, ...]:
    count = len(found.positional)
    for position in donated:
        if found.rest is None and not -count <= position < count:
            raise ValueError(
                f"{found.owner}: donate_argnums holds {position}, but the function "
                f"takes {count} arguments by position.\nGive a position from 0 to "
                f"{count - 1}."
            )
    donated = tuple(p + count if p < 0 and found.rest is None else p for p in donated)
    both = {p for p in donated if p < count and found.positional[p] in static}
    if both:
        raise ValueError(
            f"{found.owner}: argument {found.positional[min(both)]!r} is both static "
            "and donated.\nA static argument has no buffer to donate: name it among "
            "those of one kind."
        )
    return donated


def check_callable(f: Any) -> None:
    """Refuses what cannot be compiled, and methods decorated in the wrong order."""
    if isinstance(f, staticmethod | classmethod):
        kind = type(f).__name__
        static = '(static_argnames="cls")' if kind == "classmethod" else ""
        raise TypeError(
            f"px.compile: {describe_callable(f.__func__)} is a {kind} object, not a "
            f"function.\nPut @{kind} outside, above @px.compile{static}."
        )
    if not callable(f):
        raise TypeError(
            f"px.compile: {f!r} of type {type(f).__name__} is not callable.\n"
            "Pass the function first and options by keyword: px.compile(f, dims=...)."
        )


def describe_callable(f: Any) -> str:
    """The name under which errors, profiles and tables speak of f."""
    if hasattr(f, "__name__"):
        return f.__name__
    inner = getattr(f, "func", f)  # functools.partial has no name of its own
    return getattr(inner, "__name__", type(inner).__name__)


def describe_type(value: Any) -> str:
    """The type of an array argument as short as JAX writes it, f32[8,128]."""
    aval: Any = jax.typeof(value)
    try:
        return aval.str_short(short_dtypes=True)
    except (AttributeError, TypeError):  # references and other types with no shape
        return str(aval)


def _by_number(key: Any) -> Any:
    """The children of a pytree without names, as of a list: f[0], not <flat index>."""
    is_flat = isinstance(key, jax.tree_util.FlattenedIndexKey)
    return jax.tree_util.SequenceKey(key.key) if is_flat else key


def _step(key: Any) -> str:
    kinds = ("key", "idx", "name")
    return str(next((getattr(key, k) for k in kinds if hasattr(key, k)), key))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
