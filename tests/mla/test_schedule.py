"""How rows are cut into parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.mla.config import MlaConfig, served_config
from cute_kernels.mla.few_heads.config import FewHeadsConfig
from cute_kernels.mla.schedule import FEW_HEADS, MAX_PARTS, WIDE, WorkShape, choose, choose_parts, cost_us
from cute_kernels.sm90 import MAX_SHARED_BYTES

SHAPES = st.builds(WorkShape, st.integers(1, 700), st.integers(1, 256), st.integers(1, 1 << 18))


@given(SHAPES, st.sampled_from((WIDE, *FEW_HEADS)))
def test_no_part_is_empty_and_none_is_cheaper(shape, rate):
    parts = choose_parts(shape, rate)
    size = -(-shape.num_blocks // parts)
    assert 1 <= parts <= min(MAX_PARTS, shape.num_blocks)
    assert (parts - 1) * size < shape.num_blocks
    assert cost_us(shape, parts, rate) <= cost_us(shape, 1, rate)


def test_few_heads_have_a_kernel_of_their_own():
    for heads, wanted in ((1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)):
        for tokens in ("sparse", "paged"):
            config, parts = choose(tokens, "mla_fp8", WorkShape(128, heads, 2048))
            assert isinstance(config, FewHeadsConfig) and config.can_implement() is None
            assert (config.tokens, config.heads, parts) == (tokens, wanted, 1)
    assert choose("sparse", "mla_fp8", WorkShape(256, 128, 2048))[0] == served_config("sparse", "mla_fp8")
    assert choose("paged", "mla_bf16", WorkShape(128, 16, 8192))[0] == served_config("paged", "mla_bf16")


def test_few_rows_are_cut_and_a_full_gpu_is_not():
    assert choose_parts(WorkShape(4, 128, 2048)) in range(8, 17)  # of 32 blocks, on 8 CTAs a part
    assert choose_parts(WorkShape(128, 64, 2048)) == 1
    assert choose_parts(WorkShape(1, 16, 64)) == 1
    assert choose_parts(WorkShape(1, 128, 32768)) in range(24, 67)


def test_configurations_fit_and_say_why_not():
    assert MlaConfig().can_implement() is None
    assert MlaConfig(seesaw=True).smem_bytes <= MAX_SHARED_BYTES
    for config, word in (
        (MlaConfig(form="mla_bf16"), "fence"),
        (MlaConfig(form="mla_bf16", fence="reader", crossover=True), "crossover"),
        (MlaConfig(prefetch=17), "prefetch"),
        (MlaConfig(seesaw=True, crossover=True, fence="reader"), "crossover"),
        (MlaConfig(crossover=True), "fence"),
        (MlaConfig(form="int4"), "form"),
        (MlaConfig(tokens="all"), "tokens"),
        (MlaConfig(scales="fp16"), "scales"),
    ):
        reason = config.can_implement()
        assert reason is not None and word in reason


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_parts_cover_every_block_once(monkeypatch, parts):
    pytest.importorskip("cutlass")
    from cute_kernels.mla import work

    monkeypatch.setattr(work, "cutlass", SimpleNamespace(min=min))
    for num_blocks in range(30):
        shares = [range(*work.Work.share(num_blocks, parts, part)) for part in range(parts)]
        assert [block for share in shares for block in share] == list(range(num_blocks))
