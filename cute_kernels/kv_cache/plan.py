"""The plan of an append: the compiled function, angles and constant arguments, which are kept from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.arguments import check_aligned
from cute_kernels.attention.checks import Q_DTYPES
from cute_kernels.formats.kv import format_of
from cute_kernels.kv_cache.arguments import CONSTANTS, append_arguments
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.compile import AppendSpec
from cute_kernels.kv_cache.config import (
    HAS_Q,
    HAS_SEQ_LENS,
    HAS_TABLE,
    WIDE_POSITIONS,
    AppendConfig,
    RowPrologue,
    WrittenRows,
    other_rotation,
    row_alignment,
    row_transform_of,
)
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.launch_arguments import Place
from cute_kernels.runtime.memory import blank, byte_view
from cute_kernels.runtime.operator import Plan
from cute_kernels.runtime.plans import ALIGNMENT

Given = tuple[tuple[Any, ...], "tuple[Any, ...] | None"]
"""The arguments of :func:`cute_kernels.kv_cache.ops.append`."""

EXTRAS = (
    *("cu_seqlens", "slots", "position_ids", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "k_scale", "v_scale"),
    "q_shift",
)


def config_of(call: AppendCall, *, leads: bool = False) -> AppendConfig:
    """Returns the configuration of the kernel that a call uses. ``leads``: whether attention over the same caches is
    launched as the kernel's dependent.

    Calls with one new token a request, at the request's end, use the decode kernel. Appends with ``leads`` use the
    general kernel, with which attention was measured. There is one exception: with a transform, an append of a single
    token uses the decode kernel, which has less code to fetch (docs/design/kv_append.md).
    """
    rope = call.rope
    config = AppendConfig(
        k=WrittenRows(call.k_format, call.k.shape[2]),
        v=WrittenRows(call.v_format, call.v.shape[2]),
        dtype=Q_DTYPES[call.k.dtype],
        prologue=RowPrologue(
            rope="none" if rope is None else rope.style,
            rotary_dim=0 if rope is None else rope.rotary_dim,
            has_bias=any(bias is not None for bias in (call.q_bias, call.k_bias, call.v_bias)),
            has_norm=call.q_norm is not None or call.k_norm is not None,
        ),
        leads=leads,
        transform=row_transform_of(call.transform, call.q_shift is not None),
    )
    elsewhere = (call.cu_seqlens, call.slot_mapping, call.position_ids)
    alone = config.transform is not None and call.k.shape[0] == 1
    decode = (alone or not leads) and call.seq_lens is not None and all(given is None for given in elsewhere)
    return config.for_decode() if decode else config


def make_plan(call: AppendCall, *, leads: bool = False) -> Plan[[Given], torch.Tensor | None]:
    """Makes the plan of a checked call that has tokens. leads: as for `config_of`.

    The plan's launch returns the rotated q, in q_out or a new tensor; None without q. The launch is one flat function
    without intermediate objects, because a decode step waits for it in every layer.
    """
    device, rope = call.k.device, call.rope
    steps = None if rope is None else rope.phase_steps(device)
    positions = call.position_ids
    flags = {
        HAS_Q: call.q is not None,
        HAS_SEQ_LENS: call.seq_lens is not None,
        HAS_TABLE: call.block_table is not None,
        WIDE_POSITIONS: positions is not None and positions.dtype == torch.int64,
    }
    config = config_of(call, leads=leads)
    send = _sender(
        call,
        config,
        norm_eps=call.norm_eps,
        phase_steps=0 if steps is None else steps.data_ptr(),
        rope_factor=1.0 if rope is None else rope.attention_factor,
        wave=config.ctas_per_sm * GPU.num_sms(device),
        mode=sum(flag for flag, is_set in flags.items() if is_set),
    )
    new_q_out = None if call.q is None else blank(call.q.shape, call.q.dtype)
    k_view, v_view, head_major = byte_view(call.k_cache), byte_view(call.v_cache), call.cache_layout == "HND"
    no_table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    no_lengths = no_table[0]

    def launch(given: Given) -> torch.Tensor | None:
        (k, v, k_cache, v_cache, _, _, _, _, _, q, q_out, seq_lens, block_table, transform), extras = given
        if q_out is None and new_q_out is not None:
            q_out = GPU.empty(*new_q_out)
        if k_view is not None:
            k_cache = k_cache.view(k_view)
        if v_view is not None:
            v_cache = v_cache.view(v_view)
        if head_major:
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        send(
            q=k if q is None else q, k=k, v=v, q_out=k if q_out is None else q_out, k_cache=k_cache, v_cache=v_cache,
            seq_lens=no_lengths if seq_lens is None else seq_lens,
            block_table=no_table if block_table is None else block_table,
            extras=extras, constants=None if transform is None else transform.addresses,
        )  # fmt: skip
        return q_out

    return Plan(device.index, launch, (config,), (steps,))


def _sender(call: AppendCall, config: AppendConfig, **fixed: int | float) -> Callable[..., Any]:
    """Returns the compiled kernel, bound to its constant arguments.

    All calls of a plan lack the same optional arguments, so 0 is bound to them.
    """
    transformed = config.transform is not None
    declared, function = append_arguments(transformed), load(AppendSpec(config), arch_of(call.k.device.index))
    taken = {name: i for i, name in enumerate(EXTRAS) if name in declared.names}
    extras: dict[str, Place] = {name: ("extras", i) for name, i in taken.items() if call.extras[i] is not None}
    constants: dict[str, Place] = {name: ("constants", i) for i, name in enumerate(CONSTANTS) if transformed}
    fixed |= {name: 0 for name in taken if name not in extras}
    return declared.bound(function, fixed, extras, constants, ignored=("extras", "constants"))


def check_alignment(call: AppendCall, *, leads: bool = False) -> None:
    """Raises ValueError if rows are not aligned for the kernel's vectors, or lanes cannot rotate them. leads: as for
    `config_of`."""
    config = config_of(call, leads=leads)
    for name, head_dim in (("k_rotation", config.k.head_dim), ("v_rotation", config.v.head_dim)):
        width = 1 if config.transform is None else getattr(config.transform, name)
        if (wanted := other_rotation(width, head_dim)) is not None:
            raise ValueError(f"transform: got {name} {width}, want {wanted}")
    for name in ("q", "k", "v", "q_out"):
        x = getattr(call, name)
        if x is not None:
            _check_start(name, x, row_alignment(Q_DTYPES[x.dtype], x.shape[2], config.lanes, config.runs))
    for name, kv_format, head_dim in (
        ("k_cache", call.k_format, config.k.head_dim),
        ("v_cache", call.v_format, config.v.head_dim),
    ):
        _check_start(name, getattr(call, name), row_alignment(kv_format, head_dim, config.lanes, config.runs))
    by_vectors = ["q_bias", "k_bias", "v_bias", "q_norm", "k_norm"]
    by_vectors += ["k_scale"] * (format_of(call.k_format).given_scale == "channel")
    by_vectors += ["v_scale"] * (format_of(call.v_format).given_scale == "channel")
    for name in by_vectors:
        if (tensor := getattr(call, name)) is not None:
            check_aligned(name, tensor, ALIGNMENT)
    if call.num_pages * call.page_size**2 >= 2**63:
        raise ValueError(f"k_cache: got {call.num_pages} requests of {call.page_size} tokens, want fewer")


def _check_start(name: str, tensor: torch.Tensor, unit: int) -> None:
    """Raises ValueError unless every row begins on a multiple of ``unit`` bytes."""
    check_aligned(name, tensor, unit)
    strides = zip(tensor.shape[:-1], tensor.stride(), strict=False)
    if any(size > 1 and stride * tensor.element_size() % unit for size, stride in strides):
        raise ValueError(f"{name}: got strides {tensor.stride()}, want rows on multiples of {unit} bytes")
