"""Functions of Triton made from text, one for each text.

    define : text, what it names  ->  a function that Triton compiles
    enter  : kernel, its arguments  ->  text of the function that a device starts

Triton reads the source of what it compiles; Python's `linecache` has it under a name
that is a hash of the text. So a program is known by what it says: equal mods share one,
and what another function once said under the same name is never run.
"""

import functools
import hashlib
import linecache
from collections.abc import Mapping, Sequence
from typing import Any

import triton  # pyright: ignore[reportMissingImports]  # of the extra "triton"
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]

from .triton_source import Source


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def fast_tanh(x):
    """The instruction of NVIDIA's GPUs, off by at most 2^-11 of the result."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def load_now(place):
    """Elements of an array, each at its own place, on NVIDIA's GPUs.

    Triton would load them ahead into shared memory, one by one, as it does with what is
    multiplied: there would be no room for that.
    """
    kind: tl.constexpr = place.dtype.element_ty
    if kind.primitive_bitwidth == 32:
        found = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [place.to(tl.int64)],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        found = found.to(kind, bitcast=True)
    else:
        found = tl.load(place)
    return found


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def load(place):
    """The same on other devices."""
    return tl.load(place)


def define_mod(source: Source | None, *, is_nvidia: bool) -> Any:
    """The function of a mod; None for none."""
    if source is None:
        return None
    tools = {
        "libdevice": libdevice,
        "fast_tanh": fast_tanh,
        "look_up": load_now if is_nvidia else load,
    }
    return _define(source.function("mod"), tuple(tools.items()))


def define_entry(
    kernel: Any, inputs: Sequence[Any], outputs: Sequence[str], rest: Sequence[Any]
) -> Any:
    """The function that a device starts: pointers, and nothing else.

    Args:
        kernel: The kernel, which is called with all of these.
        inputs: Names of pointers, tuples of such names, and None.
        outputs: Names of pointers.
        rest: Constants and functions.
    """
    functions = {f"function{n}": x for n, x in enumerate(rest) if hasattr(x, "fn")}
    constants = [
        f"function{n}" if hasattr(x, "fn") else repr(x) for n, x in enumerate(rest)
    ]
    flat = [y for x in inputs for y in ((x,) if isinstance(x, str) else x or ())]
    given = [_argument(x) for x in inputs] + [*outputs, *constants]
    text = (
        f"def attend_{kernel.__name__}({', '.join([*flat, *outputs])}):\n"
        f"    kernel({', '.join(given)})\n"
    )
    return _define(text, tuple({"kernel": kernel, **functions}.items()))


def _argument(x: Any) -> str:
    if x is None or isinstance(x, str):
        return str(x)
    return f"({', '.join(x)},)" if x else "None"


@functools.cache
def _define(text: str, tools: tuple[tuple[str, Any], ...]) -> Any:
    """Compiles a text once; what it names is part of what it says."""
    named: Mapping[str, Any] = dict(tools)
    says = "\n".join((text, *(f"{n} {_name(x)}" for n, x in named.items())))
    digest = hashlib.sha256(says.encode()).hexdigest()[:16]
    head, rest = text.split("(", 1)
    text, name = f"{head}_{digest}({rest}", f"{head.removeprefix('def ')}_{digest}"
    file = f"<pliax {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace = {"__name__": __name__, "tl": tl, **named}
    exec(compile(text, file, "exec"), namespace)
    return triton.jit(namespace[name])  # pyright: ignore[reportAttributeAccessIssue]


def _name(x: Any) -> str:
    """What tells apart what a text names: its own text is in a function's name."""
    return str(getattr(x, "__qualname__", getattr(x, "__name__", "")))
