"""Documents packed into one row: the id of every position."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .arguments import brief
from .mod_arguments import array_of, static_integer


def packed_ids(
    function: str, given: dict[str, Any], total_length: Any, first: Any
) -> tuple[Array, int | None]:
    """Ids by position, and the number of documents if later positions belong to none.

    Ids made of lengths ascend: 0, ..., n - 1, and n beyond the last document.
    """
    found = [name for name, x in given.items() if x is not None]
    if len(found) != 1:
        raise ValueError(
            f"{function}: expected exactly one of ids, lengths and cu_seqlens, found "
            f"{' and '.join(found) or 'none'}.\nPass ids for the document of each "
            "position, or lengths or cu_seqlens with total_length."
        )
    (name,) = found
    axis = {"ids": "S", "lengths": "n", "cu_seqlens": "n + 1"}[name]
    shapes = ((axis,), ("B", axis))
    array = array_of(function, name, given[name], jnp.integer, shapes)
    if (name == "ids") != (total_length is None):
        raise ValueError(
            f"{function}: total_length belongs to lengths and cu_seqlens, found {name} "
            f"with total_length={total_length!r}.\nWith lengths or cu_seqlens pass the "
            "tokens of the whole row; ids have one for each position."
        )
    if name == "ids":
        return array, None
    array = array.astype(jnp.int32)
    ends = jnp.cumsum(array, axis=-1) if name == "lengths" else array[..., 1:]
    if ends.shape[-1] == 0:
        raise ValueError(
            f"{function}: {name} must name at least one document, found "
            f"{brief(array)}.\nAn empty row is lengths of 0."
        )
    total = static_integer(function, "total_length", total_length, 1)
    return _ids_of_ends(ends, jnp.asarray(first, jnp.int32), total), ends.shape[-1]


def _ids_of_ends(ends: Array, first: Array, total: int) -> Array:
    """How many documents end at or before each position."""
    batch = jnp.broadcast_shapes(ends.shape[:-1], first.shape)
    ends = jnp.broadcast_to(ends, (*batch, ends.shape[-1]))
    ends += jnp.broadcast_to(first[..., None], ends.shape)
    positions = jnp.arange(total, dtype=jnp.int32)

    def search(ends: Array) -> Array:
        return jnp.searchsorted(ends, positions, side="right").astype(jnp.int32)

    return jax.vmap(search)(ends) if batch else search(ends)


def same_document(ids: Array, count: int | None, b: Any, q: Any, k: Any) -> Any:
    """Whether two positions share a document."""
    return (_id(ids, b, q) == _id(ids, b, k)) & is_packed(ids, count, b, q)


def is_packed(ids: Array, count: int | None, b: Any, index: Any) -> Any:
    """Whether a position belongs to a document at all."""
    return True if count is None else _id(ids, b, index) < count


def _id(ids: Array, b: Any, index: Any) -> Any:
    return ids[index] if ids.ndim == 1 else ids[b, index]
