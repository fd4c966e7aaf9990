"""Documents: files read as bytes, and which of them are held out.

Without a folder of the user's, the documents are the `.py` files of the running
Python's standard library: real text on every machine.
"""

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import UserError


# A longer file becomes several documents, so that no single one fills the held-out set.
LONGEST_DOCUMENT = 256 * 1024
_PIECE = 4 * 1024  # of a corpus of a handful of files
_HELD_OUT_SHARE = 20  # one file in so many
_NOT_TEXT_TO_LEARN = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True)
class Document:
    """Bytes of a file, or of one part of it; `file` decides the split."""

    file: str
    part: int
    data: np.ndarray


type Sides = tuple[tuple[Document, ...], tuple[Document, ...]]


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
            state.update(_encoded(document.file))
            state.update(document.data.tobytes())
        return state.hexdigest()

    def evaluation(self, at_least: int) -> tuple[Document, ...]:
        """Whole held-out documents, in the order of their hash, of so many bytes."""
        chosen, total = [], 0
        for document in sorted(self.held_out, key=_hash_of_part):
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
        UserError: If the folder cannot be read, or holds nothing to train on.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    documents, unreadable, empty = [], 0, 0
    for path in _files(root, pattern):
        if folder is None and not _is_library_text(root, path):
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


def _files(root: Path, pattern: str) -> list[Path]:
    """Everything below the folder that the pattern names, but for folders."""
    try:
        if not root.is_dir():
            raise UserError(f"--data {root} is not a folder; name one with text files")
        os.listdir(root)
        found = sorted(root.rglob(pattern))
    except OSError as error:
        raise UserError(f"--data {root} cannot be read ({error.strerror})") from error
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"--glob {pattern!r} is no pattern for file names") from error
    return [path for path in found if not _is_folder(path)]


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _read(path: Path) -> bytes | None:
    """The bytes of a regular file, or None: no rights, a broken link, a pipe."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def _is_library_text(root: Path, path: Path) -> bool:
    return not _NOT_TEXT_TO_LEARN & set(path.relative_to(root).parts)


def _cut(file: str, data: bytes, size: int) -> Iterator[Document]:
    """A file as documents of at most `size` bytes; most files are one."""
    array = np.frombuffer(data, np.uint8)
    for part, start in enumerate(range(0, len(array), size)):
        yield Document(file, part, array[start : start + size])


def _split(documents: list[Document]) -> Sides:
    """By the hash of the file name; a handful of files by the hash of their pieces."""
    held_out = [_hash(d.file) % _HELD_OUT_SHARE == 0 for d in documents]
    if len(set(held_out)) == 2:
        return _separate(documents, held_out)
    pieces = [
        Document(d.file, d.part * (LONGEST_DOCUMENT // _PIECE) + piece.part, piece.data)
        for d in documents
        for piece in _cut(d.file, d.data.tobytes(), _PIECE)
    ]
    if len(pieces) < 2:
        raise UserError(
            f"{sum(len(d.data) for d in documents)} bytes of text are too few to hold"
            f" some out; give --data more than {_PIECE}"
        )
    hashes = [_hash_of_part(d) for d in pieces]
    held_out = [number % _HELD_OUT_SHARE == 0 for number in hashes]
    if len(set(held_out)) < 2:  # too few to leave it to chance
        held_out = [index == hashes.index(min(hashes)) for index in range(len(pieces))]
    return _separate(pieces, held_out)


def _separate(documents: list[Document], held_out: list[bool]) -> Sides:
    """Training documents, and those that are held out."""
    train = itertools.compress(documents, (not held for held in held_out))
    return tuple(train), tuple(itertools.compress(documents, held_out))


def _hash_of_part(document: Document) -> int:
    return _hash(f"{document.file}#{document.part}")


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(_encoded(name), digest_size=8).digest())


def _encoded(name: str) -> bytes:
    """File names need not be valid text."""
    return name.encode(errors="surrogateescape")
