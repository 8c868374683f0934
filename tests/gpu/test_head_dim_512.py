"""Heads of 512 columns (Gemma 4's global layers) on a GPU: decode attention against fp64, and a cache that is filled.

`test_append.py` and `test_quantize_kv.py` write such rows bit for bit, `test_decode_formats.py` reads them in every
format.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import extend_attention
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.kv_cache import KVCache
from cute_kernels.names import KvFormats
from cute_kernels.runtime import arch_of, load_many
from tests.attention.cases import Call, assert_close, make_call
from tests.gpu.specs import decode_spec

pytestmark = pytest.mark.gpu

CUDA = "cuda"
LENGTHS = (0, 1, 31, 32, 33, 300, 513, 2500)
PAGES = {"page_size": 64, "num_kv_heads": 2}
MIXED = ("int8_token_head", "int4_g4")
FORMATS: tuple[Any, ...] = ("bf16", "e4m3_tensor", "int8_token_head", MIXED, "int4_g4", "int4_g1")
CASES: dict[str, dict[str, Any]] = {
    "contiguous": {"num_kv_heads": 2},
    "pages of 64": PAGES,
    "pages of 16, 16 heads a group": {"page_size": 16, "group": 16},
    "head-major pages, window": {**PAGES, "cache_layout": "HND", "window_size": 100},
    "4 queries of 4 heads": {**PAGES, "group": 4, "q_len": 4},
    "16 queries, sinks": {**PAGES, "q_len": 16, "sinks": True},
}
CALLS = [{"kv_format": form, **options} for form in FORMATS for options in CASES.values()]
NAMES = [f"{form}, {name}" for form in FORMATS for name in CASES]


def call_of(options: dict[str, Any], **more: Any) -> Call:
    return make_call(lengths=LENGTHS, head_dim=512, **options, **more)


def specs() -> list[AttentionSpec]:
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""
    return list(dict.fromkeys(decode_spec(call_of(options, blank=True)) for options in CALLS))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    load_many(specs(), arch_of())


@pytest.mark.parametrize("options", CALLS, ids=NAMES)
def test_outputs_are_those_of_the_reference(options: dict[str, Any]):
    call = call_of(options, device=CUDA)
    out, lse = call.run(return_lse=True)
    assert torch.equal(out, call.run()), "the same inputs give the same bits"
    assert_close(call, out, lse)


def filled(kv_format: KvFormats, device: str) -> torch.Tensor:
    """Outputs [3, 18, 16, 512] of three sequences: 16 tokens at once, then one at a time."""
    generator = torch.Generator().manual_seed(3)
    cache = KVCache(1, 16, 16, 2, 512, kv_format=kv_format, device=device)
    batch, sequences = cache.make_batch(3), ("a", "b", "c")
    for sequence in sequences:
        cache.allocate(sequence, 0)
    outs = []
    for tokens in (16, 1, 1):
        cache.extend_all(sequences, tokens)
        batch.update(sequences, tokens)
        shapes = ((3, tokens, heads, 512) for heads in (16, 2, 2))
        q, k, v = (torch.randn(*shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
        outs.append(cache.append_and_attend(0, batch, q, k, v))
    return torch.cat(outs, dim=1).double().cpu()


@pytest.mark.parametrize("kv_format", ["bf16", "int8_token_head", "int4_g4"])
def test_a_cache_on_the_gpu_is_the_cache_on_the_cpu(kv_format: KvFormats):
    found, want = filled(kv_format, CUDA), filled(kv_format, "cpu")
    assert (found - want).norm() < 5e-3 * want.norm()


def test_extend_attention_refuses_it_by_name():
    call = call_of({"kv_format": "bf16"}, device=CUDA)
    ends = torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=CUDA)
    with pytest.raises(ValueError, match="q: got head_dim 512, want one of 64, 80, 96, 128, 192, 256"):
        extend_attention(call.q[:, 0], *call.tensors[1:], cu_seqlens_q=ends, kv_format="bf16")
