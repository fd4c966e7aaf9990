"""The README does what it says."""

import pathlib
import re

import pytest


README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_first_block_is_short():
    assert 8 <= len(BLOCKS[0].strip().splitlines()) <= 20


def test_the_readme_is_short():
    assert 80 <= len(README.splitlines()) <= 150


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number, standard_promotion):
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), {})


def test_every_linked_file_exists():
    root = pathlib.Path(__file__).parent.parent
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (root / link).exists()] == []
