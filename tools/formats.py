"""Writes the tables of docs/formats.md from the formats themselves: `python -m tools.formats`; a test compares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cute_kernels.formats.kv import ALIASES, FORMATS
from cute_kernels.mla.formats import FORMATS as MLA_FORMATS

PAGE = Path(__file__).resolve().parent.parent / "docs/formats.md"
HEAD_DIM = 128
SCALES = {"tensor": "[] or [1]", "head": "[num_kv_heads]", "channel": "[num_kv_heads, head_dim]"}


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kv_table() -> str:
    names = {name: alias for alias, name in ALIASES.items()}
    lines = ["| `kv_format` | also | tensor | row at head_dim 128 | beside the cache | K and V of a token and head |"]
    lines.append("|---|---|---|---:|---|---:|")
    for name, form in FORMATS.items():
        row = form.row_bytes(HEAD_DIM)
        cells = [f"`{name}`", f"`{names[name]}`" if name in names else "", " or ".join(map(short, form.cache_dtypes))]
        cells += [f"{row} bytes", SCALES[form.given_scale] if form.given_scale else "", f"{2 * row} bytes"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def mla_table() -> str:
    lines = ["| `kv_format` | tensor | head_dim | bytes of a token |", "|---|---|---:|---:|"]
    for name, form in MLA_FORMATS.items():
        for head_dim in form.head_dims:
            dtypes = " or ".join(map(short, form.cache_dtypes))
            lines.append(f"| `{name}` | {dtypes} | {head_dim} | {form.row_bytes(head_dim)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its tables made anew."""
    for mark, table in (("<!-- formats:kv -->", kv_table()), ("<!-- formats:mla -->", mla_table())):
        before, _, rest = text.partition(mark)
        _, end, after = rest.partition("<!-- /formats -->")
        if not end:
            raise ValueError(f"docs/formats.md: got no {mark} ... <!-- /formats -->, want these marks around the table")
        text = f"{before}{mark}\n{table}{end}{after}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
