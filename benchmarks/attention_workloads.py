"""What bench_attention_cpu.py computes: programs, inputs, and a float64 oracle.

Mods are written once and run on jax.numpy's arrays and on NumPy's. The oracle takes the
same float32 arrays to float64 and applies the formula to 64 random query rows of every
head; where gradients are asked for, to all rows, since d_k and d_v sum over them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks import torch_flex_cpu


D, DOCUMENTS, ORACLE_ROWS = 64, 12, 64


# --- programs: written once, for jax.numpy and for NumPy ------------------------------


def document_ids(S: int) -> np.ndarray:
    """Twelve packed documents, equal to within one token."""
    return (np.arange(S) * DOCUMENTS // S).astype(np.int32)


def slopes(H: int) -> np.ndarray:
    """ALiBi's slopes for H a power of two (Press, Smith and Lewis, 2022)."""
    return np.exp2(-8 / H * np.arange(1, H + 1)).astype(np.float32)


def causal(xp: Any, S: int) -> Any:
    return lambda b, h, q, k: q >= k


def documents(xp: Any, S: int) -> Any:
    ids = xp.asarray(document_ids(S))
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def window(xp: Any, S: int) -> Any:
    """A sixteenth of the length, causal: 1024 at 16384."""
    return lambda b, h, q, k: (q - k >= 0) & (q - k < S // 16)


def alibi(xp: Any, H: int) -> Any:
    slope = xp.asarray(slopes(H))
    return lambda score, b, h, q, k: score + slope[h] * (k - q)


def soft_cap(xp: Any, H: int) -> Any:
    cap = torch_flex_cpu.CAP
    return lambda score, b, h, q, k: cap * xp.tanh(score / cap)


@dataclass(frozen=True)
class Program:
    """Factories of a score_mod and a mask_mod: (array module, size) -> mod."""

    score: Callable[[Any, int], Any] | None = None
    mask: Callable[[Any, int], Any] | None = None


PROGRAMS = {
    "dense": Program(),
    "causal": Program(mask=causal),
    "documents": Program(mask=documents),
    "window": Program(mask=window),
    "alibi": Program(score=alibi, mask=causal),
    "soft cap": Program(score=soft_cap, mask=causal),
}


@dataclass(frozen=True)
class Workload:
    """What one entrant computes."""

    program: str
    S: int
    H: int
    backward: bool = False

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """q, k, v, and with a backward pass the output's cotangent."""
        return _arrays(self.S, self.H)[: 4 if self.backward else 3]


@lru_cache(maxsize=1)
def _arrays(S: int, H: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((4, 1, S, H, D), dtype=np.float32))


# --- oracle ---------------------------------------------------------------------------


def pick(result: Any, workload: Workload) -> Any:
    """What the oracle predicts: everything with gradients, else random query rows."""
    return result if workload.backward else result[:, _rows(workload.S)]


def oracle(workload: Workload) -> Any:
    """The output, or (output, gradients of q, k, v), in float64."""
    doubles = [x[0].astype(np.float64) for x in workload.arrays]
    each = _head_gradients if workload.backward else _head_output
    heads = [each(workload, h, *(x[:, h] for x in doubles)) for h in range(workload.H)]
    stack = [np.stack(parts, axis=1)[None] for parts in zip(*heads, strict=True)]
    return tuple(stack) if workload.backward else stack[0]


def _rows(S: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.sort(rng.choice(S, min(S, ORACLE_ROWS), replace=False))


def _head_output(workload: Workload, h: int, q: Any, k: Any, v: Any) -> Any:
    return (_weights(workload, h, q, k, _rows(workload.S)) @ v,)


def _head_gradients(
    workload: Workload, h: int, q: Any, k: Any, v: Any, d_out: Any
) -> Any:
    """Output and gradients of a dense head, 512 queries at a time."""
    parts, d_k, d_v = [], np.zeros_like(k), np.zeros_like(v)
    for rows in np.array_split(np.arange(len(q)), -(-len(q) // 512)):
        weights = _weights(workload, h, q, k, rows)
        out = weights @ v
        delta = np.sum(d_out[rows] * out, axis=-1, keepdims=True)
        d_scores = weights * (d_out[rows] @ v.T - delta) / np.sqrt(D)
        d_k += d_scores.T @ q[rows]
        d_v += weights.T @ d_out[rows]
        parts.append((out, d_scores @ k))
    out, d_q = (np.concatenate(x) for x in zip(*parts, strict=True))
    return out, d_q, d_k, d_v


def _weights(workload: Workload, h: int, q: Any, k: Any, rows: np.ndarray) -> Any:
    """Attention weights of some queries, (rows, S)."""
    program = PROGRAMS[workload.program]
    place = (0, h, rows[:, None], np.arange(workload.S)[None])
    scores = q[rows] @ k.T / np.sqrt(D)
    if program.score is not None:
        scores = program.score(np, workload.H)(scores, *place)
    if program.mask is not None:
        scores = np.where(program.mask(np, workload.S)(*place), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
