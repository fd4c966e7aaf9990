"""Batches: pieces of documents packed into rows, rows of similar length together.

    documents -> pieces (of at most `longest` bytes) -> rows -> batches

A batch is as long as its longest row; what shorter rows lack is a document of its own
that nothing is scored in.

A piece's input is the text shifted by one byte, so that a document's first byte is
predicted from 0 and no target crosses a document. The order of everything is a pure
function of a Generator: a resumed run needs only the number of its step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import pliax as px

from .corpus import Document


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a document; those from `scored` on are targets."""

    document: int
    start: int
    scored: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes fed to the model."""
        return self.stop - self.start


Row = tuple[Piece, ...]
_WINDOW = 8  # batches whose rows are sorted by length together


def cut(documents: Sequence[Document], longest: int) -> list[Piece]:
    """Every document in pieces of at most `longest` bytes, cut at natural places.

    A piece ends after the last blank line of its second half, or else after the last
    line, or else where it must: pieces keep the different lengths of paragraphs.
    """
    pieces = []
    for index, document in enumerate(documents):
        text = document.data.tobytes()
        start = 0
        while start < len(text):
            stop = _natural_end(text, start, start + longest)
            pieces.append(Piece(index, start, start, stop))
            start = stop
    return pieces


def _natural_end(text: bytes, start: int, limit: int) -> int:
    if limit >= len(text):
        return len(text)
    middle = (start + limit) // 2
    for separator in (b"\n\n", b"\n"):
        found = text.rfind(separator, middle, limit)
        if found >= 0:
            return found + len(separator)
    return limit


def cut_with_context(documents: Sequence[Document], longest: int) -> list[Piece]:
    """Windows that overlap by half: every byte is a target once, with context."""
    stride = longest // 2
    pieces = []
    for index, document in enumerate(documents):
        size = len(document.data)
        for scored in [0, *range(longest, size, stride)]:
            stop = min(size, longest if scored == 0 else scored + stride)
            start = 0 if scored == 0 else scored - stride
            pieces.append(Piece(index, start, scored, stop))
    return pieces


def pack(pieces: Sequence[Piece], capacity: int) -> list[Row]:
    """Pieces in their order, as many as fit into each row."""
    rows, row, used = [], [], 0
    for piece in pieces:
        if used + piece.size > capacity:
            rows.append(tuple(row))
            row, used = [], 0
        row.append(piece)
        used += piece.size
    return [*rows, tuple(row)]


def schedule(
    gen: px.Generator, documents: Sequence[Document], rows: int, longest: int
) -> Iterator[list[Row]]:
    """Batches without end, epoch by epoch in a new order."""
    pieces = cut(documents, longest)
    while True:
        gen, order = gen.permutation(len(pieces))
        packed = pack([pieces[i] for i in np.asarray(order)], longest)
        packed = [
            packed[i % len(packed)] for i in range(-(-len(packed) // rows) * rows)
        ]
        batches = []
        for start in range(0, len(packed), _WINDOW * rows):
            window = sorted(packed[start : start + _WINDOW * rows], key=_length)
            batches += [window[i : i + rows] for i in range(0, len(window), rows)]
        gen, order = gen.permutation(len(batches))
        yield from (batches[i] for i in np.asarray(order))


def assemble(
    documents: Sequence[Document], batch: Sequence[Row], rows: int
) -> dict[str, np.ndarray]:
    """Arrays of one batch, as long as its longest row.

    Returns:
        `inputs`, `targets`, `document` (which piece of the row a byte belongs to, -1
        after the last) and `scored`, all (rows, length).
    """
    names = ("inputs", "targets", "document", "scored")
    length = max(map(_length, batch))
    arrays = {name: np.zeros((rows, length), np.int32) for name in names}
    arrays["document"] -= 1
    for r, row in enumerate(batch):
        at = 0
        for number, piece in enumerate(row):
            place = (r, slice(at, at + piece.size))
            text = documents[piece.document].data
            arrays["targets"][place] = text[piece.start : piece.stop]
            arrays["inputs"][place] = _shifted(text, piece)
            arrays["document"][place] = number
            arrays["scored"][place] = np.arange(piece.start, piece.stop) >= piece.scored
            at += piece.size
    return arrays


def _shifted(text: np.ndarray, piece: Piece) -> np.ndarray:
    """The byte before each target; 0 before the first byte of a document."""
    if piece.start > 0:
        return text[piece.start - 1 : piece.stop - 1]
    return np.concatenate([np.zeros(1, np.uint8), text[: piece.stop - 1]])


def _length(row: Row) -> int:
    return sum(piece.size for piece in row)
