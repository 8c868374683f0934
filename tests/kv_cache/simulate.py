"""Runs the append and bulk kernels on a GPU in NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from cute_kernels.kv_cache import ops
from cute_kernels.kv_cache.bulk_ops import row_blocks
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.config import (
    BULK_THREADS,
    GROUP_BITS,
    HAS_Q,
    HAS_SEQ_LENS,
    HAS_TABLE,
    NUM_WARPS,
    Q_ROWS_PER_KV_ROW,
    WIDE_POSITIONS,
    BulkConfig,
    divisor_of,
)
from cute_kernels.runtime.composed import changed
from simulator import Float32, Gpu, Int32, Int64, running, stand_in

WHERE = ("seq_lens", "block_table", "cu_seqlens", "slot_mapping", "position_ids")
EXTRAS = ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "k_scale", "v_scale")


def simulate_append(
    call: AppendCall, rows_per_team: int = 2, by_kind: bool = True, **changes: Any
) -> torch.Tensor | None:
    """Launches the kernel that `append_kv` would, every warp in turn; writes the caches, returns q_out.

    Its configuration has ``changes``; teams take ``rows_per_team`` q heads; by_kind: the order of CTAs.
    """
    from cute_kernels.kv_cache import kernel, operands

    config = changed(ops.config_of(call), **changes)
    gpu = Gpu()
    q_out = None if call.q is None else torch.zeros(call.q.shape, dtype=call.q.dtype)
    names = (*AppendCall._fields[:4], *AppendCall._fields[9:])
    at = {name: gpu.put(getattr(call, name)) for name in names if isinstance(getattr(call, name), torch.Tensor)}
    at["q_out"] = gpu.put(q_out)
    steps = 0 if call.rope is None else gpu.put(call.rope.phase_steps())

    def strides(tensor: torch.Tensor | None) -> tuple[Any, ...]:
        return (0,) if tensor is None else tuple(Int64(s * tensor.element_size()) for s in tensor.stride()[:-1])

    def cache_strides(cache: torch.Tensor) -> tuple[Any, ...]:
        page, first, second = strides(cache)
        return (page, first, second) if call.cache_layout == "NHD" else (page, second, first)

    inputs = operands.Inputs(
        q=Int64(at.get("q", at["k"])),
        k=Int64(at["k"]),
        v=Int64(at["v"]),
        q_stride=strides(call.q)[0],
        k_stride=strides(call.k)[0],
        v_stride=strides(call.v)[0],
        num_tokens=Int32(call.num_tokens),
        num_q_heads=Int32(call.num_q_heads),
        num_kv_heads=Int32(call.num_kv_heads),
    )
    targets = operands.Targets(
        q_out=Int64(at["q_out"]),
        k_cache=Int64(at["k_cache"]),
        v_cache=Int64(at["v_cache"]),
        q_out_stride=strides(q_out)[0],
        k_strides=cache_strides(call.k_cache),
        v_strides=cache_strides(call.v_cache),
    )
    wide = call.position_ids is not None and call.position_ids.dtype == torch.int64
    flags = ((HAS_Q, call.q), (HAS_SEQ_LENS, call.seq_lens), (HAS_TABLE, call.block_table))
    mode = sum(flag for flag, tensor in flags if tensor is not None) + WIDE_POSITIONS * wide
    where = operands.Where(
        **{"slots" if name == "slot_mapping" else name: Int64(at.get(name, 0)) for name in WHERE},
        num_pages=Int32(call.num_pages),
        page_size=Int32(call.page_size),
        page_divisor=Int64(divisor_of(call.page_size)),
        batch=Int32(call.batch),
        max_pages=Int32(0 if call.block_table is None else call.block_table.shape[1]),
        table_stride=Int64(0 if call.block_table is None else call.block_table.stride(0)),
        mode=Int32(mode),
    )
    extras = operands.Extras(
        **{name: Int64(at.get(name, 0)) for name in EXTRAS},
        norm_eps=Float32(call.norm_eps),
        transforms=_transforms(call, gpu, at.get("q_shift", 0)) if config.transform is not None else None,
    )
    factor = Float32(1.0 if call.rope is None else call.rope.attention_factor)
    kv_rows = max(rows_per_team // Q_ROWS_PER_KV_ROW, 1)
    q_chunks, kv_chunks = -(-call.num_q_heads // rows_per_team), -(-call.num_kv_heads // kv_rows)
    shares = operands.Shares(
        *(Int32(n) for n in (rows_per_team, kv_rows, kv_chunks)), by_kind=stand_in(by_kind), few=stand_in(True)
    )
    blocks, chunks = range(-(-call.num_tokens // config.tokens_per_cta)), range(q_chunks + 2 * kv_chunks)
    with running(gpu):
        simulated: Any = kernel.AppendKernel(config)
        for block, chunk in itertools.product(blocks, chunks):
            for warp in range(NUM_WARPS):
                gpu.block, gpu.warp = (block, chunk, 0) if by_kind else (chunk, block, 0), warp
                simulated.kernel(shares, inputs, where, Int64(steps), targets, extras, factor)
    gpu.get(at["k_cache"], call.k_cache)
    gpu.get(at["v_cache"], call.v_cache)
    if q_out is not None:
        gpu.get(at["q_out"], q_out)
    if call.q_shift is not None:
        gpu.get(at["q_shift"], call.q_shift)
    return q_out


def _transforms(call: AppendCall, gpu: Gpu, q_shift: int) -> Any:
    from cute_kernels.kv_cache import operands

    transform: Any = call.transform
    arrays = (transform.k_center, transform.k_factor, transform.q_factor, transform.v_factor)
    reciprocal = -(-(1 << GROUP_BITS) // max(call.num_q_heads // call.num_kv_heads, 1))
    center, factor, q_factor, v_factor = (Int64(gpu.put(array)) for array in arrays)
    numbers = Int64(q_shift), Int32(call.num_q_heads), Int32(reciprocal)
    return operands.Transforms(center, factor, q_factor, v_factor, *numbers)


def simulate_bulk(
    config: BulkConfig,
    numbers: torch.Tensor,
    rows: torch.Tensor,
    scale: torch.Tensor | None,
    constants: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """Quantises numbers [n, heads, head_dim] into rows, or dequantises rows into numbers.

    constants: center and factor of a transform.
    """
    from cute_kernels.kv_cache import bulk

    gpu = Gpu()
    num_heads = numbers.shape[-2]
    num_rows = numbers.numel() // config.head_dim
    at_numbers, at_rows, at_scale = gpu.put(numbers), gpu.put(rows), gpu.put(scale)
    transforms = None
    if config.transform is not None:
        center, factor = (Int64(gpu.put(array)) for array in constants)
        nothing = Int64(0)
        transforms = bulk.Transforms(center, factor, nothing, nothing, nothing, Int32(0), Int32(0))
    with running(gpu):
        simulated: Any = bulk.BulkKernel(config)
        blocks = []
        sizes = simulated.elements.row_bytes, simulated.row_bytes
        for tensor, address, row_bytes in zip((numbers, rows), (at_numbers, at_rows), sizes, strict=True):
            inner, stride = row_blocks(tensor) or (0, 0)
            places = Int32(inner), Int64(stride * tensor.element_size()), Int64(divisor_of(inner))
            blocks.append(bulk.RowBlocks(Int64(address), row_bytes, *places))
        counts = Int32(num_rows), Int32(num_heads), Int64(divisor_of(num_heads))
        for block in range(-(-num_rows // (config.teams * bulk.ROWS_IN_FLIGHT))):
            for warp in range(BULK_THREADS // 32):
                gpu.block, gpu.warp = (block, 0, 0), warp
                simulated.kernel(*blocks, Int64(at_scale), *counts, transforms)
    gpu.get(at_numbers, numbers)
    gpu.get(at_rows, rows)
