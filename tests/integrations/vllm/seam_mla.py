"""Checks of latent attention (MLA)."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integrations.vllm.checks import check


def made(implementation: type, **fields: Any) -> Any:
    """A layer's implementation, without vLLM's own part of it."""
    layer: Any = object.__new__(implementation)
    usual = {"serves": True, "scale": 0.1, "softmax_scale": 0.1, "dcp_world_size": 1, "num_heads": 3}
    for name, value in {**usual, **fields}.items():
        setattr(layer, name, value)
    return layer


def attend(q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """q [heads, 576] over tokens [n, 576], in fp64: [heads, 512]."""
    scores = q.double() @ tokens.double().T * 0.1
    return scores.softmax(-1) @ tokens.double()[:, :512]


@check
def whole_contexts_are_decoded_from_a_latent_cache() -> None:
    from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend, FlashAttnMLAImpl
    from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend, FlashMLAImpl

    for backend, base, measured in (
        (FlashMLABackend, FlashMLAImpl, False),
        (FlashAttnMLABackend, FlashAttnMLAImpl, True),
    ):
        decode_whole_contexts(made(backend.get_impl_cls()), base, measured)


def decode_whole_contexts(layer: Any, base: type, measured: bool) -> None:
    """measured: whether a step's metadata say how many new tokens the longest request has."""
    generator = torch.Generator().manual_seed(0)
    assert isinstance(layer, base) and type(layer).__name__.startswith("CuteKernels")
    cache = torch.randn(6, 64, 576, generator=generator).bfloat16()
    table, lengths = torch.tensor([[3, 0], [5, 1]], dtype=torch.int32), torch.tensor([70, 9], dtype=torch.int32)
    decode = SimpleNamespace(block_table=table, seq_lens=lengths)
    metadata = SimpleNamespace(num_decodes=2, decode=decode)
    q = torch.empty(0)
    for q_len in (1, 2):
        if measured:
            decode.max_query_len = q_len
        q = torch.randn(2 * q_len, 3, 576, generator=generator).bfloat16()
        for given in (q, (q[..., :512], q[..., 512:])):
            out, lse = layer.forward_mqa(given, cache, metadata, None)
            assert out.shape == (2 * q_len, 3, 512) and lse is None
            for token in range(2 * q_len):
                request = token // q_len
                seen = int(lengths[request]) - q_len + token % q_len + 1
                expected = attend(q[token], cache[table[request].long()].flatten(0, 1)[:seen])
                assert (out[token].double() - expected).abs().max() < 0.02
    long = torch.zeros(2 * 17, 3, 576).bfloat16()
    cut = made(type(layer), dcp_world_size=2)
    with mock.patch.object(base, "forward_mqa", lambda self, q, *_: ("vLLM's", q)):
        if measured:
            decode.max_query_len = 17
        assert layer.forward_mqa(long, cache, metadata, None) == ("vLLM's", long)
        if measured:
            decode.max_query_len = 3  # requests of 1 and of 3 new tokens
            assert layer.forward_mqa(q, cache, metadata, None)[0] == "vLLM's"
            decode.max_query_len = 2
        assert cut.forward_mqa(q, cache, metadata, None)[0] == "vLLM's"
        assert layer.forward_mqa(q, cache[:, :16], metadata, None)[0] == "vLLM's"
    if measured:
        decode.max_query_len = 1
    give_parts_that_merge(cut, q[:2], cache, table, lengths, metadata)


def give_parts_that_merge(
    layer: Any, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, metadata: Any
) -> None:
    """Two GPUs' parts of contexts, the second request's all on the first GPU, are the whole by their log-sum-exps."""
    whole = [cache[table[request].long()].flatten(0, 1)[: int(lengths[request])] for request in range(2)]
    parts = []
    for kept in (torch.tensor([40, 9], dtype=torch.int32), torch.tensor([30, 0], dtype=torch.int32)):
        pages = torch.zeros_like(cache)
        for request in range(2):
            mine = whole[request][:40] if len(parts) == 0 else whole[request][40:]
            pages[request, : len(mine)] = mine
        metadata.decode.block_table, metadata.decode.seq_lens = torch.tensor([[0], [1]], dtype=torch.int32), kept
        parts.append(layer.forward_mqa(q, pages, metadata, None))
    weights = torch.stack([lse for _, lse in parts]).double().softmax(0)
    outs = torch.stack([out for out, _ in parts]).double()
    merged = (weights[..., None] * outs).sum(0)
    for request in range(2):
        assert (merged[request] - attend(q[request], whole[request])).abs().max() < 0.02


@check
def chosen_tokens_are_decoded_for_as_many_heads_as_there_are() -> None:
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseImpl

    from cute_kernels import quantize_mla_kv
    from layouts.kv.mla import MlaFp8

    generator = torch.Generator().manual_seed(1)
    layer = made(FlashMLASparseBackend.get_impl_cls())
    assert isinstance(layer, FlashMLASparseImpl) and type(layer).__name__ == "CuteKernelsSparseMlaImpl"
    tokens = torch.randn(4, 64, 576, generator=generator).bfloat16()
    q = torch.randn(5, 3, 576, generator=generator).bfloat16()
    slots = torch.stack([torch.randperm(256, generator=generator)[:40] for _ in range(5)]).int()
    slots[2, 30:] = -1
    exact = {"mla_bf16": tokens.flatten(0, 1).double()}
    scaled = quantize_mla_kv(tokens.flatten(0, 1), kv_format="mla_fp8")
    exact["mla_fp8"] = MlaFp8().dequantize(scaled).double()
    cache = scaled.view(4, 64, 656)
    counts = torch.tensor([40, 40, 30, 40, 40]).int()
    bf16 = layer._bf16_flash_mla_kernel(q, tokens, slots, counts)
    if layer.gives_lse:  # and takes rows of more heads, and room for the result
        padded = torch.nn.functional.pad(q, (0, 0, 0, 61))
        again, _ = layer._bf16_flash_mla_kernel(padded, tokens, slots, counts, 3, out=torch.empty(5, 64, 512))
        bf16, lse = bf16
        assert lse is None and torch.equal(again, bf16)
    outs = {
        "mla_bf16": bf16,
        "mla_fp8": layer._fp8_flash_mla_kernel(q.unsqueeze(0), cache, slots.unsqueeze(0), None)[0].squeeze(0),
    }
    for form, out in outs.items():
        for token in range(5):
            chosen = slots[token][slots[token] >= 0].long()
            assert out.shape == (5, 3, 512)
            assert (out[token].double() - attend(q[token], exact[form][chosen])).abs().max() < 0.02, form
    other = made(type(layer), serves=False)
    with mock.patch.object(FlashMLASparseImpl, "_fp8_flash_mla_kernel", lambda *_: "vLLM's"):
        assert other._fp8_flash_mla_kernel(q, cache, slots, None) == "vLLM's"


@check
def other_mla_is_left_to_vllm_with_a_reason() -> None:
    from cute_kernels.integrations.vllm import mla

    def of(**changes: Any) -> Any:
        usual = {"kv_cache_dtype": "auto", "head_size": 576, "kv_lora_rank": 512, "num_heads": 16, "dcp_world_size": 1}
        return SimpleNamespace(**{**usual, **changes})

    def reason(form: str | None = "mla_bf16", **changes: Any) -> str | None:
        return mla.reason_against(of(**changes), form)

    assert reason() is None
    assert "fp8 caches" in str(reason(None, kv_cache_dtype="fp8"))
    assert "320 columns" in str(reason(head_size=320))
    assert "256 heads" in str(reason(num_heads=256))
    assert reason(dcp_world_size=2) is None and "160 heads" in str(reason(dcp_world_size=10))
    assert "decode context parallelism" in str(mla.reason_against(of(dcp_world_size=2), "mla_bf16", cut=False))
    refused = "pages of 16 tokens; --block-size 64 is supported"
    for block, is_asked, wanted in ((16, True, refused), (16, False, None), (128, True, None)):
        caches = SimpleNamespace(block_size=block, user_specified_block_size=is_asked)
        config = SimpleNamespace(cache_config=caches)
        with mock.patch.object(mla, "get_current_vllm_config_or_none", lambda config=config: config):
            assert mla._reason_of_pages() == wanted
    with mock.patch.object(mla, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True)):
        assert "VLLM_BATCH_INVARIANT" in str(reason())


@check
def pages_have_64_tokens_where_layers_are_served() -> None:
    from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend as Backend

    made = Backend.get_impl_cls()
    assert [Backend.get_preferred_block_size(default) for default in (16, 128)] == [16, 128]
    with mock.patch.object(made, "serves_some", True):
        assert [Backend.get_preferred_block_size(default) for default in (16, 128)] == [64, 128]


@check
def kernels_of_every_step_of_mla_are_listed() -> None:
    from cute_kernels.integrations import mla_kernels

    for heads in (1, 16, 64, 128):
        for form, chosen in (("mla_bf16", False), ("mla_fp16", False), ("mla_fp8", True), ("mla_bf16", True)):
            decodes = mla_kernels.Decodes(form, chosen, heads, (1, 8, 256), (1, 4), 2048 if chosen else 8192, 64)
            specs = mla_kernels.specs(decodes, 132)
            assert {type(spec).__name__ for spec in specs} == {"MlaSpec", "CombineSpec"}
            assert all(spec.config.can_implement() is None for spec in specs if type(spec).__name__ == "MlaSpec")
