"""Calling the append kernel: plan and launch in eager mode; the registered operator under torch.compile."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.kv_cache.call import DTYPES, AppendCall, check_append
from cute_kernels.kv_cache.compile import AppendSpec
from cute_kernels.kv_cache.config import (
    CTAS_PER_SM,
    HAS_Q,
    HAS_SEQ_LENS,
    HAS_TABLE,
    WIDE_POSITIONS,
    AppendConfig,
    row_alignment,
)
from cute_kernels.kv_cache.reference import append_kv_reference
from cute_kernels.kv_cache.rope import rope_of
from cute_kernels.kv_cache.values import check_append_values
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of

# Read once: looking at the environment would cost a call 0.7 us.
DEBUG = os.environ.get("CUTE_KERNELS_DEBUG", "") not in ("", "0")
_MAX_PLANS = 4096  # prefills of ever other lengths make a plan each
_BYTES = 16  # of the widest access
_NO_EXTRAS = (None,) * 10
_NO_ADDRESSES = (0,) * 10


@dataclass(frozen=True)
class Plan:
    """Everything about a launch that does not change between calls of the same shape."""

    function: Callable[..., Any]
    device_index: int
    phase_steps: torch.Tensor | None  # kept alive for its address
    steps_address: int
    rope_factor: float
    wave: int  # CTAs that the GPU holds at a time
    mode: int
    seq_lens: torch.Tensor  # stand for those that a call does not have
    block_table: torch.Tensor


_plans: dict[tuple[Any, ...], Plan] = {}


def launch(call: AppendCall) -> torch.Tensor | None:
    """Append on CUDA tensors; returns q_out, None without q.

    A call's plan is kept by what decides it. The checks that a repeated call has passed before are left to the compiled
    function, which compares every tensor's shape, strides, dtype, alignment and device with what it was compiled for,
    in native code, before it launches; when it refuses, the checks here say why in the caller's terms.
    """
    k, q, seq_lens, table, extras, rope = call.k, call.q, call.seq_lens, call.block_table, call.extras, call.rope
    key = (
        k.shape,
        k.dtype,
        k.get_device(),
        call.v.shape,
        call.k_cache.shape,
        call.v_cache.shape,
        None if q is None else q.shape,
        None if seq_lens is None else seq_lens.shape,
        None if table is None else table.shape,
        call.k_format,
        call.v_format,
        call.cache_layout,
        None if rope is None else rope.text,
    )
    for tensor in extras:
        if tensor is not None:
            key += tuple(None if extra is None else _identity(extra) for extra in extras)
            break
    else:
        extras = _NO_EXTRAS  # by identity from here on
    plan = _plans.get(key)
    if plan is None or DEBUG:
        _check(call)
        if DEBUG:
            check_append_values(call)
        if plan is None:
            if not k.shape[0]:
                return None if q is None else torch.empty_like(q) if call.q_out is None else call.q_out
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            plan = _plans[key] = _make_plan(call)
    q_out = call.q_out
    if q is not None and q_out is None:
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    try:
        _run(plan, call, extras, q_out)
    except (TypeError, ValueError, RuntimeError):
        _check(call)
        raise
    return q_out


def _check(call: AppendCall) -> None:
    """Everything that can be said of a call without waiting for the device."""
    check_append(call)
    _check_alignment(call)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a plan relies on in a tensor that the function takes as an address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() % _BYTES


def _run(plan: Plan, call: AppendCall, extras: tuple[Any, ...], q_out: torch.Tensor | None) -> None:
    index = plan.device_index
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            _run(plan, call, extras, q_out)
        return
    k, q = call.k, call.q
    addresses = _NO_ADDRESSES
    if extras is not _NO_EXTRAS:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in extras]
    plan.function(
        k if q is None else q,
        k,
        call.v,
        k if q_out is None else q_out,
        _pages(call.k_cache, call.cache_layout),
        _pages(call.v_cache, call.cache_layout),
        plan.seq_lens if call.seq_lens is None else call.seq_lens,
        plan.block_table if call.block_table is None else call.block_table,
        *addresses[:8],
        plan.steps_address,
        *addresses[8:],
        call.norm_eps,
        plan.rope_factor,
        plan.wave,
        plan.mode,
    )


def _pages(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """The cache as [pages, page_size, num_kv_heads, row], codes as plain bytes."""
    if cache.element_size() == 1 and cache.dtype != torch.uint8:
        cache = cache.view(torch.uint8)
    return cache if layout == "NHD" else cache.transpose(1, 2)


def config_of(call: AppendCall) -> AppendConfig:
    """The kernel that a call uses."""
    rope = call.rope
    return AppendConfig(
        k_format=call.k_format,
        v_format=call.v_format,
        dtype=DTYPES[call.k.dtype],
        head_dim_k=call.k.shape[2],
        head_dim_v=call.v.shape[2],
        rope="none" if rope is None else rope.style,
        rotary_dim=0 if rope is None else rope.rotary_dim,
        has_bias=any(bias is not None for bias in (call.q_bias, call.k_bias, call.v_bias)),
        has_norm=call.q_norm is not None or call.k_norm is not None,
    )


def _make_plan(call: AppendCall) -> Plan:
    device, rope = call.k.device, call.rope
    steps = None if rope is None else rope.phase_steps(device)
    positions = call.position_ids
    flags = {
        HAS_Q: call.q is not None,
        HAS_SEQ_LENS: call.seq_lens is not None,
        HAS_TABLE: call.block_table is not None,
        WIDE_POSITIONS: positions is not None and positions.dtype == torch.int64,
    }
    nothing = torch.zeros((1, 1), dtype=torch.int32, device=device)
    return Plan(
        function=load(AppendSpec(config_of(call)), arch_of(device.index)),
        device_index=device.index,
        phase_steps=steps,
        steps_address=0 if steps is None else steps.data_ptr(),
        rope_factor=1.0 if rope is None else rope.attention_factor,
        wave=CTAS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count,
        mode=sum(flag for flag, is_set in flags.items() if is_set),
        seq_lens=nothing[0],
        block_table=nothing,
    )


def _check_alignment(call: AppendCall) -> None:
    """Raises ValueError for rows that the kernel's vectors could not address."""
    config = config_of(call)
    for name in ("q", "k", "v", "q_out"):
        x = getattr(call, name)
        if x is not None:
            _check_start(name, x, row_alignment(DTYPES[x.dtype], x.shape[2], config.lanes, config.runs))
    for name, kv_format, head_dim in (
        ("k_cache", call.k_format, config.head_dim_k),
        ("v_cache", call.v_format, config.head_dim_v),
    ):
        _check_start(name, getattr(call, name), row_alignment(kv_format, head_dim, config.lanes, config.runs))
    for name in ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "k_scale", "v_scale"):
        tensor = getattr(call, name)
        if tensor is not None and tensor.data_ptr() % _BYTES:
            raise ValueError(f"{name}: got a tensor that does not start on a multiple of {_BYTES} bytes, want it to")
    if call.num_pages * call.page_size**2 >= 2**63:
        raise ValueError(f"k_cache: got {call.num_pages} requests of {call.page_size} tokens, want fewer")


def _check_start(name: str, tensor: torch.Tensor, unit: int) -> None:
    """Raises ValueError unless every row begins on a multiple of ``unit`` bytes."""
    if tensor.data_ptr() % unit:
        raise ValueError(
            f"{name}: got a tensor that starts {tensor.data_ptr() % unit} bytes past a multiple of {unit}, want it "
            f"aligned to {unit} bytes"
        )
    strides = zip(tensor.shape[:-1], tensor.stride(), strict=False)
    if any(size > 1 and stride * tensor.element_size() % unit for size, stride in strides):
        raise ValueError(f"{name}: got strides {tensor.stride()}, want rows on multiples of {unit} bytes")


def reference(call: AppendCall) -> torch.Tensor | None:
    """The CPU implementation: checks everything, values included, and rounds q to its dtype."""
    check_append(call)
    check_append_values(call)
    q = append_kv_reference(call)
    if q is None or call.q is None:
        return None
    return q.to(call.q.dtype) if call.q_out is None else call.q_out.copy_(q)


# -- the operator -----------------------------------------------------------------------------------------------------

_library = torch.library.Library("cute_kernels", "FRAGMENT")
_library.define(
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, str k_format, str v_format, "
    "str cache_layout, str? rope, float norm_eps, Tensor? q, Tensor? seq_lens, Tensor? block_table, "
    "Tensor? cu_seqlens, Tensor? slots, Tensor? position_ids, Tensor? q_bias, Tensor? k_bias, Tensor? v_bias, "
    "Tensor? q_norm, Tensor? k_norm, Tensor? k_scale, Tensor? v_scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _call_of(*arguments: Any) -> AppendCall:
    """The operator's arguments as a call; it has no q_out, and its rope is a text."""
    rope = None if arguments[7] is None else rope_of(arguments[7])
    return AppendCall._make((*arguments[:7], rope, *arguments[8:10], None, *arguments[10:]))


def _result(call: AppendCall, q_out: torch.Tensor | None) -> torch.Tensor:
    return call.k.new_empty(0) if q_out is None else q_out


def _on_cpu(*arguments: Any) -> torch.Tensor:
    call = _call_of(*arguments)
    return _result(call, reference(call))


def _on_cuda(*arguments: Any) -> torch.Tensor:
    call = _call_of(*arguments)
    return _result(call, launch(call))


def _on_meta(k, v, k_cache, v_cache, k_format, v_format, cache_layout, rope, norm_eps, q, *others):
    return k.new_empty(0) if q is None else q.new_empty(q.shape)


_library.impl("append_kv", _on_cpu, "CPU")
_library.impl("append_kv", _on_cuda, "CUDA")
torch.library.register_fake("cute_kernels::append_kv", _on_meta, lib=_library)


def dispatch(call: AppendCall) -> torch.Tensor | None:
    """The call through the operator; q_out is written from its result."""
    rope = None if call.rope is None else call.rope.text
    result = torch.ops.cute_kernels.append_kv(*call[:7], rope, *call[8:10], *call[11:])
    if call.q is None:
        return None
    return result if call.q_out is None else call.q_out.copy_(result)
