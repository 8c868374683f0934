"""Checks of how vLLM chooses the attention backend, of its pages, and of kernels that are looked for then."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integrations.vllm.checks import check
from tests.integrations.vllm.seam_attention import reasons_against
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

    def looked_for(block: int | None, sliding: bool, **text: Any) -> tuple[Any, set[Any]]:
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
            parallel_config=None,
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
            assert attention._missing_kernels(kv_formats.formats_for("fp8"), "fp8", named) == []
        return engine, found

    def asked_for(engine: Any, page: int, window: int | None = None, shared: str | None = None) -> set[Any]:
        impl = Layer("fp8", heads=32, kv_heads=8, window=window).make("cpu")
        impl.kv_sharing_target_layer_name = shared
        return set(attention_kernels.specs_of(impl, decodes_of(engine, page), 132))

    for block, sliding, text, page, window, shared in (
        (None, False, {}, 64, None, None),
        (None, True, {"sliding_window": 4096}, 64, 4096, None),
        (None, True, {"sliding_window": 32768}, 64, 32768, None),
        (128, False, {}, 128, None, None),
        (48, False, {}, 16, None, None),
        (None, False, {"hybrid": True}, 64, None, None),
        (None, False, {"hybrid": True}, 128, None, None),
        (None, False, {"num_kv_shared_layers": 2}, 64, None, "model.layers.0"),
    ):
        engine, found = looked_for(block, sliding, **text)
        missing = asked_for(engine, page, window, shared) - found
        assert not missing, (block, sliding, text, [spec.symbol for spec in missing])


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
