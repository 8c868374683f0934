"""Variants of the MLA decode kernels on a GPU that no public call chooses: orders, fences, scales, parts, prefetching.

Judged as the public calls are, see :mod:`.test_mla_decode`; outputs are poisoned.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_kernels.mla.compile import CombineSpec, MlaSpec
from cute_kernels.mla.config import CombineConfig, MlaConfig
from cute_kernels.mla.launch import NO_CACHE, make_plan
from cute_kernels.mla.reference import mla_decode_reference, sparse_mla_decode_reference
from layouts.kv.mla import MlaModel1
from tests.mla.cases import DenseCall, SparseCall, assert_as_close_as_flash_mla, make_dense, make_sparse, moved

pytestmark = pytest.mark.gpu

DEVIATION, SCALE = 0.1, 0.5
SPARSE = [
    MlaConfig(),
    MlaConfig(fence="reader"),
    MlaConfig(seesaw=True),
    MlaConfig(scales="mixed", prefetch=4),
    MlaConfig(seesaw=True, prefetch=2),
    MlaConfig(seesaw=True, prefetch=8, fence="reader"),
    MlaConfig(scales="power_of_2"),
    MlaConfig(scales="power_of_2", seesaw=True, prefetch=4, fence="reader"),
    MlaConfig(crossover=True),
    MlaConfig(crossover=True, send_slabs=9, scales="mixed", prefetch=4),
    MlaConfig(crossover=True, seesaw=True),
    MlaConfig(form="mla_model1", head_dim=512, scales="power_of_2", prefetch=4),
    MlaConfig(form="mla_bf16", fence="reader"),
    MlaConfig(form="mla_bf16", fence="reader", seesaw=True),
]
PAGED = [
    MlaConfig("paged"),
    MlaConfig("paged", seesaw=True),
    MlaConfig("paged", "mla_bf16", fence="reader"),
    MlaConfig("paged", "mla_bf16", fence="reader", seesaw=True),
    MlaConfig("paged", "mla_bf16", fence="reader", seesaw=True, prefetch=2),
]


def specs() -> list[Any]:
    return [*map(MlaSpec, [*SPARSE, *PAGED]), CombineSpec(CombineConfig())]


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def pages_of(cache: torch.Tensor) -> tuple[int, int, int, int]:
    page_stride, token_stride, _ = (stride * cache.element_size() for stride in cache.stride())
    if cache.shape[2] == MlaModel1().row_bytes:
        token_stride = MlaModel1.DATA_BYTES
    return cache.data_ptr(), page_stride, token_stride, cache.shape[1]


def run(config: MlaConfig, call: DenseCall | SparseCall, tokens: tuple[int, ...], num_parts: int, sinks=None):
    """(out, lse) of a kernel over ``tokens``, what it takes behind num_parts; twice, with equal bits."""
    plan = make_plan(config, "sm_90a", math.prod(call.q.shape[:3]), num_parts)
    results = []
    for _ in range(2):
        out = torch.full((*call.q.shape[:3], 512), torch.nan, dtype=torch.bfloat16, device="cuda")
        results.append(plan.run(call.q, SCALE, tokens, out, sinks))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return results[0]


def check_sparse(config: MlaConfig, num_parts: int = 1, **shape: Any) -> None:
    shape = {"num_pages": 40, "page_size": 64, "length": True, "sinks": True} | shape
    call = moved(make_sparse(config.form, head_dim=config.head_dim, deviation=DEVIATION, **shape), "cuda")
    topk, lengths = call.indices.shape[2], call.options.get("topk_length")
    num_tokens = call.cache.shape[0] * call.cache.shape[1]
    tokens = (*pages_of(call.cache), num_tokens, call.indices.data_ptr(), topk, address(lengths), *NO_CACHE)
    out, lse = run(config, call, tokens, num_parts, call.options["sinks"])
    wanted_out, wanted_lse, _ = sparse_mla_decode_reference(
        *call.tensors, kv_format=call.kv_format, **(call.options | {"softmax_scale": SCALE})
    )
    assert_as_close_as_flash_mla(out, lse, wanted_out, wanted_lse)


def check_paged(config: MlaConfig, lengths: list[int], num_parts: int = 1, causal: bool = True, **shape: Any) -> None:
    call = moved(make_dense(config.form, lengths, deviation=DEVIATION, **shape), "cuda")
    table = call.block_table.data_ptr(), call.block_table.stride(0), call.block_table.shape[1]
    tokens = (*pages_of(call.cache), call.cache.shape[0], *table, call.seq_lens.data_ptr(), int(causal))
    out, lse = run(config, call, tokens, num_parts)
    options: Any = {"kv_format": call.kv_format, "softmax_scale": SCALE, "causal": causal}
    wanted_out, wanted_lse = mla_decode_reference(*call.tensors, **options)
    assert_as_close_as_flash_mla(out, lse, wanted_out, wanted_lse)


def name(config: MlaConfig) -> str:
    return config.name


@pytest.mark.parametrize("topk", [1, 64, 65, 128, 192, 1500])
@pytest.mark.parametrize("config", SPARSE, ids=name)
def test_even_and_odd_numbers_of_blocks(config, topk):
    check_sparse(config, batch=3, q_len=2, num_heads=128, topk=topk)


@pytest.mark.parametrize("num_parts", [2, 3, 7])
@pytest.mark.parametrize("config", SPARSE, ids=name)
def test_parts(config, num_parts):
    check_sparse(config, num_parts, batch=4, num_heads=128, topk=700)


@pytest.mark.parametrize("config", SPARSE, ids=name)
def test_more_ctas_than_there_is_room_for(config):
    check_sparse(config, batch=90, q_len=2, num_heads=128, topk=300)


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("config", PAGED, ids=name)
def test_pages(config, num_parts, page_size):
    check_paged(config, [0, 1, 64, 65, 777, 130], num_parts, q_len=2, num_heads=80, page_size=page_size)


@pytest.mark.parametrize("config", PAGED, ids=name)
def test_queries_that_all_see_everything(config):
    check_paged(config, [300, 5, 129], causal=False, q_len=3, num_heads=64, page_size=16)
