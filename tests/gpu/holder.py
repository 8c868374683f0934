"""CTAs that hold SMs until the host says so, so that a launch beside them finds few; imports the DSL."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import cutlass
import torch
from cutlass import Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.device import ptx
from cute_kernels.runtime import compile_options

CLUSTER = 2  # CTAs that have their SMs side by side, so that what is left takes clusters, too
SHARED_BYTES = 200 * 1024  # so much that nothing else fits the SM
DEADLINE_S = 10.0


@dsl_user_op
def load_volatile(address: Int64, *, loc=None, ip=None) -> Uint32:
    """A word that the host may write meanwhile."""
    value = Int64(address).ir_value(loc=loc, ip=ip)
    asm = "ld.volatile.global.u32 $0, [$1];"
    return Uint32(
        llvm.inline_asm(Uint32.mlir_type, [value], asm, "=r,l,~{memory}", has_side_effects=True, loc=loc, ip=ip)
    )


@cute.kernel
def hold(begun: Int64, released: Int64):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    smem.allocate(SHARED_BYTES, byte_alignment=16)
    if thread == 0:
        ptx.store_global(begun + Int64(block) * 4, [Uint32(1)])
        waiting = Int32(1)
        while waiting != 0:
            waiting = cutlass.select_(load_volatile(released) == Uint32(0), Int32(1), Int32(0))


@cute.jit
def launch(anywhere: cute.Tensor, begun: Int64, released: Int64, count: Int32, stream):
    """``anywhere``: a tensor on the GPU, by which the launch finds its stream."""
    hold(begun, released).launch(grid=(count, 1, 1), block=(32, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream)


@functools.cache
def _function() -> Any:
    anywhere = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (1,), assumed_align=4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    numbers = Int64(0), Int64(0), Int32(CLUSTER)
    return cute.compile(launch, anywhere, *numbers, stream, options=compile_options("sm_90a"))


@contextlib.contextmanager
def held(num_sms: int) -> Iterator[None]:
    """``num_sms`` SMs are taken while the block runs, and given back behind it, whatever happened in it."""
    assert num_sms % CLUSTER == 0
    words = torch.zeros(num_sms + 1, dtype=torch.int32, pin_memory=True)
    stream = torch.cuda.Stream()
    function, anywhere = _function(), torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        function(anywhere, words.data_ptr(), words[num_sms:].data_ptr(), num_sms)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not words[:num_sms].all():
            assert time.monotonic() < deadline, f"{int(words[:num_sms].sum())} of {num_sms} SMs could be taken"
        yield
    finally:
        words[num_sms] = 1
        stream.synchronize()


def ends_meanwhile(stream: torch.cuda.Stream, seconds: float = 3.0) -> bool:
    """Whether all that a stream has to do is done within the time."""
    deadline = time.monotonic() + seconds
    while not stream.query():
        if time.monotonic() > deadline:
            return False
    return True
