"""Checks the plugin against vLLM's Python, without a GPU: `python -m tests.integrations.vllm.interface FOLDER`.

FOLDER holds the package vllm, as tools/fetch_vllm.py leaves it. A process of its own, as it stands in for what vLLM
needs and is not here. Prints a JSON object: of each check "ok" or what went wrong.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integrations.vllm import stubs

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def hopper() -> Any:
    """The platform as the plugin sees it on an H200."""
    from vllm.platforms import PlatformEnum

    return SimpleNamespace(
        _enum=PlatformEnum.CUDA,
        is_cuda=lambda: True,
        is_device_capability=lambda capability: capability == 90,
        get_device_capability=lambda: (9, 0),
    )


def set_up() -> None:
    """The plugin, registered, in a vLLM that believes to be on a Hopper."""
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"
    sys.modules["vllm._C_stable_libtorch"] = SimpleNamespace()  # type: ignore[assignment]
    from cute_kernels.integrations.vllm import linear, prepare, register

    register()
    import vllm.model_executor.kernels.linear as kernels

    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    linear.current_platform = kernels.current_platform = hopper()
    linear._num_sms = lambda index: 132
    prepare.original_linear_reason = prepare.linear_reason
    prepare.linear_reason = lambda *_: None
    prepare.load_noted = lambda device: None


@check
def every_seam_is_replaced() -> None:
    from cute_kernels.integrations.vllm import plugin

    outcomes = {outcome.seam: outcome.reason for outcome in plugin.outcomes()}
    assert outcomes == {"linear": None, "attention": None, "moe": None}, outcomes


@check
def registering_again_changes_nothing() -> None:
    import vllm.model_executor.kernels.linear as kernels
    from vllm.platforms import PlatformEnum

    from cute_kernels.integrations.vllm import register

    before = list(kernels._POSSIBLE_KERNELS[PlatformEnum.CUDA])
    register()
    assert kernels._POSSIBLE_KERNELS[PlatformEnum.CUDA] == before
    assert [kernel.__name__ for kernel in before].count("CuteKernelsLinearKernel") == 1
    assert before[0].__name__ == "CuteKernelsLinearKernel"


@check
def the_compile_cache_tells_plugins_apart() -> None:
    from vllm import envs

    from cute_kernels.integrations.vllm import plugin
    from tests.integrations.vllm import layers

    def factor() -> str:
        return str(envs.compile_factors()["CUTE_KERNELS_VLLM_PLUGIN"])

    plugin._served.clear()
    before = factor()
    assert "attention,linear,moe" in before, before
    # Whether a layer is served may change from one start to the next, with the bundles that are there.
    layers.make(layers.Checkpoint("ct", 4, 128), "cpu")
    one = factor()
    layers.make(layers.Checkpoint("ct", 4, 128), "cpu")
    assert factor() == one != before
    layers.make(layers.Checkpoint("gptq", 4, 128, n=64), "cpu")
    assert factor() not in (one, before)


@check
def layers_of_every_checkpoint_give_what_it_says() -> None:
    from tests.integrations.vllm import layers

    for form in layers.CHECKPOINTS:
        layer = layers.make(form, "cpu")
        assert type(layer.kernel).__name__ == "CuteKernelsLinearKernel", form
        x = torch.randn(5, form.k, dtype=form.dtype)
        expected = x.double() @ layer.weight.T
        error = (layer.apply(x).double() - expected).abs().max() / expected.abs().max()
        assert error < (2**-7 if form.dtype == torch.bfloat16 else 2**-9), (str(form), float(error))


@check
def what_is_traced_does_not_depend_on_the_values_of_weights() -> None:
    """Zero points that are all symmetric, and an act-order that moves nothing, keep their tensors."""
    from tests.integrations.vllm import layers

    plain = layers.Checkpoint("ct", zero_point=True, act_order=True)
    symmetric = mock.patch.object(torch, "randperm", lambda n, generator: torch.arange(n))
    with symmetric:
        layer = layers.make(plain, "cpu")
    assert layer.kernel.config.has_g_idx
    x = torch.randn(3, plain.k, dtype=plain.dtype)
    expected = x.double() @ layer.weight.T
    assert (layer.apply(x).double() - expected).abs().max() < expected.abs().max() * 2**-7


@check
def other_layers_are_left_to_vllm_with_a_reason() -> None:
    from vllm.scalar_type import scalar_types

    from cute_kernels.integrations.vllm.linear import CuteKernelsLinearKernel, MPLinearLayerConfig

    def config(**changes: Any) -> MPLinearLayerConfig:
        usual: dict[str, Any] = {
            "full_weight_shape": (512, 256),
            "partition_weight_shape": (512, 256),
            "weight_type": scalar_types.uint4b8,
            "act_type": torch.bfloat16,
            "group_size": 128,
            "zero_points": False,
            "has_g_idx": False,
        }
        return MPLinearLayerConfig(**{**usual, **changes})

    assert CuteKernelsLinearKernel.can_implement(config()) == (True, None)
    assert CuteKernelsLinearKernel.can_implement(config(group_size=-1)) == (True, None)
    assert CuteKernelsLinearKernel.can_implement(config(group_size=512)) == (True, None)
    for changes, words in (
        ({"weight_type": scalar_types.int4}, "weights of type"),
        ({"weight_type": scalar_types.uint4}, "weights of type"),
        ({"zero_points": True}, "zero points True"),
        ({"act_type": torch.float8_e4m3fn}, "activations in torch.float8_e4m3fn"),
        ({"out_type": torch.float32}, "results in torch.float32"),
        ({"group_size": 96}, "groups of 96"),
        ({"group_size": 512, "partition_weight_shape": (256, 256)}, "groups of 512"),
        ({"has_g_idx": True, "partition_weight_shape": (256, 256)}, "act-order"),
    ):
        able, reason = CuteKernelsLinearKernel.can_implement(config(**changes))
        assert not able and words in str(reason), (changes, reason)


@check
def pages_have_the_bytes_that_vllm_counts() -> None:
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    from cute_kernels.integrations.vllm.attention import (
        CuteKernelsAttentionBackend,
        CuteKernelsAttentionImpl,
        cache_spec,
    )

    for kv_cache_dtype, own in (
        ("fp8", ""),
        ("fp8_e4m3", ""),
        ("int8_per_token_head", ""),
        ("fp8_per_token_head", ""),
        ("auto", "int4_g4"),
        ("auto", "bf16"),
        ("bfloat16", "int8_token_head,int4_g4"),
    ):
        os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = own
        for head_size in (64, 128, 256):
            dtype = torch.bfloat16 if own else STR_DTYPE_TO_TORCH_DTYPE[kv_cache_dtype]
            quant = get_kv_quant_mode(kv_cache_dtype)
            spec: Any = FullAttentionSpec(
                block_size=64, num_kv_heads=8, head_size=head_size, dtype=dtype, kv_quant_mode=quant
            )
            from cute_kernels.integrations.vllm import kv_formats

            formats = kv_formats.formats_for(kv_cache_dtype)
            impl = mock.Mock(spec=CuteKernelsAttentionImpl, formats=formats)
            spec = cache_spec(SimpleNamespace(impl=impl, kv_cache_dtype=kv_cache_dtype, head_size=head_size), spec)
            shape = CuteKernelsAttentionBackend.get_kv_cache_shape(5, 64, 8, spec.head_size, kv_cache_dtype)
            cache = torch.zeros(shape, dtype=spec.dtype)
            assert cache.nbytes == 5 * spec.page_size_bytes, (kv_cache_dtype, head_size, shape)
            apart = torch.zeros(5, shape[1] + 256, dtype=spec.dtype)[:, : shape[1]]  # pages with room between them
            for pages in (cache, apart):
                for view, form in zip(
                    kv_formats.views(pages, formats, head_size, 8), (formats.k, formats.v), strict=True
                ):
                    assert view.shape == (5, 64, 8, form.row_elements(head_size)), (kv_cache_dtype, view.shape)
                    assert view.dtype == form.cache_dtype and view.stride(0) * view.itemsize == pages.stride(0)
            block = CuteKernelsAttentionBackend.get_kv_cache_block_dim(64, 8, spec.head_size, kv_cache_dtype)
            assert block == 0 and CuteKernelsAttentionBackend.indexes_kv_by_block_stride()
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


def selected(**changes: Any) -> dict[str, Any]:
    """What vLLM asks of a backend for a usual layer."""
    from vllm.platforms.interface import DeviceCapability

    usual = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8",
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        "has_sliding_window": False,
    }
    return {**usual, **changes}


@check
def attention_takes_what_it_serves_and_no_more() -> None:
    from vllm.platforms.interface import DeviceCapability

    from cute_kernels.integrations.vllm.attention import CuteKernelsAttentionBackend as Backend

    for changes in (
        {},
        {"has_sink": True},
        {"has_sliding_window": True},
        {"block_size": 128},
        {"head_size": 256},
        {"use_batch_invariant": True},
    ):
        assert Backend.validate_configuration(**selected(**changes)) == [], changes
    for kv in ("fp8_e4m3", "int8_per_token_head", "fp8_per_token_head", "auto"):
        assert Backend.validate_configuration(**selected(kv_cache_dtype=kv)) == [], kv
    for changes in (
        {"head_size": 72},
        {"dtype": torch.float32},
        {"kv_cache_dtype": "int4_per_token_head"},
        {"kv_cache_dtype": "nvfp4"},
        {"block_size": 24},
        {"use_mla": True},
        {"use_mm_prefix": True},
        {"use_non_causal": True},
        {"use_batch_invariant": True, "kv_cache_dtype": "int8_per_token_head"},
        {"use_batch_invariant": True, "head_size": 256},
        {"use_kv_connector": True},
        {"use_per_head_quant_scales": True},
        {"attn_type": "encoder_only"},
        {"device_capability": DeviceCapability(10, 0)},
    ):
        assert Backend.validate_configuration(**selected(**changes)), changes


@check
def a_format_of_our_own_is_never_silently_another() -> None:
    from cute_kernels.integrations.vllm.attention import CuteKernelsAttentionBackend as Backend

    try:
        Backend.validate_configuration(**selected(kv_cache_dtype="auto", head_size=72))
    except ValueError as error:
        assert "CUTE_KERNELS_VLLM_KV_FORMAT=int4_g4: cannot serve" in str(error)
    else:
        raise AssertionError("a cache that cannot be had was not refused")


@check
def attention_is_asked_first_but_for_mla() -> None:
    import importlib

    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from cute_kernels.integrations.vllm import versions

    interface = next(iter(versions.INTERFACES.values()))
    module, name = interface.backend_priorities
    priorities = getattr(importlib.import_module(module), name)
    found = priorities(False, DeviceCapability(9, 0), None, "fp8", False)
    assert found[0] is AttentionBackendEnum.CUSTOM and AttentionBackendEnum.FLASH_ATTN in found
    assert AttentionBackendEnum.CUSTOM not in priorities(True, DeviceCapability(9, 0), None, "fp8", False)
    assert AttentionBackendEnum.CUSTOM.get_class().__name__ == "CuteKernelsAttentionBackend"


def step(new: list[int], lengths: list[int], pages: int = 40, page_size: int = 16) -> Any:
    """vLLM's description of a step: new tokens and tokens after it, of each request."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    count = len(new)
    table = torch.randperm(count * pages, generator=torch.Generator().manual_seed(0)).view(count, pages).int()
    slots = []
    for request, (fresh, length) in enumerate(zip(new, lengths, strict=True)):
        for position in range(length - fresh, length):
            slots.append(int(table[request, position // page_size]) * page_size + position % page_size)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=count,
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )


def builder(speculative: int = 0, **caches: Any) -> Any:
    """caches: fields of `attention_metadata.Caches` unlike a small model's on an H200."""
    from cute_kernels.integrations.vllm import attention_metadata

    speculation = SimpleNamespace(num_speculative_tokens=speculative, parallel_drafting=False) if speculative else None
    config = SimpleNamespace(
        speculative_config=speculation,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context={}, cudagraph_capture_sizes=[1, 2, 4]),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        model_config=SimpleNamespace(max_model_len=512, dtype=torch.bfloat16),
    )
    assert attention_metadata.decode_batches(config) == (1, 2, 3)
    with (
        mock.patch.object(attention_metadata.prepare, "load"),
        mock.patch.object(attention_metadata.attention_kernels, "specs", lambda *_: []),
        mock.patch.object(
            attention_metadata,
            "caches_of",
            lambda *_: attention_metadata.Caches(
                **{"num_heads": 4, "num_kv_heads": 2, "num_sms": 132, "extend": True} | caches
            ),
        ),
    ):
        return attention_metadata.MetadataBuilder(SimpleNamespace(block_size=16), [], config, torch.device("cpu"))


STEPS = (
    # New tokens of each request, tokens after the step, speculated ones. What decodes comes first, then what continues,
    # then what begins; but pieces do not rely on it.
    ([1, 1, 1], [9, 1, 600], 0),
    ([1, 1, 5, 5, 16, 17, 40, 3, 30], [9, 70, 105, 66, 400, 300, 41, 3, 30], 0),
    ([1, 64, 64, 128, 144, 37], [9, 70, 105, 366, 400, 300], 0),
    ([7, 200], [7, 200], 0),
    ([40, 0, 3, 50], [41, 3, 3, 90], 0),
    ([4, 4, 4], [9, 44, 8], 3),
    ([4, 4, 1, 300], [9, 44, 8, 300], 3),
    ([1, 1], [9, 44], 3),
    ([17, 17, 17], [300, 400, 1 << 16], 0),
)


def check_parts(piece: Any, new: list[int], lengths: list[int], table: torch.Tensor) -> None:
    """Parts of a request are requests of their own that end sooner."""
    chunks = piece.longest // piece.q_len
    own = range(piece.requests.start, piece.requests.stop)
    assert all(new[i] == chunks * piece.q_len for i in own)
    assert piece.q_len <= 16 and chunks <= 8
    ends = [lengths[i] - part * piece.q_len for i in own for part in reversed(range(chunks))]
    assert piece.seq_lens.tolist() == ends
    assert torch.equal(piece.block_table, torch.stack([table[i] for i in own for _ in range(chunks)]))


def check_context(piece: Any, new: list[int], lengths: list[int], common: Any) -> None:
    """The tokens of a request are found in the order of their positions, the newest where they are appended."""
    from cute_kernels.integrations.vllm.attention_metadata import MAX_CONTEXT

    slots = piece.context.pages * 16 + piece.context.places
    bounds = piece.context.starts.tolist()
    own = range(piece.requests.start, piece.requests.stop)
    for place, i in enumerate(own):
        rows = slots[bounds[place] : bounds[place + 1]]
        assert rows.numel() == lengths[i] and rows.unique().numel() == lengths[i]
        start = int(common.query_start_loc[i])
        assert torch.equal(rows[-new[i] :], common.slot_mapping[start : start + new[i]])
    assert len(own) == 1 or bounds[-1] <= MAX_CONTEXT


@check
def every_token_of_a_step_is_served_once() -> None:
    from cute_kernels.integrations.vllm.attention_metadata import Way

    for extend, invariant in ((True, False), (False, False), (True, True)):
        ways = set()
        for new, lengths, speculative in STEPS:
            common = step(new, lengths, -(-max(lengths) // 16))
            metadata = builder(speculative, extend=extend, invariant=invariant).build(0, common)
            served = list(range(metadata.num_decode_tokens))
            assert all(count == metadata.decode_len for count in new[: metadata.num_decodes])
            for piece in metadata.pieces:
                ways.add(piece.way)
                served += range(piece.tokens.start, piece.tokens.stop)
                own = range(piece.requests.start, piece.requests.stop)
                assert (piece.starts[1:] - piece.starts[:-1]).tolist() == [new[i] for i in own]
                assert piece.longest == max(new[i] for i in own)
                assert all((lengths[i] == new[i]) == (piece.way is Way.FLASH) for i in own) or invariant
                if piece.way is Way.PARTS:
                    check_parts(piece, new, lengths, common.block_table_tensor)
                elif piece.way is Way.GATHER:
                    check_context(piece, new, lengths, common)
                elif piece.way is Way.EXTEND:
                    assert piece.seq_lens.tolist() == [lengths[i] for i in own]
                    assert torch.equal(piece.block_table, common.block_table_tensor[piece.requests])
            assert served == list(range(sum(new))), (new, served)
        expected = {Way.EXTEND} if invariant else {Way.FLASH, Way.PARTS, Way.EXTEND if extend else Way.GATHER}
        assert ways == expected, (extend, invariant, ways)


@check
def prompts_that_go_on_are_one_launch() -> None:
    """However many tokens each has; few of them over long contexts go to decode attention, which splits those."""
    from cute_kernels.integrations.vllm.attention_metadata import Way

    large = {"num_heads": 32, "num_kv_heads": 8}
    for new, expected in (
        ([64] * 32, Way.EXTEND),
        ([16, 17, 300, 5, 1], Way.EXTEND),
        ([4096], Way.EXTEND),
        ([16], Way.PARTS),
        ([16, 16], Way.PARTS),
        ([16, 15], Way.EXTEND),
    ):
        made = builder(**large).build(0, step(new, [count + 400 for count in new], -(-max(new) // 16) + 25))
        assert [piece.way for piece in made.pieces] == [expected], (new, made.pieces)


def flash_attention(**given: Any) -> None:
    """Stands in for FlashAttention: causal attention of requests that lie one behind the other, in fp64."""
    q_starts, k_starts = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    assert given["causal"] and given["max_seqlen_k"] == max(b - a for a, b in pairwise(k_starts))
    for request in range(len(q_starts) - 1):
        q = given["q"][q_starts[request] : q_starts[request + 1]]
        k, v = (given[name][k_starts[request] : k_starts[request + 1]] for name in "kv")
        out = causal_attention(q, k, v, given["softmax_scale"], given["window_size"][0])
        given["out"][q_starts[request] : q_starts[request + 1]] = out


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window_left: int = -1
) -> torch.Tensor:
    """q [n, heads, dim] are the last of k, v [m, kv heads, dim]; in fp64."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = distance < 0
    if window_left >= 0:
        hidden |= distance > window_left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def serve_steps(
    kv_cache_dtype: str, window: int | None, speculative: int = 0, **caches: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the backend gave, what attention over everything gives), of all tokens of some requests' steps."""
    from cute_kernels.integrations.vllm import attention, kv_formats

    heads, kv_heads, dim, page = 4, 2, 64, 16
    generator = torch.Generator().manual_seed(0)
    impl = attention.CuteKernelsAttentionImpl(heads, dim, 0.125, kv_heads, None, window, kv_cache_dtype=kv_cache_dtype)
    impl.process_weights_after_loading(torch.float16)
    requests, pages = 4, 8
    size = kv_formats.page_bytes(impl.formats, dim, page, kv_heads)
    cache = torch.zeros(requests * pages, size + 64, dtype=torch.uint8)[:, :size]  # pages with room between them
    layer = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.015))
    q, k, v = (
        torch.randn(requests, pages * page, count, dim, generator=generator).half()
        for count in (heads, kv_heads, kv_heads)
    )
    table = torch.randperm(requests * pages, generator=generator).view(requests, pages).int()
    given, expected = [], []
    done = [0] * requests
    impl.invariant = caches.get("invariant", False)
    make = builder(speculative, **caches)
    # Requests in the order of a batch, each with its new tokens.
    for batch in (
        ((0, 30), (1, 5)),
        ((0, 1), (1, 20), (2, 40)),
        ((0, 1), (1, 1), (2, 3), (3, 1)),
        ((0, 1), (1, 1), (2, 1), (3, 33)),
        ((1, 20), (2, 20), (3, 37)),
        ((1, 4), (2, 4), (3, 4)),
        ((0, 1), (1, 1), (2, 1), (3, 1)),
    ):
        order = [request for request, _ in batch]
        new = [count for _, count in batch]
        lengths = [done[request] + count for request, count in batch]
        common = step(new, lengths, pages)
        common.block_table_tensor = table[order]
        places = [
            (request, position)
            for (request, count), length in zip(batch, lengths, strict=True)
            for position in range(length - count, length)
        ]
        slots = [int(table[request, position // page]) * page + position % page for request, position in places]
        common.slot_mapping = torch.tensor(slots)
        new_q, new_k, new_v = (torch.stack([x[request, position] for request, position in places]) for x in (q, k, v))
        output = torch.full((len(places), heads, dim), torch.nan, dtype=torch.float16)
        impl.forward(layer, new_q, new_k, new_v, cache, make.build(0, common), output)
        given.append(output)
        left = -1 if window is None else window - 1
        for (request, count), length in zip(batch, lengths, strict=True):
            fresh = q[request, length - count : length]
            expected.append(causal_attention(fresh, k[request, :length], v[request, :length], 0.125, left))
            done[request] = length
    return torch.cat(given), torch.cat(expected)


@check
def steps_of_mixed_requests_give_attention_over_everything() -> None:
    from vllm.v1.attention.backends import fa_utils

    fa_utils.flash_attn_varlen_func = flash_attention
    fa_utils.get_flash_attn_version = lambda **_: 3
    # Errors: what rounding to the cache's format costs.
    for kv_cache_dtype, form, window, speculative, bound, caches in (
        ("auto", "fp16", None, 0, 2e-3, {}),
        ("auto", "fp16", None, 0, 2e-3, {"num_sms": 1}),  # then nothing goes in parts
        ("auto", "fp16", 24, 0, 2e-3, {}),
        ("auto", "fp16", None, 3, 2e-3, {"invariant": True}),
        ("auto", "fp16", 24, 3, 2e-3, {"extend": False}),
        ("int8_per_token_head", "", None, 0, 0.03, {}),
        ("fp8", "", None, 0, 0.15, {"num_sms": 1}),
        ("fp8_per_token_head", "", 24, 3, 0.15, {}),
        ("auto", "int4_g4", None, 0, 0.5, {"num_sms": 1}),
        ("auto", "int8_token_head,int4", None, 0, 0.5, {"extend": False}),
    ):
        os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = form
        given, expected = serve_steps(kv_cache_dtype, window, speculative, **caches)
        error = float((given.double() - expected).abs().max())
        assert error < bound, (kv_cache_dtype, form, window, speculative, caches, error)
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check
def requests_without_new_tokens_are_passed_over() -> None:
    metadata = builder().build(0, step([1, 20, 0], [9, 20, 0]))
    assert metadata.num_decodes == 1 and len(metadata.pieces) == 1
    assert metadata.pieces[0].tokens == slice(1, 21)


@check
def without_the_compiler_layers_are_left_to_vllm_and_kernels_are_listed() -> None:
    import tempfile
    from pathlib import Path

    from vllm.scalar_type import scalar_types

    from cute_kernels.integrations.vllm import attention, prepare
    from cute_kernels.integrations.vllm.linear import CuteKernelsLinearKernel, MPLinearLayerConfig
    from cute_kernels.runtime import wanted

    shape = (4096, 6144)
    layer = MPLinearLayerConfig(shape, shape, scalar_types.uint4b8, torch.bfloat16, 128, False, False)
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: 32,
        get_num_kv_heads=lambda parallel: 8,
        hf_text_config=SimpleNamespace(),
        max_model_len=8192,
        dtype=torch.bfloat16,
        rswa_window=None,
    )
    engine = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[], kv_sharing_fast_prefill=False),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 8]),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(
            prepare,
            compiler_version=lambda: None,
            linear_reason=prepare.original_linear_reason,
            arch_of=lambda index: "sm_90a",
            default_directory=lambda: Path(folder),
            default_cache=lambda: SimpleNamespace(has=lambda spec, arch: False),
        ),
        mock.patch.multiple(attention, compiler_version=lambda: None, get_current_vllm_config_or_none=lambda: engine),
        mock.patch.object(torch.cuda, "get_device_name", lambda index: "NVIDIA H200"),
        mock.patch.object(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
        ),
    ):
        able, reason = CuteKernelsLinearKernel.can_implement(layer)
        assert not able and "kernels are in no bundle. Build one where the compiler is" in str(reason), reason
        path = Path(folder) / prepare.WANTED
        linear = wanted.read(path, "sm_90a")
        assert linear and all(spec.family == "linear" for spec in linear)
        reasons = attention.CuteKernelsAttentionBackend.validate_configuration(**selected())
        assert any("kernels are in no bundle" in each for each in reasons), reasons
        both = wanted.read(path, "sm_90a")
        assert {spec.family for spec in both} >= {"linear", "attention", "kv_cache"}, {spec.family for spec in both}


@check
def experts_of_every_checkpoint_give_what_it_says() -> None:
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    for checkpoint, bits, group_size, zero_point, dtype in layers.EXPERTS:
        form = layers.Checkpoint(checkpoint, bits, group_size, zero_point, dtype=dtype, n=96, k=128)
        layer, made = layers.serve_experts(form, "cpu")
        for expert_map in (None, torch.tensor([-1, 0, 1, -1, 2], dtype=torch.int32)):
            error = layers.error_of_experts(layer, made, 7, dtype, expert_map)
            assert error < (2**-6 if dtype == torch.bfloat16 else 2**-9), (str(form), error)
        assert layer.layer.w13_weight.dtype == torch.uint8


@check
def other_experts_are_left_to_vllm_with_a_reason() -> None:
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    source = moe.SOURCES["CompressedTensorsWNA16MarlinMoEMethod"]

    def reason(form: Any, **changes: Any) -> str:
        experts = layers.make_experts(form, "cpu")
        for name, value in changes.items():
            setattr(experts.layer, name, value)
        return str(moe.reason_against(experts.method, experts.layer, source))

    usual = {"checkpoint": "ct", "group_size": 32, "n": 96, "k": 128}
    assert reason(layers.Checkpoint(**usual)) == "None"
    assert "act-order" in reason(layers.Checkpoint(**usual, act_order=True))
    assert "experts of 80 features" in reason(layers.Checkpoint(**{**usual, "n": 80, "group_size": 0}))
    assert "the activation" in reason(layers.Checkpoint(**usual), activation=SimpleNamespace(value="gelu"))
    assert "biases or limits" in reason(layers.Checkpoint(**usual), w13_bias=torch.zeros(1))
    assert "weights on the input" in reason(layers.Checkpoint(**usual), apply_router_weight_on_input=True)


def main(folder: str) -> None:
    stubs.install()
    sys.path.insert(0, folder)
    outcomes: dict[str, str] = {}
    try:
        set_up()
    except Exception:
        print(json.dumps({name: f"set_up: {traceback.format_exc()}" for name in CHECKS}))
        return
    for name, function in CHECKS.items():
        try:
            function()
            outcomes[name] = "ok"
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1])
