"""Steps of an engine for the attention backend, and what attention over everything gives."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def step(new: list[int], lengths: list[int], pages: int = 40, page_size: int = 16, device: str = "cpu") -> Any:
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
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=count,
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(lengths),
        block_table_tensor=table.to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
    )


def builder(
    speculative: int = 0,
    device: str = "cpu",
    *,
    layers: dict[str, Any] | None = None,
    drafts_on: int = 0,
    **caches: Any,
) -> Any:
    """layers: the engine's. drafts_on: ranks with requests of their own, for layers of a model that drafts; 0 for
    others. caches: fields of `attention_metadata.Caches` unlike a small model's on an H200."""
    from cute_kernels.integrations.vllm import attention_metadata

    speculation = SimpleNamespace(num_speculative_tokens=speculative, parallel_drafting=False) if speculative else None
    config = SimpleNamespace(
        speculative_config=speculation,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, data_parallel_size=drafts_on),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}, cudagraph_capture_sizes=[1, 2, 4]),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        model_config=SimpleNamespace(max_model_len=512, dtype=torch.bfloat16),
    )
    assert attention_metadata.decodes_of(config, 16).batches == (1, 2, 3)
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
        spec = SimpleNamespace(block_size=16, is_draft=drafts_on > 0)
        return attention_metadata.MetadataBuilder(spec, [], config, torch.device(device))


def flash_attention(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for FlashAttention: causal attention of requests that lie one behind the other, in fp64."""
    sums = torch.empty(given["q"].shape[1], len(given["q"]))
    q_starts, k_starts = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    assert given["causal"] and given["max_seqlen_k"] == max(b - a for a, b in pairwise(k_starts))
    window, sinks = given["window_size"][0], given["s_aux"]
    for request in range(len(q_starts) - 1):
        q = given["q"][q_starts[request] : q_starts[request + 1]]
        k, v = (given[name][k_starts[request] : k_starts[request + 1]] for name in "kv")
        scale, cap = given["softmax_scale"], given["softcap"]
        out = causal_attention(q, k, v, scale, None if window < 0 else window + 1, cap or None, sinks)
        given["out"][q_starts[request] : q_starts[request + 1]] = out
        scores = scores_of(q, k, scale, None if window < 0 else window + 1, cap or None)
        sums[:, q_starts[request] : q_starts[request + 1]] = scores.logsumexp(-1)
    return given["out"], sums


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [n, heads, dim] are the last of k, v [m, kv heads, dim]; in fp64. sinks: [heads]."""
    scores, values = scores_of(q, k, scale, window, soft_cap), v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    if sinks is not None:  # one more logit, whose value is zero
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], values)


def scores_of(
    q: torch.Tensor, k: torch.Tensor, scale: float, window: int | None, soft_cap: float | None
) -> torch.Tensor:
    """Scores [heads, n, m] of `causal_attention`."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return scores.masked_fill(hidden, -torch.inf)


@dataclass(frozen=True)
class Layer:
    """A layer of attention over a cache, in fp16.

    Attributes:
        kv_cache_dtype: what vLLM calls the cache. form: of this package, instead of it; empty for none.
        window, soft_cap: as the model has them. sinks: whether it has some.
        speculative: drafted tokens of a decoding request.
        caches: fields of `attention_metadata.Caches` unlike a small model's on an H200.
        constants: a file of them, of a model whose second layer this is.
        fused: whether queries, keys and values are parts of one tensor, as a fused projection makes them.
        shared: whether it reads the cache of a layer before it, and has no keys and values of its own.
    """

    kv_cache_dtype: str
    form: str = ""
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    speculative: int = 0
    caches: dict[str, Any] = field(default_factory=dict)
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    page: int = 16
    pages: int = 8  # of a request
    rank: int = 0  # of `ranks` GPUs, each of which has so many heads of the same numbers
    ranks: int = 1
    constants: str = ""
    fused: bool = True
    shared: bool = False

    def __str__(self) -> str:
        marks = [f"window {self.window}"] if self.window else []
        marks += ["cap"] * (self.soft_cap is not None) + ["sinks"] * self.sinks
        marks += [f"{self.speculative} drafted"] if self.speculative else []
        marks += ["apart"] * (not self.fused) + ["another's cache"] * self.shared
        return ", ".join((self.form or self.kv_cache_dtype, *marks, *map(str, self.caches.items())))

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def projected(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """q, k and v [tokens, heads, dim] as a layer gets them."""
        if not self.fused:
            return list(parts)
        return list(torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1))

    @property
    def sink_logits(self) -> torch.Tensor | None:
        return torch.arange(self.heads).half() / 2 - 1 if self.sinks else None

    def make(self, device: str) -> Any:
        """The plugin's implementation of it."""
        from cute_kernels.integrations.vllm import attention

        sinks = self.sink_logits
        with mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_KV_FORMAT": self.form}):
            impl = attention.CuteKernelsAttentionImpl(
                self.heads,
                self.dim,
                self.scale,
                self.kv_heads,
                None,
                self.window,
                self.kv_cache_dtype,
                self.soft_cap,
                sinks=None if sinks is None else sinks.to(device),
            )
            impl.process_weights_after_loading(torch.float16)
            impl.invariant = self.caches.get("invariant", False)
            impl.kv_sharing_target_layer_name = "model.layers.0.self_attn.attn" if self.shared else None
            if self.constants:
                give_constants(impl, self.constants)
        if impl.transform is not None:
            impl.transform = impl.transform.to(device)  # an engine's layers are where its process is
        return impl


def constants_file(folder: str, kv_heads: int = 2, dim: int = 128, **changes: Any) -> str:
    """Of a model of two layers, the first without a transform."""
    from cute_kernels.kv_cache import CacheConstants, CacheTransform

    generator = torch.Generator().manual_seed(4)
    center, factor, of_v = (torch.randn(kv_heads, dim, generator=generator) for _ in range(3))
    arrays: dict[str, Any] = {"k_center": center, "k_factor": factor.sign() * (0.5 + factor.abs())}
    arrays |= {"v_factor": (of_v / 4).exp(), "k_rotation": 32, "v_rotation": 1}
    path = os.path.join(folder, f"constants{len(os.listdir(folder))}.safetensors")
    CacheConstants((None, CacheTransform(**arrays | changes))).save(path)
    return path


def give_constants(
    impl: Any, path: str, name: str = "model.layers.1.self_attn.attn", *, layers: int = 2, ranks: int = 1, rank: int = 0
) -> None:
    """What an engine does for a layer of a model that has constants."""
    from cute_kernels.integrations.vllm import kv_constants

    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=layers)),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    there = {"model.layers.0.mlp": SimpleNamespace(), name: SimpleNamespace(impl=impl)}
    with (
        mock.patch.dict(os.environ, {"CUTE_KERNELS_VLLM_CONSTANTS": path}),
        mock.patch("vllm.distributed.get_tensor_model_parallel_rank", lambda: rank),
    ):
        kv_constants.give(there, config, torch.device("cpu"))


BATCHES = (
    ((0, 30), (1, 5)),
    ((0, 1), (1, 20), (2, 40)),
    ((0, 1), (1, 1), (2, 3), (3, 1)),
    ((0, 1), (1, 1), (2, 1), (3, 33)),
    ((1, 20), (2, 20), (3, 37)),
    ((1, 4), (2, 4), (3, 4)),
    ((0, 1), (1, 1), (2, 1), (3, 1)),
)
"""Steps: requests in the order of a batch, each with its new tokens."""


class TorchLaunches(TorchDispatchMode):
    """Notes operations of torch that launch kernels: those that neither look at memory nor ask for some."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        looks = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
        if not looks and "empty" not in schema.name:
            self.names.append(schema.name)
        return func(*args, **(kwargs or {}))


def serve_steps(
    served: Layer,
    device: str = "cpu",
    batches: tuple[tuple[tuple[int, int], ...], ...] = BATCHES,
    call: Callable[[Callable[[], Any]], Any] = lambda step: step(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the backend gave, what attention over everything gives), of all tokens of some requests' steps; on the CPU.

    The cache's scales, and what numbers there are, do not depend on the device or on how steps are cut. call: how a
    layer's part of a step is called, which may be done more than once.
    """
    from cute_kernels.integrations.vllm import kv_formats

    generator = torch.Generator().manual_seed(0)
    impl, (heads, kv_heads, dim, page) = served.make(device), (served.heads, served.kv_heads, served.dim, served.page)
    requests, pages = 4, served.pages
    size = kv_formats.page_bytes(impl.formats, dim, page, kv_heads)
    # Pages with room between them.
    cache = torch.zeros(requests * pages, size + 64, dtype=torch.uint8, device=device)[:, :size]
    layer = SimpleNamespace(_k_scale=torch.tensor(0.02, device=device), _v_scale=torch.tensor(0.015, device=device))
    q, k, v = (
        torch.randn(requests, pages * page, count * served.ranks, dim, generator=generator)
        .half()
        .chunk(served.ranks, dim=2)[served.rank]
        for count in (heads, kv_heads, kv_heads)
    )
    table = torch.randperm(requests * pages, generator=generator).view(requests, pages).int()
    given, expected = [], []
    done = [0] * requests
    make = builder(served.speculative, device, shared=served.shared, **served.caches)
    writer = replace(served, shared=False).make(device) if served.shared else None
    for batch in batches:
        lengths = [done[request] + count for request, count in batch]
        common = step([count for _, count in batch], lengths, pages, page, device)
        common.block_table_tensor = table[[request for request, _ in batch]].to(device)
        places = [
            (request, position)
            for (request, count), length in zip(batch, lengths, strict=True)
            for position in range(length - count, length)
        ]
        slots = [int(table[request, position // page]) * page + position % page for request, position in places]
        common.slot_mapping = torch.tensor(slots, device=device)
        new = served.projected(
            *(torch.stack([x[request, position] for request, position in places]).to(device) for x in (q, k, v))
        )
        output = torch.full((len(places), heads, dim), torch.nan, dtype=torch.float16, device=device)
        metadata = make.build(0, common)
        if writer is not None:
            writer.forward(layer, *new, cache, metadata, torch.empty_like(output))
            new[1:] = (torch.full_like(x, torch.nan) for x in new[1:])
        call(functools.partial(impl.forward, layer, *new, cache, metadata, output))
        given.append(output.cpu())
        for (request, count), length in zip(batch, lengths, strict=True):
            fresh = q[request, length - count : length]
            rest = (served.scale, served.window, served.soft_cap, served.sink_logits)
            expected.append(causal_attention(fresh, k[request, :length], v[request, :length], *rest))
            done[request] = length
    return torch.cat(given), torch.cat(expected)


SHARED = ((17, 1), (21, 5), (40, 40))
"""Tokens, and new ones, of requests that begin alike: with a page that the last one fills in this step."""


def serve_shared(served: Layer, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """(what the backend gave, what attention over everything gives) in a step whose requests share a new page.

    vLLM lets a prompt begin with pages that another one of the same step computes, in whatever order they stand.
    """
    from cute_kernels.integrations.vllm import kv_formats

    generator = torch.Generator().manual_seed(5)
    impl, (heads, kv_heads, dim, page) = served.make(device), (served.heads, served.kv_heads, served.dim, served.page)
    size = kv_formats.page_bytes(impl.formats, dim, page, kv_heads)
    cache = torch.zeros(3 * served.pages, size, dtype=torch.uint8, device=device)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.02, device=device), _v_scale=torch.tensor(0.015, device=device))
    common = step([new for _, new in SHARED], [length for length, _ in SHARED], served.pages, page, device)
    table = common.block_table_tensor
    table[:, 0] = table[-1, 0]
    k, v = (torch.randn(len(SHARED), 40, kv_heads, dim, generator=generator).half() for _ in "kv")
    k[:, :page], v[:, :page] = k[-1, :page], v[-1, :page]
    q = torch.randn(len(SHARED), 40, heads, dim, generator=generator).half()
    places = [(request, at) for request, (length, new) in enumerate(SHARED) for at in range(length - new, length)]
    slots = [int(table[request, at // page]) * page + at % page for request, at in places]
    common.slot_mapping = torch.tensor(slots, device=device)
    new = served.projected(*(torch.stack([x[request, at] for request, at in places]).to(device) for x in (q, k, v)))
    output = torch.full((len(places), heads, dim), torch.nan, dtype=torch.float16, device=device)
    impl.forward(layer, *new, cache, builder(served.speculative, device, **served.caches).build(0, common), output)
    rest = (served.scale, served.window, served.soft_cap, served.sink_logits)
    expected = [
        causal_attention(q[request, length - new : length], k[request, :length], v[request, :length], *rest)
        for request, (length, new) in enumerate(SHARED)
    ]
    return output.cpu(), torch.cat(expected)
