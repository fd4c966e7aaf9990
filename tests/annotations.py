"""Every annotation of the package becomes a check, at a price that traces can pay.

    check("pliax")  # before it is first imported

jaxtyping's import hook gives the names in the shapes of each call, Float[Array, "B T"],
a scope of their own, for which it binds the arguments as `inspect` does: that was a fifth
of the suite's time, and more than a third of that of traces. Where an annotation has no
shape there are no such names, and beartype alone checks the same.
"""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype


_in_a_scope = jaxtyping.jaxtyped
_without = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def check(package: str) -> None:
    """From now on, modules of the package are imported with checked annotations."""
    # The hook writes `@jaxtyping.jaxtyped(typechecker=...)` above what it finds.
    jaxtyping.jaxtyped = lambda **options: lambda made: checked(made, **options)
    jaxtyping.install_import_hook(package, "beartype.beartype")


def checked(made: Any, *, typechecker: Callable[..., Any]) -> Any:
    """A function or class whose annotations are checked when it is called."""
    if isinstance(made, type):
        if dataclasses.is_dataclass(made) and not hasattr(made.__init__, "__wrapped__"):
            made.__init__ = checked(made.__init__, typechecker=typechecker)
        return made
    if any(map(needs_a_scope, made.__annotations__.values())):
        return _in_a_scope(made, typechecker=typechecker)
    return _without(made)


def needs_a_scope(hint: Any) -> bool:
    """Whether an annotation has shapes; a text may, and is left to jaxtyping."""
    if isinstance(hint, list | tuple):
        return any(map(needs_a_scope, hint))
    if isinstance(hint, typing.TypeAliasType):
        return needs_a_scope(hint.__value__)
    is_its_own = type(hint).__module__.startswith("jaxtyping")
    return isinstance(hint, str) or is_its_own or needs_a_scope(typing.get_args(hint))
