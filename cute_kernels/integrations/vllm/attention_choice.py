"""Replacements of vLLM's functions that choose the attention backend and count the bytes of caches.

vLLM caches its choice of a backend by the arguments of its function. But the choice here also depends on the
environment's settings for a layer or an engine, and on whether a layer has ALiBi slopes. If one of these has changed,
the cached choice is dropped.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import environment, kv_formats
from cute_kernels.integrations.vllm.attention_pages import counted
from cute_kernels.integrations.vllm.seams import Layer, layer_made, making, replace_once
from cute_kernels.integrations.vllm.versions import Interface


def replace(interface: Interface) -> None:
    """Makes vLLM try this package's backend first, choose a backend again if necessary, and compute the sizes of pages
    in bytes. A second call changes nothing.
    """
    replace_once(*interface.backend_priorities, _asks_first)
    replace_once(*interface.backend_choice, _chooses_anew)
    for module, name in (interface.attention_layer, interface.mla_layer):
        replace_once(module, f"{name}.get_kv_cache_spec", _counts_bytes)
    module, name = interface.attention_layer
    replace_once(module, f"{name}.__init__", _notes_layer)


def _asks_first(original: Callable[..., Any]) -> Any:
    """Makes vLLM try this package's backend before all others. For MLA the order stays vLLM's."""

    def priorities(use_mla: bool, *arguments: object, **named: object) -> list[Any]:
        found = original(use_mla, *arguments, **named)
        return found if use_mla else [AttentionBackendEnum.CUSTOM, *found]

    return priorities


def _chooses_anew(original: Callable[..., Any]) -> Any:
    of_engine: Callable[[], Any] = lambda: None  # noqa: E731
    of: tuple[Any, ...] = ()

    def choose(*arguments: object, **named: object) -> Any:
        nonlocal of_engine, of
        engine, own = get_current_vllm_config_or_none(), (environment.wanted_kv_format(), kv_formats.of_layer())
        now = *own, environment.wanted_layout(), environment.switch(), layer_made().has_alibi
        if engine is not of_engine() or now != of:
            original.cache_clear()
            of_engine, of = (lambda: None) if engine is None else weakref.ref(engine), now
        return original(*arguments, **named)

    vars(choose)["cache_clear"] = original.cache_clear
    return choose


def _notes_layer(original: Callable[..., Any]) -> Any:
    parameters = inspect.signature(original)

    def __init__(self: Foreign, *arguments: object, **named: object) -> None:
        given = parameters.bind(self, *arguments, **named).arguments
        name = given.get("kv_sharing_target_layer_name") or given.get("prefix")
        with making(Layer(name, given.get("alibi_slopes") is not None)):
            original(self, *arguments, **named)

    return __init__


def _counts_bytes(original: Callable[..., Any]) -> Any:
    """Makes layers with this backend describe their caches as bytes, since vLLM does not know the formats.

    While the environment names a format, layers with other backends are refused, since their caches would have another
    format.
    """

    def get_kv_cache_spec(self: Foreign, vllm_config: Foreign) -> Any:
        spec = original(self, vllm_config)
        if spec is None:
            return None
        if getattr(self.impl, "takes_constants", False):
            if spec.page_size_padded is None:  # vLLM 0.26 gives layers that slide its smallest pages, which are slower
                spec = dataclasses.replace(spec, block_size=vllm_config.cache_config.block_size)
            return counted(self, spec)
        named = environment.wanted_kv_format() if environment.wanted_seams() else None
        if named is not None:
            kind = type(self.impl).__name__
            raise ValueError(
                f"{environment.KV_FORMAT}={named}: {self.layer_name} is served by {kind}, which has no such cache"
            )
        return spec

    return get_kv_cache_spec
