"""MLA decode on a GPU, through the public calls, against the reference: as close as FlashMLA's own tests ask.

Slots that nobody sees hold NaN, indices are lost and repeated, block tables end in numbers of no page.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import cute_kernels.compat.flash_mla as flash_mla
from cute_kernels.mla import mla_decode, ops, sparse_mla_decode
from cute_kernels.mla.compile import MlaSpec
from cute_kernels.mla.config import MlaConfig, served_config
from cute_kernels.mla.formats import format_of
from cute_kernels.mla.problem import SparseExtras
from cute_kernels.mla.reference import mla_decode_reference, sparse_mla_decode_reference
from cute_kernels.mla.schedule import Workload, choose
from tests.mla import cases
from tests.mla.cases import DenseCall, SparseCall, as_flash_mla, assert_as_close_as_flash_mla, moved

pytestmark = pytest.mark.gpu

FP8 = ("mla_fp8", "mla_model1")
SPARSE_FORMATS = (*FP8, "mla_bf16")
# As large as in FlashMLA's tests, whose absolute tolerance supposes it; the scale makes some tokens matter more.
DEVIATION, SCALE = 0.1, 0.5
make_dense = functools.partial(cases.make_dense, deviation=DEVIATION)
make_sparse = functools.partial(cases.make_sparse, deviation=DEVIATION)


# Kernels that are compiled when they are called; the rest is shipped.
WIDTHS = [
    ("sparse", "mla_fp16", 576),
    ("sparse", "mla_fp16", 512),
    ("paged", "mla_fp16", 512),
    ("paged", "mla_bf16", 512),
]


def specs() -> list[MlaSpec]:
    """Kernels of this file that bundles do not hold. Whole contexts of `WIDTHS` are asked for by 192 rows of heads, of
    boxes by 128 and 192."""
    tma_tiles = [
        served_config(*which, pairs, False, True) for which in WIDTHS if which[0] == "paged" for pairs in (False, True)
    ]
    return [
        *map(MlaSpec, tma_tiles),
        *(MlaSpec(served_config(*which, mma_bound=True)) for which in WIDTHS),
        *(MlaSpec(served_config(*which)) for which in WIDTHS if which[0] == "sparse"),
    ]


def launched(call: DenseCall | SparseCall, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call on the GPU, as the public functions give them."""
    options = {"softmax_scale": SCALE} | options
    if isinstance(call, DenseCall):
        return mla_decode(
            call.q,
            call.cache,
            call.seq_lens,
            block_table=call.block_table,
            kv_format=call.kv_format,
            return_lse=True,
            **options,
        )
    return sparse_mla_decode(*call.tensors, kv_format=call.kv_format, return_lse=True, **(call.options | options))


def served(call: DenseCall | SparseCall, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, lse as FlashMLA has it."""
    return as_flash_mla(*launched(call, **options))


def wanted(call: DenseCall | SparseCall, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"softmax_scale": SCALE} | options
    if isinstance(call, DenseCall):
        return mla_decode_reference(*call.tensors, kv_format=call.kv_format, **options)
    return sparse_mla_decode_reference(*call.tensors, kv_format=call.kv_format, **(call.options | options))[:2]


def check(call: DenseCall | SparseCall, **options: Any) -> None:
    on_gpu = moved(call, "cuda")
    found = served(on_gpu, **options)
    assert_as_close_as_flash_mla(*found, *wanted(on_gpu, **options))


@pytest.mark.parametrize("num_heads", [4, 8, 32, 64, 128])
@pytest.mark.parametrize("kv_format", SPARSE_FORMATS)
@pytest.mark.parametrize("kind", ["chosen tokens", "whole contexts"])
def test_a_query_with_an_infinite_number_is_nan_and_leaves_the_others_alone(kind, kv_format, num_heads):
    if kind == "chosen tokens":
        made: Any = make_sparse(kv_format, num_heads=num_heads, topk=600, num_pages=20, page_size=64)
    else:
        made = make_dense(kv_format, [1000, 300], q_len=2, num_heads=num_heads, page_size=64)
    call = moved(made, "cuda")
    want, _ = launched(call)
    call.q[0, 0, 0, 17], call.q[-1, -1, -1, 500] = torch.inf, -torch.inf
    found, _ = launched(call)
    spoilt = ~call.q.isfinite().all(-1)
    assert found[spoilt].isnan().all() and torch.equal(found[~spoilt], want[~spoilt])


# -- sparse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 576, 2048])
@pytest.mark.parametrize("num_heads", [64, 128])
@pytest.mark.parametrize("kv_format", SPARSE_FORMATS)
def test_any_number_of_indices(kv_format, num_heads, topk):
    check(make_sparse(kv_format, batch=3, q_len=2, num_heads=num_heads, topk=topk, num_pages=40, page_size=64))


@pytest.mark.parametrize("num_heads", [1, 8, 16, 32, 63, 96, 127])
@pytest.mark.parametrize("kv_format", SPARSE_FORMATS)
def test_any_number_of_heads(kv_format, num_heads):
    check(make_sparse(kv_format, num_heads=num_heads, topk=200, num_pages=10, page_size=64, sinks=True))


@pytest.mark.parametrize("page_size", [2, 61, 64, 69, 576])
@pytest.mark.parametrize("kv_format", SPARSE_FORMATS)
def test_pages_of_any_size(kv_format, page_size):
    padding = 8 if kv_format == "mla_model1" and page_size % 2 else 48
    check(
        make_sparse(
            kv_format, num_heads=64, topk=150, num_pages=2000 // page_size, page_size=page_size, padding=padding
        )
    )


@pytest.mark.parametrize("num_heads", [64, 128])
@pytest.mark.parametrize("kv_format", SPARSE_FORMATS)
@pytest.mark.parametrize("extra", [None, (64, 30, 2), (577, 9, 64)])
def test_lengths_sinks_and_a_second_cache(kv_format, num_heads, extra):
    options: dict[str, Any] = {"length": True, "sinks": True, "extra": extra, "extra_length": extra is not None}
    check(make_sparse(kv_format, batch=5, num_heads=num_heads, topk=300, num_pages=8, page_size=64, **options))


@pytest.mark.parametrize("kv_format", SPARSE_FORMATS)
@pytest.mark.parametrize("sinks", [False, True])
def test_queries_that_see_nothing(kv_format, sinks):
    call = make_sparse(kv_format, batch=4, num_heads=64, topk=128, num_pages=4, page_size=64, sinks=sinks)
    call.indices[:2] = -1
    call.indices[2, 0] = 2**31 - 1
    check(call)
    call.options["topk_length"] = torch.tensor([0, 5, 0, 128], dtype=torch.int32)
    check(call)


@pytest.mark.parametrize(("batch", "q_len"), [(1, 1), (2, 1), (74, 1), (321, 3)])
@pytest.mark.parametrize("kv_format", FP8)
def test_batches(kv_format, batch, q_len):
    check(
        make_sparse(
            kv_format, batch=batch, q_len=q_len, num_heads=64, topk=576, num_pages=32, page_size=64, length=True
        )
    )


# Mantissas 1.2345, 1.9999 and 1.536; none makes tokens much larger than those that FlashMLA's tolerance was made for.
@pytest.mark.parametrize("factor", [1.2345, 1.9999 / 2, 3e-3])
@pytest.mark.parametrize("batch, rounds", [(2, False), (140, True)])
def test_scales_that_are_no_powers_of_two(batch, rounds, factor):
    """The 64-row kernel rounds a token to bf16 once, as its tensor cores take it; the one for few heads does not."""
    call = make_sparse("mla_fp8", batch=batch, num_heads=64, topk=200, num_pages=8, page_size=64)
    scales = call.cache[..., 512:528].contiguous().view(torch.float32) * factor
    call.cache[..., 512:528] = scales.view(torch.uint8)
    on_gpu = moved(call, "cuda")
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    config, _ = choose("sparse", "mla_fp8", 576, Workload(call.indices.shape[:2].numel(), 64, 200, num_sms))
    assert isinstance(config, MlaConfig) == rounds
    found = served(on_gpu)
    if rounds:
        rows = format_of("mla_fp8").token(576).dequantize(on_gpu.cache, torch.bfloat16)
        on_gpu = SparseCall(on_gpu.q, rows, on_gpu.indices, "mla_bf16", on_gpu.options)
    assert_as_close_as_flash_mla(*found, *wanted(on_gpu))


@pytest.mark.parametrize("exponent", [30, -40])
def test_exponents_of_any_size(exponent):
    """MODEL1's scales far from 1: beyond those that a product with 2**120 could take in, and small ones."""
    call = make_sparse("mla_model1", num_heads=64, topk=200, num_pages=8, page_size=64)
    pages = call.cache.flatten(1).clone()
    scales = pages[:, call.cache.shape[1] * 576 :]
    scales[scales != 255] += exponent % 256
    q = call.q * 2.0**-exponent
    q[..., 448:] = 0  # the RoPE columns are as large as they were
    on_gpu = moved(SparseCall(q, pages.view(call.cache.shape), call.indices, "mla_model1", call.options), "cuda")
    out, lse = served(on_gpu)
    wanted_out, wanted_lse = wanted(on_gpu)
    latent = [x[..., :448].float() * 2.0**-exponent for x in (out, wanted_out)]
    assert_as_close_as_flash_mla(latent[0], lse, latent[1], wanted_lse)


@pytest.mark.parametrize("batch", [2, 80])
@pytest.mark.parametrize("num_heads", [16, 24, 128])
@pytest.mark.parametrize(
    ("kv_format", "head_dim"), [("mla_fp8", 576), ("mla_model1", 512), ("mla_bf16", 576), ("mla_bf16", 512)]
)
def test_greatest_scores(kv_format, head_dim, num_heads, batch):
    """Of rows in one part, in several and in a cluster; sinks leave them alone."""
    call = make_sparse(
        kv_format, batch=batch, num_heads=num_heads, topk=900, num_pages=20, page_size=64, head_dim=head_dim,
        sinks=True, length=True,
    )  # fmt: skip
    call.indices[0] = -1
    on_gpu = moved(call, "cuda")
    extras = SparseExtras(**{name: on_gpu.options.get(name) for name in SparseExtras._fields})
    q, cache, indices = on_gpu.tensors
    out, lse, top = ops.sparse(ops.SparseCall(q, cache, indices, kv_format, SCALE, extras, with_max=True))
    wanted_out, wanted_lse, wanted_top = sparse_mla_decode_reference(
        *on_gpu.tensors, kv_format=kv_format, softmax_scale=SCALE, **extras._asdict()
    )
    assert_as_close_as_flash_mla(out, lse, wanted_out, wanted_lse)
    empty = wanted_top == -torch.inf
    assert torch.equal(top == -torch.inf, empty) and empty[0].all()
    torch.testing.assert_close(top[~empty], wanted_top[~empty], rtol=2.01 / 65536, atol=1e-6)


@pytest.mark.parametrize("head_dim", [576, 512])
@pytest.mark.parametrize("num_heads", [64, 128])
def test_sparse_prefill(head_dim, num_heads):
    """FlashMLA's call, one token a page as it lies among other tensors."""
    call = make_sparse(
        "mla_bf16", batch=300, q_len=1, num_heads=num_heads, topk=384, num_pages=1, page_size=500, head_dim=head_dim,
        length=True, sinks=True,
    )  # fmt: skip
    on_gpu = moved(call, "cuda")
    options: Any = {"sinks": on_gpu.options["sinks"], "topk_length": on_gpu.options["topk_length"]}
    wide = torch.nn.functional.pad(on_gpu.cache.transpose(0, 1), (0, 128))[..., :head_dim]
    out, top, lse = flash_mla.flash_mla_sparse_fwd(
        on_gpu.q[:, 0], wide, on_gpu.indices, SCALE, 512, options["sinks"], options["topk_length"]
    )
    found = sparse_mla_decode_reference(*on_gpu.tensors, kv_format="mla_bf16", softmax_scale=SCALE, **options)
    wanted_out, wanted_lse, wanted_top = (x[:, 0] for x in found)
    assert_as_close_as_flash_mla(out, lse, wanted_out, wanted_lse)
    torch.testing.assert_close(top, wanted_top, rtol=2.01 / 65536, atol=1e-6)


# -- dense -------------------------------------------------------------------------------------------------------------

RAGGED = [0, 1, 3, 64, 65, 700, 4096, 129]


@pytest.mark.parametrize("num_heads", [1, 3, 16, 63, 64, 126, 128])
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_and_queries(num_heads, q_len, causal):
    check(make_dense("mla_bf16", RAGGED, q_len=q_len, num_heads=num_heads, page_size=64), causal=causal)


@pytest.mark.parametrize("q_len", [4, 8, 16])
def test_many_queries(q_len):
    check(make_dense("mla_bf16", RAGGED, q_len=q_len, num_heads=16, page_size=64))


@pytest.mark.parametrize("page_size", [1, 2, 16, 61, 64, 576])
@pytest.mark.parametrize("kv_format", ["mla_bf16", "mla_fp16", "mla_fp8", "mla_model1"])
def test_dense_pages_of_any_size(kv_format, page_size):
    padding = 8 if kv_format == "mla_model1" and page_size % 2 else 48
    check(make_dense(kv_format, RAGGED, num_heads=64, q_len=2, page_size=page_size, padding=padding))


@pytest.mark.parametrize("num_heads", [16, 128])
def test_one_long_request_among_short_ones(num_heads):
    check(make_dense("mla_bf16", [20_000, 1, 0, 70], num_heads=num_heads, page_size=64))


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "kv_format", "head_dim"), WIDTHS)
def test_widths_and_dtypes(tokens, kv_format, head_dim):
    shape: Any = {"q_len": 2, "num_heads": 96, "page_size": 61, "head_dim": head_dim, "padding": 48}
    if tokens == "paged":
        check(make_dense(kv_format, RAGGED, **shape))
    else:
        check(make_sparse(kv_format, topk=300, num_pages=9, sinks=True, extra=(70, 9, 2), **shape))


@pytest.mark.parametrize("num_heads", [64, 96])
@pytest.mark.parametrize(("tokens", "kv_format", "head_dim"), [which for which in WIDTHS if which[0] == "paged"])
def test_widths_and_dtypes_of_boxes(tokens, kv_format, head_dim, num_heads):
    shape: Any = {"q_len": 2, "num_heads": num_heads, "page_size": 64, "head_dim": head_dim, "padding": 48}
    check(make_dense(kv_format, RAGGED, **shape))


def calls() -> list[DenseCall | SparseCall]:
    dense = make_dense("mla_bf16", RAGGED, num_heads=64, q_len=2, page_size=64)
    return [dense, make_sparse("mla_fp8", num_heads=64, topk=700, num_pages=20, page_size=64, sinks=True)]


@pytest.mark.parametrize("call", calls(), ids=["dense", "sparse"])
def test_equal_inputs_give_equal_bits(call):
    on_gpu = moved(call, "cuda")
    first = served(on_gpu)
    for _ in range(5):
        poison = [torch.full_like(x, torch.nan) for x in first]
        del poison
        assert all(torch.equal(a, b) for a, b in zip(served(on_gpu), first, strict=True))


@pytest.mark.parametrize("call", calls(), ids=["dense", "sparse"])
def test_a_captured_graph_follows_its_tensors(call):
    on_gpu = moved(call, "cuda")
    served(on_gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = launched(on_gpu)
    on_gpu.q.copy_(torch.randn_like(on_gpu.q))
    if isinstance(on_gpu, DenseCall):
        on_gpu.seq_lens.sub_(5).clamp_(min=0)
    else:
        on_gpu.indices.copy_(on_gpu.indices.flip(2))
        on_gpu.indices[0, 0] = -1
    graph.replay()
    torch.cuda.synchronize()
    assert_as_close_as_flash_mla(*as_flash_mla(out, lse), *wanted(on_gpu))


@pytest.mark.parametrize("call", calls(), ids=["dense", "sparse"])
def test_a_result_may_be_written_over_anything(call):
    on_gpu = moved(call, "cuda")
    out = torch.full((*on_gpu.q.shape[:3], 512), torch.nan, dtype=on_gpu.q.dtype, device="cuda")
    found, lse = served(on_gpu, out=out)
    assert found is out
    assert_as_close_as_flash_mla(out, lse, *wanted(on_gpu))
