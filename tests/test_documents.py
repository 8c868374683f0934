"""The documents' Python blocks run, and what they point at exists, down to the anchor."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.formats.kv import format_of
from cute_kernels.runtime import native
from tests.each import each
from tools import formats

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY", "examples/README")
DOCUMENTS = sorted([*(ROOT / f"{name}.md" for name in ROOT_PAGES), *(ROOT / "docs").rglob("*.md")])
NEEDS = {
    "docs/simulator.md": "cutlass",
    "docs/tasks/transformers.md": "transformers",
    "docs/tasks/checkpoints.md": "safetensors",
}
BLOCK = re.compile(r"^```python(?P<where>[ \w]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


RUN = [name(path) for path in DOCUMENTS if BLOCK.search(path.read_text())]


@pytest.mark.parametrize("document", RUN)
def test_python_blocks_run_in_order(document: str):
    """The blocks of one document share their names, as a reader would type them; "```python gpu" needs a GPU."""
    if document == "docs/runtime.md" and native.dsl_version() is None:
        pytest.skip("compiling needs nvidia-cutlass-dsl")
    if document in NEEDS:
        pytest.importorskip(NEEDS[document])
    text = (ROOT / document).read_text()
    scope: dict[str, object] = {"__name__": document}
    ran = 0
    torch.manual_seed(0)
    for block in BLOCK.finditer(text):
        if block["where"].strip() == "gpu" and not torch.cuda.is_available():
            continue
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block["code"], document, "exec"), scope)  # line numbers are the document's
        ran += 1
    assert ran


def test_pages_with_blocks_are_found():
    assert {"README.md", "docs/extend.md", "docs/tasks/engine.md", "docs/port/vllm.md"} <= set(RUN)


def test_the_readmes_example_is_short_and_agrees_with_the_reference():
    from cute_kernels.attention.reference import decode_attention_reference

    (block,) = BLOCK.finditer((ROOT / "README.md").read_text())
    assert len([line for line in block["code"].splitlines() if line]) <= 11
    scope: dict[str, Any] = {}
    exec(block["code"], {}, scope)
    out, q = scope["out"], scope["q"]
    formats = ("int8_token_head", "int4_g4")
    k_rows, v_rows = (format_of(name).row(128).quantize(scope[key]) for name, key in zip(formats, "kv", strict=True))
    assert torch.equal(scope["k_cache"].cpu(), k_rows.cpu()) and torch.equal(scope["v_cache"].cpu(), v_rows.cpu())
    want, _ = decode_attention_reference(
        q, k_rows, v_rows, scope["seq_lens"], kv_format=formats, compute_dtype=torch.float64
    )
    assert out.shape == q.shape and out.dtype == q.dtype
    assert (out - want).norm() <= 4e-3 * want.norm()
    assert not out[3].any()  # a request of length 0


@functools.cache
def anchors(document: Path) -> list[str]:
    """What links may point at within a document: its headings, as GitHub makes anchors of them, and `<a id="...">`."""
    text = FENCE.sub("", document.read_text())
    found: list[str] = []
    for heading in HEADING.finditer(text):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading["title"])  # a link's words
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        again = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{again}" if again else slug)
    return found + re.findall(r'<a id="([^"]+)">', text)


@each("document", DOCUMENTS, ids=name)
def test_links_within_the_repository_lead_somewhere(document: Path):
    for link in LINK.finditer(FENCE.sub("", document.read_text())):
        target = (document.parent / link["target"]).resolve() if link["target"] else document
        assert target.exists(), link[0]
        if link["anchor"] and target.suffix == ".md":
            assert link["anchor"] in anchors(target), link[0]


@each("document", DOCUMENTS, ids=name)
def test_no_anchor_is_there_twice(document: Path):
    found = anchors(document)
    assert len(found) == len(set(found)), [anchor for anchor in found if found.count(anchor) > 1]


def test_the_tables_of_formats_are_the_formats():
    text = formats.PAGE.read_text()
    assert formats.page(text) == text, "want `python -m tools.formats`"


def test_every_design_page_is_in_the_index_and_begins_with_where_it_stands():
    folder = ROOT / "docs/design"
    index = folder / "README.md"
    pages, _, history = index.read_text().partition("## History")
    of_kernels, _, across = pages.partition("## Across kernels")
    measured, others = (
        {(folder / link["target"]).resolve() for link in LINK.finditer(part)} for part in (of_kernels, across)
    )
    assert set(folder.glob("*.md")) - {index} == measured | others and not measured & others
    trials = {(folder / link["target"]).resolve() for link in LINK.finditer(history.partition("\n## ")[0])}
    assert set((folder / "history").glob("*.md")) == trials
    assert all(len(page.read_text().splitlines()) <= 150 for page in measured | others | trials), (
        "want at most 150 lines"
    )
    for page in measured:
        opening = page.read_text().partition("\n## ")[0]
        assert re.search(r"\]\(((mla|moe|weight_only_linear)\.md)?#where-it-stands\)", opening), page.name


@pytest.mark.parametrize("document", RUN)
def test_examples_have_no_keys_in_int4_without_constants(document: str):
    """A reader copies them, and plain INT4 keys lose answers (docs/accuracy.md)."""
    blocks = [match["code"] for match in BLOCK.finditer((ROOT / document).read_text())]
    lines = [line for block in blocks for line in block.splitlines()]
    found = [line for line in lines if re.search(r'(kv_format=|Cache\()"int4', line) and "transform=" not in line]
    assert not found


@pytest.mark.parametrize("page", sorted((ROOT / "docs/tasks").glob("*.md")), ids=name)
def test_a_page_that_says_how_to_do_something_is_short(page: Path):
    assert len(page.read_text().splitlines()) <= 250, "want tables and checks in docs/reference"
