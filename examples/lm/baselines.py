"""What counting reaches: unigram, bigram and interpolated trigram models of bytes.

All are fitted on training documents and scored on the same held-out documents as the
network, in nats a byte. As for the network, byte 0 stands before a document.
"""

from collections.abc import Sequence

import numpy as np

from .corpus import Document


_V = 256
_CHUNK_BYTES = 4 * 2**20
_TUNING_BYTES = 2 * 2**20
_TUNING = 10  # one training document in so many fits the weights, not the counts


def baselines(
    train: Sequence[Document], held_out: Sequence[Document]
) -> dict[str, float]:
    """Loss of each model in nats a byte.

    The trigram's probability is a mixture of the maximum-likelihood estimates of order
    3, 2, 1 and of the uniform distribution; its weights are fitted by expectation
    maximisation on training documents left out of the counts (Jelinek and Mercer,
    1980). The bigram is the same mixture without order 3, the unigram without 2.
    """
    counted = [d for i, d in enumerate(train) if i % _TUNING or len(train) < _TUNING]
    tuning = _at_most(train[::_TUNING], _TUNING_BYTES)
    counts = _counts(counted)
    fitted, scored = _estimates(counts, tuning), _estimates(counts, held_out)
    losses = {}
    for order, name in ((1, "unigram"), (2, "bigram"), (3, "trigram")):
        weights = _fit(fitted[: order + 1])
        losses[name] = float(-np.log(weights @ scored[: order + 1]).mean())
    return losses


def _contexts(documents: Sequence[Document]) -> np.ndarray:
    """(3, bytes): each byte, the one before it, and the one before that."""
    columns = []
    for document in documents:
        padded = np.concatenate([np.zeros(2, np.uint8), document.data])
        columns.append(np.stack([padded[2:], padded[1:-1], padded[:-2]]))
    return np.concatenate(columns, axis=1).astype(np.int64)


def _counts(documents: Sequence[Document]) -> list[np.ndarray]:
    """How often each byte, pair and triple occurs: shapes (V,), (V, V), (V, V, V)."""
    triples = np.zeros(_V**3, np.int64)
    rest = list(documents)
    while rest:
        some = _at_most(rest, _CHUNK_BYTES)
        rest = rest[len(some) :]
        last, before, first = _contexts(some)
        triples += np.bincount((first * _V + before) * _V + last, minlength=_V**3)
    three = triples.reshape(_V, _V, _V)
    two = three.sum(axis=0)
    return [two.sum(axis=0), two, three]


def _at_most(documents: Sequence[Document], size: int) -> Sequence[Document]:
    """The first documents, at least one, of about `size` bytes: bounds the memory."""
    ends = np.cumsum([len(d.data) for d in documents])
    return documents[: max(1, int(np.searchsorted(ends, size)))]


def _estimates(counts: list[np.ndarray], documents: Sequence[Document]) -> np.ndarray:
    """(4, bytes): probability of each byte under order 0 (uniform), 1, 2 and 3."""
    last, before, first = _contexts(documents)
    one, two, three = counts
    seen = [
        (one[last], one.sum()),
        (two[before, last], two.sum(axis=1)[before]),
        (three[first, before, last], three.sum(axis=2)[first, before]),
    ]
    uniform = np.full(len(last), 1 / _V)
    return np.stack([uniform, *(n / np.maximum(total, 1) for n, total in seen)])


def _fit(estimates: np.ndarray, iterations: int = 30) -> np.ndarray:
    """Mixture weights that maximise the likelihood."""
    weights = np.full(len(estimates), 1 / len(estimates))
    for _ in range(iterations):
        shares = weights[:, None] * estimates
        weights = (shares / shares.sum(axis=0)).mean(axis=1)
    return weights
