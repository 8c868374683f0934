"""Heads of 512 columns (Gemma 4's global layers) on a GPU: attention against fp64, and a cache that is filled.

`test_append.py` and `test_quantize_kv.py` write such rows bit for bit, `test_decode_formats.py` reads them in every
format.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.attention.call import make_extend_call as check_call
from cute_kernels.attention.combine.config import CombineConfig
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.extend_schedule import choose_unpacked
from cute_kernels.attention.plan import configs_of
from cute_kernels.kv_cache import KVCache
from cute_kernels.names import KvFormats
from cute_kernels.runtime import arch_of, load_many
from tests.attention.cases import Call, assert_close, make_call
from tests.extend.cases import Call as ExtendCall
from tests.extend.cases import assert_close as assert_extends
from tests.extend.cases import make_call as make_extend_call
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
    return [*dict.fromkeys(decode_spec(call_of(options, blank=True)) for options in CALLS), *extend_specs()]


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


# -- extend attention --------------------------------------------------------------------------------------------------

# Work tiles of 128 rows, blocks of 32 keys: ends of all kinds, requests without queries, keys, or either.
Q_LENS, KV_LENS = [70, 0, 1, 31, 33, 3, 0, 32], [300, 5, 33, 64, 95, 0, 0, 32]
LONG = [2, 1], [2500, 700]  # few queries over many keys
EXTENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "bf16, pages of 16, 8 heads a group": ("bf16", {"page_size": 16, "group": 8}),
    "bf16, contiguous, all keys": ("bf16", {"page_size": None, "causal": False}),
    "bf16, window": ("bf16", {"window_size": 40}),
    "bf16, HND, all features": (
        "bf16",
        {"cache_layout": "HND", "window_size": 200, "softcap": 20.0, "sinks": True, "alibi": True},
    ),
    "bf16, new tokens": ("bf16", {"new": True}),
    "bf16, tree": ("bf16", {"tree": True}),
    "fp16": ("fp16", {}),
    "e4m3_tensor": ("e4m3_tensor", {"unpack": False}),
    "int8_token_head": ("int8_token_head", {"unpack": False}),
    "int8_channel": ("int8_channel", {"unpack": False}),
    "K of 16 bits": (("bf16", "int8_token_head"), {}),
    "K in 8 bits, V in 4": (MIXED, {"unpack": False}),
    "int4_g4, pages of 16": ("int4_g4", {"page_size": 16, "unpack": False}),
    "e4m3_tensor, unpacked": ("e4m3_tensor", {"unpack": True}),
    "int8_token_head, unpacked": ("int8_token_head", {"unpack": True}),
    "int4_g4, unpacked": ("int4_g4", {"unpack": True}),
}


def extend_call(name: str, q_lens: list[int], lengths: list[int], device: str = CUDA, **more: Any) -> ExtendCall:
    kv_format, options = EXTENDS[name]
    if "new" in options:  # all of them are there
        lengths = [max(pair) for pair in zip(q_lens, lengths, strict=True)]
    return make_extend_call(kv_format, q_lens, lengths, head_dim=512, device=device, **options, **more)


def extend_specs() -> list[AttentionSpec]:
    """The kernels of extend attention, as `specs` has those of decode attention."""
    configs: dict[Any, None] = {}
    for name in EXTENDS:
        call = extend_call(name, [1], [300], device="cpu")
        first, *newer = configs_of(check_call(*call.tensors, **call.keywords))
        own = choose_unpacked(first) if call.options.get("unpack") else (first,)
        configs |= dict.fromkeys((*own, *newer, CombineConfig(first.q_dtype)))
    return [AttentionSpec(config) for config in configs]


def check(call: ExtendCall) -> torch.Tensor:
    """Runs a call into an output full of NaN and compares with fp64; returns the output."""
    out = torch.full_like(call.q, torch.nan)
    _, lse = call.run(out=out, return_lse=True)
    assert_extends(call, out, lse)
    return out


@pytest.mark.parametrize("name", EXTENDS)
def test_prompts_are_attention(name: str):
    """Rows that no query sees are poison."""
    out = check(call := extend_call(name, Q_LENS, KV_LENS))
    again = torch.full_like(out, torch.nan)
    call.run(out=again)
    assert torch.equal(out, again), "equal inputs give bitwise equal outputs"


@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize("name", ["bf16", "bf16, window", "int8_token_head", "e4m3_tensor, unpacked"])
def test_few_queries_over_many_keys_are_attention(name: str, num_splits: int | None):
    """Keys in splits: each half of V's columns has its own parts."""
    check(extend_call(name, *LONG, num_splits=num_splits))


@pytest.mark.parametrize("name", ["bf16", "bf16, contiguous, all keys", "int8_token_head, unpacked"])
def test_zero_scores_show_the_mask_and_every_column(name: str):
    """With q = 0 every key that is seen weighs the same: a wrong key, or column, of V is off by a row of V."""
    call = extend_call(name, [130, 5, 300], [400, 5, 290])
    call.q.zero_()
    check(call)


@pytest.mark.parametrize("kv_format", ["bf16", "int8_token_head"])
def test_chunks_of_a_prompt_are_the_prompt(kv_format: str):
    """The last chunk's queries see what one call over all of them shows them."""
    options: dict[str, Any] = {"head_dim": 512, "device": CUDA, "unpack": None if kv_format == "bf16" else False}
    whole = make_extend_call(kv_format, [96], [96], **options)
    ends = torch.tensor([0, 40], dtype=torch.int32, device=CUDA)
    part = replace(whole, q=whole.q[56:].contiguous(), cu_seqlens_q=ends)
    found, want = check(part).double(), check(whole)[56:].double()
    assert (found - want).norm() < 2e-3 * want.norm()


def test_fp8_products_refuse_it_by_name():
    call = make_extend_call("e4m3_tensor", [3], [5], head_dim=512, device=CUDA)
    with pytest.raises(ValueError, match="head_dim 128"):
        call.run(fp8_products=True)
