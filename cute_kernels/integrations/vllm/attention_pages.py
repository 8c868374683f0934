"""The pages of the attention backend, as vLLM counts them. vLLM's interface for this differs between releases.

Up to vLLM 0.26 a backend returns a cache's shape, and a layer's specification computes the number of bytes. A row in a
format that vLLM does not know is described as a head with one column for each byte. From vLLM 0.30 on the backend fills
in the specification itself (`customize_spec`), and caches come as views [pages, heads, tokens, content]. To vLLM, a
page of this backend is one head, whose tokens hold the rows of all heads. So a page's bytes are contiguous in each of
vLLM's layouts, which differ only in the order of layers and pages. `kv_formats.laid_out` decides the order of heads and
tokens within a page.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

from cute_kernels.attention.checks import head_dim_of_row
from cute_kernels.integrations import engine_cache
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import kv_formats

BACKENDS_PACK = hasattr(AttentionBackend, "customize_spec")
"""Whether vLLM asks backends for the bytes of their pages (from 0.30 on)."""
CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""KV connectors that move whole pages, with the bytes that a layer's specification counts."""
PREFERRED_BLOCK = 64  # tokens of a page, if the user names none: fewer, larger copies than vLLM's 16


class Pages(AttentionBackend):
    """The part of a backend that describes its pages."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return [16, 32, 64, 128, 256]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, PREFERRED_BLOCK)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Returns [num_blocks, page]. A page is counted in bytes, whatever dtype vLLM allocates; `kv_formats.views`
        makes K and V of it."""
        formats = kv_formats.formats_for(cache_dtype_str)
        if kv_formats.is_own(cache_dtype_str):  # then the "head size" is the bytes of K's row already (`counted`)
            head_size = head_dim_of_row(formats.k, head_size // formats.k.cache_dtype.itemsize)
        return num_blocks, kv_formats.page_bytes(formats, head_size, block_size, num_kv_heads)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2) if include_num_layers_dimension else (0, 1)

    @classmethod
    def customize_spec(cls, spec: Foreign) -> Any:
        """Returns a layer's specification with the bytes of its pages. A page's bytes are contiguous in every layout of
        vLLM.
        """
        cache_dtype = _cache_dtype_of(spec)
        not_ours = kv_formats.is_own(cache_dtype) and not kv_formats.own_formats()  # --kv-cache-dtype-skip-layers
        if spec.state_content_bytes is not None or not_ours:
            return spec
        return _packed(spec, kv_formats.formats_for(cache_dtype))


def _packed(spec: Foreign, formats: engine_cache.Formats) -> Any:
    """Returns a layer's specification with the bytes of its pages, for a vLLM that asks for them."""
    content = spec.num_kv_heads * sum(engine_cache.row_bytes(formats, spec.head_size))
    return dataclasses.replace(cast(Any, spec), num_head_slots=1, state_content_bytes=content, dtype=torch.uint8)


def wrong_by_layer(config: Foreign, slides: bool) -> dict[str, bool]:
    """Returns the reasons for which an engine cannot have formats by layer: {reason: whether it holds}. slides: whether
    a layer has a window.

    Layers of one kind share a block table, and each layer's pages have their own size. With several kinds, vLLM makes
    all pages as large as the largest.
    """
    layers = len(kv_formats.own_formats())
    if layers <= 1:
        return {}
    there = getattr(getattr(config.model_config, "hf_text_config", None), "num_hidden_layers", layers)
    return {
        "formats by layer with this vLLM": not BACKENDS_PACK,
        "formats by layer beside windows": slides,
        "formats by layer beside Mamba layers": bool(config.model_config.is_hybrid),
        "formats by layer with a KV connector": getattr(config, "kv_transfer_config", None) is not None,
        f"formats of {layers} layers for a model of {there}": there != layers,
    }


def reason_of_connector(config: Foreign) -> str | None:
    """Returns why an engine's KV connector cannot move pages; None if it can, or if there is none.

    A page holds the rows of K of all of its tokens and KV heads, then the rows of V. Rows with headers are sorted by
    head. These connectors do not work: connectors that split pages by heads or tokens, that transfer K and V
    separately, or that redistribute heads among GPUs.
    """
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is None:
        return None
    name, ranks = transfer.kv_connector, config.parallel_config.tensor_parallel_size
    if not BACKENDS_PACK or name not in CONNECTORS:
        known = ", ".join(CONNECTORS) if BACKENDS_PACK else "none with this vLLM"
        return f"KV connector {name} not supported, which may take pages apart; supported: {known}"
    return None if ranks == 1 else f"KV connector {name} with tensor parallelism of {ranks} not supported"


def _cache_dtype_of(spec: Foreign) -> str:
    """Returns a name of `--kv-cache-dtype` whose pages match a specification."""
    same = (name for name in kv_formats.BY_DTYPE if get_kv_quant_mode(name) == spec.kv_quant_mode)
    return next(same, kv_formats.OWN[0])


def counted(layer: Foreign, spec: Foreign) -> Any:
    """Returns a layer's specification. For a format unknown to vLLM, the specification has the bytes of the format's
    rows. This function is called in all releases of vLLM, also in releases that do not ask backends for these bytes.
    """
    if not kv_formats.is_own(layer.kv_cache_dtype):
        return spec
    if BACKENDS_PACK:
        return _packed(spec, layer.impl.formats)
    k_row, v_row = engine_cache.row_bytes(layer.impl.formats, layer.head_size)
    return dataclasses.replace(
        cast(Any, spec), head_size=k_row, head_size_v=v_row, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NONE
    )
