"""Appends keys in blocks. New keys wait in 16 bits until their block of tokens is full; then the block's rows are
written.

An append is two launches. The first (`.kernel`) is an ordinary append, except that it writes keys in fp16 to a
temporary tensor. The second (`.channel_blocks_kernel`) copies these keys into the ring (64 rows per sequence, kept
outside the cache), and writes the blocks that become full. Lengths on the device decide which blocks are full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from cute_kernels import arguments
from cute_kernels.arguments import check_apart, check_place, check_shape, check_tensors
from cute_kernels.attention.checks import check_alike, check_blocks, check_tail
from cute_kernels.formats.kv import WAITING, format_of
from cute_kernels.kv_cache import ops
from cute_kernels.kv_cache.arguments import FILL
from cute_kernels.kv_cache.call import AppendCall, check_append, check_cache, check_kinds
from cute_kernels.kv_cache.compile import FillSpec
from cute_kernels.kv_cache.config import WrittenRows
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.operator import Operator, Plan, on_device_of, route
from layouts.kv.channel_blocks import BLOCK_TOKENS, TAIL_TOKENS


class Fill(NamedTuple):
    """The arguments of the second launch: ``k_new``, the keys that the first launch has written, fp16 [tokens,
    num_kv_heads, head_dim], then the ring, the cache, and the tensors that say where each key belongs.
    """

    k_new: torch.Tensor
    k_tail: torch.Tensor
    tail_slots: torch.Tensor
    k_cache: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens: torch.Tensor | None
    block_table: torch.Tensor | None
    cache_layout: str
    k_format: str


def append(
    call: tuple[Any, ...],
    extras: tuple[Any, ...] | None,
    k_tail: torch.Tensor | None,
    tail_slots: torch.Tensor | None,
) -> torch.Tensor | None:
    """Appends keys in blocks, as `cute_kernels.kv_cache.ops.append` appends other keys."""
    given = AppendCall(*call, *(extras or ()))
    fill = _checked(given, k_tail, tail_slots)
    dim = 1 if given.cache_layout == "NHD" else 2
    first = given._replace(k_cache=fill.k_new.unsqueeze(dim), k_format=WAITING.name)
    if not is_compiling() and (arguments.DEBUG or given.k.is_cpu):  # before the first launch writes
        check_append(first)
        _check_slots(fill)
    q_out = ops.append(first[: len(call)], None if extras is None else first.extras)
    route(cuda=launch, cpu=reference, operator=_operator, k=fill.k_new, k_cache=fill.k_cache)(*fill)
    return q_out


def _checked(call: AppendCall, rows: torch.Tensor | None, slots: torch.Tensor | None) -> Fill:
    """Checks an append of keys in blocks, and returns the arguments of its second launch. Raises TypeError or
    ValueError as `append_kv` does."""
    k_format, v_format = call.formats
    if call.slot_mapping is not None or call.seq_lens is None:
        raise ValueError(
            f"slot_mapping: got slots, want seq_lens for {k_format.name} keys: positions decide which blocks are full"
        )
    check_kinds(call)
    tail = {"k_tail": rows, "tail_slots": slots}
    check_tensors(**{name: given for name, given in tail.items() if given is not None})
    check_shape("seq_lens", call.seq_lens, "batch")
    check_shape("k", call.k, "tokens", "heads", "head_dim")
    heads = call.k.shape[1], call.k.shape[2]
    check_cache("k_cache", call, call.k_cache, k_format, heads[1])
    check_alike(call.k_cache, call.v_cache)
    check_blocks((k_format, v_format), None if call.block_table is None else call.page_size)
    check_tail(k_format, rows, slots, call.batch, heads)
    assert rows is not None and slots is not None
    for name, tensor in (("k_tail", rows), ("tail_slots", slots), ("k_cache", call.k_cache)):
        check_place(name, tensor, call.k.device, "k")
    if arguments.DEBUG or not rows.is_cuda:  # there is no plan that would say that a call like it was checked
        check_apart("k_cache", call.k_cache, {"v_cache": call.v_cache, "k": call.k, "v": call.v})
        check_apart("k_tail", rows, {"k_cache": call.k_cache, "v_cache": call.v_cache, "k": call.k, "v": call.v})
    k_new = torch.empty(call.k.shape, dtype=torch.float16, device=call.k.device)
    return Fill(
        k_new, rows, slots, call.k_cache, call.seq_lens, call.cu_seqlens, call.block_table, call.cache_layout,
        call.k_format,
    )  # fmt: skip


def launch(*given: Any) -> None:
    """Launches the second kernel on CUDA tensors, on the current stream."""
    fill = Fill(*given)
    if not (fill.k_new.numel() and fill.k_cache.numel() and fill.seq_lens.numel()):
        return
    if arguments.DEBUG:
        _check_slots(fill)
    on_device_of(Plan(fill.k_new.get_device(), _fill), fill)


def _fill(fill: Fill) -> None:
    """Launches the second kernel on the current device, which has the tensors."""
    tokens, _, head_dim = fill.k_new.shape
    if any(stride % 4 for stride in fill.k_cache.stride()[:3]) or fill.k_cache.data_ptr() % 4:
        raise ValueError(f"k_cache: got strides {fill.k_cache.stride()}, want rows on multiples of 4 bytes")
    send = FILL.bound(load(FillSpec(WrittenRows(fill.k_format, head_dim)), arch_of(fill.k_new.get_device())), {})
    cache, table = fill.k_cache, fill.block_table
    most = tokens if fill.cu_seqlens is not None else 1  # new tokens of a request
    send(
        k_new=fill.k_new,
        k_tail=fill.k_tail,
        tail_slots=fill.tail_slots,
        k_cache=cache if fill.cache_layout == "NHD" else cache.transpose(1, 2),
        seq_lens=fill.seq_lens,
        cu_seqlens=0 if fill.cu_seqlens is None else fill.cu_seqlens.data_ptr(),
        block_table=0 if table is None else table.data_ptr(),
        table_stride=0 if table is None else table.stride(0),
        max_pages=0 if table is None else table.shape[1],
        max_blocks=(most + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1,
    )


def reference(*given: Any) -> None:
    """Computes the second launch in plain PyTorch. It defines the launch's result, and runs for CPU tensors."""
    fill = Fill(*given)
    _check_slots(fill)
    form = format_of(fill.k_format)
    cache = fill.k_cache if fill.cache_layout == "NHD" else fill.k_cache.transpose(1, 2)
    bounds = range(len(fill.seq_lens) + 1) if fill.cu_seqlens is None else fill.cu_seqlens.tolist()
    for request, (length, slot) in enumerate(zip(fill.seq_lens.tolist(), fill.tail_slots.tolist(), strict=True)):
        begin, end = bounds[request], bounds[request + 1]
        start = max(length - (end - begin), 0)
        if start >= length or begin == end:
            continue
        ring, new = fill.k_tail[slot], fill.k_new[end - (length - start) : end]
        first = start // BLOCK_TOKENS * BLOCK_TOKENS
        rows = torch.cat((ring[torch.arange(first, start, device=ring.device) % TAIL_TOKENS], new))
        for block in range((length - first) // BLOCK_TOKENS):
            base = first + block * BLOCK_TOKENS
            page, row = _page_of(fill, cache.shape, request, base)
            if page is not None:
                values = rows[block * BLOCK_TOKENS :][:BLOCK_TOKENS]
                cache[page, row : row + BLOCK_TOKENS] = form.quantize(values)
        oldest = max(start, (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS)
        kept = torch.arange(oldest, length, device=ring.device)
        ring[kept % TAIL_TOKENS] = rows[kept - first]


def _check_slots(fill: Fill) -> None:
    """Raises ValueError unless each request with new tokens has its own slot of k_tail. Waits for the device."""
    lengths, slots, most = fill.seq_lens.tolist(), fill.tail_slots.tolist(), fill.k_tail.shape[0]
    counts = [1] * len(lengths) if fill.cu_seqlens is None else fill.cu_seqlens.diff().tolist()
    seen: dict[int, int] = {}
    for request, (length, count, slot) in enumerate(zip(lengths, counts, slots, strict=True)):
        if not length or not count:
            continue
        if not 0 <= slot < most:
            raise ValueError(f"tail_slots: got {slot} for request {request}, want 0 to {most - 1}")
        if (other := seen.setdefault(slot, request)) != request:
            raise ValueError(f"tail_slots: got {slot} for requests {other} and {request}, want a slot for each")


def _page_of(fill: Fill, shape: torch.Size, request: int, base: int) -> tuple[int | None, int]:
    """Returns (page, row of the page) of the block that begins at position ``base``. The page is None if the cache has
    none for the block."""
    index, row = divmod(base, shape[1])
    page = request if index == 0 else -1
    if fill.block_table is not None:
        page = int(fill.block_table[request, index]) if index < fill.block_table.shape[1] else -1
    return (page if 0 <= page < shape[0] and row + BLOCK_TOKENS <= shape[1] else None), row


def _on_meta(*given: Any) -> None:
    pass


_operator = Operator(
    "fill_blocks(Tensor k_new, Tensor(a!) k_tail, Tensor tail_slots, Tensor(b!) k_cache, Tensor seq_lens, "
    "Tensor? cu_seqlens, Tensor? block_table, str cache_layout, str k_format) -> ()",
    cpu=reference,
    cuda=launch,
    meta=_on_meta,
)
