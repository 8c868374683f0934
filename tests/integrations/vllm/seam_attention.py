"""Checks of attention but its steps (`seam_attention_steps`): what is taken, caches, constants, kernels."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integrations.vllm.checks import check, check_once
from tests.integrations.vllm.steps import (
    Layer,
    constants_file,
    give_constants,
)

KV_DTYPES = (
    ("fp8", ""),
    ("fp8_e4m3", ""),
    ("int8_per_token_head", ""),
    ("fp8_per_token_head", ""),
    ("int4_per_token_head", ""),
    ("auto", "int4_g4"),
    ("auto", "bf16"),
    ("bfloat16", "int8_token_head,int4_g4"),
)
"""vLLM's, and the format that the environment names."""


def layer_spec(kv_cache_dtype: str, own: str, head_size: int, block_size: int = 64, **given: Any) -> Any:
    """A layer's specification, with 8 KV heads, as an engine has it; the environment names a format."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    from cute_kernels.integrations.vllm import attention, attention_pages, kv_formats

    with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": own}):
        dtype = torch.bfloat16 if own else STR_DTYPE_TO_TORCH_DTYPE[kv_cache_dtype]
        quant = get_kv_quant_mode(kv_cache_dtype)
        given |= {"block_size": block_size, "num_kv_heads": 8, "head_size": head_size, "dtype": dtype}
        spec: Any = FullAttentionSpec(kv_quant_mode=quant, **given)
        if attention_pages.BACKENDS_PACK:
            from vllm.v1.worker import utils

            asked = getattr(utils, "customize_attention_spec", lambda backend, spec: backend.customize_spec(spec))
            return asked(attention.CuteKernelsAttentionBackend, spec)
        formats = kv_formats.formats_for(kv_cache_dtype)
        impl = mock.Mock(spec=attention.CuteKernelsAttentionImpl, formats=formats)
        layer = SimpleNamespace(impl=impl, kv_cache_dtype=kv_cache_dtype, head_size=head_size)
        return attention_pages.counted(layer, spec)


def engine_caches(spec: Any, num_blocks: int, kv_cache_dtype: str, own: str) -> list[tuple[torch.Tensor, int]]:
    """Layers' caches as vLLM makes them of a specification, in all of its layouts, and tokens of their pages."""
    from cute_kernels.integrations.vllm import attention_pages
    from cute_kernels.integrations.vllm.attention import CuteKernelsAttentionBackend

    if not attention_pages.BACKENDS_PACK:
        with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": own}):
            sizes = num_blocks, spec.block_size, 8, spec.head_size, kv_cache_dtype
            shape = CuteKernelsAttentionBackend.get_kv_cache_shape(*sizes)
        apart = torch.zeros(shape[0], shape[1] + 256, dtype=spec.dtype)[:, : shape[1]]  # with room between pages
        return [(torch.zeros(shape, dtype=spec.dtype), spec.block_size), (apart, spec.block_size)]
    from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert CuteKernelsAttentionBackend.supported_kv_cache_layouts() is None  # any
    found, names = [], ["first", "second"]
    for layout in KVCacheLayout:
        raw = torch.zeros(len(names) * num_blocks * spec.page_size_bytes, dtype=torch.int8)
        layer, block, *_ = compute_layout_strides(spec, num_blocks, len(names), layout)
        tensor = KVCacheTensor(size=raw.numel(), layers=names, layer_stride=layer, block_stride=block)
        views = create_kv_cache_views(raw, spec, num_blocks, layout, tensor)
        found += [(view, spec.block_size) for view in views]
        if layout.is_layer_compact:  # pages of fewer tokens than the engine counts, as hybrid models have them
            found += [(view, 16) for view in create_kv_cache_views(raw, spec, num_blocks, layout, tensor, 16)]
    return found


@check
def pages_have_the_bytes_that_vllm_counts() -> None:
    from cute_kernels.integrations.vllm import kv_formats
    from cute_kernels.integrations.vllm.attention import CuteKernelsAttentionBackend

    for kv_cache_dtype, own in KV_DTYPES:
        for head_size in (64, 128, 256):
            spec = layer_spec(kv_cache_dtype, own, head_size)
            with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": own}):
                formats = kv_formats.formats_for(kv_cache_dtype)
            assert spec.page_size_bytes == kv_formats.page_bytes(formats, head_size, 64, 8), (own, head_size)
            for cache, tokens in engine_caches(spec, 5, kv_cache_dtype, own):
                assert cache.nbytes == 5 * spec.page_size_bytes, (kv_cache_dtype, head_size, cache.shape)
                pages = 5 * 64 // tokens
                views = kv_formats.views(cache, formats, head_size, 8)
                inner = (8, tokens) if formats.cache_layout == "HND" else (tokens, 8)
                for view, form in zip(views, (formats.k, formats.v), strict=True):
                    assert view.shape == (pages, *inner, form.row_elements(head_size)), (own, view.shape)
                    assert view.dtype == form.cache_dtype
                    assert view.stride(0) * view.itemsize == cache.stride(0) * cache.itemsize
                k, v = (view.view(torch.uint8) for view in views)
                k.fill_(1)
                v.fill_(2)  # the other half, and nobody else's
                assert int(cache.view(torch.uint8).long().sum()) == k.numel() + 2 * v.numel()
    sizes = CuteKernelsAttentionBackend.get_supported_kernel_block_sizes
    assert sizes() == sizes(None)


def rows_of_pages(raw: torch.Tensor, formats: Any, head_size: int, kv_heads: int, tokens: int) -> list[torch.Tensor]:
    """K's and V's rows [pages, kv_heads, tokens, bytes] of pages of bytes, as the documentation says where they lie."""
    parts, first = [], 0
    for form in (formats.k, formats.v):
        size = tokens * kv_heads * form.row_bytes(head_size)
        part, first = raw[:, first : first + size], first + size
        if formats.k.header_bytes or formats.v.header_bytes:  # head by head
            parts.append(part.unflatten(1, (kv_heads, tokens, -1)))
        else:
            parts.append(part.unflatten(1, (tokens, kv_heads, -1)).transpose(1, 2))
    assert first == raw.shape[1]
    return parts


@check
def appended_rows_lie_head_by_head_if_they_have_headers() -> None:
    """The reference reads the rows there, in all of vLLM's layouts, and in pages of fewer tokens than vLLM counts."""
    from cute_kernels import decode_attention, quantize_kv
    from cute_kernels.integrations.vllm import attention

    generator = torch.Generator().manual_seed(7)
    k, v = (torch.randn(9, 8, 128, generator=generator).half() for _ in "kv")
    q = torch.randn(1, 1, 16, 128, generator=generator).half()
    scales = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.015))
    for kv_cache_dtype, own, layout in (
        ("fp8", "", "NHD"),
        ("auto", "fp16", "NHD"),
        ("int8_per_token_head", "", "HND"),
        ("fp8_per_token_head", "", "HND"),
        ("auto", "int4_g4", "HND"),
        ("bfloat16", "int8_token_head,int4_g4", "HND"),
        ("auto", "fp16,int4_g1", "HND"),
    ):
        impl = Layer(kv_cache_dtype, own, heads=16, kv_heads=8).make("cpu")
        formats = impl.formats
        assert formats.cache_layout == layout, (kv_cache_dtype, own)
        for cache, tokens in engine_caches(layer_spec(kv_cache_dtype, own, 128), 3, kv_cache_dtype, own):
            slots = torch.tensor([*range(2 * tokens - 4, 2 * tokens), *range(5)])  # pages 1 and 0, in this order
            call = attention._LayerCall(impl, scales, cache, SimpleNamespace(slot_mapping=slots))  # pyright: ignore[reportArgumentType]
            call.append(k, v, slice(0, 9))
            raw = cache.view(torch.uint8).reshape(len(cache), -1)
            rows = rows_of_pages(raw, formats, 128, 8, tokens)
            for x, form, found, scale in zip((k, v), (formats.k, formats.v), rows, call.scales.values(), strict=True):
                wanted = quantize_kv(x, kv_format=form.name, scale=scale) if form.is_coded else x
                assert torch.equal(found[slots // tokens, :, slots % tokens], wanted.view(torch.uint8)), str(form)
            table, lengths = torch.tensor([[0]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
            options = {"kv_format": formats.name, "block_table": table, **call.scales}
            k_rows, v_rows = (
                part.view(form.cache_dtype).contiguous()
                for part, form in zip(rows, (formats.k, formats.v), strict=True)
            )
            heads_first = decode_attention(q, k_rows, v_rows, lengths, cache_layout="HND", **options)
            by_backend = decode_attention(q, call.k_cache, call.v_cache, lengths, **call.options, block_table=table)
            assert torch.equal(heads_first, by_backend) and bool(heads_first.any()), (kv_cache_dtype, own)


@check
def the_order_that_vllms_variable_asks_for_is_kept_within_pages() -> None:
    from vllm import envs

    from cute_kernels.integrations.vllm import attention_pages, environment, kv_formats

    names = {"NHD": "NHD", "HND": "HND"}
    if attention_pages.BACKENDS_PACK:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        order = {layout.name: layout.value.index(2) < layout.value.index(3) for layout in KVCacheLayout}
        names |= {name: "HND" if heads_first else "NHD" for name, heads_first in order.items()}
    for name, wanted in names.items():
        with mock.patch.dict(os.environ, {"VLLM_KV_CACHE_LAYOUT": name}):
            assert name == envs.VLLM_KV_CACHE_LAYOUT and environment.wanted_layout() == wanted
            for kv_cache_dtype, own in KV_DTYPES:
                with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": own}):
                    formats = kv_formats.formats_for(kv_cache_dtype)
                assert formats.cache_layout == wanted, (name, kv_cache_dtype, own)
    assert environment.wanted_layout() is None


@check
def more_requests_fit_as_vllm_counts_them() -> None:
    """Of 8192 tokens each into 100 GB, Llama-3-8B; an H100's engine had room for 1.60 times as many in int4_g4."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    from cute_kernels.integrations.vllm.attention_pages import PREFERRED_BLOCK

    engine = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=8192),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )

    def requests(spec: Any) -> int:
        return int(100e9) // (32 * spec.max_memory_usage_bytes(engine))

    quant, dtype = get_kv_quant_mode("fp8"), STR_DTYPE_TO_TORCH_DTYPE["fp8"]
    theirs = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=dtype, kv_quant_mode=quant)
    found = {
        own: requests(layer_spec("auto", own, 128, PREFERRED_BLOCK)) / requests(theirs)
        for own in ("int4_g4", "int4_g1", "int8_token_head,int4_g4")
    }
    assert found["int4_g4"] >= 1.59 and found["int4_g1"] >= 1.86 and found["int8_token_head,int4_g4"] >= 1.2, found


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


def is_asked(name: str) -> bool:
    """Whether vLLM asks backends for something."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    return name in AttentionSelectorConfig._fields


def reasons_against(**changes: Any) -> list[str]:
    """What the backend says against a layer; the environment names a format beside dtypes that take one."""
    from cute_kernels.integrations.vllm import kv_formats
    from cute_kernels.integrations.vllm.attention import CuteKernelsAttentionBackend

    given = selected(**changes)
    form = "int4_g4" if given["kv_cache_dtype"] in kv_formats.OWN else ""
    with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": form}):
        return CuteKernelsAttentionBackend.validate_configuration(**given)


@check
def attention_takes_what_it_serves_and_no_more() -> None:
    from vllm.platforms.interface import DeviceCapability

    for changes in (
        {},
        {"has_sink": True},
        {"has_sliding_window": True},
        {"block_size": 128},
        {"head_size": 256},
        {"head_size": 512},
        *({name: True} for name in ("use_dcp",) if is_asked(name)),
    ):
        assert reasons_against(**changes) == [], changes
    for kv in ("fp8_e4m3", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "auto"):
        assert reasons_against(kv_cache_dtype=kv) == [], kv
    for changes in (
        {"head_size": 72},
        {"dtype": torch.float32},
        {"kv_cache_dtype": "int4_per_token_head", "head_size": 256},
        {"kv_cache_dtype": "nvfp4"},
        {"block_size": 24},
        {"use_mla": True},
        {"use_mm_prefix": True},
        {"use_non_causal": True},
        {"use_batch_invariant": True, "kv_cache_dtype": "int8_per_token_head"},
        {"use_per_head_quant_scales": True},
        {"attn_type": "encoder_only"},
        {"device_capability": DeviceCapability(10, 0)},
        *({name: True} for name in ("use_adaptive_verification", "use_rswa") if is_asked(name)),
        *({"use_dcp": True, **more} for more in ({"has_sink": True}, {"head_size": 512}) if is_asked("use_dcp")),
        *({name: True, "head_size": 512} for name in ("use_dcp",) if is_asked(name)),
    ):
        assert reasons_against(**changes), changes


@check
def invariance_is_served_where_it_can_be() -> None:
    def reasons(**changes: Any) -> list[str]:
        return reasons_against(use_batch_invariant=True, **changes)

    assert reasons(kv_cache_dtype="auto", head_size=256) == reasons(kv_cache_dtype="auto") == []
    assert any("each of V's rows" in reason for reason in reasons(kv_cache_dtype="int8_per_token_head"))
    assert any("reads faster" in reason for reason in reasons())


@check
def a_format_of_our_own_is_never_silently_another() -> None:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    from cute_kernels.integrations.vllm import environment
    from cute_kernels.integrations.vllm.attention import CuteKernelsAttentionBackend

    def refused(call: Callable[[], Any], *words: str) -> None:
        try:
            call()
        except ValueError as error:
            assert all(word in str(error) for word in words), error
            return
        raise AssertionError(f"not refused: {words}")

    ask = CuteKernelsAttentionBackend.validate_configuration
    refused(
        lambda: ask(**selected(kv_cache_dtype="auto", head_size=72)), f"{environment.KV_FORMAT}=int4_g4: cannot serve"
    )
    refused(lambda: ask(**selected(kv_cache_dtype="auto", head_size=80)), "cannot serve", "groups of 20 columns")
    # By the command line, or by a checkpoint that says how its cache is quantised.
    refused(lambda: ask(**selected()), f"{environment.KV_FORMAT}=int4_g4: got a cache in fp8", "want one of auto")
    # A backend that was named, and latent attention, are never asked: their layers are refused.
    for layer_class in (Attention, MLAAttention):
        given = {
            "attn_type": "decoder",
            "sliding_window": None,
            "num_kv_heads": 8,
            "head_size": 128,
            "head_size_v": 128,
        }
        given |= {"kv_cache_dtype": "auto", "kv_cache_torch_dtype": torch.bfloat16, "layer_name": "model.layers.0"}
        layer = mock.MagicMock(impl=SimpleNamespace(), **given)
        config = mock.MagicMock()
        config.cache_config.block_size, config.cache_config.cache_dtype = 64, "auto"
        config.model_config.dtype = torch.bfloat16
        spec = lambda: layer_class.get_kv_cache_spec(layer, config)  # noqa: B023, E731
        refused(spec, f"{environment.KV_FORMAT}=int4_g4: model.layers.0 is served by SimpleNamespace")
        with mock.patch.dict(os.environ, {environment.KV_FORMAT: ""}):
            assert spec() is not None
    with mock.patch.dict(os.environ, {environment.SWITCH: "linear,moe"}):
        refused(environment.check, "got 'int4_g4', want the seam attention in CUTE_KERNELS_VLLM")
    with mock.patch.dict(os.environ, {environment.SWITCH: "0"}):
        environment.check()


@check
def metadata_of_another_making_is_refused() -> None:
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend

    from cute_kernels.integrations.vllm import attention

    try:
        create_chunked_local_attention_backend(attention.CuteKernelsAttentionBackend, 8192)
    except NotImplementedError as error:
        assert "ChunkedLocalAttentionBuilder" in str(error) and "leaves attention to vLLM" in str(error)
    else:
        raise AssertionError("a builder that changes metadata was taken")
    model = SimpleNamespace(
        attention_chunk_size=None, hf_text_config=SimpleNamespace(), rswa_window=None, is_hybrid=False
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[], kv_sharing_fast_prefill=False),
        speculative_config=None,
    )
    with mock.patch.object(attention, "get_current_vllm_config_or_none", lambda: config):
        assert attention._reasons_of_engine("auto", True) == []
        model.attention_chunk_size, model.hf_text_config.param_sink_number = 8192, 128
        assert attention._reasons_of_engine("auto", True) == [
            "attention within chunks not supported",
            "sinks that are tokens not supported",
        ]


@check
def constants_are_cut_to_a_ranks_heads() -> None:
    from cute_kernels.integrations.vllm import kv_constants
    from cute_kernels.kv_cache import CacheConstants

    with tempfile.TemporaryDirectory() as folder:
        path = constants_file(folder, kv_heads=4)
        whole = CacheConstants.load(path).transforms[1]
        assert whole is not None and whole.k_center is not None
        impl = Layer("auto", "int4_g4", kv_heads=2).make("cpu")
        for rank in range(2):
            give_constants(impl, path, ranks=2, rank=rank)
            assert torch.equal(impl.transform.k_center, whole.k_center[2 * rank : 2 * rank + 2])
            assert impl.transform.v_factor.shape == (2, 128) and impl.transform.k_rotation == 32
        shared = Layer("auto", "int4_g4", kv_heads=1).make("cpu")
        for rank in range(8):  # two ranks to a head
            give_constants(shared, path, ranks=8, rank=rank)
            assert torch.equal(shared.transform.k_center, whole.k_center[rank // 2 : rank // 2 + 1])
        give_constants(shared, path, "model.layers.0.self_attn.attn", ranks=8)
        assert shared.transform is None  # the file has none for it
        impl.kv_sharing_target_layer_name = "model.layers.1.self_attn.attn"
        give_constants(impl, path, "model.layers.0.self_attn.attn", ranks=2)
        assert torch.equal(impl.transform.k_center, whole.k_center[:2])  # what its cache was written with
        with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_CONSTANTS": path}):
            assert [one is None for one in kv_constants.kinds("auto", 2, 128)] == [True, False]
        assert kv_constants.kinds("auto", 2, 128) == [None]


@check
def constants_that_do_not_fit_are_refused_by_name() -> None:
    from cute_kernels.integrations.vllm import environment
    from cute_kernels.kv_cache import CacheConstants

    def refused(words: str, error: type[Exception] = ValueError, path: str = "", **given: Any) -> None:
        impl = given.pop("impl", None) or Layer("auto", "int4_g4").make("cpu")
        try:
            give_constants(impl, path or here, **given)
        except error as found:
            assert words in str(found), found
            return
        raise AssertionError(f"not refused: {words}")

    with tempfile.TemporaryDirectory() as folder:
        here = constants_file(folder)
        refused("constants of 2 layers, want the model's 3", layers=3)
        refused("model.layers.2.self_attn.attn: got constants of 2 layers", name="model.layers.2.self_attn.attn")
        refused("model.layers.1.self_attn.attn: got constants of 2 KV heads, want those of 4 ranks with 2", ranks=4)
        wide = constants_file(folder, dim=256)
        refused("model.layers.1.self_attn.attn: k_center: got shape [2, 256], want [2, 128]", path=wide)
        wide = constants_file(folder, dim=256, v_rotation=256)
        impl = Layer("auto", "int4_g4", dim=256).make("cpu")
        refused("v_rotation: got 256, want at most 128", path=wide, impl=impl)
        scaled = os.path.join(folder, "scaled")
        CacheConstants((None, None), ((torch.ones(2), None), (None, None))).save(scaled)
        refused("got scales, which vLLM takes from its checkpoint", path=scaled)
        refused("no such file", FileNotFoundError, path=os.path.join(folder, "nothing"))
        impl = Layer("auto", "int4_g4", soft_cap=3.0).make("cpu")
        refused("k_center: got one with a soft cap of 3.0, want none", impl=impl)
        impl = Layer("int4_per_token_head").make("cpu")
        os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"
        refused("with --kv-cache-dtype int4_per_token_head, want auto", impl=impl)
        for changes in ({"CUTE_KERNELS_VLLM_KV_FORMAT": ""}, {"CUTE_KERNELS_VLLM": "linear"}):
            with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_CONSTANTS": here, **changes}):
                try:
                    environment.wanted_constants()
                except ValueError as found:
                    assert "want CUTE_KERNELS_VLLM_KV_FORMAT with it, and the seam attention" in str(found)
                else:
                    raise AssertionError(changes)


@check_once
def rotated_rows_lose_no_more_than_vllms() -> None:
    """`int4_per_token_head`: of rows with outliers, with a mean and of one sign, less is lost than by vLLM's rows."""
    from cute_kernels import dequantize_kv, quantize_kv
    from cute_kernels.integrations.vllm import kv_formats

    generator = torch.Generator().manual_seed(2)
    for dim in (64, 128):
        plain = torch.randn(2000, 2, dim, generator=generator)
        outliers = plain.clone()
        outliers[..., 5] += 20
        rows = {"plain": plain, "outliers": outliers, "mean": plain + 3, "positive": plain.abs()}
        transform = kv_formats.transform_for("int4_per_token_head", 2, dim)
        assert transform is not None
        losses = {}
        for name, x in rows.items():
            written = transform.keys(x)
            ours = dequantize_kv(quantize_kv(written, kv_format="int4_g1"), kv_format="int4_g1", head_dim=dim)
            losses[name] = (ours.float() - written).pow(2).mean().sqrt() / x.std()
            assert losses[name] <= 1.001 * ((zero_point_rows(written) - written).pow(2).mean().sqrt() / x.std()), name
        bare = dequantize_kv(quantize_kv(outliers, kv_format="int4_g1"), kv_format="int4_g1", head_dim=dim)
        assert losses["outliers"] < 0.7 * (bare.float() - outliers).pow(2).mean().sqrt() / outliers.std()


def zero_point_rows(x: torch.Tensor) -> torch.Tensor:
    """What is left of rows that vLLM's `int4_per_token_head` writes: 4-bit codes, a scale and a 4-bit zero point."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    zero = (-low / scale).round().clamp(0, 15)
    return ((x / scale + zero).round().clamp(0, 15) - zero) * scale


@check
def layers_are_made_as_vllm_makes_them() -> None:
    """With another device and another dtype than torch's as the defaults."""
    from cute_kernels.kv_cache.vllm_rows import vllm_transform

    forms = (("fp8", ""), ("int8_per_token_head", ""), ("int4_per_token_head", ""), ("auto", "int4_g4"))
    usual = [Layer(*form).make("cpu") for form in forms]
    rotation = vllm_transform(2, 128)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            made = [Layer(*form).make("cpu") for form in forms]
            again = vllm_transform(2, 128)
    finally:
        torch.set_default_dtype(torch.float32)
        os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"
    pairs = [(one.transform, other.transform) for one, other in zip(usual, made, strict=True)] + [(rotation, again)]
    assert sum(one is not None for one, _ in pairs) == 2
    for one, other in pairs:
        assert (one is None) == (other is None)
        for name, array in {} if one is None else one.arrays.items():
            assert torch.equal(array, other.arrays[name]) and other.arrays[name].dtype == torch.float32, name


@check
def sizes_that_are_not_rotated_are_left_to_vllm() -> None:
    from cute_kernels.integrations.vllm import kv_formats

    assert kv_formats.reason_against_rotation("int4_per_token_head", 128) is None
    assert "head size 96 with rows that are rotated" in str(
        kv_formats.reason_against_rotation("int4_per_token_head", 96)
    )
    assert kv_formats.reason_against_rotation("fp8", 96) is None


@check
def without_the_compiler_layers_are_left_to_vllm_and_kernels_are_listed() -> None:
    import tempfile
    from pathlib import Path

    from cute_kernels.integrations import ready
    from cute_kernels.integrations.vllm import attention, prepare
    from cute_kernels.integrations.vllm.linear import CuteKernelsLinearKernel
    from cute_kernels.runtime import gpu, wanted
    from cute_kernels.runtime.gpu import standing_in
    from tests.integrations.vllm.layers import linear_config

    layer = linear_config((4096, 6144))
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: 32,
        get_num_kv_heads=lambda parallel: 8,
        hf_text_config=SimpleNamespace(),
        max_model_len=8192,
        dtype=torch.bfloat16,
        rswa_window=None,
        is_hybrid=False,
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
        mock.patch.object(prepare, "linear_reason", prepare.original_linear_reason),
        mock.patch.multiple(
            ready,
            compiler_version=lambda: None,
            arch_of=lambda index: "sm_90a",
            default_directory=lambda: Path(folder),
            default_cache=lambda: SimpleNamespace(has=lambda spec, arch: False),
        ),
        mock.patch.multiple(attention, compiler_version=lambda: None, get_current_vllm_config_or_none=lambda: engine),
        standing_in(replace(gpu.Gpu(), name=lambda index: "NVIDIA H200", num_sms=lambda device: 132)),
    ):
        able, reason = CuteKernelsLinearKernel.can_implement(layer)
        assert not able and "kernels are in no bundle. Build one where the compiler is" in str(reason), reason
        path = Path(folder) / prepare.WANTED
        linear = wanted.read(path, "sm_90a")
        assert linear and all(spec.family == "linear" for spec in linear)
        reasons = reasons_against()
        assert any("kernels are in no bundle" in each for each in reasons), reasons
        both = wanted.read(path, "sm_90a")
        assert {spec.family for spec in both} >= {"linear", "attention", "kv_cache"}, {spec.family for spec in both}
