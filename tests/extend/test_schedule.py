"""Work tiles and configurations: plain Python."""

from __future__ import annotations

import random

import pytest

from cute_kernels.attention.features import Features
from cute_kernels.extend.config import CODED_HEAD_DIMS, HEAD_DIMS, TILE_ROWS, ExtendConfig
from cute_kernels.extend.schedule import Problem, choose, count_tiles
from cute_kernels.kv_formats import format_of
from tests.extend.cases import FORMATS


def slots_of(q_lens: list[int], group: int) -> list[tuple[int, int]]:
    """(request, work tile of it) by slot as the kernel finds them, None where a slot has none."""
    ends = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    firsts = [ends[b] * group // TILE_ROWS + b for b in range(len(q_lens))]
    found = []
    for slot in range(count_tiles(ends[-1], len(q_lens), group, 1)):
        request = max(b for b, first in enumerate(firsts) if first <= slot)
        tile = slot - firsts[request]
        if tile * TILE_ROWS < q_lens[request] * group:
            found.append((request, tile))
    return found


@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_every_work_tile_has_one_slot(group):
    generator = random.Random(group)
    for _ in range(200):
        q_lens = [generator.choice([0, 1, 31, 32, 33, 128, generator.randrange(900)]) for _ in range(9)]
        want = [(b, m) for b, n in enumerate(q_lens) for m in range(-(-n * group // TILE_ROWS))]
        assert slots_of(q_lens, group) == want


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_every_format_has_a_kernel(kv_format, head_dim):
    q_dtype = "fp16" if kv_format == "fp16" else "bf16"
    config = choose(Problem(head_dim, kv_format, kv_format, q_dtype, 64, Features(causal=True, paged=True)))
    served = head_dim in (CODED_HEAD_DIMS if format_of(kv_format).is_coded else HEAD_DIMS)
    assert (config.can_implement() is None) == served
    assert config.name.isidentifier()


def test_what_cannot_be_is_said():
    good = ExtendConfig("bf16", "bf16", "bf16", 128)
    assert good.can_implement() is None
    for wrong, reason in (
        (ExtendConfig("bf16", "bf16", "fp16", 128), "q_dtype"),
        (ExtendConfig("bf16", "int8_token_head", "bf16", 128), "one of 16 bits"),
        (ExtendConfig("int8_channel", "int8_channel", "bf16", 128), "not among"),
        (ExtendConfig("e4m3_head", "e4m3_head", "bf16", 128), "e4m3_tensor"),
        (ExtendConfig("bf16", "bf16", "bf16", 96), "head_dim"),
        (ExtendConfig("bf16", "bf16", "bf16", 256), "shared memory"),
        (ExtendConfig("bf16", "bf16", "bf16", 128, producer_warps=5), "producer_warps"),
    ):
        assert reason in str(wrong.can_implement())
