"""FlashMLA's calls on CPU tensors: its signatures, its shapes and conventions, its tests' awkward strides."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

import cute_kernels.compat.flash_mla as flash_mla
from cute_kernels import arguments as package_arguments
from cute_kernels.mla import checks
from tests.mla.cases import DenseCall, SparseCall, assert_near, make_dense, make_sparse

TOLERANCE = 2e-2  # of a result rounded to bf16


def gaps_between(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with room after every dimension, as FlashMLA's tests lay tensors out."""
    larger = tensor.new_zeros([size + 1 for size in tensor.shape[:-1]] + [tensor.shape[-1] + 128])
    view = larger[tuple(slice(size) for size in tensor.shape)]
    return view.copy_(tensor)


def decode(call: SparseCall | DenseCall, metadata: Any = None, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments: dict[str, Any] = {
        "q": call.q,
        "k_cache": call.cache.unsqueeze(2),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": metadata or flash_mla.get_mla_metadata()[0],
        "is_fp8_kvcache": call.kv_format in ("mla_fp8", "mla_model1"),
    }
    if isinstance(call, DenseCall):
        arguments |= {"block_table": call.block_table, "cache_seqlens": call.seq_lens}
    else:
        names = {"sinks": "attn_sink", "extra_cache": "extra_k_cache", "extra_indices": "extra_indices_in_kvcache"}
        arguments |= {"indices": call.indices} | {names.get(name, name): x for name, x in call.options.items()}
        if arguments.get("extra_k_cache") is not None:
            arguments["extra_k_cache"] = arguments["extra_k_cache"].unsqueeze(2)
    return flash_mla.flash_mla_with_kvcache(**(arguments | changes))


def as_its_tests_lay_it_out(cache: torch.Tensor) -> torch.Tensor:
    """656-byte pages with room for a token more, 584-byte pages padded to a multiple of 576 bytes."""
    pages, size, row = cache.shape
    stride = (size + 1) * row if row == 656 else -(-size * row // 576) * 576
    memory = cache.new_full((pages, stride), 255)
    memory[:, : size * row] = cache.flatten(1)
    return memory[:, : size * row].unflatten(1, (size, row))


def test_signatures_are_flash_mlas():
    assert list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters) == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
        "softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache",
        "extra_indices_in_kvcache", "topk_length", "extra_topk_length",
    ]  # fmt: skip
    assert list(inspect.signature(flash_mla.flash_mla_sparse_fwd).parameters) == [
        "q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length",
    ]  # fmt: skip
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(flash_mla.flash_mla_with_kvcache).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert defaults.pop("causal") is False and defaults.pop("is_fp8_kvcache") is False
    assert set(defaults.values()) == {None}
    metadata, nothing = flash_mla.get_mla_metadata(1, "old", arguments=2)
    assert isinstance(metadata, flash_mla.FlashMLASchedMeta) and nothing is None and not metadata.have_initialized


@pytest.mark.parametrize("kv_format", ["mla_fp8", "mla_model1", "mla_bf16"])
@pytest.mark.parametrize("everything", [False, True])
def test_sparse_decode(kv_format, everything):
    options = {"length": True, "sinks": True, "extra": (4, 2, 7), "extra_length": True} if everything else {}
    call = make_sparse(kv_format, padding=16, **options)
    wanted = call.oracle()
    loose = SparseCall(gaps_between(call.q), call.cache, gaps_between(call.indices), kv_format, call.options)
    out, lse = decode(loose)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32 and lse.shape == (3, 4, 2)
    assert_near(out, wanted[0], TOLERANCE)
    assert_near(lse.transpose(1, 2), wanted[1], 1e-4)


@pytest.mark.parametrize(("topk", "block_size"), [(5, 2), (30, 61), (70, 64), (9, 69), (40, 576)])
@pytest.mark.parametrize("kv_format", ["mla_fp8", "mla_model1"])
@pytest.mark.parametrize("features", [(), ("length",), ("length", "extra"), ("length", "extra", "extra_length")])
def test_what_its_sparse_tests_vary(kv_format, topk, block_size, features):
    """Block sizes, strides, lengths and extra caches; on a GPU, too, nothing of it is refused."""
    options: dict[str, Any] = {"length": "length" in features, "extra_length": "extra_length" in features}
    options["extra"] = (topk, 2, {2: 576, 61: 2, 64: 53, 69: 64, 576: 61}[block_size]) if "extra" in features else None
    call = make_sparse(
        kv_format, batch=2, q_len=3, num_heads=2, topk=topk, num_pages=3, page_size=block_size, sinks=True, **options
    )
    wanted = call.oracle()
    caches = {
        name: as_its_tests_lay_it_out(cache)
        for name, cache in {"cache": call.cache, "extra_cache": call.options.get("extra_cache")}.items()
        if cache is not None
    }
    extra = {name: cache for name, cache in caches.items() if name != "cache"}
    laid = SparseCall(
        gaps_between(call.q), caches["cache"], gaps_between(call.indices), kv_format, call.options | extra
    )
    out, lse = decode(laid)
    assert_near(out, wanted[0], TOLERANCE)
    assert_near(lse.transpose(1, 2), wanted[1], 1e-4)
    problem = checks.sparse_problem(call.q, caches["cache"], call.indices, kv_format=kv_format, **laid.options)
    checks.check_alignment(problem, **caches)


@pytest.mark.parametrize("h_kv", [1, 2, 3, 8])
def test_heads_of_a_dense_cache_begin_where_a_gpu_can_read(h_kv):
    cache = torch.zeros(3, 64, h_kv, 576).bfloat16()
    table, lengths = torch.zeros(2, 3).int(), torch.zeros(2).int()
    for head in range(h_kv):
        own = cache[:, :, head]
        problem = checks.dense_problem(torch.zeros(2, 4, 9, 576).bfloat16(), own, table, lengths, kv_format="mla_bf16")
        checks.check_alignment(problem, cache=own)


@pytest.mark.parametrize("kv_format", ["mla_bf16", "mla_fp16", "mla_fp8"])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_decode(kv_format, causal):
    call = make_dense(kv_format, [0, 1, 11], q_len=3)
    wanted = call.oracle(causal=causal)
    out, lse = decode(call, causal=causal)
    assert out.dtype == call.q.dtype and lse.shape == (3, 4, 3)
    assert_near(out, wanted[0], TOLERANCE)
    assert_near(lse.transpose(1, 2), wanted[1], 1e-4)


def test_dense_decode_with_several_heads_in_the_cache():
    calls = [make_dense("mla_bf16", [3, 9], q_len=2, num_heads=3, seed=0) for _ in range(2)]
    other = make_dense("mla_bf16", [3, 9], q_len=2, num_heads=3, seed=0).cache * 0.5
    cache = torch.stack((calls[0].cache, other), dim=2)
    q = torch.cat((calls[0].q, calls[1].q), dim=2)
    both = DenseCall(q, cache, calls[0].block_table, calls[0].seq_lens, "mla_bf16")
    out, lse = decode(both, k_cache=cache)
    for part, own in ((slice(3), calls[0].cache), (slice(3, 6), other)):
        alone = DenseCall(calls[0].q, own, calls[0].block_table, calls[0].seq_lens, "mla_bf16")
        wanted, wanted_lse = decode(alone)
        assert torch.equal(out[:, :, part], wanted) and torch.equal(lse[:, part], wanted_lse)


def test_metadata_serves_calls_of_one_configuration():
    metadata, _ = flash_mla.get_mla_metadata()
    call = make_sparse("mla_fp8")
    first = decode(call, metadata)
    assert metadata.have_initialized and metadata.config is not None and metadata.config.topk == 7
    assert torch.equal(decode(call, metadata)[0], first[0])
    with pytest.raises(ValueError, match="got a call with topk 5, want 7"):
        decode(call, metadata, indices=call.indices[..., :5])


@pytest.mark.parametrize("head_dim", [576, 512])
def test_sparse_prefill(head_dim):
    call = make_sparse(
        "mla_bf16", batch=5, q_len=1, head_dim=head_dim, num_pages=1, page_size=9, length=True, sinks=True
    )
    wanted = call.oracle(scale=0.03)
    arguments = gaps_between(call.q[:, 0]), call.cache.transpose(0, 1), gaps_between(call.indices)
    options = {"attn_sink": call.options["sinks"], "topk_length": call.options["topk_length"]}
    out, top, lse = flash_mla.flash_mla_sparse_fwd(*arguments, 0.03, **options)
    assert out.shape == (5, 4, 512) and top.shape == lse.shape == (5, 4)
    assert_near(out, wanted[0][:, 0], TOLERANCE)
    assert_near(lse, wanted[1][:, 0], 1e-4)
    assert_near(top, wanted[2][:, 0], 1e-4)


def test_prefill_indices_beyond_the_tokens_are_no_mistake():
    q, kv = torch.randn(2, 3, 576).bfloat16(), torch.randn(4, 1, 576).bfloat16()
    indices = torch.tensor([[[0, 2, 4]], [[2**31 - 1, -1, 4]]], dtype=torch.int32)
    expected = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1)
    with package_arguments.checking_values():
        found = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert not found[0][1].any() and torch.all(found[1][1] == -math.inf) and torch.all(found[2][1] == math.inf)


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "v": ({"head_dim_v": 576}, ValueError, "head_dim_v: got 576, want 512"),
    "metadata": ({"tile_scheduler_metadata": torch.zeros(1)}, TypeError, "want the FlashMLASchedMeta"),
    "splits": ({"num_splits": torch.zeros(1)}, ValueError, "num_splits: got Tensor, want None"),
    "causal": ({"causal": True}, ValueError, "causal: got True with indices"),
    "q": ({"q": torch.zeros(2, 576)}, ValueError, r"q: got shape \[2, 576\], want \[b, s_q, h_q, head_dim\]"),
    "cache": ({"k_cache": torch.zeros(2, 3, 656)}, ValueError, "k_cache: got shape"),
    "heads": ({"k_cache": torch.zeros(2, 3, 2, 656).byte()}, ValueError, r"want \[num_blocks, page_block_size, 1, row"),
    "table": ({"indices": None}, ValueError, "block_table: got None without indices"),
    "sink": ({"indices": None, "attn_sink": torch.zeros(4)}, ValueError, "attn_sink: got a tensor without indices"),
}


@pytest.mark.parametrize(("changes", "error", "words"), MISTAKES.values(), ids=list(MISTAKES))
def test_mistakes_are_named(changes, error, words):
    with pytest.raises(error, match=words):
        decode(make_sparse("mla_fp8"), **changes)


def test_mistakes_of_prefill_are_named():
    q, kv, indices = torch.zeros(2, 4, 576).bfloat16(), torch.zeros(3, 1, 576).bfloat16(), torch.zeros(2, 1, 5).int()
    for arguments, words in (
        ((q[0], kv, indices), "q: got shape"),
        ((q, kv[:, 0], indices), "kv: got shape"),
        ((q, kv, indices[0]), "indices: got shape"),
    ):
        with pytest.raises(ValueError, match=words):
            flash_mla.flash_mla_sparse_fwd(*arguments, 0.1)
    with pytest.raises(ValueError, match="d_v: got 256, want 512"):
        flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, 256)
