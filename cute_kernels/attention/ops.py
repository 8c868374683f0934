"""Calling the kernel: schedule, workspace and launch in eager mode; the registered operator under torch.compile."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.attention.checks import Q_DTYPES, check_call, check_lengths, check_scale, check_tensors
from cute_kernels.attention.compile import DecodeSpec
from cute_kernels.attention.config import KEEP_PARTIALS, WRITE_LSE, DecodeConfig
from cute_kernels.attention.reference import decode_attention_reference
from cute_kernels.attention.schedule import Problem, Schedule, head_blocks, make_schedule
from cute_kernels.attention.tiles import HEAD_DIMS, has_headers
from cute_kernels.kv_formats import format_of
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.workspace import EMPTY, POOL

# Read once: looking at the environment would cost a call 0.7 us.
DEBUG = os.environ.get("CUTE_KERNELS_DEBUG", "") not in ("", "0")
_BYTES = 16  # alignment of bulk copies and tensor maps
_MAX_PLANS = 4096  # a cache that grows by a token a step makes a plan a step


@dataclass(frozen=True)
class Plan:
    """Everything about a launch that does not change between calls of the same shape."""

    function: Callable[..., Any]
    schedule: Schedule
    device_index: int
    softmax_scale: float
    num_words: int  # of workspace, 0 if there is nothing to combine


_plans: dict[tuple[Any, ...], Plan] = {}


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: str,
    softmax_scale: float | None,
    num_splits: int | None,
    return_lse: bool,
    out: torch.Tensor | None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any]:
    """Decode attention on CUDA tensors: (out, lse or None).

    A call's schedule is kept by what decides it. The checks that a repeated call has passed before are left to the
    compiled function, which compares every tensor's shape, strides, dtype, alignment and device with what it was
    compiled for, in native code, before it launches; when it refuses, the checks here say why in the caller's terms.
    """
    offset = (k_cache.data_ptr() | v_cache.data_ptr()) % _BYTES
    # The cache's dtypes, because signed bytes would pass for unsigned ones.
    key = (q.shape, k_cache.shape, q.dtype, k_cache.dtype, v_cache.dtype, q.get_device(), kv_format, num_splits, offset)
    plan = _plans.get(key)
    if softmax_scale is not None:
        check_scale(softmax_scale)
    if plan is None or DEBUG:
        _check(q, k_cache, v_cache, seq_lens, kv_format, num_splits, out)
        _check_given_scales(kv_format, k_scale, v_scale)
        if plan is None:
            if not k_cache.numel():
                return _without_tokens(q, out)
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            plan = _plans[key] = _make_plan(q, k_cache, kv_format, num_splits, not offset)
    result = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    scale = plan.softmax_scale if softmax_scale is None else softmax_scale
    try:
        _run(plan, q, k_cache, v_cache, seq_lens, result, lse, scale, k_scale, v_scale)
    except (TypeError, ValueError, RuntimeError):
        _check(q, k_cache, v_cache, seq_lens, kv_format, num_splits, out)
        raise
    return result, lse


def _check(q, k_cache, v_cache, seq_lens, kv_format, num_splits, out) -> None:
    """Everything that can be said of a call without waiting for the device, and in debug mode the lengths."""
    check_call(q, k_cache, v_cache, seq_lens, kv_format, num_splits, out)
    _check_alignment(q, k_cache, v_cache, kv_format, out)
    if DEBUG:
        check_lengths(seq_lens, k_cache.shape[1])


def _check_given_scales(kv_format: str, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    granularity = format_of(kv_format).given_scale
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if granularity is not None and scale is None:
            raise ValueError(f"{name}: got None, want the fp32 scales of a {kv_format} cache, per {granularity}")


def _without_tokens(q: torch.Tensor, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result for an empty batch or an empty cache, which no kernel is launched for."""
    lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
    return torch.zeros_like(q) if out is None else out.zero_(), lse


def _run(
    plan: Plan, q, k_cache, v_cache, seq_lens, out, lse: torch.Tensor | None, scale: float, k_scale=None, v_scale=None
) -> None:
    index = plan.device_index
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            _run(plan, q, k_cache, v_cache, seq_lens, out, lse, scale, k_scale, v_scale)
        return
    partials = 0
    if plan.num_words:
        partials = POOL.get(index, torch._C._cuda_getCurrentRawStream(index), plan.num_words)
    plan.function(
        q,
        _as_bytes(k_cache),
        _as_bytes(v_cache),
        seq_lens,
        out,
        lse.data_ptr() if lse is not None else 0,
        partials,
        k_scale.data_ptr() if k_scale is not None else 0,
        v_scale.data_ptr() if v_scale is not None else 0,
        scale_stride(k_scale),
        scale_stride(v_scale),
        scale,
        plan.schedule.num_splits,
        WRITE_LSE if lse is not None else 0,
    )


def _as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A cache as the compiled functions take it: 8-bit codes of any dtype are bytes to them."""
    return cache.view(torch.uint8) if cache.element_size() == 1 and cache.dtype != torch.uint8 else cache


def scale_stride(scale: torch.Tensor | None) -> int:
    """Elements from a KV head's given scales to the next one's: 0 for one scale per tensor ([] or [1]), 1 for one per
    head ([num_kv_heads] or [num_kv_heads, 1]), else the columns that have their own ([num_kv_heads, head_dim])."""
    if scale is None or scale.numel() == 1:
        return 0
    return scale.shape[-1] if scale.dim() == 2 else 1


def _make_plan(q: torch.Tensor, k_cache: torch.Tensor, kv_format: str, num_splits: int | None, aligned: bool) -> Plan:
    problem = problem_of(q, k_cache, kv_format, aligned)
    return _plan_of(make_schedule(problem, num_splits), problem, q.device)


def _plan_of(schedule: Schedule, problem: Problem, device: torch.device) -> Plan:
    rows = problem.batch * problem.num_q_heads * schedule.num_splits
    return Plan(
        function=load(DecodeSpec(schedule.config), arch_of(device.index)),
        schedule=schedule,
        device_index=device.index,
        softmax_scale=problem.head_dim**-0.5,
        num_words=rows * schedule.config.partial_words if schedule.num_splits > 1 else 0,
    )


def problem_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    kv_format: str | tuple[str, str],
    aligned: bool = True,
    v_cache: torch.Tensor | None = None,
) -> Problem:
    """What the schedule needs to know of a call; ``v_cache`` where it is not as ``k_cache``."""
    k_format, v_format = (kv_format, kv_format) if isinstance(kv_format, str) else kv_format
    v_cache = k_cache if v_cache is None else v_cache
    request_bytes = [cache[0].numel() * cache.element_size() if len(cache) else 0 for cache in (k_cache, v_cache)]
    return Problem(
        batch=q.shape[0],
        max_seq_len=k_cache.shape[1],
        num_q_heads=q.shape[2],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[3],
        v_head_dim=next(d for d in HEAD_DIMS if format_of(v_format).row_elements(d) == v_cache.shape[3]),
        k_format=k_format,
        v_format=v_format,
        q_dtype=Q_DTYPES[q.dtype],
        aligned=aligned and not any(size % _BYTES for size in request_bytes),
        num_sms=_num_sms(q.device),
    )


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check_alignment(q, k_cache, v_cache, kv_format: str, out) -> None:
    tensors = {"q": q} if out is None else {"q": q, "out": out}
    if not has_headers(format_of(kv_format)):
        tensors |= {"k_cache": k_cache, "v_cache": v_cache}
    for name, tensor in tensors.items():
        if tensor.data_ptr() % _BYTES:
            raise ValueError(
                f"{name}: got a tensor that starts {tensor.data_ptr() % _BYTES} bytes past a multiple of {_BYTES}, "
                f"want it aligned to {_BYTES} bytes"
            )
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.data_ptr() % 4:
            raise ValueError(f"{name}: got a tensor that does not start on a multiple of 4 bytes, want it to")


# -- other ways in ----------------------------------------------------------------------------------------------------


def schedule_for(q: torch.Tensor, k_cache: torch.Tensor, kv_format: str) -> Schedule:
    """The configuration and splits that a call with these tensors uses."""
    return make_schedule(problem_of(q, k_cache, kv_format))


def bind_config(
    config: DecodeConfig,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    num_splits: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """A launch of a given configuration, for experiments; planned once, so that repeating it costs the launch alone.

    The splits are those that the schedule chooses for these tensors unless given. The tensors are taken to be right.
    """
    problem = problem_of(q, k_cache, (config.k_format, config.v_format), v_cache=v_cache)
    splits = make_schedule(problem).num_splits if num_splits is None else num_splits
    plan = _plan_of(Schedule(config, splits, head_blocks(problem, config)), problem, q.device)

    def call() -> torch.Tensor:
        _run(plan, q, k_cache, v_cache, seq_lens, out, None, plan.softmax_scale, k_scale, v_scale)
        return out

    return call


def launch_splits(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: str,
    softmax_scale: float | None,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`launch` with fixed splits, and each split's own result; see ``decode_attention_splits``."""
    check_call(q, k_cache, v_cache, seq_lens, kv_format, num_splits, None)
    check_scale(softmax_scale)
    _check_given_scales(kv_format, None, None)
    _check_alignment(q, k_cache, v_cache, kv_format, None)
    if DEBUG:
        check_lengths(seq_lens, k_cache.shape[1])
    batch, _, heads, head_dim = q.shape
    if not k_cache.numel():
        split_out = torch.zeros((batch, num_splits, heads, head_dim), dtype=torch.float32, device=q.device)
        split_sum = torch.zeros_like(split_out[..., 0])
        return torch.zeros_like(q), split_out, torch.full_like(split_sum, float("-inf")), split_sum
    aligned = not (k_cache.data_ptr() | v_cache.data_ptr()) % _BYTES
    plan = _make_plan(q, k_cache, kv_format, num_splits, aligned)
    out = torch.empty_like(q)
    words = torch.full(
        (batch, heads, num_splits, plan.schedule.config.partial_words), EMPTY, dtype=torch.int32, device=q.device
    )
    scale = plan.softmax_scale if softmax_scale is None else softmax_scale
    with torch.cuda.device(q.device):
        plan.function(
            q,
            k_cache,
            v_cache,
            seq_lens,
            out,
            0,
            words.data_ptr(),
            *[0] * 4,
            scale,
            num_splits,
            KEEP_PARTIALS,
        )
    empty = words[..., head_dim] == EMPTY  # splits without tokens
    values = words.view(torch.float32)
    partial = values[..., :head_dim].masked_fill(empty.unsqueeze(-1), 0.0)
    maximum = values[..., head_dim].masked_fill(empty, float("-inf"))
    total = values[..., head_dim + 1].masked_fill(empty, 0.0)
    normalised = partial / torch.where(total > 0, total, 1.0).unsqueeze(-1)
    ln2 = 0.6931471805599453  # the kernel's maxima are in powers of two
    return out, normalised.transpose(1, 2), (maximum * ln2).transpose(1, 2), total.transpose(1, 2)


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: str,
    softmax_scale: float | None,
    num_splits: int | None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU implementation: (out in q's dtype, lse fp32)."""
    check_call(q, k_cache, v_cache, seq_lens, kv_format, num_splits, out)
    check_scale(softmax_scale)
    check_lengths(seq_lens, k_cache.shape[1])
    result, lse = decode_attention_reference(
        q, k_cache, v_cache, seq_lens, kv_format=kv_format, softmax_scale=softmax_scale
    )
    result = result.to(q.dtype)
    return (result if out is None else out.copy_(result)), lse.float()


# -- the operator -----------------------------------------------------------------------------------------------------

_library = torch.library.Library("cute_kernels", "DEF")
_library.define(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, str kv_format, "
    "float? softmax_scale, int? num_splits) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _on_cuda(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits):
    return launch(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits, True, None)


def _on_meta(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


_library.impl("decode_attention", reference, "CPU")
_library.impl("decode_attention", _on_cuda, "CUDA")
torch.library.register_fake("cute_kernels::decode_attention", _on_meta, lib=_library)


def needs_dispatch(q: Any, k_cache: Any, v_cache: Any, seq_lens: Any) -> bool:
    """Whether a call must go through the operator: it is being traced, or a tensor is not a plain one.

    Raises TypeError for an argument that is no tensor at all.
    """
    if torch.compiler.is_compiling():
        return True
    if type(q) is type(k_cache) is type(v_cache) is type(seq_lens) is torch.Tensor:
        return not (q.is_cuda or q.is_cpu)
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens)
    return True
