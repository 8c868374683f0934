"""What judges kernels is judged: the comparison lets a rounded result pass, and nothing that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.mla import mla_decode, sparse_mla_decode
from cute_kernels.mla.reference import sparse_mla_decode_reference
from tests.mla.cases import assert_as_close_as_flash_mla, make_dense, make_sparse, moved


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    call = make_sparse("mla_fp8", topk=40, num_pages=9)
    call.indices[0, 0] = -1
    out, lse, _ = sparse_mla_decode_reference(*call.tensors, kv_format="mla_fp8")
    return out, lse


def test_rounding_passes():
    out, lse = pair()
    assert_as_close_as_flash_mla(out.bfloat16(), lse * (1 + 1e-5), out, lse)


@pytest.mark.parametrize("wrong", ["nan", "element", "direction", "lse", "finite", "infinite"])
def test_mistakes_do_not(wrong):
    out, lse = pair()
    bad_out, bad_lse = out.clone(), lse.clone()
    if wrong == "nan":
        bad_out[0, 0, 0, 0] = torch.nan
    elif wrong == "element":
        bad_out[1, 1, 2, 300] += 0.05
    elif wrong == "direction":
        bad_out *= 1 + 0.015 * torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    elif wrong == "lse":
        bad_lse[1, 0, 0] += 0.01
    elif wrong == "finite":
        bad_lse[0, 0, 0] = 0.0
    else:
        bad_lse[1, 0, 0] = torch.inf
    with pytest.raises(AssertionError):
        assert_as_close_as_flash_mla(bad_out, bad_lse, out, lse)


def test_moved_calls_are_the_same():
    dense = make_dense("mla_model1", [3, 9], page_size=2, padding=48)
    sparse = make_sparse("mla_model1", padding=48, length=True, sinks=True, extra=(3, 2, 2))
    again, other = moved(dense, "cpu"), moved(sparse, "cpu")
    assert again.cache.stride() == dense.cache.stride()
    assert other.options["extra_cache"].stride() == sparse.options["extra_cache"].stride()
    run: Any = {"kv_format": "mla_model1"}
    assert torch.equal(
        mla_decode(again.q, again.cache, again.seq_lens, block_table=again.block_table, **run),
        mla_decode(dense.q, dense.cache, dense.seq_lens, block_table=dense.block_table, **run),
    )
    found = sparse_mla_decode(*other.tensors, **run, **other.options)
    assert torch.equal(found, sparse_mla_decode(*sparse.tensors, **run, **sparse.options))
