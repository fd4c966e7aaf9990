"""What flex_attention was given, checked: mods as data, shapes that fit.

Every error says what was asked, what was found and what to do, before any kernel runs.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jaxtyping import Array

from pliax.core.jaxprs import ClosedFunction, close


_DTYPES = ("float16", "bfloat16", "float32", "float64")
_INDEX = jax.ShapeDtypeStruct((), jnp.int32)
_SIGNATURES = {
    "score_mod": "score_mod(score, b, h, q_idx, kv_idx)",
    "mask_mod": "mask_mod(b, h, q_idx, kv_idx)",
}


def close_mask_mod(mask_mod: Callable[..., Any] | ClosedFunction) -> ClosedFunction:
    """Trace a mask_mod; its result must be one bool."""
    if isinstance(mask_mod, ClosedFunction):
        return mask_mod
    _check_positional(mask_mod, "mask_mod", 4)
    closed = close(mask_mod, _INDEX, _INDEX, _INDEX, _INDEX)
    _check_result(closed, "mask_mod", closed.out_aval.dtype == jnp.bool_, "bool[]")
    return jax.tree.map(jax.lax.stop_gradient, closed)


def close_score_mod(
    score_mod: Callable[..., Any] | None, dtype: Any
) -> ClosedFunction | None:
    """Trace a score_mod for scores of `dtype`; its result must be one float."""
    if score_mod is None:
        return None
    _check_positional(score_mod, "score_mod", 5)
    score = jax.ShapeDtypeStruct((), dtype)
    closed = close(score_mod, score, _INDEX, _INDEX, _INDEX, _INDEX)
    floating = jnp.issubdtype(closed.out_aval.dtype, jnp.floating)
    _check_result(closed, "score_mod", floating, f"{jnp.dtype(dtype).name}[]")
    return closed


def check_arrays(query: Array, key: Array, value: Array, *, enable_gqa: bool) -> None:
    """Refuse arrays that do not fit together.

    Raises:
        ValueError: On ranks, batch, lengths, heads or head dimensions.
        TypeError: On dtypes that are not floating or differ.
    """
    arrays = {"query": query, "key": key, "value": value}
    found = ", ".join(f"{name} {_brief(x)}" for name, x in arrays.items())
    for name, x in arrays.items():
        if x.ndim != 4:
            _refuse(f"{name} must have 4 dimensions (B, T, H, D)", found)
        if 0 in x.shape:
            _refuse(f"{name} has a dimension of length 0", found)
    _check_dtypes(arrays, found)
    if query.shape[3] != key.shape[3]:
        _refuse("query and key differ in their head dimension", found)
    if key.shape[:3] != value.shape[:3]:
        _refuse("key and value differ in batch, length or heads", found)
    if key.shape[0] not in (1, query.shape[0]):
        _refuse("key and value must have the query's batch size, or 1", found)
    _check_heads(query, key, found, enable_gqa=enable_gqa)


def check_block_mask(query: Array, key: Array, block_mask: Any) -> None:
    """Refuse a mask made for another batch, other heads or other lengths.

    Raises:
        ValueError: Saying which shape the mask was made for and which was found.
    """
    batch, heads, *lengths = block_mask.shape
    wanted = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    fits = batch in (1, wanted[0]) and heads in (1, wanted[1])
    if not fits or tuple(lengths) != wanted[2:]:
        raise ValueError(
            f"flex_attention: block_mask was made for (B, H, q_len, kv_len) = "
            f"{block_mask.shape}, the arrays have {wanted}.\n"
            "Make the mask with create_block_mask for these sizes; B and H may be None."
        )


def _check_dtypes(arrays: dict[str, Array], found: str) -> None:
    dtypes = {x.dtype for x in arrays.values()}
    if not all(dtype.name in _DTYPES for dtype in dtypes):
        _refuse(f"query, key and value must be {_DTYPES}", found, TypeError)
    if len(dtypes) > 1:
        _refuse("query, key and value must have one dtype", found, TypeError)


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


def _refuse(reason: str, found: str, kind: type[Exception] = ValueError) -> None:
    raise kind(f"flex_attention: {reason} ({found}).")


def _brief(x: Any) -> str:
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    return aval.str_short(short_dtypes=True)


def _check_positional(mod: Callable[..., Any], role: str, wanted: int) -> None:
    """By the number of positional parameters without a default."""
    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError):
        return  # builtins without a signature: tracing will tell
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    count = sum(p.kind in positional and p.default is p.empty for p in parameters)
    if count != wanted:
        raise TypeError(
            f"{role}: expected {wanted} positional parameters, "
            f"{_SIGNATURES[role]}, got {count}."
        )


def _check_result(
    closed: ClosedFunction, role: str, right_dtype: bool, wanted: str
) -> None:
    aval = closed.out_aval
    if aval.shape != () or not right_dtype:
        raise TypeError(
            f"{role} must return one {wanted} for scalar indices; it returned "
            f"{_brief(aval)}.\nMods are written for one score at a time."
        )
