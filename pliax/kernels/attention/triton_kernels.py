"""The kernels of flex_attention in Triton: forward, dq, and dk with dv.

A program has the rows of a tile and visits the blocks its mask lists, those in which
`mask_mod` is asked after the others. What is beyond the end is loaded as 0, and of a
mod's indices the last is taken. A block of a list may end in tiles that are wholly
beyond. `score_mod` and `mask_mod` are functions written for
the call, `(s, b, h, q, k, args)` to tiles; None where there is none.

Forward, m the maximum and l the sum of a row:

    s = score_mod(scale q k),  m' = max(m, s),  p = 2^((s - m') log2 e)
    l = l 2^((m - m') log2 e) + sum(p),  o = o 2^((m - m') log2 e) + p v

Backward, with delta = sum(do o) - d lse of each query. The tile of dk and dv lies on
its side, so that weights stay in registers; it is visited for all query heads of its
keys, one after another: no sum depends on who comes first.

    p = 2^((s - m) log2 e - log2 l),  ds = p (do v - delta) ds/d(q k)
    dq = scale ds k,  dk = scale ds' q,  dv = p' do

References:
    Dao, "FlashAttention-2", 2023, Algorithms 1 and 2.
"""

import triton  # pyright: ignore[reportMissingImports]  # of the extra "triton"
import triton.language as tl  # pyright: ignore[reportMissingImports]


LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x log2 e)
EXACT = tl.constexpr("ieee")  # products; of 16 bits they are anyhow, and AMD's want it


# --- what the kernels share -----------------------------------------------------------


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _rows(
    x, first, LENGTH: tl.constexpr, STRIDE: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, IS_SURE: tl.constexpr,
):  # fmt: skip
    """Rows of a matrix, 0 beyond its end; `IS_SURE` if none is beyond."""
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDE)
    start = x + tl.cast(first, tl.int64) * STRIDE
    places = start + row[:, None] * STRIDE + channel[None, :]
    if IS_SURE and WIDE == CHANNELS:
        return tl.load(places)
    if IS_SURE:
        return tl.load(places, channel[None, :] < CHANNELS, 0.0)
    is_there = (first + row)[:, None] < LENGTH
    if WIDE != CHANNELS:
        is_there &= channel[None, :] < CHANNELS
    return tl.load(places, is_there, 0.0)


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _store(
    x, first, found, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of a result, those that there are."""
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDE)
    start = x + tl.cast(first, tl.int64) * STRIDE
    places = start + row[:, None] * STRIDE + channel[None, :]
    is_there = ((first + row)[:, None] < LENGTH) & (channel[None, :] < CHANNELS)
    tl.store(places, found.to(x.dtype.element_ty), is_there)


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _index(first, LENGTH: tl.constexpr, COUNT: tl.constexpr, HAS_END: tl.constexpr):
    """Indices of a tile's side; of those beyond the end, if it may be, the last."""
    index = first + tl.arange(0, COUNT)
    if HAS_END:
        index = tl.minimum(index, LENGTH - 1)
    return index


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _list(
    num, indices, b, h, row, LISTS_B: tl.constexpr, LISTS_H: tl.constexpr,
    LISTED_ROWS: tl.constexpr, LISTED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """How many blocks a row of them has, and a pointer to which."""
    place = row
    if LISTS_H > 1:
        place += h * LISTED_ROWS
    if LISTS_B > 1:
        place += b * (LISTS_H * LISTED_ROWS)
    count = tl.load(num + place)
    return count, indices + place.to(tl.int64) * LISTED_COLUMNS


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _start(which, n, count, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Where visit n begins; each block of the list takes several visits."""
    n = tl.minimum(n, tl.maximum(count - 1, 0))
    return tl.load(which + n // (BLOCK // STEP)) * BLOCK + n % (BLOCK // STEP) * STEP


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _is_visible(
    mask_mod: tl.constexpr, mask_args, b, h, q, k, is_there,
    HAS_END: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What a partial block, or one that reaches beyond the end, leaves of a tile."""
    seen = is_there
    if mask_mod is not None:
        seen = mask_mod(None, b, h, q, k, mask_args)
        if HAS_END:
            seen &= is_there
    return tl.broadcast_to(seen, (HIGH, WIDE))


# --- forward --------------------------------------------------------------------------


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _visit_keys(
    state, q, k, v, start, b, h, q_index, score_args, mask_args, scale: tl.constexpr,
    score_mod: tl.constexpr, mask_mod: tl.constexpr, IS_PARTIAL: tl.constexpr,
    HAS_END: tl.constexpr, HAS_UNSEEN: tl.constexpr, IS_LINEAR: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    DEEP: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One step of the softmax."""
    acc, top, total = state
    keys = _rows(k, start, S, K * D, D, COLUMNS, DEEP, not IS_PARTIAL)
    scores = tl.dot(q, tl.trans(keys), input_precision=EXACT)
    k_index = _index(start, S, COLUMNS, HAS_END)[None, :]
    if not IS_LINEAR:
        scores *= scale
        if score_mod is not None:
            scores = score_mod(scores, b, h, q_index[:, None], k_index, score_args)
            scores = tl.broadcast_to(scores, (ROWS, COLUMNS))
    if IS_PARTIAL:
        is_there = (start + tl.arange(0, COLUMNS) < S)[None, :]
        seen = _is_visible(
            mask_mod, mask_args, b, h, q_index[:, None], k_index, is_there,
            HAS_END, ROWS, COLUMNS,
        )  # fmt: skip
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    if IS_LINEAR:
        factor: tl.constexpr = scale * LOG2E
        shift *= factor
        weights = tl.exp2(scores * factor - shift[:, None])
        fade = tl.exp2(top * factor - shift)
    else:  # beside a score of -1e9, the fused product would be off by its rounding
        weights = tl.exp2((scores - shift[:, None]) * LOG2E)
        fade = tl.exp2((top - shift) * LOG2E)
    values = _rows(v, start, S, K * V, V, COLUMNS, WIDE, not IS_PARTIAL)
    if IS_PARTIAL and HAS_UNSEEN:  # 0 times NaN is not 0
        some = tl.max(seen.to(tl.int32), 0) > 0
        values = tl.where(some[:, None], values, 0.0)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype.element_ty), values, acc, input_precision=EXACT)
    return acc, new_top, total


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def forward(
    q, k, v, num, indices, full_num, full_indices, score_args, mask_args,
    out, maximum, log_sum,
    score_mod: tl.constexpr, mask_mod: tl.constexpr, scale: tl.constexpr,
    HAS_LISTS: tl.constexpr, HAS_UNSEEN: tl.constexpr, IS_LINEAR: tl.constexpr,
    B: tl.constexpr, SHARED: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    LISTS_B: tl.constexpr, LISTS_H: tl.constexpr,
    LISTED_ROWS: tl.constexpr, LISTED_COLUMNS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DEEP: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Output, maximum and logarithm of the sum of a tile of queries."""
    tile = TILES - 1 - tl.program_id(0) % TILES  # long rows of a causal mask first
    head = tl.program_id(0) // TILES
    b, h = head // H, head % H
    b_long, first = b.to(tl.int64), tile * ROWS
    q += b_long * (T * H * D) + h * D
    b_keys = b_long * 0 if SHARED else b_long
    k += b_keys * (S * K * D) + h // (H // K) * D
    v += b_keys * (S * K * V) + h // (H // K) * V
    queries = _rows(q, first, T, H * D, D, ROWS, DEEP, T % ROWS == 0)
    q_index = _index(first, T, ROWS, T % ROWS != 0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    state = tl.zeros((ROWS, WIDE), tl.float32), top, tl.zeros((ROWS,), tl.float32)
    HAS_END: tl.constexpr = S % BLOCK_K != 0  # of a block in the lists
    if HAS_LISTS:
        count, which = _list(
            full_num, full_indices, b, h, first // BLOCK_Q,
            LISTS_B, LISTS_H, LISTED_ROWS, LISTED_COLUMNS,
        )  # fmt: skip
        count *= BLOCK_K // COLUMNS
        start = _start(which, 0, count, BLOCK_K, COLUMNS)
        for n in range(count):
            state = _visit_keys(
                state, queries, k, v, start, b, h, q_index, score_args, mask_args,
                scale, score_mod, mask_mod, False, False, HAS_UNSEEN, IS_LINEAR,
                K, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
            )  # fmt: skip
            start = _start(which, n + 1, count, BLOCK_K, COLUMNS)
        count, which = _list(
            num, indices, b, h, first // BLOCK_Q,
            LISTS_B, LISTS_H, LISTED_ROWS, LISTED_COLUMNS,
        )  # fmt: skip
        count *= BLOCK_K // COLUMNS
        start = _start(which, 0, count, BLOCK_K, COLUMNS)
        for n in range(count):
            state = _visit_keys(
                state, queries, k, v, start, b, h, q_index, score_args, mask_args,
                scale, score_mod, mask_mod, True, HAS_END, HAS_UNSEEN, IS_LINEAR,
                K, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
            )  # fmt: skip
            start = _start(which, n + 1, count, BLOCK_K, COLUMNS)
    else:
        for n in range(S // COLUMNS):
            state = _visit_keys(
                state, queries, k, v, n * COLUMNS, b, h, q_index, score_args,
                mask_args, scale, score_mod, mask_mod, False, False, HAS_UNSEEN,
                IS_LINEAR, K, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
            )  # fmt: skip
        if S % COLUMNS != 0:
            start = tl.full((), S // COLUMNS * COLUMNS, tl.int32)
            state = _visit_keys(
                state, queries, k, v, start, b, h, q_index, score_args, mask_args,
                scale, score_mod, mask_mod, True, True, HAS_UNSEEN, IS_LINEAR,
                K, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
            )  # fmt: skip
    acc, top, total = state
    sees = total != 0.0  # NaN included
    acc = acc / tl.where(sees, total, 1.0)[:, None]
    if IS_LINEAR:
        top *= scale
    if_blind = tl.where(total == total, top, total)
    top = tl.where(top == float("-inf"), if_blind, top)  # NaN, or nothing is seen
    rest = tl.where(sees, tl.log(tl.where(sees, total, 1.0)), 0.0)
    out += b_long * (T * H * V) + h * V
    _store(out, first, acc, T, H * V, V, ROWS, WIDE)
    place, is_there = first + tl.arange(0, ROWS), first + tl.arange(0, ROWS) < T
    row = head.to(tl.int64) * T
    tl.store(maximum + row + place, top, is_there)
    tl.store(log_sum + row + place, rest, is_there)


# --- backward: dq ---------------------------------------------------------------------


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _weights_and_slope(
    scores, shift, log_total, b, h, q_index, k_index, score_args,
    scale: tl.constexpr, score_mod: tl.constexpr, IS_LINEAR: tl.constexpr,
    HAS_SLOPE: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The weights of a tile once more, and how much a modified score changes."""
    slope = 1.0
    if IS_LINEAR:
        weights = tl.exp2(scores * (scale * LOG2E) - shift)
    else:
        scores *= scale
        if score_mod is not None:
            if HAS_SLOPE:
                scores, slope = score_mod(scores, b, h, q_index, k_index, score_args)
                slope = tl.broadcast_to(slope, (HIGH, WIDE))
            else:
                scores = score_mod(scores, b, h, q_index, k_index, score_args)
            scores = tl.broadcast_to(scores, (HIGH, WIDE))
        weights = tl.exp2((scores - shift) * LOG2E - log_total)
    return weights, slope


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _d_scores(
    weights, slope, d_weights, delta, HAS_SLOPE: tl.constexpr, IS_PARTIAL: tl.constexpr
):
    """Of what is hidden the slope may be infinite, and the value NaN."""
    found = weights * (d_weights - delta)
    if HAS_SLOPE:
        found *= slope
    if HAS_SLOPE or IS_PARTIAL:
        found = tl.where(weights == 0.0, 0.0, found)
    return found


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _visit_for_dq(
    dq, q, d_out, shift, log_total, delta, k, v, start, b, h, q_index,
    score_args, mask_args, scale: tl.constexpr,
    score_mod: tl.constexpr, mask_mod: tl.constexpr, IS_PARTIAL: tl.constexpr,
    HAS_END: tl.constexpr, HAS_UNSEEN: tl.constexpr, IS_LINEAR: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    DEEP: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What some keys add to dq."""
    keys = _rows(k, start, S, K * D, D, COLUMNS, DEEP, not IS_PARTIAL)
    values = _rows(v, start, S, K * V, V, COLUMNS, WIDE, not IS_PARTIAL)
    scores = tl.dot(q, tl.trans(keys), input_precision=EXACT)
    k_index = _index(start, S, COLUMNS, HAS_END)[None, :]
    weights, slope = _weights_and_slope(
        scores, shift[:, None], log_total[:, None], b, h, q_index[:, None], k_index,
        score_args, scale, score_mod, IS_LINEAR, HAS_SLOPE, ROWS, COLUMNS,
    )  # fmt: skip
    if IS_PARTIAL:
        is_there = (start + tl.arange(0, COLUMNS) < S)[None, :]
        seen = _is_visible(
            mask_mod, mask_args, b, h, q_index[:, None], k_index, is_there,
            HAS_END, ROWS, COLUMNS,
        )  # fmt: skip
        weights = tl.where(seen, weights, 0.0)
    d_weights = tl.dot(d_out, tl.trans(values), input_precision=EXACT)
    d_scores = _d_scores(
        weights, slope, d_weights, delta[:, None], HAS_SLOPE, IS_PARTIAL
    )
    if IS_PARTIAL and HAS_UNSEEN:
        some = tl.max(seen.to(tl.int32), 0) > 0
        keys = tl.where(some[:, None], keys, 0.0)
    return tl.dot(d_scores.to(k.dtype.element_ty), keys, dq, input_precision=EXACT)


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def backward_q(
    q, k, v, d_out, shift, log_total, delta, num, indices, full_num, full_indices,
    score_args, mask_args, dq,
    score_mod: tl.constexpr, mask_mod: tl.constexpr, scale: tl.constexpr,
    HAS_LISTS: tl.constexpr, HAS_UNSEEN: tl.constexpr, IS_LINEAR: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    B: tl.constexpr, SHARED: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    LISTS_B: tl.constexpr, LISTS_H: tl.constexpr,
    LISTED_ROWS: tl.constexpr, LISTED_COLUMNS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DEEP: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries."""
    tile = TILES - 1 - tl.program_id(0) % TILES
    head = tl.program_id(0) // TILES
    b, h = head // H, head % H
    b_long, first = b.to(tl.int64), tile * ROWS
    q += b_long * (T * H * D) + h * D
    d_out += b_long * (T * H * V) + h * V
    b_keys = b_long * 0 if SHARED else b_long
    k += b_keys * (S * K * D) + h // (H // K) * D
    v += b_keys * (S * K * V) + h // (H // K) * V
    queries = _rows(q, first, T, H * D, D, ROWS, DEEP, T % ROWS == 0)
    d_outs = _rows(d_out, first, T, H * V, V, ROWS, WIDE, T % ROWS == 0)
    place, is_there = first + tl.arange(0, ROWS), first + tl.arange(0, ROWS) < T
    row = head.to(tl.int64) * T
    shifts = tl.load(shift + row + place, is_there, float("inf"))
    log_totals = shifts
    if not IS_LINEAR:
        log_totals = tl.load(log_total + row + place, is_there, 0.0)
    deltas = tl.load(delta + row + place, is_there, 0.0)
    q_index = _index(first, T, ROWS, T % ROWS != 0)
    acc = tl.zeros((ROWS, DEEP), tl.float32)
    HAS_END: tl.constexpr = S % BLOCK_K != 0  # of a block in the lists
    if HAS_LISTS:
        count, which = _list(
            full_num, full_indices, b, h, first // BLOCK_Q,
            LISTS_B, LISTS_H, LISTED_ROWS, LISTED_COLUMNS,
        )  # fmt: skip
        count *= BLOCK_K // COLUMNS
        start = _start(which, 0, count, BLOCK_K, COLUMNS)
        for n in range(count):
            acc = _visit_for_dq(
                acc, queries, d_outs, shifts, log_totals, deltas, k, v, start, b, h,
                q_index, score_args, mask_args, scale, score_mod, mask_mod, False,
                False, HAS_UNSEEN, IS_LINEAR, HAS_SLOPE,
                K, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
            )  # fmt: skip
            start = _start(which, n + 1, count, BLOCK_K, COLUMNS)
        count, which = _list(
            num, indices, b, h, first // BLOCK_Q,
            LISTS_B, LISTS_H, LISTED_ROWS, LISTED_COLUMNS,
        )  # fmt: skip
        count *= BLOCK_K // COLUMNS
        start = _start(which, 0, count, BLOCK_K, COLUMNS)
        for n in range(count):
            acc = _visit_for_dq(
                acc, queries, d_outs, shifts, log_totals, deltas, k, v, start, b, h,
                q_index, score_args, mask_args, scale, score_mod, mask_mod, True,
                HAS_END, HAS_UNSEEN, IS_LINEAR, HAS_SLOPE,
                K, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
            )  # fmt: skip
            start = _start(which, n + 1, count, BLOCK_K, COLUMNS)
    else:
        for n in range(S // COLUMNS):
            acc = _visit_for_dq(
                acc, queries, d_outs, shifts, log_totals, deltas, k, v, n * COLUMNS,
                b, h, q_index, score_args, mask_args, scale, score_mod, mask_mod,
                False, False, HAS_UNSEEN, IS_LINEAR, HAS_SLOPE,
                K, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
            )  # fmt: skip
        if S % COLUMNS != 0:
            start = tl.full((), S // COLUMNS * COLUMNS, tl.int32)
            acc = _visit_for_dq(
                acc, queries, d_outs, shifts, log_totals, deltas, k, v, start, b, h,
                q_index, score_args, mask_args, scale, score_mod, mask_mod, True,
                True, HAS_UNSEEN, IS_LINEAR, HAS_SLOPE,
                K, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
            )  # fmt: skip
    dq += b_long * (T * H * D) + h * D
    _store(dq, first, acc * scale, T, H * D, D, ROWS, DEEP)


# --- backward: dk and dv --------------------------------------------------------------


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _statistic(x, place, T: tl.constexpr, beyond, IS_PARTIAL: tl.constexpr):
    """A number for each query, `beyond` for those beyond the end."""
    if IS_PARTIAL:  # noqa: SIM108  # known when it is compiled
        found = tl.load(x + place, place < T, beyond)
    else:
        found = tl.load(x + place)
    return found


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _visit_queries(
    sums, k, v, q, d_out, shift, log_total, delta, start, b, h, k_index,
    score_args, mask_args, scale: tl.constexpr,
    score_mod: tl.constexpr, mask_mod: tl.constexpr, IS_PARTIAL: tl.constexpr,
    HAS_END: tl.constexpr, IS_LINEAR: tl.constexpr, HAS_SLOPE: tl.constexpr,
    H: tl.constexpr, T: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What some queries add to dk and dv; the rows of the tile are keys."""
    dk, dv = sums
    queries = _rows(q, start, T, H * D, D, COLUMNS, DEEP, not IS_PARTIAL)
    d_outs = _rows(d_out, start, T, H * V, V, COLUMNS, WIDE, not IS_PARTIAL)
    scores = tl.dot(k, tl.trans(queries), input_precision=EXACT)
    # Statistics are loaded where they are needed: registers are short.
    place = start + tl.arange(0, COLUMNS)
    shifts = _statistic(shift, place, T, float("inf"), IS_PARTIAL)
    log_totals = shifts
    if not IS_LINEAR:
        log_totals = _statistic(log_total, place, T, 0.0, IS_PARTIAL)
    q_index = _index(start, T, COLUMNS, HAS_END)[None, :]
    weights, slope = _weights_and_slope(
        scores, shifts[None, :], log_totals[None, :], b, h, q_index, k_index[:, None],
        score_args, scale, score_mod, IS_LINEAR, HAS_SLOPE, ROWS, COLUMNS,
    )  # fmt: skip
    if IS_PARTIAL:
        seen = _is_visible(
            mask_mod, mask_args, b, h, q_index, k_index[:, None], (place < T)[None, :],
            HAS_END, ROWS, COLUMNS,
        )  # fmt: skip
        weights = tl.where(seen, weights, 0.0)
    half = weights.to(q.dtype.element_ty)
    dv = tl.dot(half, d_outs, dv, input_precision=EXACT)
    d_weights = tl.dot(v, tl.trans(d_outs), input_precision=EXACT)
    deltas = _statistic(delta, place, T, 0.0, IS_PARTIAL)
    d_scores = _d_scores(
        weights, slope, d_weights, deltas[None, :], HAS_SLOPE, IS_PARTIAL
    )
    half = d_scores.to(q.dtype.element_ty)
    dk = tl.dot(half, queries, dk, input_precision=EXACT)
    return dk, dv


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def backward_kv(
    q, k, v, d_out, shift, log_total, delta, num, indices, full_num, full_indices,
    score_args, mask_args, dk, dv,
    score_mod: tl.constexpr, mask_mod: tl.constexpr, scale: tl.constexpr,
    HAS_LISTS: tl.constexpr, HAS_UNSEEN: tl.constexpr, IS_LINEAR: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    B: tl.constexpr, SHARED: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    LISTS_B: tl.constexpr, LISTS_H: tl.constexpr,
    LISTED_ROWS: tl.constexpr, LISTED_COLUMNS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DEEP: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys, of all that see them; lists are by column."""
    tile = tl.program_id(0) % TILES  # the first keys of a causal mask, longest, first
    head = tl.program_id(0) // TILES
    b_keys, h_keys = head // K, head % K
    b_long, first = b_keys.to(tl.int64), tile * ROWS
    keys_at = b_long * (S * K * D) + h_keys * D
    values_at = b_long * (S * K * V) + h_keys * V
    keys = _rows(k + keys_at, first, S, K * D, D, ROWS, DEEP, S % ROWS == 0)
    values = _rows(v + values_at, first, S, K * V, V, ROWS, WIDE, S % ROWS == 0)
    k_index = _index(first, S, ROWS, S % ROWS != 0)
    sums = tl.zeros((ROWS, DEEP), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)
    HAS_END: tl.constexpr = T % BLOCK_Q != 0  # of a block in the lists
    for n in range((B if SHARED else 1) * (H // K)):
        b, h = b_keys + n // (H // K), h_keys * (H // K) + n % (H // K)
        row = (b * H + h).to(tl.int64) * T
        q_here = q + b.to(tl.int64) * (T * H * D) + h * D
        d_here = d_out + b.to(tl.int64) * (T * H * V) + h * V
        if HAS_LISTS:
            count, which = _list(
                full_num, full_indices, b, h, first // BLOCK_K,
                LISTS_B, LISTS_H, LISTED_ROWS, LISTED_COLUMNS,
            )  # fmt: skip
            count *= BLOCK_Q // COLUMNS
            start = _start(which, 0, count, BLOCK_Q, COLUMNS)
            for i in range(count):
                sums = _visit_queries(
                    sums, keys, values, q_here, d_here, shift + row, log_total + row,
                    delta + row, start, b, h, k_index, score_args, mask_args,
                    scale, score_mod, mask_mod, False, False, IS_LINEAR,
                    HAS_SLOPE, H, T, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
                )  # fmt: skip
                start = _start(which, i + 1, count, BLOCK_Q, COLUMNS)
            count, which = _list(
                num, indices, b, h, first // BLOCK_K,
                LISTS_B, LISTS_H, LISTED_ROWS, LISTED_COLUMNS,
            )  # fmt: skip
            count *= BLOCK_Q // COLUMNS
            start = _start(which, 0, count, BLOCK_Q, COLUMNS)
            for i in range(count):
                sums = _visit_queries(
                    sums, keys, values, q_here, d_here, shift + row, log_total + row,
                    delta + row, start, b, h, k_index, score_args, mask_args,
                    scale, score_mod, mask_mod, True, HAS_END, IS_LINEAR,
                    HAS_SLOPE, H, T, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
                )  # fmt: skip
                start = _start(which, i + 1, count, BLOCK_Q, COLUMNS)
        else:
            for i in range(T // COLUMNS):
                sums = _visit_queries(
                    sums, keys, values, q_here, d_here, shift + row, log_total + row,
                    delta + row, i * COLUMNS, b, h, k_index, score_args, mask_args,
                    scale, score_mod, mask_mod, False, False, IS_LINEAR,
                    HAS_SLOPE, H, T, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
                )  # fmt: skip
            if T % COLUMNS != 0:
                start = tl.full((), T // COLUMNS * COLUMNS, tl.int32)
                sums = _visit_queries(
                    sums, keys, values, q_here, d_here, shift + row, log_total + row,
                    delta + row, start, b, h, k_index, score_args, mask_args,
                    scale, score_mod, mask_mod, True, True, IS_LINEAR,
                    HAS_SLOPE, H, T, S, D, V, DEEP, WIDE, ROWS, COLUMNS,
                )  # fmt: skip
    dk_sum, dv_sum = sums
    _store(dk + keys_at, first, dk_sum * scale, S, K * D, D, ROWS, DEEP)
    _store(dv + values_at, first, dv_sum, S, K * V, V, ROWS, WIDE)
