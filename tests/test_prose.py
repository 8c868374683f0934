"""Pages can be read: short lines, short sentences, names of files that there are, one spelling of a format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.each import each

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY", "examples/README")
PAGES = sorted([*(ROOT / f"{name}.md" for name in ROOT_PAGES), *(ROOT / "docs").rglob("*.md")])
DESIGN = sorted((ROOT / "docs/design").glob("*.md"))
MOST_CHARACTERS, MOST_WORDS = 160, 25
LONG_SENTENCES = 8  # of all pages; never more
NOT_PROSE = re.compile(r"^```.*?^```$|<!-- bench:.*?<!-- /bench -->|<!--.*?-->", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`\[(*\d])|(?<=[.:;])\s")
PATH = re.compile(r"`((?:[\w.]+/)+[\w.*]+\.(?:py|json|md|toml))(?::\w+)?`")
RECORD = re.compile(r"`(\w+\.json)`")
SPAN, NAME = re.compile(r"`([^`\n]+)`"), re.compile(r"\b(?=\w*[a-z0-9]_[a-z]|[A-Z]+[a-z]\w*[A-Z])[A-Za-z]\w+")
CODE = ("cute_kernels", "layouts", "bench", "tests", "tools", "simulator", "examples")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(text: str) -> list[str]:
    """Lines of a page that are neither code nor tables nor generated."""
    if text.startswith("<!-- made by"):
        return []
    return [line for line in NOT_PROSE.sub("", text).split("\n") if not line.lstrip().startswith("|")]


def sentences(text: str) -> list[str]:
    """Sentences of a page; a colon or a semicolon ends one, too."""
    paragraphs: list[list[str]] = [[]]
    for line in prose(text):
        stripped = line.strip()
        if not stripped or stripped.startswith("#") or line.startswith("    ") or ITEM.match(stripped):
            paragraphs.append([])
        if stripped and not stripped.startswith("#"):
            paragraphs[-1].append(stripped)
    return [sentence for lines in paragraphs if lines for sentence in END.split(" ".join(lines))]


@each("page", PAGES, ids=name)
def test_lines_of_prose_fit_an_editor(page: Path):
    assert not [line for line in prose(page.read_text()) if len(line) > MOST_CHARACTERS]


def test_sentences_are_short():
    """A subject, a verb, an object: a sentence with more words than `MOST_WORDS` is read twice."""
    found = [
        f"{name(page)}: {sentence}"
        for page in PAGES
        for sentence in sentences(page.read_text())
        if len(sentence.split()) > MOST_WORDS
    ]
    assert len(found) <= LONG_SENTENCES, "\n".join(found)


def test_a_versions_changes_are_read_in_a_minute():
    versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert len(versions) >= 2
    assert all(len(version.strip().splitlines()) <= 60 for version in versions), "want at most 60 lines a version"


@pytest.mark.parametrize("page", DESIGN, ids=name)
def test_files_that_a_design_page_names_are_there(page: Path):
    """Paths are those of the repository or of `cute_kernels`; records lie in bench/results."""
    text = page.read_text()
    rooms = ("", "cute_kernels", "cute_kernels/gemm", "cute_kernels/attention", "cute_kernels/mla")
    folders = [ROOT / room for room in rooms]
    missing = [path for path in PATH.findall(text) if not any([*folder.glob(path)] for folder in folders)]
    missing += [record for record in RECORD.findall(text) if not (ROOT / "bench/results" / record).exists()]
    assert not missing


def test_names_on_design_pages_are_in_the_code():
    """Functions, classes and arguments in backquotes: a page is about the code as it is."""
    files = [
        file
        for folder in CODE
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".json") and file.stem != "kernel_figures"
    ]
    known = {file.stem for file in files}.union(
        *(re.findall(r"\w+", file.read_text()) for file in files if file.suffix == ".py")
    )
    named = {
        (name(page), one) for page in DESIGN for span in SPAN.findall(page.read_text()) for one in NAME.findall(span)
    }
    assert not sorted((page, one) for page, one in named if one not in known)


@each("page", PAGES, ids=name)
def test_a_weight_format_has_one_spelling(page: Path):
    """ "w4g128", as arguments and messages have it."""
    assert not re.findall(r"\bw[48]f?_g(?:\d|channel)", page.read_text())


@pytest.mark.parametrize("notebook", sorted((ROOT / "docs/notebooks").glob("*.ipynb")), ids=name)
def test_a_notebooks_code_and_drawings_fit_a_page(notebook: Path):
    """Beside the sidebar, at 1100 pixels: a drawing shrinks to some four fifths at most, code is not wrapped."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(len(line.rstrip()) <= 88 for cell in cells for line in cell["source"])
    drawings = ["".join(out.get("data", {}).get("image/svg+xml", "")) for cell in cells for out in cell["outputs"]]
    widths = [int(found[1]) for drawing in drawings if (found := re.search(r'<svg[^>]* width="(\d+)"', drawing))]
    assert widths and max(widths) <= 1050


def test_sentences_are_found():
    text = "# Title\n\nOne two. Three: four\nfive.\n\n- six\n- seven; eight\n\n| a | table |\n\n```\ncode\n```\n"
    assert sentences(text) == ["One two.", "Three:", "four five.", "- six", "- seven;", "eight"]
