"""Attention with a configuration of the caller's choice, and the one that a plain call would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.attention.call import AttentionCall, Given, make_call, make_extend_call
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.decode_schedule import DecodeSchedule, head_blocks, make_schedule, schedule_of
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.options import NO_EXTEND_OPTIONS, NO_OPTIONS
from cute_kernels.attention.plan import (
    check_alignment,
    decode_plan_of,
    decode_sender,
    extend_launches,
    problem_of,
)
from cute_kernels.formats.kv import format_of, format_pair
from cute_kernels.runtime.operator import Plan, on_device_of


def schedule_for(q: torch.Tensor, k_cache: torch.Tensor, kv_format: str | tuple[str, str]) -> DecodeSchedule:
    """Returns the configuration and splits of a plain call with these tensors; V is as K."""
    seq_lens = torch.empty(q.shape[0], dtype=torch.int32, device=q.device)
    scales = _scales_for(kv_format, k_cache)
    return make_schedule(problem_of(make_call(q, k_cache, k_cache, seq_lens, kv_format=kv_format, **scales)))


def _scales_for(kv_format: str | tuple[str, str], cache: torch.Tensor) -> dict[str, Any]:
    """Returns scales of the shapes that the formats want, where only shapes matter."""
    wanted = {"tensor": (), "head": (cache.shape[2],), "channel": (cache.shape[2], cache.shape[3])}
    granularities = [format_of(name).given_scale for name in format_pair(kv_format)]
    return {
        name: torch.ones(wanted[granularity], dtype=torch.float32, device=cache.device)
        for name, granularity in zip(("k_scale", "v_scale"), granularities, strict=True)
        if granularity is not None
    }


def _plan_of(call: AttentionCall, config: DecodeConfig | ExtendConfig, num_splits: int | None) -> Plan:
    """Returns the plan of a checked call that launches a given configuration alone."""
    if isinstance(config, ExtendConfig):
        launches = extend_launches(call, config)
        return Plan(call.q.device.index, launches.launch, (launches,))
    problem = problem_of(call)
    if num_splits is None:
        schedule = schedule_of(problem, config, make_schedule(problem).num_splits)
    else:
        schedule = DecodeSchedule(config, num_splits, head_blocks(problem, config))
    return decode_plan_of(call, problem, schedule, decode_sender(call, schedule))


def bind_config(
    config: DecodeConfig | ExtendConfig,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    num_splits: int | None = None,
    kv_format: str | tuple[str, str] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Callable[[], Any]:
    """Returns what launches a given configuration, planned once: repeating it costs the launch alone.

    The splits are those that the schedule chooses for these tensors unless given. ``kv_format``: where it is not what
    the configuration says (formats that share a kernel). A launch of decode attention returns ``out``, one of extend
    attention (out, lse or None).
    """
    formats = kv_format or config.format_names
    complete: dict[str, Any] | None
    if cu_seqlens_q is None:
        complete = {**NO_OPTIONS, **options} if options else None
        call = make_call(q, k_cache, v_cache, seq_lens, kv_format=formats, out=out, **options)
    else:
        complete = {**NO_EXTEND_OPTIONS, **options}
        more = {"kv_format": formats, "num_splits": num_splits, "out": out, **complete}
        call = make_extend_call(q, k_cache, v_cache, seq_lens, cu_seqlens_q=cu_seqlens_q, **more)
        check_alignment(call)
    plan = _plan_of(call, config, num_splits)
    numbers = None, num_splits, return_lse
    given = Given(q, k_cache, v_cache, seq_lens, formats, *numbers, out, complete, cu_seqlens_q)

    def run() -> Any:
        result = on_device_of(plan, given)
        return out if cu_seqlens_q is None else result

    return run
