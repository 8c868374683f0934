"""Checks of how vLLM chooses the attention backend, of its pages, and of kernels that are looked for then."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cute_kernels.names import KvFormatName
from tests.integrations.vllm.checks import check
from tests.integrations.vllm.seam_attention import engine_caches, layer_spec, reasons_against, rows_of_pages
from tests.integrations.vllm.steps import Layer


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


@check
def attention_with_slopes_is_left_to_vllm() -> None:
    """ALiBi's, which a backend is not asked about."""
    import importlib

    from cute_kernels.integrations.vllm import versions

    module_name, name = next(iter(versions.INTERFACES.values())).attention_layer
    module = importlib.import_module(module_name)
    found: list[list[str]] = []

    def choose(*_: Any, **__: Any) -> None:
        found.append(reasons_against(kv_cache_dtype="int8_per_token_head"))
        raise InterruptedError

    with (
        mock.patch.object(module, "get_current_vllm_config", mock.MagicMock),
        mock.patch.object(module, "kv_cache_dtype_str_to_dtype", lambda *_: torch.int8),
        mock.patch.object(module, "get_attn_backend", choose),
    ):
        for slopes in ([0.5] * 8, None):
            for given in ((8, 128, 0.1, 8, slopes), (8, 128, 0.1)):
                more = {} if len(given) > 3 else {"alibi_slopes": slopes}
                try:
                    getattr(module, name)(*given, **more)
                except InterruptedError:
                    continue
                raise AssertionError("no backend was chosen")
    assert found == [["ALiBi not supported"]] * 2 + [[]] * 2, found


@check
def backends_are_chosen_anew_for_another_engine_of_a_process() -> None:
    """vLLM keeps what it chose, by less than what decides it."""
    import vllm.platforms
    from vllm.v1.attention import selector

    from cute_kernels.integrations.vllm import attention_choice

    asked: list[str] = []

    class Platform:
        def get_attn_backend_cls(self, *_: Any, **__: Any) -> str:
            asked.append(os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"])
            return "cute_kernels.integrations.vllm.attention.CuteKernelsAttentionBackend"

    one, other = (mock.Mock(), mock.Mock())
    with (
        mock.patch.object(vllm.platforms, "current_platform", Platform(), create=True),
        mock.patch.object(attention_choice, "get_current_vllm_config_or_none") as engine,
    ):
        for config, form, switch in (
            (one, "int4_g4", "1"),
            (one, "int4_g4", "1"),
            (one, "", "1"),
            (other, "", "1"),
            (other, "", "linear"),
            (other, "", "linear"),
        ):
            engine.return_value = config
            with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": form, "CUTE_KERNELS_VLLM": switch}):
                selector._cached_get_attn_backend(backend=None, attn_selector_config="a layer's", num_heads=None)
    assert asked == ["int4_g4", "", "", ""], asked


@check
def layers_that_slide_have_the_engines_pages() -> None:
    """Kernels are looked for with those before a layer is chosen, where they cannot be compiled."""
    from vllm.model_executor.layers.attention.attention import Attention

    impl = Layer("fp8", window=4096).make("cpu")
    layer = mock.MagicMock(
        impl=impl, attn_type="decoder", sliding_window=4096, num_kv_heads=8, head_size=128, head_size_v=128
    )
    layer.kv_cache_dtype, layer.kv_cache_torch_dtype = "fp8", torch.uint8
    layer.attn_backend.get_supported_kernel_block_sizes = lambda *_: [16, 32, 64]
    layer.attn_backend.is_mla = lambda: False
    layer.attn_backend.customize_spec = lambda spec: spec
    config = mock.MagicMock()
    config.cache_config.block_size, config.cache_config.skip_page_size_padded = 64, None
    assert Attention.get_kv_cache_spec(layer, config).block_size == 64


@check
def kernels_that_are_looked_for_are_those_that_are_asked_for() -> None:
    """Windows that no context reaches, pages of hybrids, layers that read another layer's cache."""
    from cute_kernels.integrations import attention_kernels
    from cute_kernels.integrations.vllm import attention, kv_formats
    from cute_kernels.integrations.vllm.attention_metadata import decodes_of

    def looked_for(kv: str, block: int | None, sliding: bool, **text: Any) -> tuple[Any, set[Any]]:
        model = SimpleNamespace(
            get_num_attention_heads=lambda parallel: 32,
            get_num_kv_heads=lambda parallel: 8,
            hf_text_config=SimpleNamespace(**text),
            is_hybrid=text.get("hybrid", False),
            max_model_len=8192,
            dtype=torch.bfloat16,
        )
        engine = SimpleNamespace(
            model_config=model,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            speculative_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
        found: set[Any] = set()
        with (
            mock.patch.multiple(
                attention, compiler_version=lambda: None, get_current_vllm_config_or_none=lambda: engine
            ),
            mock.patch.object(attention.prepare, "why_not_ready", lambda device, specs: found.update(specs)),
            mock.patch.object(attention_kernels.GPU, "num_sms", lambda device: 132),
        ):
            named = {"head_size": 128, "block_size": block, "has_sliding_window": sliding}
            assert attention._missing_kernels(kv_formats.formats_for(kv), kv, named) == []
        return engine, found

    def asked_for(kv: str, engine: Any, page: int, window: int | None, shared: str | None) -> set[Any]:
        impl = Layer(kv, heads=32, kv_heads=8, window=window).make("cpu")
        impl.kv_sharing_target_layer_name = shared
        return set(attention_kernels.specs_of(impl, decodes_of(engine, page), 132))

    for kv, block, sliding, text, page, window, shared in (
        ("fp8", None, False, {}, 64, None, None),
        ("int8_per_token_head", None, False, {}, 64, None, None),
        ("fp8", None, True, {"sliding_window": 4096}, 64, 4096, None),
        ("fp8", None, True, {"sliding_window": 32768}, 64, 32768, None),
        ("fp8", 128, False, {}, 128, None, None),
        ("fp8", 48, False, {}, 16, None, None),
        ("fp8", None, False, {"hybrid": True}, 64, None, None),
        ("fp8", None, False, {"hybrid": True}, 128, None, None),
        ("fp8", None, False, {"num_kv_shared_layers": 2}, 64, None, "model.layers.0"),
    ):
        engine, found = looked_for(kv, block, sliding, **text)
        missing = asked_for(kv, engine, page, window, shared) - found
        assert not missing, (kv, block, sliding, text, [spec.symbol for spec in missing])
        assert all(("head_major" in spec.symbol) == (kv != "fp8") for spec in found if "decode_" in spec.symbol), kv


@check
def hybrids_have_pages_that_fit_or_are_refused_by_name() -> None:
    """Up to 0.26 vLLM makes pages of Mamba's states as large as attention's in 16 bits."""
    from vllm.v1.attention.backend import AttentionBackend

    from cute_kernels.integrations.vllm import attention

    model = SimpleNamespace(hf_text_config=SimpleNamespace(), is_hybrid=True)
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[], kv_sharing_fast_prefill=False),
        speculative_config=None,
    )
    fits = hasattr(AttentionBackend, "customize_spec")
    with mock.patch.object(attention, "get_current_vllm_config_or_none", lambda: config):
        refused = [] if fits else ["Mamba layers beside such pages not supported"]
        assert attention._reasons_of_engine("auto", True) == refused
        assert attention._reasons_of_engine("fp8", True) == []  # which vLLM counts itself


@check
def connectors_that_move_whole_pages_are_served_and_others_are_refused_by_name() -> None:
    from cute_kernels.integrations.vllm import attention_pages, kv_formats
    from cute_kernels.integrations.vllm.attention import CuteKernelsAttentionBackend

    def reason(name: str | None, ranks: int = 1) -> str:
        transfer = None if name is None else SimpleNamespace(kv_connector=name)
        parallel = SimpleNamespace(tensor_parallel_size=ranks)
        engine = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
        return str(attention_pages.reason_of_connector(engine))

    assert CuteKernelsAttentionBackend.supports_kv_connector() and reason(None) == "None"
    assert "KV connector NixlConnector not supported" in reason("NixlConnector")
    for name in attention_pages.CONNECTORS:
        if not attention_pages.BACKENDS_PACK:
            assert "supported: none with this vLLM" in reason(name)
            continue
        assert reason(name) == "None" and "tensor parallelism of 2" in reason(name, 2)
    if attention_pages.BACKENDS_PACK:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        assert set(attention_pages.CONNECTORS) <= set(KVConnectorFactory._registry)
        # What they ask vLLM for does not contradict the order within a page.
        engine = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None))
        for name in attention_pages.CONNECTORS:
            connector = KVConnectorFactory.get_connector_class_by_name(name)
            asked = connector.get_required_kvcache_layout(engine) or "HND"
            with mock.patch.dict(os.environ, {"VLLM_KV_CACHE_LAYOUT": asked}):
                assert kv_formats.formats_for("int8_per_token_head").cache_layout == "HND", asked


@check
def a_page_that_a_connector_moves_by_its_bytes_is_the_page() -> None:
    """As OffloadingConnector sees a layer: [pages, bytes that the specification counts], as far apart as pages are."""
    from cute_kernels.integrations.vllm import attention_pages, kv_formats

    if not attention_pages.BACKENDS_PACK:
        return
    for kv_cache_dtype, own in (("fp8", ""), ("int4_per_token_head", ""), ("auto", "int8_token_head,int4_g4")):
        spec = layer_spec(kv_cache_dtype, own, 128)
        with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": own}):
            formats = kv_formats.formats_for(kv_cache_dtype)
        for cache, tokens in engine_caches(spec, 5, kv_cache_dtype, own):
            if tokens != spec.block_size:
                continue
            cache.view(torch.uint8).copy_(torch.randint(0, 255, cache.view(torch.uint8).shape, dtype=torch.uint8))
            width, place = cache.element_size(), cache.storage_offset() * cache.element_size()
            pages = torch.empty(0, dtype=torch.uint8).set_(
                cache.untyped_storage(), place, (5, spec.page_size_bytes), (cache.stride(0) * width, 1)
            )
            rows = rows_of_pages(pages, formats, 128, 8, tokens)  # a block is K's rows, then V's
            for view, own_rows in zip(kv_formats.views(cache, formats, 128, 8), rows, strict=True):
                view = view if formats.cache_layout == "HND" else view.transpose(1, 2)
                assert torch.equal(view.view(torch.uint8), own_rows), (kv_cache_dtype, own)
            before = [view.view(torch.uint8).clone() for view in kv_formats.views(cache, formats, 128, 8)]
            pages[3] = pages[1]
            for old, view in zip(before, kv_formats.views(cache, formats, 128, 8), strict=True):
                now = view.view(torch.uint8)
                assert torch.equal(now[3], old[1]) and torch.equal(now[[0, 1, 2, 4]], old[[0, 1, 2, 4]])


@check
def layers_that_are_skipped_share_pages_with_ours() -> None:
    """vLLM makes pages of a quantised cache as large as a few tokens of the layers that it leaves in 16 bits."""
    from vllm.platforms.interface import Platform

    from cute_kernels.integrations.vllm import attention, attention_pages, kv_formats
    from cute_kernels.integrations.vllm.attention import CuteKernelsAttentionBackend

    caches = SimpleNamespace(
        kv_cache_dtype_skip_layers=["0"], kv_sharing_fast_prefill=False, block_size=64, mamba_page_size_padded=None
    )
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(),
        is_hybrid=False,
        get_num_kv_heads=lambda parallel: 8,
        get_head_size=lambda: 128,
        dtype=torch.bfloat16,
    )
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    engine = SimpleNamespace(model_config=model, parallel_config=parallel, cache_config=caches, speculative_config=None)
    refused = ["--kv-cache-dtype-skip-layers not supported"]
    with mock.patch.object(attention, "get_current_vllm_config_or_none", lambda: engine):
        assert attention._reasons_of_engine("auto", True) == refused  # it would be in our format all the same
        fits = attention_pages.BACKENDS_PACK
        assert attention._reasons_of_engine("fp8", True) == ([] if fits else refused)
    if not fits:
        return
    for caches.cache_dtype in ("fp8", "int8_per_token_head", "int4_per_token_head"):
        caches.block_size, formats = 64, kv_formats.formats_for(caches.cache_dtype)
        with (
            mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": ""}),
            mock.patch("vllm.config.vllm.set_current_vllm_config", lambda config: nullcontext()),
        ):
            Platform._align_heterogeneous_kv_block_size(engine, CuteKernelsAttentionBackend)
        page = kv_formats.page_bytes(formats, 128, caches.block_size, 8)
        assert caches.skip_page_size_padded == page and page >= 16 * 8 * 128 * 2 * 2, caches.cache_dtype
        assert any(caches.block_size % size == 0 for size in (64, 128, 256))


BY_LAYER: tuple[tuple[KvFormatName, KvFormatName], ...] = (
    ("int8_token_head", "int4_g4"),
    ("int4_g4", "int4_g4"),
    ("bf16", "int8_token_head"),
    ("int4_g4", "int4_g4"),
)


def by_layer(folder: str) -> str:
    """A file of formats, as `cute-kernels calibrate --budget` writes it."""
    from cute_kernels.formats.kv import LayerFormats

    path = f"{folder}/formats.json"
    LayerFormats(BY_LAYER).save(path)
    return path


def name_of(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


@check
def layers_have_pages_in_formats_of_their_own() -> None:
    """As vLLM cuts them out of its memory, side by side: what is written into one layer's is in no other's."""
    from cute_kernels.integrations.vllm import attention, attention_pages, kv_formats, seams

    if not attention_pages.BACKENDS_PACK:
        return
    try:
        from vllm.v1.core import kv_cache_planning
    except ImportError:  # up to 0.32
        from vllm.v1.core import kv_cache_utils as kv_cache_planning
    from vllm.v1.kv_cache_interface import FullAttentionSpec, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker import utils

    specs, impls, blocks = {}, {}, 5
    with tempfile.TemporaryDirectory() as folder:
        path = by_layer(folder)
        for number, pair in enumerate(BY_LAYER):
            name = name_of(number)
            with seams.making(seams.Layer(name)):
                impls[name] = Layer("auto", path).make("cpu")
            assert (impls[name].formats.k.name, impls[name].formats.v.name) == pair
            layer = SimpleNamespace(impl=impls[name], kv_cache_dtype="auto")
            spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
            with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": path}):
                spec = attention_pages.counted(layer, spec)
                asked = getattr(utils, "customize_attention_spec", lambda backend, spec: backend.customize_spec(spec))
                specs[name] = asked(attention.CuteKernelsAttentionBackend, spec)
            assert specs[name].page_size_bytes == kv_formats.page_bytes(impls[name].formats, 128, 64, 2)
    config = mock.MagicMock()
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.attention_config.hisparse_config = config.cache_config.num_gpu_blocks_override = None
    page = sum(spec.page_size_bytes for spec in specs.values())
    with mock.patch.object(kv_cache_planning, "get_hisparse_kv_cache_groups", lambda *_: None, create=True):
        groups = kv_cache_planning.get_kv_cache_groups(config, specs)
    assert len(groups) == 1 and groups[0].kv_cache_spec.page_size_bytes == page
    for layout in (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC):
        config.cache_config.get_resolved_kv_cache_layout = lambda layout=layout: layout
        made = kv_cache_planning.get_kv_cache_config_from_groups(config, groups, blocks * page)
        assert made.num_blocks == blocks
        raw = torch.zeros(blocks * page, dtype=torch.int8)
        caches: dict[str, torch.Tensor] = {}
        for tensor in made.kv_cache_tensors:
            views = create_kv_cache_views(raw, specs[tensor.layers[0]], blocks, layout, tensor)
            caches |= dict(zip(tensor.layers, views, strict=True))
        parts = [
            view.view(torch.uint8)
            for name, impl in impls.items()
            for view in kv_formats.views(caches[name], impl.formats, 128, 2)
        ]
        for value, part in enumerate(parts, 1):
            part.fill_(value)
        assert all(bool((part == value).all()) for value, part in enumerate(parts, 1)), layout
        assert int((raw == 0).sum()) == 0, layout


@check
def a_layers_format_is_known_while_vllm_makes_it() -> None:
    import importlib

    from cute_kernels.integrations.vllm import kv_formats, versions

    module_name, name = next(iter(versions.INTERFACES.values())).attention_layer
    module = importlib.import_module(module_name)
    found: list[tuple[str, str]] = []

    def choose(*_: Any, **__: Any) -> None:
        formats = kv_formats.formats_for("auto")
        found.append((formats.k.name, formats.v.name))
        raise InterruptedError

    def make(number: int, **named: Any) -> None:
        try:
            getattr(module, name)(8, 128, 0.1, 8, prefix=name_of(number), **named)
        except InterruptedError:
            return
        raise AssertionError("no backend was chosen")

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": by_layer(folder)}),
        mock.patch.object(module, "get_current_vllm_config", mock.MagicMock),
        mock.patch.object(module, "kv_cache_dtype_str_to_dtype", lambda *_: torch.int8),
        mock.patch.object(module, "get_attn_backend", choose),
    ):
        for number in range(len(BY_LAYER)):
            make(number)
        make(3, kv_sharing_target_layer_name=name_of(0))  # it reads that one's pages
        assert tuple(found) == (*BY_LAYER, BY_LAYER[0])
        for number in (4, None):
            try:
                make(4) if number else kv_formats.formats_for("auto")
            except ValueError as error:
                who = name_of(4) if number else "pages of no layer"
                assert f"{who}: got formats of 4 layers" in str(error), error
            else:
                raise AssertionError(number)


@check
def formats_by_layer_are_refused_where_pages_would_be_as_large_as_the_largest() -> None:
    from cute_kernels.integrations.vllm import attention_pages, doctor, versions

    def reasons(slides: bool = False, hybrid: bool = False, layers: int = 4, connector: object = None) -> list[str]:
        model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=layers), is_hybrid=hybrid)
        config = SimpleNamespace(model_config=model, kv_transfer_config=connector)
        return [what for what, is_so in attention_pages.wrong_by_layer(config, slides).items() if is_so]

    old = [] if attention_pages.BACKENDS_PACK else ["formats by layer with this vLLM"]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(versions, "installed", lambda: "0.33.0"),
    ):
        path = by_layer(folder)
        with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": path, "CUTE_KERNELS_VLLM": "1"}):
            assert reasons() == old
            assert "formats by layer beside windows" in reasons(slides=True)
            assert "formats by layer beside Mamba layers" in reasons(hybrid=True)
            assert "formats of 4 layers for a model of 5" in reasons(layers=5)
            assert "formats by layer with a KV connector" in reasons(connector=object())
            assert "KV caches in 4 formats by layer with" in doctor.examine().detail
        with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": f"{folder}/none.json"}):
            found = doctor.examine()
            assert found.status == "limited" and f"CUTE_KERNELS_VLLM_KV_FORMAT: {folder}/none.json: no" in found.detail
    with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": "int4_g4"}):
        assert reasons(slides=True, hybrid=True, layers=5, connector=object()) == []
