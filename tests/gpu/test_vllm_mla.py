"""Decoding of latent attention through vLLM's backend with the plugin, on a GPU; needs vLLM."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm")

HEADS, TOKENS, SCALE = 8, (700, 300, 64, 161), 192**-0.5
NEW_TOKENS = (1, 2, 4, 16, 17, 28, 64)
"""Of a request: FlashMLA serves those that `mla_decode` does not."""


def layer_of(implementation: type, **fields: Any) -> Any:
    """A layer's implementation, without what vLLM's own constructor asks of an engine."""
    layer: Any = object.__new__(implementation)
    usual = {"serves": True, "scale": SCALE, "dcp_world_size": 1, "num_heads": HEADS}
    for name, value in {**usual, "kv_cache_dtype": "auto", "kv_lora_rank": 512, **fields}.items():
        setattr(layer, name, value)
    return layer


def decoding(new: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """(queries, cache, metadata, exact results in fp64) of requests with as many new tokens each."""
    from vllm.v1.attention.ops.flashmla import get_mla_metadata

    generator = torch.Generator("cuda").manual_seed(new)
    pages = -(-max(TOKENS) // 64)
    count = len(TOKENS)
    cache = torch.randn(count * pages, 64, 576, generator=generator, device="cuda").to(dtype)
    table = torch.randperm(count * pages, generator=generator, device="cuda").int().view(count, pages)
    lengths = torch.tensor(TOKENS, dtype=torch.int32, device="cuda")
    q = torch.randn(count * new, HEADS, 576, generator=generator, device="cuda").to(dtype)
    schedule, _ = get_mla_metadata(lengths, new * HEADS, 1, is_fp8_kvcache=False)
    decode = SimpleNamespace(block_table=table, seq_lens=lengths, scheduler_metadata=schedule)
    rows = []
    for request, length in enumerate(TOKENS):
        keys = cache[table[request].long()].flatten(0, 1)[:length].double()
        scores = q[request * new : (request + 1) * new].double() @ keys.T * SCALE
        seen = torch.arange(length, device="cuda") <= torch.arange(length - new, length, device="cuda")[:, None]
        rows.append(scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ keys[:, :512])
    return q, cache, SimpleNamespace(num_decodes=count, decode=decode), torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("new", NEW_TOKENS)
def test_decoding_gives_attention_over_the_whole_context(new: int, dtype: torch.dtype):
    from vllm.v1.attention.backends.mla.flashmla import FlashMLAImpl

    from cute_kernels.integrations.vllm.mla import Decoding

    q, cache, metadata, exact = decoding(new, dtype)
    out, _ = layer_of(type("Ours", (Decoding, FlashMLAImpl), {})).forward_mqa(
        (q[..., :512], q[..., 512:]), cache, metadata, None
    )
    assert out.shape == exact.shape and out.dtype == dtype
    error = float((out.double() - exact).norm() / exact.norm())
    assert error < (4e-3 if dtype == torch.bfloat16 else 1e-3), error


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_chosen_tokens_are_decoded_for_as_many_heads_as_there_are(heads: int):
    from cute_kernels import quantize_mla_kv
    from cute_kernels.integrations.vllm.mla import CuteKernelsSparseMlaImpl
    from layouts.kv.mla import MlaFp8

    generator = torch.Generator("cuda").manual_seed(heads)
    tokens = torch.randn(40 * 64, 576, generator=generator, device="cuda").bfloat16()
    scaled = quantize_mla_kv(tokens, kv_format="mla_fp8")
    q = torch.randn(5, heads, 576, generator=generator, device="cuda").bfloat16()
    slots = torch.stack([torch.randperm(2560, generator=generator, device="cuda")[:2048] for _ in range(5)]).int()
    slots[2, 1000:] = -1
    layer = layer_of(CuteKernelsSparseMlaImpl, softmax_scale=SCALE, num_heads=heads)
    bf16 = layer._bf16_flash_mla_kernel(q, tokens.view(40, 64, 576), slots)
    given = {
        "mla_bf16": bf16[0] if layer.gives_lse else bf16,
        "mla_fp8": layer._fp8_flash_mla_kernel(q.unsqueeze(0), scaled.view(40, 64, 656), slots.unsqueeze(0), None)[0][
            0
        ],
    }
    exact = {"mla_bf16": tokens.double(), "mla_fp8": MlaFp8().dequantize(scaled.cpu()).double().cuda()}
    for form, out in given.items():
        for token in range(5):
            keys = exact[form][slots[token][slots[token] >= 0].long()]
            wanted = (q[token].double() @ keys.T * SCALE).softmax(-1) @ keys[:, :512]
            error = float((out[token].double() - wanted).norm() / wanted.norm())
            assert error < 5e-3, (form, token, error)
