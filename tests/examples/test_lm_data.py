"""Corpus, batches and baselines of the language model example."""

import itertools
import os
import pathlib
import tempfile

import numpy as np
import pytest
from hypothesis import given, strategies as st
from lm.baselines import baselines
from lm.batches import assemble, cut, cut_with_context, pack, schedule
from lm.corpus import LONGEST_DOCUMENT, Document, load_corpus
from lm.errors import UserError

import pliax as px


texts = st.lists(st.binary(min_size=1, max_size=90), min_size=1, max_size=6)


def documents_of(contents):
    return [
        Document(str(i), 0, np.frombuffer(t, np.uint8)) for i, t in enumerate(contents)
    ]


@pytest.mark.parametrize("cutter", [cut, cut_with_context])
@given(contents=texts, longest=st.sampled_from([8, 20]))
def test_every_byte_is_a_target_exactly_once(cutter, contents, longest):
    documents = documents_of(contents)
    counts = [np.zeros(len(d.data), int) for d in documents]
    for piece in cutter(documents, longest):
        assert 0 < piece.size <= longest
        assert piece.start <= piece.scored < piece.stop
        counts[piece.document][piece.scored : piece.stop] += 1
    assert all((count == 1).all() for count in counts)


@given(contents=texts, longest=st.sampled_from([8, 20]))
def test_no_target_crosses_a_document(contents, longest):
    """The input before a document's first byte is 0, else the byte before the target."""
    documents = documents_of(contents)
    rows = pack(cut(documents, longest), longest)
    batch = assemble(documents, rows, len(rows))
    for r, row in enumerate(rows):
        at = 0
        for number, piece in enumerate(row):
            text = documents[piece.document].data
            place = r, slice(at, at + piece.size)
            np.testing.assert_array_equal(
                batch["targets"][place], text[piece.start : piece.stop]
            )
            before = np.concatenate([np.zeros(1, np.uint8), text])[
                piece.start : piece.stop
            ]
            np.testing.assert_array_equal(batch["inputs"][place], before)
            assert (batch["document"][place] == number).all()
            at += piece.size
        assert (batch["document"][r, at:] == -1).all()
        assert not batch["scored"][r, at:].any()
    assert batch["scored"].sum() == sum(len(d.data) for d in documents)


def test_the_schedule_covers_each_epoch_and_depends_on_the_seed_alone():
    documents = documents_of([bytes([65 + i]) * (7 * i + 1) for i in range(12)])
    total = sum(len(d.data) for d in documents)

    def first(seed):
        return list(
            itertools.islice(schedule(px.Generator(seed), documents, 2, 20), 30)
        )

    assert first(0) == first(0) != first(1)
    seen = set()
    for batch in first(0):
        seen |= {
            (p.document, i)
            for row in batch
            for p in row
            for i in range(p.start, p.stop)
        }
    assert len(seen) == total
    lengths = {sum(p.size for row in batch for p in row) for batch in first(0)}
    assert len(lengths) > 3


def test_files_that_cannot_be_used_are_counted_or_cut(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_bytes(b"some text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "long.txt").write_bytes(b"x" * (2 * LONGEST_DOCUMENT + 5))
    corpus = load_corpus(tmp_path, "*.txt")
    assert (corpus.unreadable, corpus.empty) == (2, 1)
    both = (*corpus.train, *corpus.held_out)
    assert len(both) == 33
    assert max(len(d.data) for d in both) == LONGEST_DOCUMENT
    assert {d.file for d in corpus.train}.isdisjoint(d.file for d in corpus.held_out)


@given(number=st.integers(0, 999), size=st.sampled_from([8_000, 40_000, 600_000]))
def test_one_file_is_split_into_pieces_whatever_its_name(number, size):
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / f"book{number}.txt").write_bytes(b"x" * size)
        corpus = load_corpus(pathlib.Path(folder), "*.txt")
    assert corpus.train
    assert corpus.held_out
    assert sum(len(d.data) for d in (*corpus.train, *corpus.held_out)) == size


def test_names_that_are_no_text_are_read(tmp_path):
    for number in range(30):
        with open(os.fsencode(tmp_path) + b"/\xff%d\n#1.txt" % number, "wb") as file:
            file.write(b"text")
    corpus = load_corpus(tmp_path, "*.txt")
    assert len(corpus.train) + len(corpus.held_out) == 30
    assert len(corpus.digest) == 16


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "tiny.txt").write_bytes(b"abc")
    with pytest.raises(UserError, match="3 bytes of text are too few"):
        load_corpus(tmp_path, "*.txt")


def test_the_standard_library_has_no_tests_in_it():
    corpus = load_corpus(None, "*.py")
    names = {d.file for d in (*corpus.train, *corpus.held_out)}
    assert "argparse.py" in names
    assert not any("test" in name.split("/")[:-1] for name in names)
    assert sum(len(d.data) for d in corpus.evaluation(100_000)) >= 100_000


def test_baselines_reach_the_entropy_of_their_order():
    """Uniform letters: log 4. Each letter fixed by the one before: nothing beyond order 2."""
    rng = np.random.default_rng(0)
    random = [
        Document(str(i), 0, rng.integers(65, 69, 5000).astype(np.uint8))
        for i in range(20)
    ]
    cyclic = [
        Document(str(i), 0, np.tile(np.arange(65, 69, dtype=np.uint8), 1000))
        for i in range(20)
    ]
    losses = baselines(random[:-1], random[-1:])
    assert losses["unigram"] == pytest.approx(np.log(4), abs=0.01)
    losses = baselines(cyclic[:-1], cyclic[-1:])
    assert losses["unigram"] == pytest.approx(np.log(4), abs=0.01)
    assert losses["bigram"] < 0.01
    assert losses["trigram"] < 0.01
