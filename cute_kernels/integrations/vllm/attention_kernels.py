"""Which kernels the attention of a served model will ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.attention.checks import MAX_Q_LEN, Q_DTYPES
from cute_kernels.attention.compile import DecodeSpec
from cute_kernels.attention.config import PAGE_TOKENS
from cute_kernels.attention.features import Features
from cute_kernels.attention.schedule import Problem, make_schedule
from cute_kernels.kv_cache.compile import AppendSpec, BulkSpec
from cute_kernels.kv_cache.config import AppendConfig, BulkConfig
from cute_kernels.runtime.spec import KernelSpec


@dataclass(frozen=True)
class Decodes:
    """The decoding steps of an engine.

    batches: requests of a step. q_len: new tokens of a request, at most, where they are speculated. max_seq_len,
    page_size: of the block table. dtype: of queries.
    """

    batches: tuple[int, ...]
    q_len: int
    max_seq_len: int
    page_size: int
    dtype: torch.dtype


def specs(impls: Iterable[Any], decodes: Decodes, device: torch.device) -> list[KernelSpec]:
    """The kernels of layers (`CuteKernelsAttentionImpl`): appends, decoding, short and long continuations."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    found: dict[KernelSpec, None] = {}
    for impl in impls:
        found.update(dict.fromkeys(_specs_of(impl, decodes, num_sms)))
    return list(found)


def _specs_of(impl: Any, decodes: Decodes, num_sms: int) -> Iterator[KernelSpec]:
    forms, dtype = (impl.formats.k.name, impl.formats.v.name), Q_DTYPES[decodes.dtype]
    yield AppendSpec(AppendConfig(*forms, dtype, impl.head_size, impl.head_size))
    yield AppendSpec(AppendConfig(*forms, dtype, impl.head_size, impl.head_size, leads=True))
    yield from (BulkSpec(BulkConfig("dequantize", form, dtype, impl.head_size)) for form in forms)
    pages = -(-decodes.max_seq_len // decodes.page_size)
    for q_len, batches, after_append in (
        (1, decodes.batches, True),
        *([(decodes.q_len, decodes.batches, True)] if decodes.q_len > 1 else []),
        # What continues a prompt by few tokens: any number of them.
        *((q_len, (1,), False) for q_len in range(1, MAX_Q_LEN + 1)),
    ):
        for batch in batches:
            problem = Problem(
                batch=batch,
                max_seq_len=pages * decodes.page_size,
                num_q_heads=impl.num_heads,
                num_kv_heads=impl.num_kv_heads,
                head_dim=impl.head_size,
                v_head_dim=impl.head_size,
                k_format=forms[0],
                v_format=forms[1],
                q_dtype=dtype,
                q_len=q_len,
                page_tokens=max(size for size in PAGE_TOKENS if decodes.page_size % size == 0),
                features=_features(impl, q_len, pages * decodes.page_size),
                num_sms=num_sms,
                after_append=after_append,
            )
            yield DecodeSpec(make_schedule(problem).config)


def _features(impl: Any, q_len: int, max_seq_len: int) -> Features:
    window = impl.sliding_window
    return Features(
        queries=q_len > 1,
        causal=q_len > 1,
        window=window is not None and window < max_seq_len,
        soft_cap=impl.soft_cap is not None,
        sinks=impl.sinks is not None,
        paged=True,
    )
