"""Workloads: the shapes of the published tables, and inputs whose bytes are what a decode step reads."""

import pytest
import torch

from bench import workloads
from bench.entry import Entry
from bench.floor import StreamingFloor
from bench.peers import relative_error
from bench.suites import TOLERANCE, reference_rows
from bench.workloads import DecodeShape, make_inputs
from cute_kernels.attention.reference import decode_attention_reference
from cute_kernels.formats.kv import CHANNEL_BLOCKS, FORMATS, format_of


def test_cache_bytes_are_the_published_ones():
    shape = DecodeShape(512)
    megabytes = {name: round(shape.cache_bytes(name) * 1e-6) for name in ("bf16", "int4_g1", "int4_g4")}
    assert megabytes == {"bf16": 2147, "int4_g1": 570, "int4_g4": 671}


def test_other_shapes_exceed_l2_in_every_format_by_the_least_power_of_two():
    shapes = workloads.other_shapes()
    for shape in shapes:
        assert shape.cache_bytes("int4_g1") > workloads.L2_BYTES >= shape.cache_bytes("int4_g1") // 2
        assert shape.cache_bytes("bf16") < 8 << 30
    assert {(s.num_q_heads, s.num_kv_heads) for s in shapes} == {(8, 1), (64, 8), (32, 32)}
    assert {s.head_dim for s in shapes} == {64, 128, 256}
    assert min(s.seq_len for s in shapes) == 1024 and max(s.seq_len for s in shapes) == 131072


@pytest.mark.parametrize("kv_format", [*FORMATS, CHANNEL_BLOCKS.name])
def test_every_format_that_the_command_takes_has_inputs(kv_format):
    inputs = make_inputs(DecodeShape(2, 64, 4, 2, 64, page_size=32), kv_format, device="cpu")
    empty = make_inputs(DecodeShape(2, 64, 4, 2, 64, page_size=32), kv_format, device="cpu", filled=False)
    assert empty.k_cache.shape == inputs.k_cache.shape and empty.v_cache.dtype == inputs.v_cache.dtype
    rows, want = reference_rows(inputs)
    out = torch.full_like(inputs.q, torch.nan)
    Entry().bind(inputs, out=out)()
    assert relative_error(out[rows], want) <= TOLERANCE


@pytest.mark.parametrize("kv_format", [*FORMATS, CHANNEL_BLOCKS.name])
@pytest.mark.parametrize("page_size", [0, 32])
def test_head_major_inputs_hold_the_same_rows_in_another_order_and_run(kv_format, page_size):
    shape = DecodeShape(2, 64, 4, 2, 64, page_size=page_size)
    tokens, heads = (make_inputs(each, kv_format, device="cpu") for each in (shape, shape.heads_first))
    empty = make_inputs(shape.heads_first, kv_format, device="cpu", filled=False)
    assert heads.options["cache_layout"] == "HND" and "cache_layout" not in tokens.options
    for name in ("k_cache", "v_cache"):
        cache = getattr(heads, name)
        assert cache.is_contiguous() and getattr(empty, name).shape == cache.shape
        assert torch.equal(cache.transpose(1, 2).view(torch.uint8), getattr(tokens, name).view(torch.uint8))
    assert heads.shape.name == f"{shape.name}, heads first" and heads.shape.as_dict()["cache_layout"] == "HND"
    assert heads.shape.cache_bytes(kv_format) == shape.cache_bytes(kv_format)
    rows, want = reference_rows(heads)
    torch.testing.assert_close(want, reference_rows(tokens)[1])
    out = torch.full_like(heads.q, torch.nan)
    Entry().bind(heads, out=out)()
    assert relative_error(out[rows], want) <= TOLERANCE


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "int4_g1", "int4_g8"])
def test_inputs_have_the_formats_bytes_and_run(kv_format):
    shape = DecodeShape(3, seq_len=20, num_q_heads=4, num_kv_heads=2, head_dim=64)
    inputs = make_inputs(shape, kv_format, device="cpu", chunk_rows=7)
    caches = (inputs.k_cache, inputs.v_cache)
    assert sum(cache.numel() * cache.element_size() for cache in caches) == shape.cache_bytes(kv_format)
    assert inputs.q.dtype == (torch.float16 if kv_format == "fp16" else torch.bfloat16)
    out, _ = decode_attention_reference(inputs.q, *caches, inputs.seq_lens, kv_format=kv_format)
    assert torch.isfinite(out).all()
    values = format_of(kv_format).dequantize(inputs.k_cache, 64, torch.float32)
    assert 0.9 < values.std() < 1.1  # Gaussian, every chunk filled
    assert values.std(dim=-1).min() > 0.5
    assert not torch.equal(*caches)


def test_the_same_seed_gives_the_same_inputs():
    shape = DecodeShape(2, seq_len=9, head_dim=64)
    first, second = (make_inputs(shape, "int4_g4", device="cpu", seed=3) for _ in range(2))
    assert torch.equal(first.k_cache, second.k_cache) and torch.equal(first.q, second.q)


def test_a_sample_of_requests_spans_the_batch():
    inputs = make_inputs(DecodeShape(9, seq_len=4, head_dim=64), "bf16", device="cpu")
    index, few = inputs.sample(3)
    assert index.tolist() == [0, 4, 8] and few.shape.batch == 3
    assert torch.equal(few.k_cache, inputs.k_cache[[0, 4, 8]])
    assert make_inputs(DecodeShape(1, seq_len=4), "bf16", device="cpu").sample(4)[0].tolist() == [0]


def test_a_floor_of_bytes_that_no_kernel_reads_evenly_is_refused():
    floor = StreamingFloor(flush=lambda: None, device="cpu")
    for num_bytes in (0, 100):
        with pytest.raises(ValueError, match=f"num_bytes: got {num_bytes}, want a positive multiple of 64"):
            floor(num_bytes)
