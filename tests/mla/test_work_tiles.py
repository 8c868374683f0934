"""Shares of a launch whose rows are cut into parts: every one is a CTA's, once, and the CTAs of a cluster have shares
of the same row. Of a line :mod:`.test_stream_k` has the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import work, work_tiles
from cute_kernels.mla.config import BLOCK_HEADS
from cute_kernels.mla.work import MlaSizes
from simulator import PlainThread, stand_in


class Locator:
    """Rows of request b have 70 b tokens, those of the extra cache 30 b."""

    def lengths(self, source, request: int) -> tuple[int, int]:
        return 70 * request, 30 * request


@pytest.mark.parametrize(
    ("rows", "request_rows", "num_heads", "parts"), [(1, 1, 64, 1), (6, 2, 128, 3), (12, 3, 300, 2), (7, 1, 128, 7)]
)
def test_every_share_once(run_on, rows, request_rows, num_heads, parts):
    run_on(PlainThread())
    head_blocks = -(-num_heads // BLOCK_HEADS)
    shape = MlaSizes(rows, request_rows, num_heads, num_heads, parts, stand_in(0), stand_in(0.0))
    num_ctas = rows * head_blocks * parts
    counts = work_tiles.Counts.of(shape, head_blocks, num_ctas)
    shares: list[Any] = []
    for cta in range(num_ctas):
        own = work_tiles.WorkTiles.of(shape, None, None, Locator(), counts, 0, 0, cta, 0)
        shares.append(own.work(own.row, own.start, own.left))
    found = [(own.row, own.first_head, own.part) for own in shares]
    heads = range(0, head_blocks * BLOCK_HEADS, BLOCK_HEADS)
    assert sorted(found) == list(itertools.product(range(rows), heads, range(parts)))
    for own in shares:
        assert not (own.left or own.publishes or own.resumes)
        request = own.row // request_rows
        main = -(-70 * request // 64)
        blocks = main + -(-30 * request // 64)
        assert (own.length, own.main_blocks, own.extra_length) == (70 * request, main, 30 * request)
        assert (own.begin, own.end) == work.WorkTile.share(blocks, parts, own.part)
    if head_blocks % 2 == 0:
        pairs = zip(shares[::2], shares[1::2], strict=True)
        assert all((a.row, a.part) == (b.row, b.part) for a, b in pairs)
