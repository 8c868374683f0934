"""Triton kernel that reads a buffer and does next to nothing else. Imported only where triton is installed."""
# Triton exists on GPU machines only, and its kernels are a language that type checkers do not know.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

# The kernel would store if a thread block's words summed to this: the compiler cannot rule that out, so every load is
# real. A coincidence would cost one 4-byte store.
_NEVER = 0x5A17C0DE


@triton.jit(do_not_specialize=["num_steps"])
def _read_kernel(
    source,
    sink,
    num_words,
    num_steps,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    NEVER: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for step in range(tl.program_id(0), num_steps, tl.num_programs(0)):
        base = tl.cast(step, tl.int64) * (BLOCK * UNROLL)
        for part in tl.static_range(UNROLL):
            offset = base + part * BLOCK + lane
            total += tl.load(source + offset, mask=offset < num_words, other=0)
    if tl.sum(total) == NEVER:
        tl.store(sink, 1)


def read(
    source: torch.Tensor,
    sink: torch.Tensor,
    *,
    block_words: int,
    unroll: int,
    num_warps: int,
    num_programs: int | None,
    never: int = _NEVER,
) -> None:
    """Reads all of `source` (int32, contiguous) once. `num_programs` None: one step per program.

    Stores 1 to `sink` (int32) if the words that one program read sum to `never` (which is how tests see that it read).
    """
    num_words = source.numel()
    num_steps = triton.cdiv(num_words, block_words * unroll)
    grid = (min(num_steps, num_programs or num_steps),)
    _read_kernel[grid](
        source, sink, num_words, num_steps, BLOCK=block_words, UNROLL=unroll, NEVER=never, num_warps=num_warps
    )
