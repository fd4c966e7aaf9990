"""Documents: files read as bytes, and which of them are held out.

Without a folder of the user's, the documents are the `.py` files of the running
Python's standard library: real text on every machine.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import UserError


# A longer file becomes several documents, so that no single one fills the held-out set.
LONGEST_DOCUMENT = 256 * 1024
_SHORTER_PIECES = 4 * 1024
_HELD_OUT_SHARE = 20  # one file in so many
_NOT_TEXT_TO_LEARN = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True)
class Document:
    """A name, which decides the split, and the bytes."""

    name: str
    data: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents, and how many files could not be used."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    unreadable: int
    empty: int

    @property
    def digest(self) -> str:
        """Identifies names and contents: a resumed run must see the same ones."""
        state = hashlib.blake2b(digest_size=8)
        for document in (*self.train, *self.held_out):
            state.update(document.name.encode())
            state.update(document.data.tobytes())
        return state.hexdigest()

    def evaluation(self, at_least: int) -> tuple[Document, ...]:
        """Whole held-out documents, in the order of their hash, of so many bytes."""
        chosen, total = [], 0
        for document in sorted(self.held_out, key=lambda d: _hash(d.name)):
            if total >= at_least:
                break
            chosen.append(document)
            total += len(document.data)
        return tuple(chosen)


def load_corpus(folder: Path | None, pattern: str) -> Corpus:
    """Read the documents below a folder, by default the standard library's.

    Args:
        folder: Where to look, recursively; None for the standard library.
        pattern: Glob for file names.

    Raises:
        UserError: If the folder does not exist, or holds nothing to train on.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise UserError(
            f"--data {root} is not a folder; name one that holds text files"
        )
    documents, unreadable, empty = [], 0, 0
    for path in sorted(root.rglob(pattern)):
        if path.is_dir() or (folder is None and not _is_library_text(root, path)):
            continue
        data = _read(path)
        if data is None:
            unreadable += 1
            continue
        empty += not data
        documents += _cut(path.relative_to(root).as_posix(), data, LONGEST_DOCUMENT)
    if not documents:
        raise UserError(
            f"no readable, non-empty file below {root} matches --glob {pattern!r}"
            f" ({unreadable} unreadable, {empty} empty); name another folder or pattern"
        )
    return Corpus(*_split(documents), unreadable, empty)


def _read(path: Path) -> bytes | None:
    """The bytes of a regular file, or None: no rights, a broken link, a pipe."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def _is_library_text(root: Path, path: Path) -> bool:
    return not _NOT_TEXT_TO_LEARN & set(path.relative_to(root).parts)


def _cut(name: str, data: bytes, size: int) -> Iterator[Document]:
    """One document, or several of at most `size` bytes named `name#0` and so on."""
    array = np.frombuffer(data, np.uint8)
    if len(array) <= size:
        if len(array):
            yield Document(name, array)
        return
    for number, start in enumerate(range(0, len(array), size)):
        yield Document(f"{name}#{number}", array[start : start + size])


def _split(
    documents: list[Document],
) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """By the hash of the file name; a handful of files is cut into pieces first."""
    for key in (lambda name: name.split("#")[0], lambda name: name):
        held_out = [_hash(key(d.name)) % _HELD_OUT_SHARE == 0 for d in documents]
        if any(held_out) and not all(held_out):
            train = (d for d, out in zip(documents, held_out, strict=True) if not out)
            rest = (d for d, out in zip(documents, held_out, strict=True) if out)
            return tuple(train), tuple(rest)
        documents = [
            piece
            for d in documents
            for piece in _cut(d.name, d.data.tobytes(), _SHORTER_PIECES)
        ]
    size = sum(len(d.data) for d in documents)
    raise UserError(
        f"{size} bytes of text are too few to hold some out; give --data more text"
    )


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
