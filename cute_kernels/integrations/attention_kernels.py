"""The list of kernels that the attention layers of a served model need."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from cute_kernels.attention import extend_schedule as extend
from cute_kernels.attention.checks import MAX_Q_LEN, Q_DTYPES
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_schedule import make_schedule
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import EXTEND_HEAD_DIMS, has_token_scale
from cute_kernels.attention.extend_schedule import choose
from cute_kernels.attention.plan import specs_of as extend_specs_of
from cute_kernels.attention.policies import PAGE_TOKENS
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.formats.scores.features import PLAIN, WIDEST_RESTORED, Features
from cute_kernels.integrations.engine_cache import Formats
from cute_kernels.integrations.objects import Foreign
from cute_kernels.kv_cache.compile import AppendSpec, BulkSpec
from cute_kernels.kv_cache.config import AppendConfig, BulkConfig, WrittenRows, row_transform_of
from cute_kernels.kv_cache.step_compile import StepSpec
from cute_kernels.kv_cache.step_config import serving_config
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.spec import KernelSpec

BATCHES = (*range(1, 65), *range(72, 4097, 8))
"""Batch sizes of decode steps for which kernels are looked up. A batch size in between uses the same kernels as a
neighbour."""
PART_BATCHES = (1, *range(8, 257, 8))
"""Batch sizes for which kernels are looked up in steps whose requests continue a prompt by few tokens."""


def batches_up_to(most: int) -> tuple[int, ...]:
    """Returns the `BATCHES` whose kernels cover steps of up to ``most`` requests."""
    below = bisect.bisect_left(BATCHES, most)
    return BATCHES[: below + 1]


@dataclass(frozen=True)
class EngineLayer:
    """The settings of an attention layer that its kernels depend on. The layer objects of engines have the same
    fields.
    """

    formats: Formats
    head_size: int
    num_heads: int
    num_kv_heads: int
    transform: CacheTransform | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool | None = None
    kv_sharing_target_layer_name: str | bool | None = None


@dataclass(frozen=True)
class Decodes:
    """The settings of an engine's decode steps.

    Attributes:
        batches: the numbers of requests that a step may have.
        q_len: largest number of new tokens of a request in a step; more than 1 with speculative decoding.
        max_seq_len: number of tokens that a row of the block table has pages for.
        page_size: number of tokens of a page.
        dtype: the queries' dtype.
        invariant: whether extend attention also computes decode steps, so that a token's result does not depend on the
            batch.
        ranks: number of GPUs among which a request's cached tokens are split; each gets the queries of all heads.
    """

    batches: tuple[int, ...]
    q_len: int
    max_seq_len: int
    page_size: int
    dtype: torch.dtype
    invariant: bool = False
    ranks: int = 1


def can_extend(formats: Formats, head_size: int) -> bool:
    """Returns whether extend attention reads caches whose K and V have these formats."""
    if head_size not in EXTEND_HEAD_DIMS:
        return False
    return _extend_config(formats, head_size, "fp16", 16, PLAIN).can_implement() is None


def is_unpacked(formats: Formats, head_size: int) -> bool:
    """Returns whether extend attention with many queries reads K and V in 16 bits: the cache stores them in 16 bits, or
    another kernel unpacks them first.
    """
    config = _extend_config(formats, head_size, "fp16", 16, PLAIN)
    return not config.coded or config.why_as_it_lies is None


def key_rows_of(impl: Foreign) -> ExtendConfig | None:
    """Returns the configuration of the extend kernel whose MMAs have keys as rows, for a layer's longest requests; None
    if the layer has no such kernel.

    With this configuration, `serves_key_rows` decides whether few queries are faster with keys as rows than with tiles
    of 128 rows. The configuration assumes the largest pages. TMA loads and the number of heads of a tile make no
    difference to this decision.
    """
    if not can_extend(impl.formats, impl.head_size):
        return None
    features = replace(_features(impl, 1, 1 << 30), causal=True, shift=False)
    config = _extend_config(impl.formats, impl.head_size, "fp16", max(PAGE_TOKENS), features)
    return extend.key_rows_of(config)


def why_not_invariant(formats: Formats, head_size: int) -> str | None:
    """Returns why extend attention cannot make a token's result independent of the batch; None if it can.

    If V has a scale per row, extend attention uses the largest scale of a tile of rows. Which rows share a tile
    depends on how a prompt is split.
    """
    if not can_extend(formats, head_size):
        return f"head size {head_size}, which extend attention does not serve"
    return "a scale for each of V's rows" if has_token_scale(formats.v) else None


def _extend_config(formats: Formats, head_size: int, q_dtype: str, page_size: int, features: Features) -> ExtendConfig:
    names = formats.k.name, formats.v.name
    dense = next((form.name for form in (formats.k, formats.v) if not form.is_coded), q_dtype)  # it is in q's dtype
    page_tokens = max(size for size in PAGE_TOKENS if page_size % size == 0)
    return choose(AttentionProblem.ragged(head_size, *names, dense, page_tokens, features))


def specs(impls: Iterable[Foreign], decodes: Decodes, device: torch.device) -> list[KernelSpec]:
    """Returns the kernels of attention layers (`CuteKernelsAttentionImpl`) for appends, decoding, and prompts continued
    by few or many tokens."""
    num_sms, kinds = GPU.num_sms(device), {_kind(impl): impl for impl in impls}
    return list(dict.fromkeys(spec for impl in kinds.values() for spec in _specs_of(impl, decodes, num_sms)))


def _kind(impl: Foreign) -> tuple[object, ...]:
    """Returns the settings of a layer that its kernels depend on. They are equal for most layers of a model."""
    shape = impl.formats, impl.head_size, impl.num_heads, impl.num_kv_heads
    options = impl.sliding_window, impl.soft_cap is None, impl.sinks is None, reads_anothers_cache(impl)
    return *shape, *options, row_transform_of(impl.transform, shift=False)


def reads_anothers_cache(impl: Foreign) -> bool:
    """Returns whether a layer attends over another layer's cache, and has no cache to write."""
    return getattr(impl, "kv_sharing_target_layer_name", None) is not None


def _sees_shift(impl: Foreign) -> bool:
    """Returns whether kernels must correct the scores because the cached keys have their center subtracted.

    The subtraction changes all scores of a query by the same number. This changes the result only if the layer has a
    soft cap or sinks.
    """
    centred = impl.transform is not None and impl.transform.k_center is not None
    return centred and (impl.soft_cap is not None or impl.sinks is not None)


def specs_of(impl: Foreign, decodes: Decodes, num_sms: int) -> list[KernelSpec]:
    """Returns the kernels of one layer on a GPU with ``num_sms`` SMs."""
    return list(dict.fromkeys(_specs_of(impl, decodes, num_sms)))


def _specs_of(impl: Foreign, decodes: Decodes, num_sms: int) -> Iterator[KernelSpec]:
    forms, dtype = (impl.formats.k.name, impl.formats.v.name), Q_DTYPES[decodes.dtype]
    k, v = (WrittenRows(form, impl.head_size) for form in forms)
    rows = row_transform_of(impl.transform, shift=False)
    yield AppendSpec(AppendConfig(k, v, dtype, transform=rows))
    rows_of_step = row_transform_of(impl.transform, _sees_shift(impl))
    append = AppendConfig(k, v, dtype, leads=True, transform=rows_of_step)
    yield AppendSpec(append)
    if rows_of_step is not None:
        yield AppendSpec(append.for_decode())  # of one token alone
    pages = -(-decodes.max_seq_len // decodes.page_size)
    if can_extend(impl.formats, impl.head_size):
        # What a transform does is undone after the kernel, and sinks join where shifts do.
        features = replace(_features(impl, 1, pages * decodes.page_size), causal=decodes.ranks == 1, shift=False)
        features = replace(features, sinks=features.sinks and not _sees_shift(impl))
        config = _extend_config(impl.formats, impl.head_size, dtype, decodes.page_size, features)
        yield from extend_specs_of(config, splits=not decodes.invariant)
    dequantises = not (decodes.invariant or is_unpacked(impl.formats, impl.head_size))
    if dequantises or not can_extend(impl.formats, impl.head_size):
        wide = dtype if rows is None else "fp32"  # rounded once, when the transform is undone
        yield from (BulkSpec(BulkConfig("dequantize", form, wide, impl.head_size)) for form in forms)
    if decodes.invariant:
        return
    for q_len, batches, after_append in (
        # A step has as many drafted tokens as were found, up to those that are asked for.
        *((q_len, decodes.batches, decodes.ranks == 1) for q_len in range(1, decodes.q_len + 1)),
        # What continues a prompt by few tokens: any number of them.
        *((q_len, PART_BATCHES, False) for q_len in range(1, MAX_Q_LEN + 1) if decodes.ranks == 1),
        *((q_len, decodes.batches, False) for q_len in range(1, decodes.q_len + 1) if reads_anothers_cache(impl)),
    ):
        for batch in batches:
            problem = AttentionProblem(
                batch=batch,
                max_seq_len=pages * decodes.page_size,
                num_q_heads=impl.num_heads * decodes.ranks,
                num_kv_heads=impl.num_kv_heads,
                head_dim=impl.head_size,
                v_head_dim=impl.head_size,
                k_format=forms[0],
                v_format=forms[1],
                q_dtype=dtype,
                q_len=q_len,
                page_tokens=max(size for size in PAGE_TOKENS if decodes.page_size % size == 0),
                features=_features(impl, q_len, pages * decodes.page_size, after_append),
                num_sms=num_sms,
                after_append=after_append,
            )
            alone = None
            if after_append and q_len == 1:
                of_step = replace(problem, appends=True)
                alone = serving_config(of_step, make_schedule(of_step), append)
            yield StepSpec(alone) if alone is not None else AttentionSpec(make_schedule(problem).config)


def _features(impl: Foreign, q_len: int, max_seq_len: int, after_append: bool = False) -> Features:
    window, transform = impl.sliding_window, impl.transform
    # What it does to V is undone by the kernel after an append alone, as `append_and_decode` has it.
    restored = transform if after_append and transform is not None and transform.v_rotation <= WIDEST_RESTORED else None
    return Features(
        queries=q_len > 1,
        causal=q_len > 1,
        window=window is not None and window < max_seq_len,
        soft_cap=impl.soft_cap is not None,
        sinks=impl.sinks is not None,
        shift=_sees_shift(impl),
        v_rotation=1 if restored is None else restored.v_rotation,
        v_factor=restored is not None and restored.v_factor is not None,
        paged=True,
        head_major=impl.formats.cache_layout == "HND",
    )
