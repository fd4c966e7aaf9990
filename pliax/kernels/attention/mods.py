"""The score modifications models are trained with, as score_mods.

    score_mod : (score, b, h, q_idx, kv_idx) -> score

Each function makes one. Arrays are data: they may be learned, and get gradients. All
arithmetic is in the score's dtype, that of the softmax.

`sinks` acts on the result of attention, through its log-sum-exp.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pliax.core.generator import Generator

from .arguments import brief, kind_of
from .mod_arguments import (
    PER_HEAD,
    PER_SEQUENCE,
    array_of,
    check_mod,
    integer_or_array,
    is_array,
    pick,
    static_integer,
)


type ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


# --- combinations ---------------------------------------------------------------------


def compose(*score_mods: Any) -> ScoreMod:
    """Several score_mods one after the other, the first one first.

    Args:
        *score_mods: One or more score_mods.

    Raises:
        TypeError: If there is none, or one is no function of a score and four indices.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import mods
        >>> mod = mods.compose(mods.distance_decay(0.5), mods.soft_cap(2.0))
        >>> float(mod(jnp.float32(1.0), 0, 0, 6, 4))
        0.0
    """
    if not score_mods:
        raise TypeError(
            "compose: expected at least one score_mod, found none.\n"
            "Pass them one by one, as in compose(alibi(8), soft_cap(50.0))."
        )
    for mod in score_mods:
        check_mod("compose", "score_mod", mod)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for mod in score_mods:
            score = mod(score, b, h, q, k)
        return score

    return score_mod


def with_offset(score_mod: Any, offset: Any) -> ScoreMod:
    """A score_mod for queries that begin at position `offset` of their sequence.

    For decoding and for prefill in chunks; the counterpart of `masks.with_offset`.

    Args:
        score_mod: The score_mod of the whole sequence.
        offset: Position of the first query, in tokens: an integer, or an integer array
            () or (B,), one for each sequence. An array is data.

    Raises:
        TypeError: If `score_mod` is no score_mod, or `offset` no integer.
        ValueError: If `offset` has more than one axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import mods
        >>> step = mods.with_offset(mods.distance_decay(1.0), jnp.asarray([5, 9]))
        >>> [float(step(jnp.float32(0.0), b, 0, 0, 4)) for b in (0, 1)]
        [-1.0, -5.0]

    References:
        PyTorch, "FlexAttention part II: FlexAttention for inference", 2025.
    """
    check_mod("with_offset", "score_mod", score_mod)
    offset = integer_or_array("with_offset", "offset", offset, None, PER_SEQUENCE)
    return lambda s, b, h, q, k: score_mod(s, b, h, q + pick(offset, b), k)


# --- functions of the distance --------------------------------------------------------


def alibi(slopes: Any) -> ScoreMod:
    r"""Attention with linear biases: a penalty proportional to the distance.

    .. math:: s_{ij} - m_h\, |i - j|

    For keys before the query this is the paper's bias; for keys after it the penalty is
    the same, as in flash-attention, so that encoders can use it too.

    Args:
        slopes: The number of query heads H, which takes the constant slopes of
            `alibi_slopes`; or slopes of your own, a floating array (H,), that get a
            gradient.

    Raises:
        TypeError: If it is neither an integer nor a floating array.
        ValueError: If the number of heads is below 1, or the array has not one axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import mods
        >>> float(mods.alibi(8)(jnp.float32(1.0), 0, 1, 6, 2))
        0.0

    References:
        Press, Smith, Lewis, "Train short, test long: Attention with linear biases
        enables input length extrapolation", 2022, section 3.
    """
    if is_array(slopes):
        learned = array_of("alibi", "slopes", slopes, jnp.floating, (("H",),))
        return lambda s, b, h, q, k: s - learned[h].astype(s.dtype) * _distance(s, q, k)
    fixed = alibi_slopes(static_integer("alibi", "slopes", slopes, 1))

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        # A constant: without stop_gradient the backward pass would sum one for it.
        slope = jax.lax.stop_gradient(jnp.asarray(fixed, score.dtype)[h])
        return score - slope * _distance(score, q, k)

    return score_mod


def alibi_slopes(num_heads: Any) -> Float[np.ndarray, " H"]:
    """The slopes of ALiBi, a geometric sequence in float64.

    For H heads, a power of two, `2 ** (-8 (h + 1) / H)`. Otherwise those of the next
    lower power of two P, and then every other one of 2 P, until there are H.

    Args:
        num_heads: Query heads H.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is below 1.

    Examples:
        >>> from pliax.kernels import mods
        >>> mods.alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> mods.alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]

    References:
        Press, Smith, Lewis, 2022, section 3 and the code published with it.
    """
    heads = static_integer("alibi_slopes", "num_heads", num_heads, 1)
    lower = 1 << (heads.bit_length() - 1)

    def geometric(n: int) -> np.ndarray:
        return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

    return np.concatenate([geometric(lower), geometric(2 * lower)[::2]])[:heads]


def distance_decay(rate: Any) -> ScoreMod:
    r"""Weights that decay exponentially with the distance.

    .. math:: s_{ij} - r_h\, |i - j|, \qquad
        e^{s_{ij} - r_h |i - j|} = \gamma_h^{|i - j|}\, e^{s_{ij}},
        \quad \gamma_h = e^{-r_h}

    RetNet multiplies its weights, which no softmax normalises, by this factor; here it
    acts on the weights before they are normalised.

    Args:
        rate: Decay by token, -log(gamma): a number of at least 0, or a floating array
            () or (H,) that gets a gradient.

    Raises:
        TypeError: If it is neither a real number nor a floating array.
        ValueError: If it is negative or not finite, or has more than one axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import mods
        >>> float(mods.distance_decay(0.25)(jnp.float32(1.0), 0, 0, 2, 6))
        0.0

    References:
        Sun et al., "Retentive network: A successor to transformer for large language
        models", 2023, section 2.1, equation 5.
        Sun et al., "A length-extrapolatable transformer", 2022 (xPos).
    """
    rate = _number_or_array("distance_decay", "rate", rate, 0.0)
    return lambda s, b, h, q, k: s - _value(rate, s, h) * _distance(s, q, k)


def relative_bias(table: Any, *, max_distance: Any = None) -> ScoreMod:
    r"""A learned bias for each relative position, clipped to the table's ends.

    .. math:: s_{ij} + t_{h,\, \mathrm{clip}(i - j)}

    Args:
        table: Biases by ascending `q_idx - kv_idx`, a floating array (R,) or (H, R). It
            gets a gradient.
        max_distance: The distance of the last entry, in tokens; entry r is for
            `q_idx - kv_idx = r - (R - 1) + max_distance`. None centres the table, whose
            R = 2 max_distance + 1 is then odd. For causal attention R - 1 makes the
            first entry that of distance 0.

    Raises:
        TypeError: If the table is no floating array, or the distance no integer.
        ValueError: If the table's rank is wrong, if R is even without max_distance, or
            if distance 0 is not in the table.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import mods
        >>> mod = mods.relative_bias(jnp.asarray([-1.0, 0.0, 1.0]))
        >>> [float(mod(jnp.float32(0.0), 0, 0, q, 4)) for q in range(2, 7)]
        [-1.0, -1.0, 0.0, 1.0, 1.0]

    References:
        Shaw, Uszkoreit, Vaswani, "Self-attention with relative position
        representations", 2018, section 3.2: the clipping.
        Raffel et al., 2020, section 2.1: a scalar for each position.
    """
    table = array_of(
        "relative_bias", "table", table, jnp.floating, (("R",), ("H", "R"))
    )
    last = _last_distance(table.shape[-1], max_distance)
    first = last - table.shape[-1] + 1

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        index = jnp.clip(q - k, first, last) - first
        bias = table[index] if table.ndim == 1 else table[h, index]
        return score + bias.astype(score.dtype)

    return score_mod


def _last_distance(size: int, max_distance: Any) -> int:
    if max_distance is None and size % 2 == 0:
        raise ValueError(
            f"relative_bias: table must have an odd length 2 max_distance + 1, found "
            f"{size}.\nPass max_distance, the distance of its last entry."
        )
    if max_distance is None:
        return size // 2
    last = static_integer("relative_bias", "max_distance", max_distance, 0)
    if last >= size:
        raise ValueError(
            f"relative_bias: max_distance must be below the table's length {size}, "
            f"found {last}.\nThe table must hold distance 0; with max_distance="
            f"{size - 1} its first entry does."
        )
    return last


def t5_bias(
    table: Any,
    *,
    bidirectional: bool = True,
    num_buckets: Any = None,
    max_distance: Any = 128,
) -> ScoreMod:
    """A learned bias for each bucket of relative positions, as T5 has it.

    The nearer half of the buckets is for one distance each, the other half grows
    logarithmically up to `max_distance`; all farther keys share the last bucket. T5
    does not scale its products: pass `scale=1.0` to flex_attention.

    Args:
        table: Biases, a floating array (num_buckets, H). It gets a gradient.
        bidirectional: Whether keys after the query have buckets of their own, the
            upper half, as in T5's encoder. In its decoder (False) they share bucket 0.
        num_buckets: Buckets, an even number of at least 4 if bidirectional; None takes
            the table's.
        max_distance: Tokens from which on all share a bucket; T5's 128.

    Raises:
        TypeError: If the table is no floating array, or a number no integer.
        ValueError: If the table's shape is wrong, or there are too few buckets.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import mods
        >>> bucket = mods.t5_bias(jnp.arange(32.0)[:, None])
        >>> [float(bucket(jnp.float32(0.0), 0, 0, q, 20)) for q in (24, 20, 16, 99)]
        [4.0, 0.0, 20.0, 14.0]

    References:
        Raffel et al., "Exploring the limits of transfer learning with a unified
        text-to-text transformer", 2020, section 2.1 and the code published with it.
    """
    table = array_of("t5_bias", "table", table, jnp.floating, (("num_buckets", "H"),))
    count = _bucket_count(table, num_buckets, bidirectional)
    half = count // 2 if bidirectional else count
    farthest = static_integer("t5_bias", "max_distance", max_distance, half // 2 + 1)
    buckets = _t5_buckets(half, farthest)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = jnp.abs(q - k) if bidirectional else jnp.maximum(q - k, 0)
        bucket = jnp.asarray(buckets)[jnp.minimum(distance, farthest)]
        if bidirectional:
            bucket = jnp.where(k > q, bucket + half, bucket)
        return score + table[bucket, h].astype(score.dtype)

    return score_mod


def _bucket_count(table: Array, num_buckets: Any, bidirectional: bool) -> int:
    least = 4 if bidirectional else 2
    found = table.shape[0] if num_buckets is None else num_buckets
    count = static_integer("t5_bias", "num_buckets", found, least)
    if table.shape[0] != count:
        raise ValueError(
            f"t5_bias: table must be (num_buckets, H) with {count} buckets, found "
            f"{brief(table)}.\nLeave num_buckets=None to take the table's."
        )
    if bidirectional and count % 2:
        raise ValueError(
            f"t5_bias: num_buckets must be even if bidirectional, found {count}.\n"
            "Half of them are for keys after the query."
        )
    return count


def _t5_buckets(count: int, max_distance: int) -> Int[np.ndarray, " D"]:
    """The bucket of each distance up to `max_distance`.

    With e = count // 2 the bucket of n >= e is e + j for the largest j that has
    log(n / e) / log(max_distance / e) (count - e) >= j. In integers this reads
    n^(count - e) e^j >= max_distance^j e^(count - e): exact, where a logarithm rounds.
    """
    exact = count // 2
    rest = count - exact
    buckets = list(range(exact))
    bucket = exact
    for n in range(exact, max_distance + 1):
        while bucket < count - 1 and (
            n**rest * exact ** (bucket + 1 - exact)
            >= max_distance ** (bucket + 1 - exact) * exact**rest
        ):
            bucket += 1
        buckets.append(bucket)
    return np.asarray(buckets, np.int32)


def _distance(score: Any, q: Any, k: Any) -> Any:
    return jnp.abs(q - k).astype(score.dtype)


# --- functions of the score -----------------------------------------------------------


def soft_cap(cap: Any) -> ScoreMod:
    r"""Keeps scores inside (-cap, cap) smoothly.

    .. math:: c \tanh(s_{ij} / c)

    Args:
        cap: The bound, above 0: a number, or a floating array () or (H,) that gets a
            gradient. Gemma 2 uses 50.

    Raises:
        TypeError: If it is neither a real number nor a floating array.
        ValueError: If it is not positive and finite, or has more than one axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pliax.kernels import mods
        >>> float(mods.soft_cap(2.0)(jnp.float32(100.0), 0, 0, 0, 0))
        2.0

    References:
        Gemma Team, "Gemma 2: Improving open language models at a practical size",
        2024, section 2.
    """
    cap = _number_or_array("soft_cap", "cap", cap, np.nextafter(0.0, 1.0))

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        bound = _value(cap, score, h)
        return bound * jnp.tanh(score / bound)

    return score_mod


def dropout(generator: Any, rate: Any) -> ScoreMod:
    r"""Drops each score with probability `rate`.

    .. math::
        s_{ij} \to -\infty \text{ if } w_{bhij} < 2^{32} \mathrm{rate}, \qquad
        s_{ij} - \log(1 - \mathrm{rate}) \text{ otherwise}

    The word w is a pure function of the generator and the four indices: with T the
    Threefry-2x32 bijection and k the key that `generator.key()` derives,

    .. math:: w_{bhij} = T(T(k, (b, h)), (i, j))_0

    Indices below 2^32 never share a key and counter. The forward and the backward
    pass, which visit a score several times, therefore see one mask, whatever the blocks
    and the sharding.

    By itself this is DropKey: the softmax normalises over the kept keys, and the factor
    1 / (1 - rate) cancels. Dropout after the softmax, torch's, is the same weights over
    the undropped sum. With both log-sum-exps of flex_attention it is

        out * jnp.exp(lse_dropped - lse)[..., None]

    exactly, where `out` and `lse_dropped` come from attention with this mod and `lse`
    from attention without it.

    Sharp edge: a generator is used up by nothing but your own hand. Take a new child
    for every layer and step, `gen, child = gen.fold_in(layer)`. Inside `shard_map` the
    indices are those of the shard: fold its axis index in too.

    Args:
        generator: One `px.Generator`; its contents are data.
        rate: Probability that a score is dropped, in [0, 1); 0 changes nothing.

    Raises:
        TypeError: If `generator` is no Generator, or `rate` no real number.
        ValueError: If `rate` is outside [0, 1), or `generator` is a batch.

    Examples:
        >>> import jax, jax.numpy as jnp, pliax as px
        >>> from pliax.kernels import mods
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
        >>> request = px.AuxRequest(lse=True)
        >>> drop = mods.dropout(px.Generator(0), 0.1)
        >>> _, full = px.flex_attention(q, k, v, return_aux=request)
        >>> out, aux = px.flex_attention(q, k, v, score_mod=drop, return_aux=request)
        >>> (out * jnp.exp(aux.lse - full.lse)[..., None]).shape
        (1, 8, 2, 4)

    References:
        Srivastava et al., "Dropout: A simple way to prevent neural networks from
        overfitting", 2014.
        Li et al., "DropKey for vision transformer", 2023.
        Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011,
        section 4.
    """
    if not isinstance(generator, Generator):
        raise TypeError(
            f"dropout: generator must be a px.Generator, found {kind_of(generator)}.\n"
            "Pass px.Generator(seed), or px.Generator.from_key(key)."
        )
    probability = _number("dropout", "rate", rate, 0.0)
    if probability >= 1.0:
        raise ValueError(
            f"dropout: rate must be in [0, 1), found {probability}.\n"
            "It is the probability that a score is dropped."
        )
    _, key = generator.key()
    words = jax.random.key_data(key)
    if probability == 0.0:
        return lambda s, b, h, q, k: s
    threshold = np.uint32(min(round(probability * 2**32), 2**32 - 1))
    kept = -math.log1p(-probability)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        row = _threefry((words[0], words[1]), (b, h))  # once a head, not once a score
        word, _ = _threefry(row, (q, k))
        return jnp.where(word < threshold, -jnp.inf, score + kept)

    return score_mod


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # Salmon et al., table 2, 2 words
_PARITY = 0x1BD11BDA  # of Skein's key schedule, cut to 32 bits


def _threefry(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Threefry-2x32-20 in plain integer arithmetic, which fuses into a tile of scores.

    JAX's primitive runs as a loop over whole arrays on a CPU, and wants all of its
    words in one shape; here key and counter stay as small as the indices they read.
    """
    first, second = (jnp.asarray(x).astype(jnp.uint32) for x in key)
    keys = (first, second, first ^ second ^ np.uint32(_PARITY))
    x, y = (jnp.asarray(n).astype(jnp.uint32) for n in counter)
    x, y = x + keys[0], y + keys[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(bits) | y >> np.uint32(32 - bits)) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


# --- attention sinks ------------------------------------------------------------------


def sinks(out: Any, lse: Any, logits: Any) -> Array:
    r"""Attention whose softmax has further, learned logits of value 0.

    .. math:: o_i\, \sigma\Bigl(\mathrm{lse}_i - \log \sum_n e^{l_{hn}}\Bigr)

    equals the softmax over the scores of query i and the sink logits, times the values
    and zeros. A query can so attend to nothing.

    Args:
        out: Output of flex_attention, (B, T, H, V).
        lse: Its log-sum-exp, (B, T, H), from `return_aux=px.AuxRequest(lse=True)`.
        logits: Sink logits, a floating array (H,), or (H, n) for n sinks of each head.
            Not multiplied by attention's `scale`.

    Returns:
        The output with sinks, in the dtype of `out`; differentiable in all arguments.
        A query that sees no key keeps output 0.

    Raises:
        TypeError: If an argument is no floating array.
        ValueError: If the shapes do not fit together.

    Examples:
        >>> import jax, jax.numpy as jnp, pliax as px
        >>> from pliax.kernels import mods
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
        >>> out, aux = px.flex_attention(q, k, v, return_aux=px.AuxRequest(lse=True))
        >>> mods.sinks(out, aux.lse, jnp.zeros(2)).shape
        (1, 8, 2, 4)

    References:
        Xiao et al., "Efficient streaming language models with attention sinks", 2023,
        section 3: a learned sink token.
        OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025, section 2: a learned
        logit in the denominator of each head.
    """
    out = array_of("sinks", "out", out, jnp.floating, (("B", "T", "H", "V"),))
    lse = array_of("sinks", "lse", lse, jnp.floating, (("B", "T", "H"),))
    logits = array_of("sinks", "logits", logits, jnp.floating, (("H",), ("H", "n")))
    if out.shape[:3] != lse.shape or logits.shape[0] != lse.shape[2]:
        raise ValueError(
            "sinks: out (B, T, H, V), lse (B, T, H) and logits (H,) or (H, n) must "
            f"agree, found {brief(out)}, {brief(lse)} and {brief(logits)}.\n"
            "Pass the output and the lse of one flex_attention."
        )
    logits = logits.astype(lse.dtype)
    total = logits if logits.ndim == 1 else jax.nn.logsumexp(logits, axis=1)
    empty = lse == -jnp.inf
    margin = jnp.where(empty, jnp.zeros_like(lse), lse) - total[None, None]
    gate = jnp.where(empty, 0.0, jax.lax.logistic(margin))
    return (out.astype(lse.dtype) * gate[..., None]).astype(out.dtype)


# --- numbers --------------------------------------------------------------------------


def _number(function: str, name: str, x: Any, least: float) -> float:
    """A real number of at least `least`."""
    bound = "at least 0" if least == 0.0 else "above 0"
    real = isinstance(x, numbers.Real | np.floating)
    if isinstance(x, bool) or not real:
        raise TypeError(
            f"{function}: {name} must be a real number, found {kind_of(x)}.\n"
            f"Pass a finite number {bound}."
        )
    if not least <= float(x) < math.inf:  # also where it is NaN
        raise ValueError(
            f"{function}: {name} must be finite and {bound}, found {x!r}.\n"
            f"Pass a finite number {bound}."
        )
    return float(x)


def _number_or_array(function: str, name: str, x: Any, least: float) -> float | Array:
    if not is_array(x):
        return _number(function, name, x, least)
    return array_of(function, name, x, jnp.floating, PER_HEAD)


def _value(x: Any, score: Any, h: Any) -> Any:
    """One number for all heads or one for each, in the score's dtype."""
    if isinstance(x, float):
        return score.dtype.type(x)
    return pick(x, h).astype(score.dtype)
