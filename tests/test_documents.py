"""The documents' Python blocks run, and what they point at exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN = ("README.md", "docs/api.md", "docs/kv_cache.md", "docs/linear.md", "docs/mla.md")
BLOCK = re.compile(r"^```python(?P<where>[ \w]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)(?P<target>[^)#\s]+)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", RUN)
def test_python_blocks_run_in_order(document: str):
    """The blocks of one document share their names, as a reader would type them; "```python gpu" needs a GPU."""
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


def test_the_readmes_example_is_ten_lines_and_agrees_with_the_reference():
    from cute_kernels.attention.reference import decode_attention_reference

    (block,) = BLOCK.finditer((ROOT / "README.md").read_text())
    assert len([line for line in block["code"].splitlines() if line]) <= 10
    scope: dict[str, Any] = {}
    exec(block["code"], {}, scope)
    out, q, row = scope["out"], scope["q"], scope["row"]
    k_rows, v_rows = (row.quantize(scope[key]) for key in ("k", "v"))
    want, _ = decode_attention_reference(
        q, k_rows, v_rows, scope["seq_lens"], kv_format="int4_g4", compute_dtype=torch.float64
    )
    assert out.shape == q.shape and out.dtype == q.dtype
    assert (out - want).norm() <= 4e-3 * want.norm()
    assert not out[3].any()  # a request of length 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_within_the_repository_lead_somewhere(document: Path):
    for link in LINK.finditer(document.read_text()):
        assert (document.parent / link["target"]).exists(), link["target"]
