"""Muon's arithmetic in NumPy: bfloat16 as `torch.optim.Muon` rounds, and float64."""

import math

import ml_dtypes
import numpy as np


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUST_LR_FNS = (None, "original", "match_rms_adamw", "spectral_unclamped")


def bfloat16(x):
    """Round to bfloat16, to nearest even, and carry on in float32."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def exactly(x):
    """The golden run's rounding: none."""
    return np.asarray(x, np.float64)


def newton_schulz(G, steps=5, rounding=bfloat16, coefficients=COEFFICIENTS, eps=1e-7):
    X = rounding(G)
    number = X.dtype.type
    schedule = np.atleast_2d(coefficients).astype(number)
    X = X.T if G.shape[0] > G.shape[1] else X
    X = rounding(X / np.maximum(np.sqrt(np.sum(X * X)), number(eps)))
    for i in range(steps):
        a, b, c = schedule[min(i, len(schedule) - 1)]
        A = rounding(X @ X.T)
        B = rounding(b * A + c * (A @ A))
        X = rounding(a * X + B @ X)
    return X.T if G.shape[0] > G.shape[1] else X


def ratio(shape, adjust_lr_fn, layout):
    A, B = shape if layout == "out_in" else shape[::-1]
    return {
        None: math.sqrt(max(1, A / B)),
        "original": math.sqrt(max(1, A / B)),
        "match_rms_adamw": 0.2 * math.sqrt(max(A, B)),
        "spectral_unclamped": math.sqrt(A / B),
    }[adjust_lr_fn]


def muon(
    W,
    gradients,
    *,
    rounding=bfloat16,
    learning_rate=1e-3,
    weight_decay=0.1,
    momentum=0.95,
    nesterov=True,
    adjust_lr_fn=None,
    layout="in_out",
):
    """The weights after one step per gradient."""
    number = np.float32 if rounding is bfloat16 else np.float64
    W, M = W.astype(number), np.zeros(W.shape, number)
    mu, lr, decay = number(momentum), number(learning_rate), number(weight_decay)
    factor = number(ratio(W.shape, adjust_lr_fn, layout))
    for G in gradients:
        G = G.astype(number)
        M = mu * M + (1 - mu) * G
        X = newton_schulz((1 - mu) * G + mu * M if nesterov else M, rounding=rounding)
        W = W * (1 - lr * decay)
        W = W - lr * factor * X.astype(number)
    return W


def well_conditioned(seed, rows, columns, low=0.3):
    """A float32 matrix with singular values in [low, 1]."""
    rng = np.random.default_rng(seed)
    k = min(rows, columns)
    U, _ = np.linalg.qr(rng.standard_normal((rows, k)))
    V, _ = np.linalg.qr(rng.standard_normal((columns, k)))
    return ((U * rng.uniform(low, 1, k)) @ V.T).astype(np.float32)


def mean_error(actual, golden):
    return np.abs(np.asarray(actual, np.float64) - golden).mean()
