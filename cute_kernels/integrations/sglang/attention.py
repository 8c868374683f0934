"""Attention of SGLang over paged KV pools: the backend's registration, its pages and pools, and what it does not
support.

`--attention-backend cute_kernels` selects the backend, so a server with another backend is never changed. An
unsupported server is refused, with the reasons, when the backend is made. If the plug-in was not loaded, SGLang does
not know the name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from cute_kernels.integrations import attention_kernels, engine_cache
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang import rows
from cute_kernels.integrations.sglang.attention_layers import decodes_of, formats_of, kernel_layers, layers_of
from cute_kernels.integrations.sglang.seams import Hook, Seam, make_ready, named, reasons_against, say_once
from cute_kernels.integrations.sglang.versions import Interface

if TYPE_CHECKING:
    from cute_kernels.integrations.sglang.attention_backend import CuteKernelsAttentionBackend

NAME = "cute_kernels"
"""The value of `--attention-backend` that selects this backend."""
PAGE_SIZES = (16, 32, 64, 128, 256)
PAGE_SIZE = 64  # tokens of a page, where the command line names none that is supported
CHOICES = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""Fields of SGLang's configuration that may name the backend."""


def hooks(interface: Interface) -> dict[str, Hook]:
    """Returns the hooks around SGLang's functions, by the functions' full names.

    Raises:
        ImportError, AttributeError: this SGLang has no registry of attention backends.
    """
    for place in (interface.attention_backends, interface.attention_choices):
        named(place)
    return {
        interface.page_sizes: Hook(wants_pages, ("view",)),
        interface.pool_class: Hook(_pool_class, ("self", "kind", "default")),
        interface.slot_bytes: Hook(_slot_bytes, ("self", "kvc", "num_layers")),
    }


def offer(interface: Interface) -> None:
    """Registers the backend, and its name on the command line. It is called once every hook is in place."""
    named(interface.attention_backends)[NAME] = make
    choices = named(interface.attention_choices)
    choices[:] = dict.fromkeys([*choices, NAME])


SEAM = Seam(f"attention with --attention-backend {NAME}", hooks, offer)


def wants_pages(original: Callable[[Foreign], dict[str, object]], view: Foreign) -> dict[str, object]:
    """Returns SGLang's settings for a command line's backends. With this backend, an unsupported page size, such as the
    default of one token, becomes 64."""
    declared = original(view)
    page_size = declared.get("page_size", view.page_size)
    if page_size in PAGE_SIZES or NAME not in (getattr(view, name, None) for name in CHOICES):
        return declared
    say_once(f"pages have {PAGE_SIZE} tokens (--page-size {page_size})")
    return declared | {"page_size": PAGE_SIZE}


def _pool_class(original: Callable[..., type], configurator: Foreign, *, kind: str, default: type) -> type:
    """Returns the class of a model's pool: `RowsPool` if the environment asks for this package's formats, else
    SGLang's.

    Raises:
        ValueError: a feature of the server cannot read these formats; the message has every reason.
    """
    found = original(configurator, kind=kind, default=default)
    formats = rows.wanted_formats()
    if formats is None or kind != "mha":
        return found
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.runtime_context import attention_backends, get_disagg, get_memory

    from cute_kernels.integrations.sglang.pool import RowsPool

    memory, config = get_memory(), configurator.model_config
    wrong = {
        f"attention backends {attention_backends()}; want {NAME}": set(attention_backends()) != {NAME},
        f"a cache in {configurator.kv_cache_dtype}; want --kv-cache-dtype fp8_e4m3": configurator.kv_cache_dtype
        is not torch.float8_e4m3fn,
        f"a pool of {found.__name__}": found is not MHATokenToKVPool or configurator.use_mla_backend,
        "sliding windows with a pool of their own": configurator.is_hybrid_swa,
        "HiCache": memory.enable_hierarchical_cache,
        "LMCache": memory.enable_lmcache,
        "disaggregation": get_disagg().disaggregation_mode not in (None, "null"),
    }
    reasons = [what for what, is_so in wrong.items() if is_so]
    reason = engine_cache.reason_against(formats, config.head_dim, config.dtype)
    if reasons := [*reasons, *([] if reason is None else [reason])]:
        raise ValueError(f"{rows.KV_FORMAT}={formats}: not supported: {'; '.join(reasons)}")
    return RowsPool


def _slot_bytes(original: Callable[..., int], configurator: Foreign, kvc: Foreign, num_layers: int) -> int:
    """Returns the bytes of a token in all layers. SGLang counts one byte for each column. This function scales SGLang's
    number to the bytes of rows in this package's formats."""
    found, formats = original(configurator, kvc, num_layers), rows.wanted_formats()
    if formats is None:
        return found
    config = kvc.model_config
    return found * sum(engine_cache.row_bytes(formats, config.head_dim)) // (config.head_dim + config.v_head_dim)


def make(runner: Foreign) -> CuteKernelsAttentionBackend:
    """Makes the backend of a model, with its kernels ready.

    Raises:
        ValueError: the server or the model is not supported; the message has every reason.
    """
    from cute_kernels.integrations.sglang.attention_backend import CuteKernelsAttentionBackend

    layers = layers_of(runner.model)
    reasons = [*_reasons_of_server(runner), *_reasons_of_model(runner, layers)]
    device, kinds = torch.device(runner.device), kernel_layers(runner, layers)
    if reasons := reasons or make_ready(device, lambda: attention_kernels.specs(kinds, decodes_of(runner), device)):
        raise ValueError(f"--attention-backend {NAME}: {'; '.join(reasons)}")
    say_once(f"attention over a {formats_of(runner)} pool in pages of {runner.page_size} runs here")
    return CuteKernelsAttentionBackend(runner)


def _reasons_of_server(runner: Foreign) -> list[str]:
    """Returns the reasons why the server's configuration is not supported."""
    from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel

    parallel, execution = get_parallel(), get_exec()
    wrong = {
        "speculative decoding": runner.is_draft_worker or runner.spec_algorithm.is_speculative(),
        "context parallelism": parallel.attn_dcp_size > 1 or parallel.attn_cp_size > 1,
        "two-batch overlap, whose halves would share workspaces": execution.overlap.enable_two_batch_overlap,
        "PD multiplexing, whose streams would share workspaces": get_disagg().enable_pdmux,
        "diffusion language models": execution.dllm.dllm_algorithm is not None,
        "--enable-deterministic-inference": rows.is_deterministic(),
    }
    return [f"{what} is not supported" for what, is_so in wrong.items() if is_so]


def _reasons_of_model(runner: Foreign, layers: list[Foreign]) -> list[str]:
    """Returns the reasons why a model, its layers or its pool are not supported."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from cute_kernels.integrations.sglang.pool import RowsPool

    pool, reasons = runner.token_to_kv_pool, reasons_against(torch.device(runner.device))
    wanted = MHATokenToKVPool if rows.wanted_formats() is None else RowsPool
    if runner.use_mla_backend or type(pool) is not wanted:
        return [*reasons, f"a pool of {type(pool).__name__}; supported: {wanted.__name__}"]
    if pool.kv_cache_layout != "nhd":
        reasons.append(f"a pool laid out as {pool.kv_cache_layout}; supported: nhd")
    if runner.kv_cache_dtype is not torch.float8_e4m3fn:
        reasons.append(f"a cache in {runner.kv_cache_dtype}; want --kv-cache-dtype fp8_e4m3")
    if runner.page_size not in PAGE_SIZES:
        reasons.append(f"--page-size {runner.page_size}; supported: {', '.join(map(str, PAGE_SIZES))}")
    for layer in layers:
        if (reason := _reason_of_layer(layer, runner)) is not None:
            return [*reasons, f"layer {layer.layer_id}: {reason}"]
    return reasons


def _reason_of_layer(layer: Foreign, runner: Foreign) -> str | None:
    """Returns the reason why a layer is not supported; None if it is."""
    wrong = {
        "cross attention": layer.is_cross_attention,
        f"attention of type {layer.attn_type}": getattr(layer.attn_type, "value", layer.attn_type) != "decoder",
        "attention within chunks": layer.use_irope,
        f"a temperature by length ({layer.xai_temperature_len})": layer.xai_temperature_len > 0,
        f"scores capped by {layer.logit_capping_method}": layer.logit_cap > 0 and layer.logit_capping_method != "tanh",
        f"head sizes {layer.qk_head_dim} and {layer.v_head_dim}": layer.qk_head_dim != layer.v_head_dim,
    }
    found = [f"{what} is not supported" for what, is_so in wrong.items() if is_so]
    return found[0] if found else engine_cache.reason_against(formats_of(runner), layer.qk_head_dim, runner.dtype)
