"""The masks attention is trained and served with, as mask_mods.

    mask_mod : (b, h, q_idx, kv_idx) -> bool          True where the query sees the key

`noop_mask` and `causal` are mask_mods; every other function makes one. They are written
as comparisons of index expressions and of captured arrays, from which a whole block of
scores can be decided at once. Python integers become part of the mask's program, arrays
are data: new contents of the same shapes neither trace nor compile again.

Sharp edge: an array that is shorter than the sequence answers for all later positions
with its last element, as every JAX array does.
"""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax.numpy as jnp

from .arguments import kind_of
from .mod_arguments import (
    PER_SEQUENCE,
    SCALAR,
    array_of,
    check_mod,
    integer_or_array,
    pick,
    static_integer,
)
from .packing import is_packed, packed_ids, same_document


type MaskMod = Callable[[Any, Any, Any, Any], Any]


# --- mask_mods ------------------------------------------------------------------------


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hides nothing: the whole square.

    Args:
        b: Sequence of the batch; an integer scalar, as all four.
        h: Query head.
        q_idx: Position of the query.
        kv_idx: Position of the key.

    Examples:
        >>> from pliax.kernels import masks
        >>> bool(masks.noop_mask(0, 0, 0, 3))
        True
    """
    return jnp.ones((), bool)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A query sees itself and what came before: the lower triangle.

    Args:
        b: Sequence of the batch; an integer scalar, as all four.
        h: Query head.
        q_idx: Position of the query.
        kv_idx: Position of the key.

    Examples:
        >>> from pliax.kernels import masks
        >>> [[int(masks.causal(0, 0, q, k)) for k in range(3)] for q in range(3)]
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    References:
        Vaswani et al., "Attention is all you need", 2017, section 3.2.3.
    """
    return q_idx >= kv_idx


# --- combinations ---------------------------------------------------------------------


def and_masks(*mask_mods: Any) -> MaskMod:
    """What all of the masks show: their intersection.

    Args:
        *mask_mods: One or more mask_mods.

    Raises:
        TypeError: If there is none, or one is no function of four indices.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import masks
        >>> mask = masks.and_masks(masks.causal, masks.padding(jnp.asarray([2])))
        >>> [[int(mask(0, 0, q, k)) for k in range(3)] for q in range(3)]
        [[1, 0, 0], [1, 1, 0], [1, 1, 0]]

    References:
        Dong et al., "FlexAttention: A programming model for generating optimized
        attention kernels", 2024.
    """
    return _combined("and_masks", operator.and_, mask_mods)


def or_masks(*mask_mods: Any) -> MaskMod:
    """What any of the masks shows: their union.

    Args:
        *mask_mods: One or more mask_mods.

    Raises:
        TypeError: If there is none, or one is no function of four indices.

    Examples:
        >>> from pliax.kernels import masks
        >>> mask = masks.or_masks(masks.causal, lambda b, h, q, k: k < 2)
        >>> [[int(mask(0, 0, q, k)) for k in range(3)] for q in range(3)]
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]

    References:
        Dong et al., "FlexAttention", 2024.
    """
    return _combined("or_masks", operator.or_, mask_mods)


def not_mask(mask_mod: Any) -> MaskMod:
    """What the mask hides: its complement.

    Args:
        mask_mod: A mask_mod.

    Raises:
        TypeError: If it is no function of four indices.

    Examples:
        >>> from pliax.kernels import masks
        >>> mask = masks.not_mask(masks.causal)
        >>> [[int(mask(0, 0, q, k)) for k in range(3)] for q in range(3)]
        [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    """
    check_mod("not_mask", "mask_mod", mask_mod)
    return lambda b, h, q, k: ~jnp.asarray(mask_mod(b, h, q, k))


def with_offset(mask_mod: Any, offset: Any) -> MaskMod:
    """The rows of a mask from `offset` on: query 0 stands at position `offset`.

    For decoding and for prefill in chunks, where the queries are the last or the next
    tokens of a sequence whose keys are cached.

    Args:
        mask_mod: The mask of the whole sequence.
        offset: Position of the first query, in tokens: an integer, or an integer array
            () or (B,), one for each sequence. An array is data.

    Raises:
        TypeError: If `mask_mod` is no mask_mod, or `offset` no integer.
        ValueError: If `offset` has more than one axis.

    Examples:
        >>> from pliax.kernels import masks
        >>> step = masks.with_offset(masks.causal, 2)
        >>> [int(step(0, 0, 0, k)) for k in range(4)]
        [1, 1, 1, 0]

    References:
        PyTorch, "FlexAttention part II: FlexAttention for inference", 2025.
    """
    check_mod("with_offset", "mask_mod", mask_mod)
    offset = integer_or_array("with_offset", "offset", offset, None, PER_SEQUENCE)
    return lambda b, h, q, k: mask_mod(b, h, q + pick(offset, b), k)


# --- one sequence ---------------------------------------------------------------------


def sliding_window(window: Any) -> MaskMod:
    """A band along the diagonal: `-right <= q_idx - kv_idx <= left`.

    Args:
        window: Tokens. An integer w: a query sees itself and the w - 1 keys before it,
            `0 <= q_idx - kv_idx < w`, as in Mistral. A pair (left, right): it sees
            itself, `left` keys before and `right` keys after, as in flash-attention;
            w means (w - 1, 0). Each may be an integer array (): a width that changes
            from layer to layer of a scan is data.

    Raises:
        TypeError: If a width is no integer.
        ValueError: If the window is below 1, a side below 0, or there are not two.

    Examples:
        >>> from pliax.kernels import masks
        >>> causal, both = masks.sliding_window(2), masks.sliding_window((1, 1))
        >>> [[int(causal(0, 0, q, k)) for k in range(4)] for q in range(3)]
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
        >>> [[int(both(0, 0, q, k)) for k in range(4)] for q in range(3)]
        [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]

    References:
        Beltagy, Peters, Cohan, "Longformer", 2020, section 3.1.
        Jiang et al., "Mistral 7B", 2023, section 2.
    """
    left, right = _sides("sliding_window", window)
    return lambda b, h, q, k: (q - k <= left) & (k - q <= right)


def dilated(window: Any, dilation: Any) -> MaskMod:
    """Every `dilation`-th diagonal of a wider band, the main diagonal among them.

    Args:
        window: Visible keys, as in `sliding_window`: an integer w shows the w keys
            `q_idx - i dilation` for 0 <= i < w, a pair (left, right) so many on
            each side.
        dilation: Distance of neighbouring visible keys, in tokens; 1 leaves no gap.

    Raises:
        TypeError: If a number is no integer.
        ValueError: If window or dilation is below 1, or a side below 0.

    Examples:
        >>> from pliax.kernels import masks
        >>> mask = masks.dilated(2, 3)
        >>> [int(mask(0, 0, 7, k)) for k in range(9)]
        [0, 0, 0, 0, 1, 0, 0, 1, 0]

    References:
        Beltagy, Peters, Cohan, "Longformer", 2020, section 3.1, figure 2c.
    """
    left, right = _sides("dilated", window)
    step = static_integer("dilated", "dilation", dilation, 1)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        band = (q - k <= left * step) & (k - q <= right * step)
        return band & ((q - k) % step == 0)

    return mask_mod


def prefix_lm(prefix_length: Any) -> MaskMod:
    """Causal, but all see the first `prefix_length` keys.

    Args:
        prefix_length: Tokens of the prefix, whose queries see one another in both
            directions: an integer, or an integer array () or (B,). An array is data.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is negative, or has more than one axis.

    Examples:
        >>> from pliax.kernels import masks
        >>> mask = masks.prefix_lm(2)
        >>> [[int(mask(0, 0, q, k)) for k in range(4)] for q in range(4)]
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]

    References:
        Raffel et al., "Exploring the limits of transfer learning with a unified
        text-to-text transformer", 2020, section 3.2.1, figure 3.
    """
    name = ("prefix_lm", "prefix_length")
    length = integer_or_array(*name, prefix_length, 0, PER_SEQUENCE)
    return lambda b, h, q, k: (k < pick(length, b)) | (q >= k)


def global_and_window(global_tokens: Any, window: Any) -> MaskMod:
    """A band along the diagonal, and the first rows and columns whole.

    Args:
        global_tokens: Tokens at the beginning which see all and which all see: an
            integer, or an integer array () or (B,). An array is data.
        window: Tokens. An integer w shows w // 2 keys on each side, as the paper has
            it; a pair (left, right) as in `sliding_window`.

    Raises:
        TypeError: If a number is no integer.
        ValueError: If `global_tokens` is negative, or the window below 1.

    Examples:
        >>> from pliax.kernels import masks
        >>> mask = masks.global_and_window(1, 2)
        >>> [[int(mask(0, 0, q, k)) for k in range(5)] for q in range(4)]
        [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 1, 1, 1]]

    References:
        Beltagy, Peters, Cohan, "Longformer", 2020, section 3.1, figure 2d.
    """
    name = ("global_and_window", "global_tokens")
    first = integer_or_array(*name, global_tokens, 0, PER_SEQUENCE)
    left, right = _sides("global_and_window", window, symmetric=True)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        band = (q - k <= left) & (k - q <= right)
        return band | (q < pick(first, b)) | (k < pick(first, b))

    return mask_mod


# --- several sequences in one ---------------------------------------------------------


def document(
    ids: Any = None,
    *,
    lengths: Any = None,
    cu_seqlens: Any = None,
    total_length: Any = None,
) -> MaskMod:
    """Squares along the diagonal: each document of a packed row sees itself only.

    Combine it with `causal` for a language model. Exactly one of the three descriptions
    is given; the contents of all are data.

    Args:
        ids: A number for each position, equal within a document: an integer array (S,),
            or (B, S) for rows packed differently.
        lengths: Tokens of each document, in order: (n,) or (B, n). Documents of length
            0 are allowed. Positions beyond the last document belong to none: they see
            nothing and nothing sees them.
        cu_seqlens: Where documents begin, and where the last one ends, as in
            flash-attention: 0, then the running sum of the lengths; (n + 1,) or
            (B, n + 1). Beyond the last document as for `lengths`.
        total_length: Tokens of the whole row, a Python integer; with `lengths` or
            `cu_seqlens` only, whose sum is not known while tracing.

    Raises:
        TypeError: If the array is none of integers, or `total_length` no integer.
        ValueError: If not exactly one description is given, if its rank is wrong, or if
            `total_length` is missing, superfluous or below 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import masks
        >>> mask = masks.document(lengths=jnp.asarray([1, 2]), total_length=4)
        >>> [[int(mask(0, 0, q, k)) for k in range(4)] for q in range(4)]
        [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]

    References:
        Krell et al., "Efficient sequence packing without cross-contamination", 2021.
    """
    given = {"ids": ids, "lengths": lengths, "cu_seqlens": cu_seqlens}
    ids, count = packed_ids("document", given, total_length, 0)
    return lambda b, h, q, k: same_document(ids, count, b, q, k)


def shared_prefix(
    prefix_length: Any,
    ids: Any = None,
    *,
    lengths: Any = None,
    cu_seqlens: Any = None,
    total_length: Any = None,
) -> MaskMod:
    """The first columns whole, then squares along the diagonal.

    One prefix is followed by several continuations, each of which sees the prefix and
    itself; the prefix sees itself only. Combine it with `causal` for a language model.

    Args:
        prefix_length: Tokens of the prefix: an integer, or an integer array () or (B,).
        ids: A number for each position of the whole row, (S,) or (B, S), equal within a
            continuation; those of the prefix are not looked at.
        lengths: Tokens of each continuation, (n,) or (B, n).
        cu_seqlens: Where continuations begin, counted from the end of the prefix, and
            where the last one ends; (n + 1,) or (B, n + 1).
        total_length: Tokens of the whole row, the prefix among them; with `lengths` or
            `cu_seqlens` only. Positions beyond the last continuation see nothing.

    Raises:
        TypeError: If an argument is no integer, or none of integers.
        ValueError: As `document`, and if `prefix_length` is negative.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import masks
        >>> mask = masks.shared_prefix(1, jnp.asarray([0, 1, 1, 2]))
        >>> [[int(mask(0, 0, q, k)) for k in range(4)] for q in range(4)]
        [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 1]]

    References:
        Juravsky et al., "Hydragen: High-throughput LLM inference with shared
        prefixes", 2024.
    """
    name = ("shared_prefix", "prefix_length")
    prefix = integer_or_array(*name, prefix_length, 0, PER_SEQUENCE)
    given = {"ids": ids, "lengths": lengths, "cu_seqlens": cu_seqlens}
    ids, count = packed_ids("shared_prefix", given, total_length, prefix)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        end = pick(prefix, b)
        own = (q >= end) & same_document(ids, count, b, q, k)
        return own | ((k < end) & is_packed(ids, count, b, q))

    return mask_mod


def padding(lengths: Any) -> MaskMod:
    """The first columns: keys from `lengths[b]` on are hidden.

    Args:
        lengths: Real tokens of each sequence, an integer array (B,). Contents are data.

    Raises:
        TypeError: If it is no array of integers.
        ValueError: If its rank is not 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import masks
        >>> mask = masks.padding(jnp.asarray([2, 3]))
        >>> [[int(mask(b, 0, 0, k)) for k in range(4)] for b in range(2)]
        [[1, 1, 0, 0], [1, 1, 1, 0]]

    References:
        Devlin et al., "BERT", 2019, whose implementation names it the attention mask.
    """
    lengths = array_of("padding", "lengths", lengths, jnp.integer, (("B",),))
    return lambda b, h, q, k: k < lengths[b].astype(jnp.int32)


def block_diffusion(length: Any, block: Any) -> MaskMod:
    """The training mask of block diffusion: three patterns on two copies of a text.

    The sequence is 2 `length` long: a noised copy, then the clean text, both cut into
    blocks. A noised query sees its own noised block and the clean blocks before it; a
    clean query sees its own clean block and those before it.

    Args:
        length: Tokens of the text, half of the sequence.
        block: Tokens denoised together; the last block may be shorter.

    Raises:
        TypeError: If a number is no integer.
        ValueError: If a number is below 1.

    Examples:
        >>> from pliax.kernels import masks
        >>> mask = masks.block_diffusion(2, 1)
        >>> [[int(mask(0, 0, q, k)) for k in range(4)] for q in range(4)]
        [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]

    References:
        Arriola et al., "Block diffusion: Interpolating between autoregressive and
        diffusion language models", 2025, section 3.2 and the masks M_BD, M_OBC, M_BC
        of the appendix.
    """
    n = static_integer("block_diffusion", "length", length, 1)
    size = static_integer("block_diffusion", "block", block, 1)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        diagonal = (k < n) & (q // size == k // size)
        offset_causal = (k >= n) & (q // size > (k - n) // size)
        block_causal = (k >= n) & ((q - n) // size >= (k - n) // size)
        return ((q < n) & (diagonal | offset_causal)) | ((q >= n) & block_causal)

    return mask_mod


# --- grids ----------------------------------------------------------------------------


def neighborhood_2d(size: Any, kernel: Any) -> MaskMod:
    """A window around each pixel of an image, moved inwards at the borders.

    Positions number the pixels row by row. Each query sees exactly
    kernel_h kernel_w keys: its window starts at `clip(i - kernel // 2, 0, n - kernel)`
    along an axis of n.

    Args:
        size: Height and width of the image, in pixels (or patches).
        kernel: Height and width of the window; an even one reaches one further back.

    Raises:
        TypeError: If a number is no integer.
        ValueError: If there are not two, one is below 1, or a window exceeds the image.

    Examples:
        >>> from pliax.kernels import masks
        >>> mask = masks.neighborhood_2d((2, 3), (1, 2))
        >>> [[int(mask(0, 0, q, k)) for k in range(6)] for q in range(3)]
        [[1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]]

    References:
        Hassani, Walton, Li, Li, Shi, "Neighborhood attention transformer", 2023,
        section 3.1.
    """
    return _neighborhood("neighborhood_2d", size, kernel, ("height", "width"))


def neighborhood_3d(size: Any, kernel: Any) -> MaskMod:
    """A window around each voxel of a video or volume, moved inwards at the borders.

    Args:
        size: Depth (or frames), height and width; positions number them in this order,
            the last one fastest.
        kernel: Depth, height and width of the window, as in `neighborhood_2d`.

    Raises:
        TypeError: If a number is no integer.
        ValueError: If there are not three, one is below 1, or a window exceeds the
            volume.

    Examples:
        >>> from pliax.kernels import masks
        >>> mask = masks.neighborhood_3d((3, 1, 2), (2, 1, 1))
        >>> [[int(mask(0, 0, q, k)) for k in range(6)] for q in (0, 5)]
        [[1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 1]]

    References:
        Hassani et al., "Neighborhood attention transformer", 2023, section 3.1.
    """
    return _neighborhood("neighborhood_3d", size, kernel, ("depth", "height", "width"))


def _neighborhood(function: str, size: Any, kernel: Any, axes: Any) -> MaskMod:
    sizes = _integer_tuple(function, "size", size, axes)
    kernels = _integer_tuple(function, "kernel", kernel, axes)
    if any(window > n for window, n in zip(kernels, sizes, strict=True)):
        raise ValueError(
            f"{function}: kernel must fit into size {sizes}, found {kernels}.\n"
            "A window as large as the axis already sees all of it."
        )

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        places = zip(*(_coordinates(x, sizes) for x in (q, k)), strict=True)
        visible = []
        for (i, j), n, window in zip(places, sizes, kernels, strict=True):
            start = jnp.clip(i - window // 2, 0, n - window)
            visible.append((j >= start) & (j < start + window))
        return reduce(operator.and_, visible)

    return mask_mod


def _coordinates(index: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Of a row-major position; the first axis needs no remainder."""
    found = []
    for n in reversed(sizes[1:]):
        found.append(index % n)
        index = index // n
    return [index, *reversed(found)]


# --- arguments ------------------------------------------------------------------------


def _combined(function: str, operation: Any, mask_mods: Any) -> MaskMod:
    if not mask_mods:
        raise TypeError(
            f"{function}: expected at least one mask_mod, found none.\n"
            f"Pass them one by one, as in {function}(causal, sliding_window(128))."
        )
    for mask_mod in mask_mods:
        check_mod(function, "mask_mod", mask_mod)
    return lambda b, h, q, k: reduce(operation, (m(b, h, q, k) for m in mask_mods))


def _sides(function: str, window: Any, *, symmetric: bool = False) -> tuple[Any, Any]:
    """Visible keys before and after the query."""
    if not isinstance(window, tuple | list):
        width = integer_or_array(function, "window", window, 1, SCALAR)
        return (width // 2, width // 2) if symmetric else (width - 1, 0)
    if len(window) != 2:
        raise ValueError(
            f"{function}: window must be an integer or a pair (left, right), found "
            f"{window!r}.\nThe pair counts visible keys before and after the query."
        )
    left, right = window
    return (
        integer_or_array(function, "window", left, 0, SCALAR),
        integer_or_array(function, "window", right, 0, SCALAR),
    )


def _integer_tuple(function: str, name: str, x: Any, axes: Any) -> tuple[int, ...]:
    if not isinstance(x, tuple | list) or len(x) != len(axes):
        raise ValueError(
            f"{function}: {name} must be {len(axes)} integers, found {kind_of(x)}.\n"
            f"Pass ({', '.join(axes)})."
        )
    return tuple(static_integer(function, name, n, 1) for n in x)
