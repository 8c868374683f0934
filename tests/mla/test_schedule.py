"""How rows are cut into parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.mla.config import MlaConfig
from cute_kernels.mla.schedule import MAX_PARTS, WorkShape, choose_parts, cost_us
from cute_kernels.sm90 import MAX_SHARED_BYTES

SHAPES = st.builds(WorkShape, st.integers(1, 700), st.integers(1, 256), st.integers(1, 1 << 18))


@given(SHAPES)
def test_no_part_is_empty_and_none_is_cheaper(shape):
    parts = choose_parts(shape)
    size = -(-shape.num_blocks // parts)
    assert 1 <= parts <= min(MAX_PARTS, shape.num_blocks)
    assert (parts - 1) * size < shape.num_blocks
    assert cost_us(shape, parts) <= cost_us(shape, 1)


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
        (MlaConfig(crossover=True, fence="reader"), "fence"),
        (MlaConfig(form="int4"), "form"),
        (MlaConfig(tokens="all"), "tokens"),
        (MlaConfig(scales="fp16"), "scales"),
        (MlaConfig(scales="ue8m0"), "scales"),
        (MlaConfig(form="mla_model1", scales="ue8m0"), "head_dim"),
        (MlaConfig(form="mla_model1", head_dim=512), "scales"),
        (MlaConfig(form="mla_model1", head_dim=512, scales="ue8m0", seesaw=True), "seesaw"),
        (MlaConfig(form="mla_bf16", head_dim=448, fence="reader"), "head_dim"),
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
