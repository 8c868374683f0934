"""Replays named shared-memory accesses, one kernel launch each, for a profiler to count.

``python -m tests.gpu.bank_replay`` launches every access of `layouts.patterns.ACCESSES` in order; each launch is one
warp that issues the access `REPEATS` times and touches shared memory in no other way, so that a counter divided by
`REPEATS` is the cost of the access.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import cutlass
import torch
from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from layouts.patterns import ACCESSES, Access

REPEATS = 8
SMEM_BYTES = 48 * 1024
INSTRUCTIONS = {
    ("ld", 2): "ld.volatile.shared.u16 {v0}, [{address}];",
    ("ld", 4): "ld.volatile.shared.b32 {v0}, [{address}];",
    ("ld", 8): "ld.volatile.shared.v2.b32 {{{v0}, {v1}}}, [{address}];",
    ("ld", 16): "ld.volatile.shared.v4.b32 {{{v0}, {v1}, {v2}, {v3}}}, [{address}];",
    ("st", 4): "st.volatile.shared.b32 [{address}], {data};",
    ("st", 8): "st.volatile.shared.v2.b32 [{address}], {{{data}, {data}}};",
    ("st", 16): "st.volatile.shared.v4.b32 [{address}], {{{data}, {data}, {data}, {data}}};",
    ("ldmatrix", 16): "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{v0}, {v1}, {v2}, {v3}}}, [{address}];",
}
"""PTX of each kind and width; ``v0..v3`` are loaded registers."""


@dsl_user_op
def access_shared(address: Int32, instruction: str, width: int, *, loc=None, ip=None) -> Int32:
    """Issue one access and return a value that depends on what was loaded (the address itself for a store)."""
    registers = ["v0", "v1", "v2", "v3"]
    narrow = width == 2
    declare = ".reg .b16 v0; " if narrow else ".reg .b32 v0, v1, v2, v3; "
    body = instruction.format(address="$1", data="$1", **{name: name for name in registers})
    if instruction.startswith("st"):
        result = "mov.b32 $0, $1;"
    elif narrow:
        result = "cvt.u32.u16 $0, v0;"
    else:
        loaded = registers[: width // 4]
        result = "mov.b32 $0, v0; " + " ".join(f"xor.b32 $0, $0, {name};" for name in loaded[1:])
    asm = f"{{ {declare}{body} {result} }}"
    return Int32(
        llvm.inline_asm(
            Int32.mlir_type,
            [Int32(address).ir_value(loc=loc, ip=ip)],
            asm,
            "=&r,r,~{memory}",
            has_side_effects=True,
            loc=loc,
            ip=ip,
        )
    )


class Replay:
    """One compiled kernel per (kind, width): lane -> byte offset comes from global memory."""

    def __init__(self, kind: str, width: int):
        self.width = width
        self.instruction = INSTRUCTIONS[kind, width]

    @cute.jit
    def __call__(self, offsets: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(offsets, out).launch(grid=[1, 1, 1], block=[32, 1, 1], smem=SMEM_BYTES, stream=stream)

    @cute.kernel
    def kernel(self, offsets: cute.Tensor, out: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        address = Int32(base) + Int32(offsets[lane])  # pyright: ignore[reportArgumentType]
        # Zero at run time, unknown to the compiler: chains the accesses, so that equal ldmatrix are not merged.
        zero = Int32(out[lane])  # pyright: ignore[reportArgumentType]
        value = zero
        for _ in cutlass.range_constexpr(REPEATS):
            value = access_shared(address + (value & zero), self.instruction, self.width)
        out[lane] = value


def compile_replay(kind: str, width: int, options: str = "--enable-tvm-ffi --gpu-arch sm_90a"):
    """Compile the replay kernel of one kind and width; needs no GPU."""
    offsets = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (32,), assumed_align=16)
    out = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (32,), assumed_align=16)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Replay(kind, width), offsets, out, stream, options=options)


def replay(accesses: list[Access]) -> None:
    """Launch each access once, in order."""
    compiled = {key: compile_replay(*key) for key in sorted({(access.kind, access.width) for access in accesses})}
    offsets = [torch.tensor(access.addresses, dtype=torch.int32, device="cuda") for access in accesses]
    outs = torch.zeros(len(accesses), 32, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    for access, lanes, out in zip(accesses, offsets, outs, strict=True):
        compiled[access.kind, access.width](lanes, out)
    torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    replay(list(ACCESSES.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
