"""How the kernels see tokens: every column of a key is one of a tile, and comes from the bytes that hold it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.mla import plan
from cute_kernels.mla.checks import cache_shape
from cute_kernels.mla.compile import shipped_specs
from cute_kernels.mla.config import COMBINE_SLOTS, SCALES, SHIPPED, CombineConfig, served_config
from cute_kernels.mla.few_heads.config import shipped_few_heads
from cute_kernels.mla.formats import FORMATS, format_of
from cute_kernels.mla.layout import SLAB_COLUMNS, layout_of
from layouts.kv.mla import MlaModel1

WIDTHS = [(name, head_dim) for name, form in FORMATS.items() for head_dim in form.head_dims]


@pytest.mark.parametrize(("name", "head_dim"), WIDTHS)
def test_slabs_are_the_columns(name, head_dim):
    layout = layout_of(name, head_dim)
    assert layout.num_slabs * SLAB_COLUMNS == head_dim
    scored = [first + i for first, count in layout.score_runs for i in range(count)]
    assert sorted(scored) == list(range(layout.num_slabs))
    left, right = layout.parts
    assert sorted(left + right) == list(range(layout.num_slabs)) and right == (4, 5, 6, 7)


@pytest.mark.parametrize("name", SCALES)
def test_parts_of_a_token_are_where_the_format_has_them(name):
    (head_dim,) = format_of(name).head_dims
    token, layout = format_of(name).token(head_dim), layout_of(name, head_dim)
    rows = token.quantize(torch.randn(1, head_dim))[0]
    codes, *others = token.unpack(rows)
    assert torch.equal(rows[: layout.code_slabs * SLAB_COLUMNS], codes.view(torch.uint8))
    rope = next(part for part in others if part.dtype == torch.bfloat16)
    assert torch.equal(rows[layout.rope_offset :][:128], rope.view(torch.uint8))
    scales = next(part for part in others if part.dtype != torch.bfloat16)
    first = layout.data_bytes if layout.is_split else layout.scales_offset
    assert torch.equal(rows[first:][: layout.scale_bytes], scales.view(torch.uint8))
    assert layout.slabs_per_scale * layout.num_scales == layout.code_slabs == layout.num_slabs - 1
    assert layout.data_bytes + (layout.scale_bytes if layout.is_split else 0) == token.row_bytes


@pytest.mark.parametrize("tokens", ["sparse", "paged"])
@pytest.mark.parametrize(("name", "head_dim"), WIDTHS)
def test_every_width_of_every_format_is_served(tokens, name, head_dim):
    config = served_config(tokens, name, head_dim)
    assert config.can_implement() is None
    assert served_config(tokens, name, FORMATS[name].head_dims[0]) == served_config(tokens, name)
    assert config.layout.dtype == {torch.bfloat16: "bf16", torch.float16: "fp16"}[FORMATS[name].q_dtype]


def test_what_is_shipped_has_names_of_its_own_and_its_combination():
    specs: Any = shipped_specs()
    combined = [
        ((spec.config.dtype, spec.config.partials), spec.config.slots)
        for spec in specs
        if isinstance(spec.config, CombineConfig)
    ]
    assert len({spec.symbol for spec in specs}) == len(specs) == len(SHIPPED) + len(shipped_few_heads()) + len(combined)
    used = {
        (config.layout.dtype, config.partials) for config in (*map(served_config_of, SHIPPED), *shipped_few_heads())
    }
    assert set(combined) == set(itertools.product(used, COMBINE_SLOTS))


def served_config_of(which):
    return served_config(*which)


def test_one_power_of_2_is_for_values_of_one_kind():
    """Columns of a half may differ by any power of 2 where some have scales and others none."""
    forms = {name: served_config("sparse", name).partials for name in FORMATS}
    assert forms == {"mla_fp8": "fp16", "mla_bf16": "fp16", "mla_fp16": "fp16", "mla_model1": "fp32"}


def test_data_of_split_pages_are_launched_as_close_as_they_lie():
    form = format_of("mla_model1")
    pages = torch.zeros(3, 64 * 584 + 64, dtype=torch.uint8)
    cache = pages[:, : 64 * 584].unflatten(1, (64, 584))
    shape = cache_shape("cache", cache, form, 512)
    indices: Any = SimpleNamespace(data_ptr=lambda: 77)
    assert plan.chosen(cache, indices, None) == {"cache": cache.data_ptr(), "indices": 77, "topk_length": 0}
    assert plan._num_tokens(shape) == 3 * 64
    assert plan._pages(shape) == {
        "page_stride": 64 * 584 + 64,
        "token_stride": MlaModel1.DATA_BYTES,
        "page_size": 64,
    }
