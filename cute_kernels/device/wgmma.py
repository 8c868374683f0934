"""Warpgroup MMA with the A operand in registers: D[64, N] += A[64, 16] B[N, 16]^T on four warps (sm_90a).

The instruction runs asynchronously. No other instruction may access its registers, A or accumulators, from `fence`
until a wait that covers its commit group. `fence` and the waits take registers and return them, so that the compiler
moves no access across them. Pass registers of A through `fence`, and use accumulators only as `wait_all` or `wait_for`
returns them. The PTX manual, "Asynchronous warpgroup level matrix instructions", has fragments and descriptors;
`layouts.fragments` proves the fragments.

Fragments of lane (g, t) = (lane / 4, lane % 4) of warp w: register 0 of A has row 16 w + g, columns 2t and 2t + 1.
Register 1 has row 16 w + g + 8, and registers 2 and 3 have the same two rows, eight columns on. Accumulator 4 j + i has
row 16 w + g + 8 (i / 2), column 8 j + 2 t + i % 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.device.instruction import Asm, effect, struct_of

ROW_BYTES = 128  # of a row of B in shared memory: 64 elements of 16 bits, what 128-byte swizzling permutes
ATOM_BYTES = 8 * ROW_BYTES  # rows among which pieces of 16 bytes are exchanged; B starts on a multiple of it
STEP_BYTES = 32  # of a row: the 16 elements of one instruction
_UNIT = 16  # bytes that descriptors count
# Upper word: stride of 8 rows, and the layout with 128-byte swizzling. Lower word: the address, and a stride of 1 that
# such a layout does not use.
DESCRIPTOR_HIGH = (ATOM_BYTES // _UNIT) | 1 << 30
DESCRIPTOR_LOW = 1 << 16


def descriptor(address) -> Uint32:
    """Returns the lower word of B's descriptor. B lies at a shared address, in rows of 128 bytes with the 128-byte
    swizzle.

    A row has 64 columns. Each 16 columns are ``STEP_BYTES`` further; see `advanced`.
    """
    return (Uint32(address) >> 4) | Uint32(DESCRIPTOR_LOW)


def advanced(low: Uint32, num_bytes: int) -> Uint32:
    """Returns the lower word of the descriptor for an address ``num_bytes`` higher."""
    return low + Uint32(num_bytes // _UNIT)


def _through(asm: str, values: Sequence, dtype, letter: str, *, loc=None, ip=None) -> list:
    """Emits ``asm`` with all ``values`` as operands, and returns them unchanged. So the compiler moves no access to the
    values across the instruction."""
    # A one-element struct is no struct to inline assembly, so nothing less than two registers is taken.
    assert len(values) > 1
    struct = llvm.inline_asm(
        struct_of(dtype.mlir_type, len(values)),
        [dtype(value).ir_value(loc=loc, ip=ip) for value in values],
        asm,
        ",".join([f"={letter}"] * len(values) + [str(i) for i in range(len(values))] + ["~{memory}"]),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [dtype(llvm.extractvalue(dtype.mlir_type, struct, [i], loc=loc, ip=ip)) for i in range(len(values))]


@dsl_user_op
def fence(registers: Sequence[Uint32], *, loc=None, ip=None) -> list[Uint32]:
    """Hands registers to the MMAs that follow: registers of A, and accumulators that other instructions have written.
    Returns the registers.
    """
    return _through("wgmma.fence.sync.aligned;", registers, Uint32, "r", loc=loc, ip=ip)


@effect
def commit() -> Asm[None]:
    """Commits the MMAs since the last commit as one commit group."""
    return Asm("wgmma.commit_group.sync.aligned;")


@effect
def wait(pending: int) -> Asm[None]:
    """Waits until at most the last ``pending`` commit groups are running."""
    return Asm(f"wgmma.wait_group.sync.aligned {pending};")


@dsl_user_op
def wait_all(sums: Sequence[Float32], *, loc=None, ip=None) -> list[Float32]:
    """Waits until no commit group is running. Returns the accumulators ``sums``."""
    return _through("wgmma.wait_group.sync.aligned 0;", sums, Float32, "f", loc=loc, ip=ip)


@dsl_user_op
def wait_for(sums: Sequence[Float32], pending: int, *, loc=None, ip=None) -> list[Float32]:
    """Waits until at most the last ``pending`` commit groups are running. Returns the accumulators ``sums``, which the
    commit groups that still run must not write.
    """
    return _through(f"wgmma.wait_group.sync.aligned {pending};", sums, Float32, "f", loc=loc, ip=ip)


@dsl_user_op
def mma(sums: Sequence[Float32], a: Sequence[Uint32], b_low: Uint32, *, dtype: str, loc=None, ip=None) -> list[Float32]:
    """Issues D += A B^T with N = 2 * len(sums) columns, 8 to 256. sums: a thread's accumulators. a: the thread's four
    registers of A.

    b_low: `descriptor` of B [N, 16], the same in all threads. dtype: "f16" or "bf16".
    """
    return _mma(sums, len(sums), a, b_low, dtype, loc=loc, ip=ip)


@dsl_user_op
def first_mma(num_sums: int, a: Sequence[Uint32], b_low: Uint32, *, dtype: str, loc=None, ip=None) -> list[Float32]:
    """Issues D = A B^T with ``num_sums`` accumulators, which need no initial values. The other arguments are those of
    `mma`.
    """
    return _mma([], num_sums, a, b_low, dtype, loc=loc, ip=ip)


@dsl_user_op
def wait_for_dots(dots: Sequence[Int32], pending: int, *, loc=None, ip=None) -> list[Int32]:
    """Waits as `wait_for` does, for the accumulators of `multiply_bytes`."""
    return _through(f"wgmma.wait_group.sync.aligned {pending};", dots, Int32, "r", loc=loc, ip=ip)


@dsl_user_op
def multiply_bytes(
    sums: Sequence[Int32], count: int, a: Sequence[Uint32], b_low: Uint32, *, loc=None, ip=None
) -> list[Int32]:
    """Issues D += A B^T of signed bytes, exact in int32: A [64, 32], B [2 * count, 32]. If ``sums`` is empty, D = A
    B^T.

    For lane (g, t) of warp w, register 0 of A has row 16 w + g, columns 4t to 4t + 3, low byte first. Register 1 has
    row 16 w + g + 8, and registers 2 and 3 have the same two rows, 16 columns further. Accumulators have the layout of
    `mma`. An instruction takes 32 of the 128 bytes of a row of B; the next 32 begin `STEP_BYTES` later.
    """
    return _issue(sums, count, a, b_low, "k32.s32.s8.s8", "", Int32, "r", loc=loc, ip=ip)


@dsl_user_op
def multiply_e4m3(
    sums: Sequence[Float32], count: int, a: Sequence[Uint32], b_low: Uint32, *, loc=None, ip=None
) -> list[Float32]:
    """Multiplies E4M3 numbers, with the operands of `multiply_bytes`. Accumulators are fp32, but the tensor cores add
    with only some 14 bits."""
    return _issue(sums, count, a, b_low, "k32.f32.e4m3.e4m3", ", 1, 1", Float32, "f", loc=loc, ip=ip)


def _mma(sums: Sequence[Float32], count: int, a: Sequence[Uint32], b_low: Uint32, dtype: str, *, loc, ip):
    """Issues one MMA of 16-bit floats. If ``sums`` is empty, the ``count`` results are the product alone."""
    return _issue(sums, count, a, b_low, f"k16.f32.{dtype}.{dtype}", ", 1, 1, 0", Float32, "f", loc=loc, ip=ip)


def _issue(sums, count: int, a, b_low, kind: str, scales: str, number, constraint: str, *, loc, ip) -> list:
    """Issues one MMA. If ``sums`` is empty, the ``count`` results are the product alone.

    Args:
        kind: the instruction's name after m64nN.
        scales: immediate operands after the predicate for accumulation.
        number: the accumulators' type.
        constraint: the letter of the accumulators' registers in inline assembly.
    """
    d = ", ".join(f"${i}" for i in range(count))
    a_registers = ", ".join(f"${count + i}" for i in range(4))
    asm = (
        f"{{ .reg .b64 b; .reg .pred p; setp.{'eq' if sums else 'ne'}.u32 p, 0, 0; "
        f"mov.b64 b, {{${count + 4}, {DESCRIPTOR_HIGH:#x}}}; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}{kind} {{{d}}}, {{{a_registers}}}, b, p{scales}; }}"
    )
    kind_of_sums = number.mlir_type
    operands = [Uint32(x).ir_value(loc=loc, ip=ip) for x in (*a, b_low)]
    operands += [number(x).ir_value(loc=loc, ip=ip) for x in sums]
    struct = llvm.inline_asm(
        struct_of(kind_of_sums, count),
        operands,
        asm,
        ",".join([f"={constraint}"] * count + ["r"] * 5 + [str(i) for i in range(len(sums))] + ["~{memory}"]),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [number(llvm.extractvalue(kind_of_sums, struct, [i], loc=loc, ip=ip)) for i in range(count)]
