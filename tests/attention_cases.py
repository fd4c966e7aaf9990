"""Mods and masks every implementation is held to: arrays they capture, and programs.

A case's `captured` are made for a length; `score_mod` and `mask_mod` are factories from
these arrays, so that laws can differentiate, replace and widen what a mod captured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    name: str
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    floats: Callable[[int], tuple[Any, ...]] = lambda length: ()
    integers: Callable[[int], tuple[Any, ...]] = lambda length: ()
    batch: int | None = None
    heads: int | None = None

    def __repr__(self) -> str:
        return self.name


B, H, K, D, V = 2, 4, 2, 16, 8


def _documents(length):
    rng = np.random.default_rng(length)
    return (jnp.asarray(np.sort(rng.integers(0, 4, (B, length)), axis=1), jnp.int32),)


def _slopes(length):
    return (jnp.asarray(2.0 ** -np.arange(1, H + 1), jnp.float32),)


def _table(length):
    rng = np.random.default_rng(length)
    return (jnp.asarray(rng.normal(size=2 * length - 1), jnp.float32),)


def causal(floats, integers):
    return lambda b, h, q, k: q >= k


def _alibi(floats, integers):
    (slopes,) = floats
    return lambda s, b, h, q, k: s - slopes[h] * (q - k).astype(s.dtype)


def _relative(length):
    def score_mod(floats, integers):
        (table,) = floats
        return lambda s, b, h, q, k: s + table[q - k + length - 1]

    return score_mod


def _document(floats, integers):
    (ids,) = integers
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k)


def _per_head_window(floats, integers):
    return lambda b, h, q, k: (q >= k) & (q - k < 10 * (h + 1))


def _some_rows(floats, integers):
    return lambda b, h, q, k: (q % 3 == 0) & (q >= k)


def cases(length: int) -> list[Case]:
    return [
        Case("dense"),
        Case("causal", mask_mod=causal),
        Case(
            "sliding_window", mask_mod=lambda f, i: lambda b, h, q, k: abs(q - k) < 40
        ),
        Case("document", mask_mod=_document, integers=_documents, batch=B),
        Case(
            "prefix_lm",
            mask_mod=lambda f, i: lambda b, h, q, k: (k < length // 4) | (q >= k),
        ),
        Case("alibi", score_mod=_alibi, mask_mod=causal, floats=_slopes),
        Case(
            "soft_cap",
            score_mod=lambda f, i: lambda s, b, h, q, k: 2.0 * jnp.tanh(s / 2.0),
            mask_mod=_per_head_window,
            heads=H,
        ),
        Case("relative_bias", _relative(length), causal, floats=_table),
        Case("masked_rows", mask_mod=_some_rows),
    ]
