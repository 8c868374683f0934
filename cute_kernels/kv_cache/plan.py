"""`AppendPlan`, the part of an append that is kept from call to call: compiled function, angles, launch numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from cute_kernels.runtime.memory import Blank, blank, byte_view
from cute_kernels.runtime.plans import ALIGNMENT

Given = tuple[tuple[Any, ...], "tuple[Any, ...] | None"]
"""The arguments of :func:`cute_kernels.kv_cache.ops.append`."""

EXTRAS = (
    *("cu_seqlens", "slots", "position_ids", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "k_scale", "v_scale"),
    "q_shift",
)


@dataclass(frozen=True)
class AppendPlan:
    """Everything about a launch that does not change between calls of the same shapes, dtypes, device and options.

    Attributes:
        send: the compiled kernel, bound to its constant arguments; it takes the other arguments
            (:mod:`cute_kernels.kv_cache.arguments`) by name. In native code it compares the shape, strides, dtype,
            alignment and device of every tensor with its compiled signature. It launches on torch's current stream of
            the tensors' device.
        phase_steps: the turns per position of RoPE's angles. The tensor is kept alive because ``send`` holds its
            address.
        new_q_out: arguments of `GPU.empty` that allocate the rotated q if the caller gives no tensor; None without q.
        k_view, v_view: dtypes as which the kernel takes the caches; None for the caches' own dtypes.
        head_major: whether the caches are "HND".
        seq_lens, block_table: placeholders for calls without lengths or block table.
    """

    send: Callable[..., Any]
    device_index: int
    phase_steps: torch.Tensor | None
    new_q_out: Blank | None
    k_view: torch.dtype | None
    v_view: torch.dtype | None
    head_major: bool
    seq_lens: torch.Tensor
    block_table: torch.Tensor

    def launch(self, given: Given) -> torch.Tensor | None:
        """Launches on the current stream of the plan's device, which must be the current device. Returns the rotated q,
        in q_out or a new tensor; None without q.

        given: the arguments of :func:`cute_kernels.kv_cache.ops.append`. This is one flat function without intermediate
            objects, because a decoding step waits for it in every layer.
        """
        (k, v, k_cache, v_cache, _, _, _, _, _, q, q_out, seq_lens, block_table, transform), extras = given
        if q_out is None and self.new_q_out is not None:
            q_out = GPU.empty(*self.new_q_out)
        if self.k_view is not None:
            k_cache = k_cache.view(self.k_view)
        if self.v_view is not None:
            v_cache = v_cache.view(self.v_view)
        if self.head_major:
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        self.send(
            q=k if q is None else q, k=k, v=v, q_out=k if q_out is None else q_out, k_cache=k_cache, v_cache=v_cache,
            seq_lens=self.seq_lens if seq_lens is None else seq_lens,
            block_table=self.block_table if block_table is None else block_table,
            extras=extras, constants=None if transform is None else transform.addresses,
        )  # fmt: skip
        return q_out


def config_of(call: AppendCall, *, leads: bool = False) -> AppendConfig:
    """Returns the configuration of the kernel that a call uses. ``leads``: whether attention over the same caches is
    launched as the kernel's dependent.

    Calls with one new token a request, at the request's end, use the decode kernel. Appends that lead use the general
    kernel, with which attention was measured. There is one exception: a single token, of a cache with a transform, uses
    the decode kernel, which has less code to fetch (docs/design/kv_append.md).
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


def make_plan(call: AppendCall, *, leads: bool = False) -> AppendPlan:
    """Makes the plan of a checked call that has tokens. leads: as for `config_of`."""
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
    config = config_of(call, leads=leads)
    return AppendPlan(
        send=_sender(
            call,
            config,
            norm_eps=call.norm_eps,
            phase_steps=0 if steps is None else steps.data_ptr(),
            rope_factor=1.0 if rope is None else rope.attention_factor,
            wave=config.ctas_per_sm * GPU.num_sms(device),
            mode=sum(flag for flag, is_set in flags.items() if is_set),
        ),
        device_index=device.index,
        phase_steps=steps,
        new_q_out=None if call.q is None else blank(call.q.shape, call.q.dtype),
        k_view=byte_view(call.k_cache),
        v_view=byte_view(call.v_cache),
        head_major=call.cache_layout == "HND",
        seq_lens=nothing[0],
        block_table=nothing,
    )


def _sender(call: AppendCall, config: AppendConfig, **fixed: int | float) -> Callable[..., Any]:
    """Returns the compiled kernel, bound to its constant arguments.

    All calls of a plan lack the same extras, so the arguments of these extras are 0.
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
