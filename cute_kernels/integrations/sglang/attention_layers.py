"""A model's attention layers in SGLang, as this package's kernels take them: formats, windows, decode steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from cute_kernels.formats.kv import format_of
from cute_kernels.integrations import attention_kernels
from cute_kernels.integrations.engine_cache import Formats
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang import rows

FP8 = Formats(format_of("e4m3_tensor"), format_of("e4m3_tensor"))
"""K's and V's formats in the pool of `--kv-cache-dtype fp8_e4m3`."""


def formats_of(runner: Foreign) -> Formats:
    """Returns K's and V's formats in a model's pool."""
    return rows.wanted_formats() or FP8


def layers_of(model: torch.nn.Module) -> list[Foreign]:
    """Returns a model's attention layers."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def decodes_of(runner: Foreign) -> attention_kernels.Decodes:
    """Returns the decode steps that a server may run: their numbers of requests and tokens, and the page size."""
    return attention_kernels.Decodes(
        batches=attention_kernels.batches_up_to(runner.req_to_token_pool.size),
        q_len=1,
        max_seq_len=runner.req_to_token_pool.req_to_token.shape[1],
        page_size=runner.page_size,
        dtype=runner.dtype,
    )


def kernel_layers(runner: Foreign, layers: Iterable[Foreign]) -> list[Any]:
    """Returns layers as `attention_kernels` takes them.

    If any layer reads another layer's cache, all layers are marked as doing so. Kernels without an append are then
    loaded, too.
    """
    layers = list(layers)
    shared = len({layer.layer_id for layer in layers}) < len(layers)
    sinks = any(name.rpartition(".")[2] == "sinks" for name, _ in runner.model.named_parameters())
    return [
        attention_kernels.EngineLayer(
            formats=formats_of(runner),
            head_size=layer.qk_head_dim,
            num_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            sliding_window=window_of(layer),
            soft_cap=layer.logit_cap or None,
            sinks=sinks or None,
            kv_sharing_target_layer_name=shared or None,
        )
        for layer in layers
    ]


def window_of(layer: Foreign) -> int | None:
    """Returns the number of tokens that a query sees, its own token included; None for all. SGLang's number is one
    less, as it leaves out the query's own token.
    """
    return layer.sliding_window_size + 1 if (layer.sliding_window_size or -1) > -1 else None
