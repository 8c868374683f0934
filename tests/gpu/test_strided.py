"""Caches, queries and tables with gaps: the numbers of dense ones, nothing between rows read into them or written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels import append_and_decode, append_kv
from cute_kernels.kv_cache import Rope, dequantize_kv, quantize_kv
from cute_kernels.kv_cache.compile import BulkSpec
from cute_kernels.kv_cache.config import BulkConfig
from cute_kernels.runtime import arch_of, load_many
from tests.attention import cases
from tests.attention.cases import Call, assert_close
from tests.extend import cases as extend_cases
from tests.gpu.specs import append_specs, decode_spec, step_specs
from tests.kv_cache.cases import Shape
from tests.kv_cache.cases import make_call as make_append
from tests.kv_cache.steps import make_step
from tests.tensors import among_others, apart, fused, padded, side_by_side

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("strided_kernels")]

CUDA = "cuda"
LENGTHS = (0, 1, 33, 513, 1200, 64)
FORMATS = ("bf16", "int4_g1", "int4_g4", "int8_token_head", ("e4m3_tensor", "int4_g2"))
GAPS = {"blocks": 1, "tokens (heads in HND)": 2, "rows": 3}
PAGES = {"contiguous": None, "paged": 16}
EXTENDED = ("bf16", "int4_g4", "int8_token_head")
BULK = ("bf16", "int4_g4", "int8_token_head")
APPENDED = ("bf16", "int4_g1", "int4_g4", "int8_token_head", "e4m3_tensor")
STEPS = [
    Shape(kv_format, rope=Rope(128), num_q_heads=16, num_kv_heads=4, place=place, page_size=16, layout=layout)
    for kv_format in ("bf16", "int4_g4", "int8_token_head")
    for place, layout in (("table", "NHD"), ("table", "HND"), ("contiguous", "NHD"))
]


def call_for(kv_format: Any, heads: tuple[int, int], page_size: int | None, layout: str, **options: Any) -> Call:
    """Of (KV heads, queries)."""
    given: dict[str, Any] = {"device": CUDA, "page_size": page_size, "cache_layout": layout} | options
    return cases.make_call(kv_format, LENGTHS, num_kv_heads=heads[0], group=4, q_len=heads[1], **given)


HEADS = (((1, 1), "NHD"), ((8, 2), "NHD"), ((8, 2), "HND"))
OTHERS = [
    *[(kv_format, (2, 1), size, "NHD") for kv_format in ("bf16", "int4_g4", "int8_tensor") for size in (None, 32)],
    *[(kv_format, (2, 1), 16, "NHD") for kv_format in ("bf16", "int4_g4", "int8_token_head")],
    *[(kv_format, (8, 1), 16, "NHD") for kv_format in ("bf16", "int4_g4")],
    *[(kv_format, (1, 1), size, "NHD") for kv_format in ("bf16", "int4_g4") for size in (None, 256)],
]


def specs() -> list[Any]:
    """The kernels that the tests of this module need."""
    main: list[Any] = [
        (name, heads, size, layout) for name in FORMATS for heads, layout in HEADS for size in PAGES.values()
    ]
    found: list[Any] = []
    for case in (*main, *OTHERS):
        dense = call_for(*case, device="cpu", blank=True)
        found += [decode_spec(dense), *(decode_spec(spread(dense, dim)) for dim in GAPS.values())]
        if case[2] == 16 and case[1] == (2, 1) and case[0] != "bf16":
            found.append(decode_spec(Call(dense.q, dense.k_cache, padded(dense.v_cache, 4), *rest(dense))))
    found += append_specs(Shape(name, new=new, rope=Rope(128)) for name in APPENDED for new in ((1,), (2,)))
    found += [
        BulkSpec(BulkConfig(direction, name, "bf16", 128)) for direction in ("quantize", "dequantize") for name in BULK
    ]
    for shape in STEPS:
        for q_len in (1, 3):
            given = make_step(shape, (5, 300, 33, 1025), q_len, blank=True)
            found += step_specs(given, fused=True)
    return list(dict.fromkeys(found))


@pytest.fixture(scope="session")
def strided_kernels() -> None:
    load_many(specs(), arch_of())


def rest(call: Call) -> tuple[Any, ...]:
    return call.seq_lens, call.kv_format, call.options


def spread(call: Call, dim: int) -> Call:
    """``call`` with NaN between what dimensions from ``dim`` on count, and queries of a wider projection."""
    caches = [among_others(cache, dim)[0] for cache in (call.k_cache, call.v_cache)]
    return Call(fused(call.q), caches[0], caches[1], call.seq_lens, call.kv_format, call.options)


def check(call: Call, **options: Any) -> torch.Tensor:
    out, lse = call.run(return_lse=True, **options)
    assert_close(call, out, lse)
    return out


@pytest.mark.parametrize("page_size", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_what_lies_between_rows_does_not_count(kv_format, page_size):
    for heads, layout in HEADS:
        dense = call_for(kv_format, heads, page_size, layout)
        for dim in GAPS.values():
            out = check(spread(dense, dim))
            if dim == 1:  # the same kernel
                assert torch.equal(out, dense.run())


@pytest.mark.parametrize("page_size", [None, 32], ids=["contiguous", "paged"])
@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4", "int8_tensor"])
def test_k_and_v_of_one_tensor(kv_format, page_size):
    """As `kv[:, 0]` and `kv[:, 1]`, as `kv[0]` and `kv[1]`, and row by row."""
    dense = call_for(kv_format, (2, 1), page_size, "NHD")
    for dim in (0, 1, 2, 3):
        check(Call(dense.q, *side_by_side(dense.k_cache, dense.v_cache, dim), *rest(dense)))


@pytest.mark.parametrize("kv_format", ["int4_g4", "int8_token_head", "bf16"])
def test_blocks_need_no_more_than_the_alignment_of_rows(kv_format):
    """Pages 16 bytes apart and, of rows with scales, a word: served by copies of words."""
    dense = call_for(kv_format, (2, 1), 16, "NHD")
    size = dense.k_cache.element_size()
    for gap in (16, 4) if kv_format != "bf16" else (16, 48):
        check(Call(dense.q, padded(dense.k_cache, gap // size), padded(dense.v_cache, 3 * gap // size), *rest(dense)))


def test_wide_tables_are_read_where_they_are():
    dense = call_for("int4_g4", (2, 1), 16, "NHD")
    wide = apart(dense.options["block_table"], 8000)
    assert torch.equal(dense.with_options(block_table=wide).run(), check(dense))


def test_a_single_request_may_have_any_stride():
    dense = cases.make_call("bf16", (300,), num_kv_heads=2, max_seq_len=320, device=CUDA)
    odd = [x.as_strided(x.shape, (x.stride(0) + 3, *x.stride()[1:])) for x in dense.tensors[:3]]
    assert torch.equal(Call(odd[0], odd[1], odd[2], *rest(dense)).run(), check(dense))


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4"])
@pytest.mark.parametrize("page_size", [None, 256], ids=["contiguous", "paged"])
def test_blocks_beyond_two_to_the_31(kv_format, page_size):
    """Three requests (or eleven pages) a gigabyte apart."""
    dense = cases.make_call(kv_format, (256, 200, 77), group=4, page_size=page_size, device=CUDA, poison=False)
    size, caches = dense.k_cache.element_size(), []
    for cache in (dense.k_cache, dense.v_cache):
        stride = (5 << 28) // size
        far = torch.empty(stride * cache.shape[0], dtype=cache.dtype, device=CUDA)
        caches.append(far.as_strided(cache.shape, (stride, *cache.stride()[1:])).copy_(cache))
    check(Call(dense.q, caches[0], caches[1], *rest(dense)))


# -- append ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [(1,) * 6, (3, 0, 40, 4, 1, 1)], ids=["decode", "prefill"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dim", GAPS.values(), ids=GAPS)
@pytest.mark.parametrize("kv_format", ["bf16", "int4_g1", "int4_g4", "int8_token_head", "e4m3_tensor"])
def test_an_append_writes_rows_and_nothing_beside_them(kv_format, dim, layout, new):
    dense = make_append(
        Shape(kv_format, new=new, lengths=(40, 100, 47, 49, 1, 17), rope=Rope(128), layout=layout), CUDA
    )
    caches, beside = zip(*(among_others(cache, dim) for cache in (dense.k_cache, dense.v_cache)), strict=True)
    assert dense.block_table is not None
    strided = dense._replace(k_cache=caches[0], v_cache=caches[1], block_table=apart(dense.block_table))
    outs = []
    for call in (dense, strided):
        given = call._asdict()
        given["kv_format"] = (given.pop("k_format"), given.pop("v_format"))
        given["qkv_bias"] = tuple(given.pop(name) for name in ("q_bias", "k_bias", "v_bias"))
        outs.append(append_kv(**given))
    assert torch.equal(*outs)
    for got, want in zip(caches, (dense.k_cache, dense.v_cache), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert all(bool((x.view(torch.uint8) == 0xFF).all()) for x in beside)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("shape", STEPS, ids=lambda shape: f"{shape.kv_format}-{shape.place}-{shape.layout}")
def test_a_step_over_caches_with_gaps_is_that_over_dense_ones(shape, q_len):
    step = make_step(shape, (5, 300, 33, 1025), q_len, CUDA)
    caches, beside = zip(*(among_others(step[name], 1) for name in ("k_cache", "v_cache")), strict=True)
    strided = step | {"k_cache": caches[0], "v_cache": caches[1]}
    if shape.place == "table":
        strided["block_table"] = apart(step["block_table"], 40)
    out = append_and_decode(**strided)
    assert torch.equal(out, append_and_decode(**step))
    for got, want in zip(caches, (step["k_cache"], step["v_cache"]), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert all(bool((x.view(torch.uint8) == 0xFF).all()) for x in beside)


@pytest.mark.parametrize("kv_format", BULK)
def test_bulk_kernels_read_and_write_blocks_with_gaps(kv_format):
    x = torch.randn(7, 5, 2, 128, device=CUDA).bfloat16()
    rows = quantize_kv(x, kv_format=kv_format)
    (numbers, _), (room, beside) = among_others(x, 2), among_others(rows, 1)
    quantize_kv(numbers, kv_format=kv_format, out=room)
    assert torch.equal(room.view(torch.uint8), rows.view(torch.uint8))
    back, between = among_others(torch.zeros_like(x), 2)
    dequantize_kv(room, kv_format=kv_format, head_dim=128, out=back)
    assert torch.equal(back, dequantize_kv(rows, kv_format=kv_format, head_dim=128))
    assert bool((beside.view(torch.uint8) == 0xFF).all()) and bool(between.isnan().all())


@pytest.mark.parametrize("dim", GAPS.values(), ids=GAPS)
@pytest.mark.parametrize("kv_format", EXTENDED)
def test_extend_attention_reads_the_same_caches(kv_format, dim):
    for page_size, layout in ((None, "NHD"), (16, "NHD"), (16, "HND")):
        call = extend_cases.make_call(
            kv_format, (100, 7, 1), (150, 7, 70), num_kv_heads=2, page_size=page_size, cache_layout=layout, device=CUDA
        )
        caches = [among_others(cache, dim)[0] for cache in (call.k_cache, call.v_cache)]
        strided = replace(call, k_cache=caches[0], v_cache=caches[1])
        assert torch.equal(strided.run(), call.run())


def test_a_dense_call_is_not_mistaken_for_a_strided_one():
    """Of the same shapes, one after the other: plans are kept by strides, too."""
    for kv_format in ("bf16", "int4_g4"):
        dense = call_for(kv_format, (8, 1), 16, "NHD")
        calls = [dense, *(spread(dense, dim) for dim in (1, 2, 3))]
        wanted = dense.run()
        for call in (*calls, *reversed(calls)):
            assert_close(call, call.run())
            assert torch.equal(dense.run(), wanted)
