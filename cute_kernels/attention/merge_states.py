"""Merges attention over disjoint sets of keys: checks, launch and operator. The kernel is in `combine.kernel`.

Attention over two sets of keys is the average of both results, weighted by exp(lse), where lse = log(sum of
exp(score)). This is exact. So a prefix that many requests share can be attended to once (cascade inference, Ye et al.
2024), and a long context can be attended to in parts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed

from cute_kernels import arguments
from cute_kernels.attention.arguments import COMBINE
from cute_kernels.attention.combine.config import NDIMS, CombineConfig
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.reference import merge_states_reference
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.operator import Operator, Plan, is_direct, launcher, route

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
VECTOR_BYTES = 16  # that rows are a multiple of
MAX_VECTORS = 2**31 - 1024  # the index of a row is 32-bit

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(out, lse) of one set of keys, then (out, lse) of the other set."""


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over two disjoint sets of keys into attention over their union, exactly.

    Args:
        out_a, out_b: bf16, fp16 or fp32 [batch, q_len, num_heads, head_dim] or [tokens, num_heads, head_dim]; both of
            one shape and dtype. A row has a multiple of 16 bytes.
        lse_a, lse_b: fp32, the shape without head_dim: natural log of the sum of exponentials of the scores, as
            ``decode_attention(..., return_lse=True)`` returns it. A part without keys has -inf, or +inf as FlashMLA
            returns. Such a part is ignored, and its out may hold anything.

    Returns:
        (out, lse) for all keys, in the dtypes of the parts; out 0 and lse -inf if both parts are empty. The
        arithmetic is fp32. Merge more parts one after the other. Sinks do not merge: leave them out of the parts, and
        multiply the merged out by sigmoid(lse - sinks).

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.

    CPU tensors run the reference implementation.
    """
    states = out_a, lse_a, out_b, lse_b
    if is_direct(states[0], states[1], states[2:]):
        return launch(states)
    tensors = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    return route(cuda=_on_cuda, cpu=reference, operator=_operator, **tensors)(*states)


def merge_over_ranks(
    out: torch.Tensor, lse: torch.Tensor, group: torch.distributed.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the attention of all ranks, where each rank has attended to its own keys (context parallelism).

    Args:
        out, lse: this rank's result, as for `merge_states`; the shape is the same on all ranks. A rank without keys
            passes lse -inf.
        group: the ranks that hold the parts; default: all ranks.

    Returns:
        (out, lse) for all keys. Parts are merged in the order of the ranks, so every rank has the same bits; they are
        summed in fp32 and rounded once.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    check_states(out=out, lse=lse)
    count = torch.distributed.get_world_size(group)
    outs, sums = ([torch.empty_like(own) for _ in range(count)] for own in (out, lse))
    torch.distributed.all_gather(outs, out, group)
    torch.distributed.all_gather(sums, lse, group)
    states = [(each.float(), total) for each, total in zip(outs, sums, strict=True)]
    merged, total = functools.reduce(lambda left, right: merge_states(*left, *right), states)
    return merged.to(out.dtype), total


def check_states(**tensors: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless all tensors are states of one shape. Messages name a tensor by its
    keyword.
    """
    arguments.check_tensors(**tensors)
    first, out = next(iter(tensors.items()))
    if out.dim() not in NDIMS:
        raise ValueError(f"{first}: got {out.dim()} dimensions, want 3 or 4: [..., num_heads, head_dim]")
    arguments.check_dtype(first, out, *DTYPES)
    row_bytes = out.shape[-1] * out.element_size()
    if row_bytes % VECTOR_BYTES or not row_bytes:
        raise ValueError(f"{first}: got rows of {row_bytes} bytes, want a multiple of {VECTOR_BYTES}")
    if out.numel() * out.element_size() // VECTOR_BYTES > MAX_VECTORS:
        raise ValueError(
            f"{first}: got shape {arguments.shape_of(out)}, want at most {MAX_VECTORS} times {VECTOR_BYTES} bytes"
        )
    for name, tensor in tensors.items():
        arguments.check_place(name, tensor, out.device, first)
        dtype, shape = (out.dtype, out.shape) if name.startswith("out") else (torch.float32, out.shape[:-1])
        arguments.check_dtype(name, tensor, dtype)
        arguments.check_shape(name, tensor, *shape)
        arguments.check_contiguous(name, tensor)


def reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges states on CPU tensors."""
    check_states(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    out, lse = merge_states_reference(out_a, lse_a, out_b, lse_b)
    return out.to(out_a.dtype), lse


def _key(states: States) -> tuple[Any, ...]:
    """Returns the key of a call's plan."""
    out_a = states[0]
    elements = out_a.numel()
    return out_a.dtype, out_a.dim(), out_a.get_device(), not elements, elements > MAX_VECTORS


def _checked(states: States) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks a call. Returns the first state, (out_a, lse_a), from which the plan is made."""
    out_a, lse_a, out_b, lse_b = states
    check_states(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    for name, tensor in (("out_a", out_a), ("out_b", out_b)):
        arguments.check_aligned(name, tensor, VECTOR_BYTES)
    return out_a, lse_a


def _plan_of(state: tuple[torch.Tensor, torch.Tensor]) -> Plan | None:
    """Returns a plan for all calls whose states have this state's dtype and number of dimensions. Returns None if the
    state has no elements."""
    out, _ = state
    if not out.numel():
        return None
    config, device = CombineConfig(DTYPES[out.dtype], out.dim(), states=True), out.get_device()
    send = COMBINE.bound(load(AttentionSpec(config), arch_of(device)), {"sinks": 0, "last": 0, "num_parts": 2})

    def launch(states: States) -> tuple[torch.Tensor, torch.Tensor]:
        out_a, lse_a, out_b, lse_b = states
        out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
        values, sums = out_a.data_ptr(), lse_a.data_ptr()
        strides = {"value_stride": out_b.data_ptr() - values, "sum_stride": lse_b.data_ptr() - sums}
        send(out=out, values=values, sums=sums, lse=lse.data_ptr(), **strides)
        return out, lse

    return Plan(device, launch)


# All repeated calls are checked, since a complete key of four tensors would take as long to make.
launch = launcher(_key, _checked, _plan_of, lambda state: _on_meta(*state), lambda states: True)
"""The CUDA implementation."""


# -- the operator ------------------------------------------------------------------------------------------------------


def _on_cuda(out_a, lse_a, out_b, lse_b) -> tuple[torch.Tensor, torch.Tensor]:
    return launch((out_a, lse_a, out_b, lse_b))


def _on_meta(out_a, lse_a, *other):
    return torch.empty_like(out_a), torch.empty_like(lse_a)


_operator = Operator(
    "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    cpu=reference,
    cuda=_on_cuda,
    meta=_on_meta,
)
