"""Attention of vLLM over quantised KV caches: decoding through `append_and_decode`, prompts through FlashAttention.

The backend is registered as vLLM's CUSTOM backend and asked first. It supports the cache dtypes of `kv_formats`; for
other dtypes vLLM uses its own backends. A layer's step appends its new tokens to the cache, and has up to three parts:

    decoding            requests with equally many new tokens (one, or more if speculative): append and attention in one
                        call
    first chunks        FlashAttention on the exact new K and V, which are also appended
    continued prompts   extend attention over the cache, all requests in one launch (chunked prefill, prefix hits);
                        `attention_metadata.Way` has the ways for caches that extend attention cannot read
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from cute_kernels import append_and_decode, append_kv, arguments, decode_attention, dequantize_kv, extend_attention
from cute_kernels.attention.checks import MAX_Q_LEN
from cute_kernels.integrations import attention_kernels, engine_cache
from cute_kernels.integrations.engine_cache import Formats, rows_of
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import (
    attention_choice,
    attention_ranks,
    environment,
    kv_constants,
    kv_formats,
    prepare,
)
from cute_kernels.integrations.vllm.attention_metadata import (
    FLASH_HEAD_SIZE,
    Context,
    Metadata,
    MetadataBuilder,
    Piece,
    Way,
    decodes_of,
    is_invariant,
    most_queries,
)
from cute_kernels.integrations.vllm.attention_pages import (
    BACKENDS_PACK,
    PREFERRED_BLOCK,
    Pages,
    reason_of_connector,
    wrong_by_layer,
)
from cute_kernels.integrations.vllm.plugin import is_replaced, note_served
from cute_kernels.integrations.vllm.seams import layer_made, say_once
from cute_kernels.integrations.vllm.versions import Interface
from cute_kernels.names import CacheLayout
from cute_kernels.runtime.native import compiler_version


class CuteKernelsAttentionBackend(Pages):
    """The attention backend, with the properties that vLLM queries before it chooses one."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CuteKernelsAttentionImpl]:
        return CuteKernelsAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in kv_formats.served_dtypes()

    @classmethod
    def _supports(cls) -> bool:
        return True

    supports_sink = supports_sliding_window = _supports
    supports_batch_invariance = _supports  # `validate_configuration` has the formats of which it is not so
    supports_kv_connector = _supports  # those that move whole pages: `attention_pages.reason_of_connector`

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # a step's parts are cut by the lengths that the host knows

    @classmethod
    def supports_compute_capability(cls, capability: Foreign) -> bool:
        return (capability.major, capability.minor) == (9, 0)

    @classmethod
    def validate_configuration(cls, *arguments: Any, **named: Any) -> list[str]:
        """Returns the reasons against this backend, vLLM's and its own, and logs them once.

        Raises:
            ValueError: the environment asks for a cache format that is not supported, or not supported with this dtype.
        """
        reasons = super().validate_configuration(*arguments, **named)
        kv_cache_dtype: Any = named.get("kv_cache_dtype")
        if not cls.supports_kv_cache_dtype(kv_cache_dtype):
            return reasons
        if not is_replaced("attention"):
            return [*reasons, f"{environment.SWITCH}={environment.switch()}"]
        kv_formats.check_dtype(kv_cache_dtype)
        if reasons and len(kv_formats.own_formats()) > 1 and named.get("attn_type") != AttentionType.DECODER:
            return reasons  # a layer of an encoder, which has another number
        formats = kv_formats.formats_for(kv_cache_dtype)
        head_size = named["head_size"]
        slides = bool(named.get("has_sliding_window"))
        reasons += _reasons_of_engine(kv_cache_dtype, attention_kernels.can_extend(formats, head_size), slides)
        reasons += ["ALiBi not supported"] if layer_made().has_alibi else []
        if named.get("use_dcp") and (named.get("has_sink") or head_size > FLASH_HEAD_SIZE):
            reasons += [f"decode context parallelism with sinks or head sizes above {FLASH_HEAD_SIZE} not supported"]
        unreadable = engine_cache.reason_against(formats, head_size, named["dtype"])
        unrotated = kv_formats.reason_against_rotation(kv_cache_dtype, head_size)
        reasons += [reason for reason in (unreadable, unrotated) if reason]
        if named.get("use_batch_invariant"):
            reason = kv_formats.reason_against_invariance(kv_cache_dtype)
            reason = reason or attention_kernels.why_not_invariant(formats, head_size)
            reasons += [f"VLLM_BATCH_INVARIANT with {reason}"] if reason else []
        reasons += [] if reasons else _missing_kernels(formats, kv_cache_dtype, named)
        if not reasons:
            return []
        words = f"a {formats} cache (--kv-cache-dtype {kv_cache_dtype}): {'; '.join(reasons)}"
        if kv_formats.is_own(kv_cache_dtype) and named.get("attn_type") == AttentionType.DECODER:
            raise ValueError(f"{environment.KV_FORMAT}={environment.wanted_kv_format()}: cannot serve {words}")
        say_once(f"attention over {words}; it is left to vLLM", logging.WARNING)
        return reasons


def _reasons_of_engine(kv_cache_dtype: str, extends: bool, slides: bool = False) -> list[str]:
    """Returns the reasons against the backend in the engine's configuration.

    extends: whether extend attention reads the caches. slides: whether the layer has a window.
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        return []
    model = config.model_config
    text = getattr(model, "hf_text_config", None)
    wrong = {
        **attention_ranks.reasons_against(config, extends, slides, is_invariant()),
        "reference sliding windows": getattr(model, "rswa_window", None) is not None,
        "--kv-cache-dtype-skip-layers": bool(config.cache_config.kv_cache_dtype_skip_layers)
        and (kv_formats.is_own(kv_cache_dtype) or not BACKENDS_PACK),
        "--kv-sharing-fast-prefill": bool(config.cache_config.kv_sharing_fast_prefill),
        "more drafted tokens than decode attention takes": not extends and most_queries(config) > MAX_Q_LEN,
        # Their states' pages are as large as attention's in 16 bits, where vLLM does not ask what these take.
        "Mamba layers beside such pages": kv_formats.is_own(kv_cache_dtype) and model.is_hybrid and not BACKENDS_PACK,
        # Layers that serve these put metadata of their own making under a backend.
        "attention within chunks": getattr(model, "attention_chunk_size", None) is not None,
        "sinks that are tokens": bool(getattr(text, "param_sink_number", 0)),
        **(wrong_by_layer(config, slides) if kv_formats.is_own(kv_cache_dtype) else {}),
    }
    found = [f"{what} not supported" for what, is_so in wrong.items() if is_so]
    connector = reason_of_connector(config)
    return found if connector is None else [*found, connector]


def _missing_kernels(formats: Formats, kv_cache_dtype: str, named: dict[str, Any]) -> list[str]:
    """Returns [message] if kernels are in no bundle and cannot be compiled here; else []."""
    config = get_current_vllm_config_or_none()
    if compiler_version() is not None or config is None or config.model_config is None:
        return []
    model, parallel, text = config.model_config, config.parallel_config, config.model_config.hf_text_config
    num_kv_heads = model.get_num_kv_heads(parallel)
    layers = [
        attention_kernels.EngineLayer(
            formats=formats,
            head_size=named["head_size"],
            num_heads=model.get_num_attention_heads(parallel),
            num_kv_heads=num_kv_heads,
            transform=transform,
            sliding_window=(getattr(text, "sliding_window", None) or 1) if named.get("has_sliding_window") else None,
            soft_cap=getattr(text, "attn_logit_softcapping", None),
            sinks=named.get("has_sink") or None,
            kv_sharing_target_layer_name=_some_read_anothers_cache(config) or None,
        )
        for transform in kv_constants.kinds(kv_cache_dtype, num_kv_heads, named["head_size"])
    ]
    block = named.get("block_size") or PREFERRED_BLOCK
    sizes = CuteKernelsAttentionBackend.get_supported_kernel_block_sizes()
    pages = [size for size in sizes if block % size == 0][-1:]
    if model.is_hybrid:  # then a block is as large as a state of a Mamba layer
        pages = [size for size in sizes if size >= pages[0]]
    device = torch.device("cuda", torch.cuda.current_device())
    specs = [spec for size in pages for spec in attention_kernels.specs(layers, decodes_of(config, size), device)]
    reason = prepare.why_not_ready(device, specs)
    return [] if reason is None else [reason]


def _some_read_anothers_cache(config: Foreign) -> bool:
    """Returns whether a model, or its drafting model, has layers that read another layer's cache."""
    drafts = config.speculative_config is not None and config.speculative_config.use_gemma4_mtp()
    return drafts or bool(getattr(config.model_config.hf_text_config, "num_kv_shared_layers", 0))


def _device() -> torch.device:
    """Returns the device of this process's layers."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _kept(before: torch.Tensor | None, now: torch.Tensor) -> torch.Tensor:
    """Returns ``now``, copied into the memory of ``before`` if that is not None. Captured graphs read this memory after
    a reload.
    """
    return now if before is None else before.copy_(now)


class CuteKernelsAttentionImpl(AttentionImpl):
    """A layer's attention. Its arguments are those that vLLM passes to every implementation."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    takes_constants: ClassVar[bool] = True
    """Tells `kv_constants.give` to set the layer's transform."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError(
                f"ALiBi over a quantised cache is not served; {environment.SWITCH}=linear leaves attention to vLLM"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window, self.soft_cap = sliding_window, logits_soft_cap or None
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks, self.sink_logits, self.flash_sinks = sinks, None, None
        self.formats = kv_formats.formats_for(kv_cache_dtype)
        transform = kv_formats.transform_for(kv_cache_dtype, self.num_kv_heads, head_size)
        self.transform = None if transform is None else kv_constants.kept(transform, _device())
        note_served(f"attention {self.formats} {head_size}")
        self.invariant = is_invariant()
        config = get_current_vllm_config_or_none()
        self.ranks = None if config is None else attention_ranks.ranks_of(config)
        self.flash_version = fa_utils.get_flash_attn_version(head_size=head_size)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None:
            self.sink_logits = _kept(self.sink_logits, self.sinks.detach().float().contiguous())
            # FlashAttention-3 takes no others.
            self.flash_sinks = _kept(self.flash_sinks, self.sinks.detach().to(torch.bfloat16))

    def forward(
        self,
        layer: Foreign,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes a layer's attention. query, output: [tokens, num_heads, head_size]; key, value: [tokens,
        num_kv_heads, head_size]."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: got a fused quantisation of the output, want none")
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        if arguments.DEBUG and not bool((attn_metadata.slot_mapping >= 0).any()):  # vLLM warms up: pages are nobody's
            with arguments.checking_values(False):
                return self.forward(layer, query, key, value, kv_cache, attn_metadata, output)
        call = _LayerCall(self, layer, kv_cache, attn_metadata)
        first, pieces = attn_metadata.num_decode_tokens, attn_metadata.pieces
        shared = attention_kernels.reads_anothers_cache(self)
        # Prompts that share a prefix share its pages from the step on that computes them: nothing is read before
        # all new tokens of the step are in the cache.
        if self.ranks is not None or (pieces and not shared):
            new = slice(first if self.ranks is None else 0, max([first, *(piece.tokens.stop for piece in pieces)]))
            call.append(key[new], value[new], new)
        if first and self.ranks is not None:
            self.ranks.decode(call, query[:first], output[:first])
        elif first:
            call.decode(query[:first], key, value, output[:first])
        for piece in pieces:
            tokens = piece.tokens
            if piece.way is Way.FLASH and not shared:
                call.flash(piece, query[tokens], key[tokens], value[tokens], output[tokens], piece)
            elif self.ranks is not None:
                self.ranks.extend(call, piece, query[tokens], key[tokens], value[tokens], output[tokens])
            else:
                call.continued[piece.way](piece, query[tokens], output[tokens])
        return output


class _LayerCall:
    """One layer's step: its cache, its scales, and the work of each part of the step."""

    def __init__(
        self, impl: CuteKernelsAttentionImpl, layer: Foreign, kv_cache: torch.Tensor, metadata: Metadata
    ) -> None:
        self.impl, self.metadata = impl, metadata
        self.k_cache, self.v_cache = kv_formats.views(kv_cache, impl.formats, impl.head_size, impl.num_kv_heads)
        self.scales: dict[str, Any] = {
            "k_scale": None if impl.formats.k.given_scale is None else layer._k_scale,
            "v_scale": None if impl.formats.v.given_scale is None else layer._v_scale,
        }

    @property
    def continued(self) -> dict[Way, Callable[[Piece, torch.Tensor, torch.Tensor], None]]:
        """For each `Way` of a piece, the function (piece, queries, output) that attends over the cache. The requests'
        new tokens are already cached."""
        return {Way.FLASH: self.extend, Way.EXTEND: self.extend, Way.PARTS: self.parts, Way.GATHER: self.gathered}

    @property
    def options(self) -> dict[str, Any]:
        """The options of `decode_attention`, `append_and_decode` and `extend_attention` for every request."""
        impl = self.impl
        return {
            "kv_format": impl.formats.name,
            "cache_layout": impl.formats.cache_layout,
            "softmax_scale": impl.scale,
            "window_size": impl.sliding_window,
            "softcap": impl.soft_cap,
            "sinks": impl.sink_logits,
            "transform": impl.transform,
            **self.scales,
        }

    def decode(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
        metadata = self.metadata
        requests, q_len = metadata.num_decodes, metadata.decode_len
        tokens = requests * q_len
        q, out = (rows.unflatten(0, (requests, q_len)) for rows in (query, output))
        options = {**self.options, "block_table": metadata.block_table[:requests], "out": out}
        lengths = metadata.seq_lens[:requests]
        if not attention_kernels.reads_anothers_cache(self.impl):
            k, v = (new[:tokens].unflatten(0, (requests, q_len)) for new in (key, value))
            append_and_decode(q, k, v, self.k_cache, self.v_cache, lengths, **options)
        else:
            decode_attention(rows_of(q), self.k_cache, self.v_cache, lengths, **options)

    def append(self, key: torch.Tensor, value: torch.Tensor, tokens: slice) -> None:
        slots, formats = self.metadata.slot_mapping[tokens], self.impl.formats
        rows = {"kv_format": formats.name, "cache_layout": formats.cache_layout, "transform": self.impl.transform}
        append_kv(key, value, self.k_cache, self.v_cache, slot_mapping=slots, **rows, **self.scales)

    def extend(self, piece: Piece, query: torch.Tensor, output: torch.Tensor) -> None:
        assert piece.seq_lens is not None
        invariant = self.impl.invariant
        # Else it depends on how many queries there are, and graphs would hold memory for the longest contexts.
        unpack = False if invariant or piece.max_seq_len is None else None
        options = {**self.options, "cu_seqlens_q": piece.starts, "block_table": piece.block_table, "out": output}
        options |= {"num_splits": 1 if invariant else None, "unpack": unpack, "max_seq_len": piece.max_seq_len}
        extend_attention(rows_of(query), self.k_cache, self.v_cache, piece.seq_lens, **options)

    def parts(self, piece: Piece, query: torch.Tensor, output: torch.Tensor) -> None:
        assert piece.seq_lens is not None
        shape = (-1, piece.q_len)
        options = {**self.options, "block_table": piece.block_table, "out": output.unflatten(0, shape)}
        decode_attention(rows_of(query.unflatten(0, shape)), self.k_cache, self.v_cache, piece.seq_lens, **options)

    def gathered(self, piece: Piece, query: torch.Tensor, output: torch.Tensor) -> None:
        context = piece.context
        assert context is not None
        formats, head_size = self.impl.formats, self.impl.head_size
        names: tuple[Any, Any] = (formats.k.name, formats.v.name)
        transform = self.impl.transform
        wide = query.dtype if transform is None else torch.float32
        rows = (gather(cache, context, formats.cache_layout) for cache in (self.k_cache, self.v_cache))
        k, v = (
            dequantize_kv(row, kv_format=name, head_dim=head_size, dtype=wide, scale=scale)
            for row, name, scale in zip(rows, names, self.scales.values(), strict=True)
        )
        if transform is not None:  # FlashAttention is given what it was before
            k, v = (x.to(query.dtype) for x in (transform.original_keys(k), transform.restore(v)))
        self.flash(piece, query, k, v, output, context)

    def flash(
        self,
        piece: Piece,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        keys: Piece | Context,
    ) -> attention_ranks.Partial:
        """Computes FlashAttention into ``output``. Returns (output, log-sum-exps [tokens, heads]).

        keys: the piece or context whose ``starts`` bound each request in key and value, one request after another.
        """
        impl = self.impl
        _, lse = fa_utils.flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=piece.starts,
            max_seqlen_q=piece.longest,
            cu_seqlens_k=keys.starts,
            max_seqlen_k=keys.longest,
            softmax_scale=impl.scale,
            causal=True,
            window_size=[-1, -1] if impl.sliding_window is None else [impl.sliding_window - 1, 0],
            softcap=impl.soft_cap or 0.0,
            fa_version=impl.flash_version,
            s_aux=impl.flash_sinks,
            return_softmax_lse=True,
        )
        return output, lse.T


WIDE = torch.complex128, torch.int64, torch.int32  # 16 bytes or fewer, whatever they mean; rows have whole words


def gather(cache: torch.Tensor, context: Context, layout: CacheLayout) -> torch.Tensor:
    """Gathers the rows [tokens, num_kv_heads, row] of a context's tokens from a cache, up to 16 bytes at a time."""
    wide = next(dtype for dtype in WIDE if cache.shape[3] * cache.element_size() % dtype.itemsize == 0)
    tokens = cache if layout == "NHD" else cache.transpose(1, 2)
    return tokens.view(wide)[context.pages, context.places].view(cache.dtype)


# -- the seam ---------------------------------------------------------------------------------------------------------


def replace(interface: Interface) -> str:
    """Registers the backend, puts it first, and makes vLLM compute the sizes of its pages in bytes. Returns a line for
    the log.
    """
    custom = AttentionBackendEnum.CUSTOM
    path = f"{CuteKernelsAttentionBackend.__module__}.{CuteKernelsAttentionBackend.__qualname__}"
    if custom.is_overridden() and custom.get_path() != path:
        raise ImportError(f"attention backend: got CUSTOM taken by {custom.get_path()}, want it free for {path}")
    own = kv_formats.described()  # a wrong name is said now
    register_backend(custom, path)
    attention_choice.replace(interface)
    dtypes = ", ".join(kv_formats.BY_DTYPE)
    more = f", and caches in {own}" if own is not None else ""
    return f"attention with --kv-cache-dtype {dtypes}{more} runs here"
