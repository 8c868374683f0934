"""What is wrong with a call is said in the caller's terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels.mla import mla_decode, sparse_mla_decode
from tests.mla.cases import make_dense, make_sparse

Change = Callable[[dict[str, Any]], None]


def _set(**values: Any) -> Change:
    return lambda arguments: arguments.update(values)


def _with(name: str, change: Callable[[torch.Tensor], Any]) -> Change:
    return lambda arguments: arguments.update({name: change(arguments[name])})


DENSE: dict[str, tuple[Change, type[Exception], str]] = {
    "format": (_set(kv_format="fp8"), ValueError, "kv_format: got 'fp8', want one of mla_bf16"),
    "format pair": (_set(kv_format=("mla_fp8", "mla_fp8")), TypeError, "kv_format: got"),
    "q list": (_set(q=[1.0]), TypeError, "q: got list, want a torch.Tensor"),
    "q 3-d": (
        _with("q", lambda q: q[:, 0]),
        ValueError,
        r"q: got shape \[2, 4, 576\], want \[batch, q_len, num_heads, head_dim\]",
    ),
    "q dtype": (
        _with("q", torch.Tensor.half),
        TypeError,
        "q: got dtype torch.float16, want torch.bfloat16 for mla_fp8",
    ),
    "q strides": (_with("q", lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)), ValueError, "q: got strides"),
    "q columns": (_with("q", lambda q: q[..., :512].contiguous()), ValueError, "q: got head_dim 512, want 576"),
    "q heads": (_with("q", lambda q: q.repeat(1, 1, 33, 1)), ValueError, "q: got 132 heads, want 1 to 128"),
    "no heads": (_with("q", lambda q: q[:, :, :0]), ValueError, "q: got 0 heads"),
    "q_len": (_with("q", lambda q: q.repeat(1, 9, 1, 1)), ValueError, "q: got q_len 18, want 1 to 16"),
    "no queries": (_with("q", lambda q: q[:, :0].contiguous()), ValueError, "q: got q_len 0"),
    "cache 4-d": (
        _with("cache", lambda c: c.unsqueeze(2)),
        ValueError,
        "cache: got shape .* want \\[num_pages, page_size, row\\]",
    ),
    "cache dtype": (_with("cache", lambda c: c.to(torch.int16)), TypeError, "cache: got dtype torch.int16"),
    "cache row": (_with("cache", lambda c: c[..., :584]), ValueError, "cache: got rows of 584 elements, want 656"),
    "cache row stride": (_with("cache", lambda c: c.repeat(1, 1, 2)[..., ::2]), ValueError, "a last stride of 1"),
    "cache gaps": (
        _with("cache", lambda c: torch.nn.functional.pad(c, (0, 16))[..., :656]),
        ValueError,
        "want a page's tokens 656 bytes apart",
    ),
    "cache overlap": (_with("cache", lambda c: c[:1].expand(5, -1, -1)), ValueError, "pages that do not overlap"),
    "empty pages": (_with("cache", lambda c: c[:, :0]), ValueError, "cache: got pages without tokens"),
    "cache place": (_with("cache", lambda c: c.to("meta")), ValueError, "cache: got a tensor on meta, want it on cpu"),
    "table dtype": (_with("block_table", torch.Tensor.long), TypeError, "block_table: got dtype torch.int64"),
    "table rows": (_with("block_table", lambda t: t[:1]), ValueError, r"block_table: got shape \[1, .*want \[2, max"),
    "table strides": (_with("block_table", lambda t: t.t().contiguous().t()), ValueError, "columns side by side"),
    "table size": (
        _with("block_table", lambda t: t[:, :1].expand(2, 2**30)),
        ValueError,
        "block_table: got 4294967296 tokens a request",
    ),
    "lengths dtype": (_with("seq_lens", torch.Tensor.long), TypeError, "seq_lens: got dtype torch.int64"),
    "lengths shape": (_with("seq_lens", lambda x: x[:1]), ValueError, r"seq_lens: got shape \[1\], want \[2\]"),
    "length": (_set(seq_lens=torch.tensor([3, 99], dtype=torch.int32)), ValueError, "seq_lens: got 99 for request 1"),
    "negative": (_set(seq_lens=torch.tensor([-1, 9], dtype=torch.int32)), ValueError, "seq_lens: got -1 for request 0"),
    "page": (
        _set(block_table=torch.full((2, 4), 77, dtype=torch.int32)),
        ValueError,
        "block_table: got page 77 for request 0 at position 0, want 0 to 5",
    ),
    "scale": (_set(softmax_scale=0.0), ValueError, "softmax_scale: got 0.0"),
    "causal": (_set(causal=1), TypeError, "causal: got 1, want True or False"),
    "out dtype": (_set(out=torch.zeros(2, 2, 4, 512)), TypeError, "out: got dtype torch.float32, want torch.bfloat16"),
    "out shape": (_set(out=torch.zeros(2, 2, 4, 576).bfloat16()), ValueError, "out: got shape .* with 512 columns"),
    "out list": (_set(out=[]), TypeError, "out: got list"),
    "out strides": (_set(out=torch.zeros(512, 2, 2, 4).bfloat16().permute(1, 2, 3, 0)), ValueError, "out: got strides"),
}


@pytest.mark.parametrize(("change", "error", "words"), DENSE.values(), ids=list(DENSE))
def test_dense_mistakes_are_named(change, error, words):
    call = make_dense("mla_fp8", [3, 9], q_len=2)
    names = ("q", "cache", "block_table", "seq_lens")
    arguments: dict[str, Any] = {**dict(zip(names, call.tensors, strict=True)), "kv_format": "mla_fp8"}
    change(arguments)
    with pytest.raises(error, match=words):
        mla_decode(**arguments)


SPARSE: dict[str, tuple[Change, type[Exception], str]] = {
    "indices dtype": (_with("indices", torch.Tensor.long), TypeError, "indices: got dtype torch.int64"),
    "indices shape": (_with("indices", lambda x: x[:, :1]), ValueError, r"indices: got shape .* want \[3, 2, topk\]"),
    "indices strides": (_with("indices", lambda x: x.repeat(1, 1, 2)[..., ::2]), ValueError, "indices: got strides"),
    "length dtype": (_with("topk_length", torch.Tensor.long), TypeError, "topk_length: got dtype torch.int64"),
    "length shape": (_set(topk_length=torch.zeros(3, 2, dtype=torch.int32)), ValueError, r"topk_length: got shape"),
    "sinks dtype": (_with("sinks", torch.Tensor.bfloat16), TypeError, "sinks: got dtype torch.bfloat16"),
    "sinks shape": (_with("sinks", lambda s: s[:2]), ValueError, r"sinks: got shape \[2\], want \[4\]"),
    "extra alone": (_set(extra_indices=None), ValueError, "extra_indices: got None with extra_cache"),
    "indices alone": (_set(extra_cache=None), ValueError, "extra_indices: got a tensor without extra_cache"),
    "length alone": (
        _set(extra_cache=None, extra_indices=None),
        ValueError,
        "extra_topk_length: got a tensor without extra_cache",
    ),
    "extra row": (_with("extra_cache", lambda c: c[..., :584]), ValueError, "extra_cache: got rows of 584"),
    "extra dtype": (_with("extra_cache", torch.Tensor.float), TypeError, "extra_cache: got dtype torch.float32"),
    "extra shape": (_with("extra_indices", lambda x: x[:1]), ValueError, r"extra_indices: got shape"),
    "extra list": (_set(extra_indices=[1]), TypeError, "extra_indices: got list"),
    "scale": (_set(softmax_scale="1"), TypeError, "softmax_scale: got str"),
}


@pytest.mark.parametrize(("change", "error", "words"), SPARSE.values(), ids=list(SPARSE))
def test_sparse_mistakes_are_named(change, error, words):
    call = make_sparse("mla_fp8", length=True, sinks=True, extra=(4, 2, 3), extra_length=True)
    names = ("q", "cache", "indices")
    arguments: dict[str, Any] = {**dict(zip(names, call.tensors, strict=True)), **call.options, "kv_format": "mla_fp8"}
    change(arguments)
    with pytest.raises(error, match=words):
        sparse_mla_decode(**arguments)
