"""What flex_attention was given, checked: mods as data, shapes that fit.

Every error says what was asked, what was found and what to do, before any kernel runs.
"""

import inspect
import numbers
import operator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import jax.ref
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.dtypes import TypePromotionError
from jax.errors import (
    ConcretizationTypeError,
    TracerArrayConversionError,
    TracerBoolConversionError,
    TracerIntegerConversionError,
)
from jaxtyping import Array

from pliax.core._jax import is_symbolic_dim
from pliax.core.conditions import guard_or_false
from pliax.core.jaxprs import ClosedFunction, close

from .configs import FLAGS, UNIT
from .triton_configs import LEAST, WARPS


_DTYPES = ("float16", "bfloat16", "float32", "float64")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_INDEX = jax.ShapeDtypeStruct((), jnp.int32)
_SIGNATURES = {
    "score_mod": "score_mod(score, b, h, q_idx, kv_idx)",
    "mask_mod": "mask_mod(b, h, q_idx, kv_idx)",
}
_CAPTURE = (
    "{role} runs on traced scalars: capture jnp.asarray(array) where it indexes a list "
    "or a NumPy array, and "
)
_NOTES = {
    TracerBoolConversionError: "{role} runs on traced scalars: use &, | and jnp.where "
    "instead of `and`, `or` and `if`.",
    TracerIntegerConversionError: _CAPTURE + "give loops and shapes static sizes.",
    TracerArrayConversionError: _CAPTURE + "use jnp's functions.",
    ConcretizationTypeError: "{role} runs on traced scalars: use jnp's functions, and "
    "x.astype(dtype) instead of float(x) and int(x).",
    TypePromotionError: "{role} gets int32 indices: cast them before arithmetic with "
    "floats, in a score_mod with q_idx.astype(score.dtype).",
}


# --- mods -----------------------------------------------------------------------------


def close_mask_mod(mask_mod: Any) -> ClosedFunction:
    """Trace a mask_mod; its result must be one bool."""
    closed = _close(mask_mod, "mask_mod", (_INDEX,) * 4)
    _check_result(closed, "mask_mod", closed.out_aval.dtype == jnp.bool_, "bool[]")
    return jax.tree.map(jax.lax.stop_gradient, closed)


def close_score_mod(
    score_mod: Any, dtype: Any, axes: frozenset[str] = frozenset()
) -> ClosedFunction | None:
    """Trace a score_mod for scores of `dtype`, which vary over mesh `axes`.

    Its result must be one float, at least as wide.
    """
    if score_mod is None:
        return None
    score = jax.ShapeDtypeStruct((), dtype)
    closed = _close(score_mod, "score_mod", (score, *(_INDEX,) * 4), axes)
    found, wanted = closed.out_aval.dtype, jnp.dtype(dtype)
    as_wide = jnp.issubdtype(found, jnp.floating) and found.itemsize >= wanted.itemsize
    _check_result(closed, "score_mod", as_wide, f"{wanted.name}[]")
    return closed


def _close(
    mod: Any,
    role: str,
    arguments: tuple[jax.ShapeDtypeStruct, ...],
    axes: frozenset[str] = frozenset(),
) -> ClosedFunction:
    """Trace a mod, or take one that was traced for the same arguments."""
    if isinstance(mod, ClosedFunction):
        _check_traced(mod, role, arguments)
        return mod
    check_positional(mod, role, len(arguments))
    try:
        closed = close(mod, *arguments, axes=axes, name=role)
    except tuple(_NOTES) as error:
        note = next(text for kind, text in _NOTES.items() if isinstance(error, kind))
        error.add_note(note.format(role=role))
        raise
    _check_without_refs(closed, role)
    return closed


def _check_without_refs(closed: ClosedFunction, role: str) -> None:
    """A mod is a function: it is evaluated any number of times, in any order."""
    jaxpr = closed.program.jaxpr
    variables = (*jaxpr.constvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars))
    refs = [v.aval for v in variables if isinstance(v.aval, jax.ref.AbstractRef)]
    if refs:
        raise TypeError(
            f"{role} must not read or write a Ref, found {refs[0]}.\nIt is evaluated "
            "several times a score and in any order: capture the array itself, as in "
            "ref[...] outside of it, and return what it computes."
        )


def _check_traced(mod: ClosedFunction, role: str, arguments: tuple[Any, ...]) -> None:
    found = [v.aval for v in mod.program.jaxpr.invars]
    if [(a.shape, a.dtype) for a in found] != [(a.shape, a.dtype) for a in arguments]:
        avals = (ShapedArray(a.shape, jnp.dtype(a.dtype)) for a in arguments)
        raise TypeError(
            f"{role}: expected a function traced for ({_briefs(avals)}), "
            f"{_SIGNATURES[role]}, got one for ({_briefs(found)}).\n"
            "Pass the Python function itself; it is traced for the right arguments."
        )


def check_positional(mod: Any, role: str, wanted: int) -> None:
    """By the number of positional parameters without a default."""
    if not callable(mod):
        raise TypeError(
            f"{role} must be a function {_SIGNATURES[role]}, found {kind_of(mod)}.\n"
            "Write it for scalars; it may capture arrays."
        )
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return  # builtins without a signature: tracing will tell
    required = [
        p
        for p in signature.parameters.values()
        if _is_single(p) and p.default is p.empty
    ]
    keywords = [p.name for p in required if p.kind is p.KEYWORD_ONLY]
    if keywords:
        raise TypeError(
            f"{role}: expected {_SIGNATURES[role]}, got required keyword-only "
            f"parameters {keywords}.\n"
            "Give them a default, or bind them with functools.partial."
        )
    try:
        signature.bind(*range(wanted))
    except TypeError:
        raise TypeError(
            f"{role}: expected {wanted} positional parameters, "
            f"{_SIGNATURES[role]}, got {len(required)}.\n"
            "Name the parameters as shown, used or not; a further one needs a default."
        ) from None


def _is_single(p: inspect.Parameter) -> bool:
    return p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)


def _check_result(
    closed: ClosedFunction, role: str, right_dtype: bool, wanted: str
) -> None:
    aval = closed.out_aval
    if aval.shape != () or not right_dtype:
        raise TypeError(
            f"{role} must return one {wanted} for scalar indices; it returned "
            f"{brief(aval)}.\nMods are written for one score at a time."
        )


# --- numbers --------------------------------------------------------------------------


def integer(function: str, name: str, x: Any, remedy: str) -> Any:
    """An integer from anything that has an index, but no bool; or a symbolic size.

    Raises:
        TypeError: Saying what was found, a traced value apart.
    """
    if isinstance(x, Tracer):
        raise TypeError(
            f"{function}: {name} must be a Python integer, found the traced value "
            f"{brief(x)}.\nSizes are static: take them from an array's shape, or mark "
            "the argument of jax.jit with static_argnames."
        )
    if is_symbolic_dim(x):
        return x
    try:
        if isinstance(x, bool | np.bool_):
            raise TypeError
        return operator.index(x)
    except TypeError:
        raise TypeError(
            f"{function}: {name} must be an integer, found {kind_of(x)}.\n{remedy}"
        ) from None


def check_scale(scale: Any, head_dimension: int, dtype: Any) -> float:
    """The factor of the products; None gives 1/sqrt(D).

    Raises:
        TypeError: If it is not a real number, or an array.
        ValueError: If it is not finite in the softmax's dtype.
    """
    if scale is None:
        return head_dimension**-0.5
    if isinstance(scale, jax.Array | np.ndarray):
        raise TypeError(
            f"flex_attention: scale must be a Python number, found the array "
            f"{brief(scale)}.\nFor a learned temperature write "
            "score_mod=lambda score, b, h, q_idx, kv_idx: score * temperature, with "
            "scale=1.0; a concrete array becomes a number with float(scale)."
        )
    real = isinstance(scale, numbers.Real) or (
        isinstance(scale, np.generic) and jnp.issubdtype(scale.dtype, jnp.floating)
    )
    if isinstance(scale, bool) or not real:
        raise TypeError(
            f"flex_attention: scale must be a real number, found {kind_of(scale)}.\n"
            "Leave scale=None for 1/sqrt(D)."
        )
    largest: Any = float(jnp.finfo(dtype).max)
    if not -largest <= scale <= largest:  # also where it is NaN
        raise ValueError(
            f"flex_attention: scale must be finite in {jnp.dtype(dtype).name}, found "
            f"{scale!r}.\nLeave scale=None for 1/sqrt(D)."
        )
    return float(scale)


def check_kernel_options(
    kernel_options: Any, block_mask: Any, implementation: str | None
) -> dict[str, int]:
    """Names to integers of at least 1, or of FLAGS, True or False.

    The fused kernels cut a mask's blocks, those of "xla" are the mask's.

    Raises:
        TypeError: If it is no dict, or a value no integer, or no bool of FLAGS.
        ValueError: If a value is below 1 or no int32, or a mask already says the block
            size, or its blocks cannot be cut so.
    """
    remedy = 'Pass for example kernel_options={"block_q": 128} or {"splits": 8}.'
    options = {} if kernel_options is None else kernel_options
    if not isinstance(options, dict) or not all(isinstance(n, str) for n in options):
        raise TypeError(
            "flex_attention: kernel_options must be a dict from names to integers, "
            f"found {kind_of(kernel_options)}.\n{remedy}"
        )
    flags: dict[str, int] = {
        name: _flag(name, x) for name, x in options.items() if name in FLAGS
    }
    options = {
        name: _number(name, n, remedy)
        for name, n in options.items()
        if name not in FLAGS
    }
    wrong = {name: n for name, n in options.items() if not 1 <= n < 2**31}
    if wrong:
        limit = "at least 1" if min(wrong.values()) < 1 else "below 2**31"
        raise ValueError(
            f"flex_attention: kernel_options must be {limit}, found {wrong}.\n{remedy}"
        )
    blocks = {name: n for name, n in options.items() if "block_" in name}
    if implementation == "mosaic_gpu":
        for name, n in blocks.items():
            _check_unit(name, n)
            _check_cut(name, n, block_mask)
    elif implementation == "triton":
        for name, n in options.items():
            if name in blocks:
                _check_power(name, n, least=LEAST)
            elif name.endswith("warps"):
                _check_power(name, n, most=WARPS)
        for name, n in blocks.items():
            _check_cut(name, n, block_mask)
    elif blocks and block_mask is not None:
        raise ValueError(
            f"flex_attention: kernel_options {blocks} were given together with a "
            f"block_mask, whose block_size {block_mask.block_size} is used.\n"
            "Leave kernel_options out, and pass block_size to create_block_mask."
        )
    return options | flags


def _number(name: str, x: Any, remedy: str) -> int:
    if isinstance(x, bool | np.bool_):
        remedy += f" Options that are True or False: {', '.join(FLAGS)}."
    return integer("flex_attention", f"kernel_options[{name!r}]", x, remedy)


def _flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise TypeError(
            f"flex_attention: kernel_options[{name!r}] must be True or False, found "
            f"{kind_of(x)}.\nPass True to refuse gradients whose sums have no order, "
            "False to have them by atomic additions, or leave it out."
        )
    return bool(x)


def _check_unit(name: str, n: int) -> None:
    """Refuse what the tensor cores of a Hopper GPU do not take."""
    if n % UNIT:
        raise ValueError(
            f"flex_attention: kernel_options[{name!r}] must be a multiple of {UNIT} "
            f'for "mosaic_gpu", found {n}.\nPass {max(n // UNIT, 1) * UNIT}, or '
            "leave it out for the fastest that was measured."
        )


def _check_power(name: str, n: int, *, least: int = 1, most: int | None = None) -> None:
    """Refuse sizes that Triton has no tiles of, and more warps than share one."""
    power = 1 << (n.bit_length() - 1)
    nearest = max(least, power if most is None else min(power, most))
    if n != nearest:
        limit = "" if most is None else f" and at most {most}"
        raise ValueError(
            f"flex_attention: kernel_options[{name!r}] must be a power of two, at "
            f'least {least}{limit}, for "triton", found {n}.\nPass {nearest}, or leave '
            "it out for the fastest that was measured."
        )


def _check_cut(name: str, n: int, block_mask: Any) -> None:
    """Refuse what the mask's blocks cannot be cut into."""
    asked = f"flex_attention: kernel_options[{name!r}]"
    if block_mask is None:
        return
    sizes, side = block_mask.block_size, name.endswith("kv")
    if sizes[side] % n:
        raise ValueError(
            f"{asked} must divide the {('queries', 'keys')[side]} of the block_mask's "
            f"blocks, block_size={sizes}, found {n}.\nPass a divisor of {sizes[side]}, "
            "or make the mask with larger blocks: create_block_mask(block_size=...)."
        )


def check_instance(name: str, x: Any, kind: type, remedy: str) -> None:
    """Refuse anything but None or a `kind`, also the class itself.

    Raises:
        TypeError: Saying what was found and how to make the right thing.
    """
    if x is not None and not isinstance(x, kind):
        raise TypeError(
            f"flex_attention: {name} must be {_article(kind)} or None, "
            f"found {kind_of(x)}.\n{remedy}"
        )


# --- arrays ---------------------------------------------------------------------------


def as_arrays(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array]:
    """JAX arrays of what was given: NumPy's become what `jnp.asarray` makes of them.

    Raises:
        TypeError: If one of them is not an array.
    """
    return _as_array("query", query), _as_array("key", key), _as_array("value", value)


def _as_array(name: str, x: Any) -> Array:
    if isinstance(x, jax.Array):
        return x
    try:
        if not isinstance(x, np.ndarray) and not hasattr(x, "__jax_array__"):
            raise TypeError
        return jnp.asarray(x)
    except TypeError:
        raise TypeError(
            f"flex_attention: {name} must be an array, found {kind_of(x)}.\n"
            "Pass a floating array of dimensions (B, T, H, D)."
        ) from None


def check_arrays(query: Array, key: Array, value: Array, *, enable_gqa: bool) -> None:
    """Refuse arrays that do not fit together.

    Raises:
        ValueError: On ranks, batch, lengths, heads or head dimensions.
        TypeError: On dtypes that are not floating or differ.
    """
    arrays = {"query": query, "key": key, "value": value}
    found = ", ".join(f"{name} {brief(x)}" for name, x in arrays.items())
    for name, x in arrays.items():
        if x.ndim != 4:
            remedy = f"Add the missing ones, as in {name}[None] for one sequence."
            _refuse(f"{name} must have 4 dimensions (B, T, H, D)", found, remedy)
        if any(guard_or_false(n == 0) for n in x.shape):
            remedy = "Every length must be at least 1: skip the call for empty arrays."
            _refuse(f"{name} has a dimension of length 0", found, remedy)
    _check_dtypes(arrays, found)
    if query.shape[3] != key.shape[3]:
        remedy = "Project both to one D; only value may have another."
        _refuse("query and key differ in their head dimension", found, remedy)
    if key.shape[:3] != value.shape[:3]:
        remedy = "Give value the key's (B, S, K); only its last dimension is free."
        _refuse("key and value differ in batch, length or heads", found, remedy)
    if not _is_shared_or(query.shape[0], key.shape[0]):
        remedy = "Repeat key and value along the batch, or pass one sequence of them."
        _refuse("key and value must have the query's batch size, or 1", found, remedy)
    _check_heads(query, key, found, enable_gqa=enable_gqa)


def check_has_mask_mod(function: str, block_mask: Any) -> None:
    """Refuse a mask that was indexed and not given a new mask_mod.

    Raises:
        ValueError: Naming `with_mask_mod`.
    """
    if block_mask.mask_mod is None:
        raise ValueError(
            f"{function}: {block_mask!r} has no mask_mod: it was indexed, which "
            "renumbers b, h and q_idx.\nGive it one for the new numbers with "
            "block_mask.with_mask_mod(mask_mod)."
        )


def check_block_mask(query: Array, key: Array, block_mask: Any) -> None:
    """Refuse a mask made for another batch, other heads or other lengths.

    Raises:
        ValueError: Saying which shape the mask was made for and which was found, or
            that it has no mask_mod.
    """
    if block_mask.kv_num_blocks.ndim != 3:
        raise ValueError(
            "flex_attention: block_mask's kv_num_blocks must have 3 dimensions (B, H, "
            f"rows), found {brief(block_mask.kv_num_blocks)}: a stack of masks.\n"
            "Map over the stack with jax.vmap or jax.lax.scan, or index its leaves."
        )
    batch, heads, *lengths = block_mask.shape
    wanted = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    fits = _is_shared_or(wanted[0], batch) and _is_shared_or(wanted[1], heads)
    if not fits or tuple(lengths) != wanted[2:]:
        raise ValueError(
            f"flex_attention: block_mask was made for (B, H, q_len, kv_len) = "
            f"{block_mask.shape}, the arrays have {wanted}.\n"
            f"{_other_mask(fits, wanted)}"
        )
    check_has_mask_mod("flex_attention", block_mask)
    if block_mask.lists_decide:  # given for all of the batch, whatever mask_mod reads
        return
    found = (f"a batch of {wanted[0]}", f"{wanted[1]} heads")
    for position, name in enumerate("bh"):
        if not block_mask.mask_mod.reads(position):
            continue
        if block_mask.shape[position] != wanted[position]:  # so it is 1
            raise ValueError(
                f"flex_attention: block_mask's mask_mod reads {name}, but the mask was "
                f"made with {name.upper()}=None for {found[position]}.\n"
                f"Pass {name.upper()}={wanted[position]} to create_block_mask."
            )


def _is_shared_or(size: Any, n: Any) -> bool:
    """Whether n is a size, or 1 for all of it; a 1 asks nothing of a symbolic size."""
    return (isinstance(n, int) and n == 1) or n == size or n == 1


def _other_mask(heads_fit: bool, wanted: tuple[int, ...]) -> str:
    make = "ake the mask with create_block_mask for these sizes; B and H may be None."
    if not heads_fit:
        return f"M{make}"
    q_len, kv_len = wanted[2:]
    return f"Pass block_mask.adjust({q_len}, {kv_len}), or m{make}"


def _check_dtypes(arrays: dict[str, Array], found: str) -> None:
    query, *others = (x.dtype.name for x in arrays.values())
    if query in ("float16", "bfloat16") and others[0] in _FLOAT8:
        if others[0] == others[1]:
            return
    elif others[0] in _FLOAT8 or others[1] in _FLOAT8:
        remedy = "Cast the query, for example with .astype(jnp.bfloat16)."
        wanted = f"key and value may be {_FLOAT8} for a float16 or bfloat16 query only"
        _refuse(wanted, found, remedy, TypeError)
    if not all(name in (*_DTYPES, *_FLOAT8) for name in (query, *others)):
        remedy = "Cast them, for example with .astype(jnp.bfloat16)."
        _refuse(f"query, key and value must be {_DTYPES}", found, remedy, TypeError)
    if len({query, *others}) > 1:
        remedy = "Cast them to one, for example with .astype(query.dtype)."
        _refuse("query, key and value must have one dtype", found, remedy, TypeError)


def _check_heads(query: Array, key: Array, found: str, *, enable_gqa: bool) -> None:
    heads, shared = query.shape[2], key.shape[2]
    if heads == shared:
        return
    asked = f"flex_attention: query has {heads} heads but key has {shared} ({found})."
    if heads % shared:
        raise ValueError(
            f"{asked}\nThe number of query heads must be a multiple of the number of "
            "key heads."
        )
    if not enable_gqa:
        raise ValueError(
            f"{asked}\nPass enable_gqa=True to share each key head among "
            f"{heads // shared} query heads, or repeat key and value."
        )


def _refuse(
    reason: str, found: str, remedy: str, kind: type[Exception] = ValueError
) -> NoReturn:
    raise kind(f"flex_attention: {reason} ({found}).\n{remedy}")


# --- words ----------------------------------------------------------------------------


def brief(x: Any) -> str:
    """Dtype and shape of an array, as f32[2,3]."""
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    return aval.str_short(short_dtypes=True)


def _briefs(avals: Any) -> str:
    return ", ".join(brief(aval) for aval in avals)


def kind_of(x: Any) -> str:
    """What something is, in few words."""
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, jax.Array):
        return f"the array {brief(x)}"
    if isinstance(x, np.ndarray):
        return f"a NumPy array {x.dtype}{list(x.shape)}"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
