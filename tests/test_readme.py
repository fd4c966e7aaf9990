"""README and docs do what they say."""

import pathlib
import re

import pytest


ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document):
    return re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)


def test_the_readme_is_short_and_so_is_its_first_block():
    assert 80 <= len(README.read_text().splitlines()) <= 150
    assert 8 <= len(blocks(README)[0].strip().splitlines()) <= 20


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_code_of_a_document_runs_from_top_to_bottom(document, standard_promotion):
    names = {}
    for number, block in enumerate(blocks(document)):
        exec(compile(block, f"{document.name} block {number}", "exec"), names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_linked_file_exists(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
