"""PTX as Python functions: a function's annotations describe its inline assembly.

A function decorated with :func:`pure` or :func:`effect` returns the text of instructions. In the text, $0, $1 and so on
stand for the results, then for the parameters that are DSL scalars or sequences of DSL scalars, in order. All other
parameters are compile-time constants of the text. Arithmetic is `pure`, so that the compiler may move, merge and drop
it. The DSL's own ``inline_ptx`` marks every instruction volatile, which fixes the traced order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

ResultT = TypeVar("ResultT")

REGISTERS = {Float32: "f", Int32: "r", Uint32: "r", Int64: "l", Uint64: "l"}


class Asm(str, Generic[ResultT]):
    """The text of instructions whose result is a DSL scalar, a list of scalars, or None.

    Attributes:
        count: number of results of the instruction.
        early: whether results may be written before all operands are read (early clobber).
        memory: for an `effect`, whether other accesses to memory must not be moved across it.
    """

    count: int
    early: bool
    memory: bool

    def __new__(cls, text: str, *, count: int = 1, early: bool = False, memory: bool = True) -> Asm[ResultT]:
        self = super().__new__(cls, text)
        self.count, self.early, self.memory = count, early, memory
        return self


def pure(function: Callable[..., Asm]) -> Callable[..., Any]:
    """Decorates a function that describes an instruction whose results depend on its operands alone."""
    return _instruction(function, False)


def effect(function: Callable[..., Asm]) -> Callable[..., Any]:
    """Decorates a function that describes an instruction with side effects. The compiler neither drops such
    instructions nor changes their order."""
    return _instruction(function, True)


def struct_of(element, count: int):
    """Returns the MLIR type that an instruction with several results returns."""
    return llvm.StructType.get_literal([element] * count)  # pyright: ignore[reportAttributeAccessIssue]


def loaded(num_words: int) -> str:
    """Returns the text of a load after its opcode: the type suffix and the result registers."""
    results = ", ".join(f"${i}" for i in range(num_words))
    return f".v{num_words}.u32 {{{results}}}" if num_words > 1 else ".u32 $0"


def stored(values: Sequence[Any], first: int) -> tuple[str, str]:
    """Returns (type suffix, operands) of a store's text, for values of 32 bits. first: index of the first value among
    the operands.
    """
    kind = "f32" if isinstance(values[0], Float32) else "u32"
    inputs = ", ".join(f"${first + i}" for i in range(len(values)))
    return (f".v{len(values)}.{kind}", f"{{{inputs}}}") if len(values) > 1 else (f".{kind}", inputs)


def zero_extended(load: str, num_bytes: int, source: str) -> str:
    """Returns the text of a load of 1, 2 or 4 bytes, zero-extended to a word."""
    if num_bytes == 4:
        return f"{load}.u32 $0, {source};"
    return f"{{ .reg .b16 t; {load}.u{8 * num_bytes} t, {source}; cvt.u32.u16 $0, t; }}"


def _instruction(function: Callable[..., Asm], has_effect: bool) -> Callable[..., Any]:
    hints = get_type_hints(function)
    (result,) = get_args(hints.pop("return"))
    parameters = inspect.signature(function).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
    scalars = {name: (_scalar(hints[name]), _is_sequence(hints[name])) for name in parameters}
    operand_names = [name for name, (scalar, many) in scalars.items() if scalar or many]

    @dsl_user_op
    @functools.wraps(function)
    def emit(*args, loc=None, ip=None, **kwargs):
        asm = function(*args, **kwargs)
        given = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        operands: list[Any] = []
        for name in operand_names:
            scalar, many = scalars[name]
            for value in given[name] if many else (given[name],):
                operands.append(value if scalar is None else scalar(value))
        return _emitted(asm, result, operands, has_effect, loc, ip)

    return emit


def _scalar(hint: object) -> Any:
    """Returns the DSL scalar type that an annotation has, directly or in a union or a sequence; None if there is
    none.
    """
    return next((kind for kind in (hint, *get_args(hint)) if kind in REGISTERS), None)


def _is_sequence(hint: object) -> bool:
    return hint is Sequence or getattr(hint, "__origin__", None) is Sequence


def _emitted(asm: Asm, result: object, operands: Sequence[Any], has_effect: bool, loc, ip):
    """Emits the text ``asm`` as inline assembly. Returns its results in the type ``result``."""
    kind = _scalar(result)
    registers = [] if kind is None else [("=&" if asm.early else "=") + REGISTERS[kind]] * asm.count
    registers += [REGISTERS.get(type(operand), "r") for operand in operands]  # others are words as the DSL adds them up
    registers += ["~{memory}"] if has_effect and asm.memory else []
    found = None if kind is None else kind.mlir_type if asm.count == 1 else struct_of(kind.mlir_type, asm.count)
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    made = llvm.inline_asm(found, values, str(asm), ",".join(registers), has_side_effects=has_effect, loc=loc, ip=ip)
    if kind is None:
        return None
    several = (
        [made]
        if asm.count == 1
        else [llvm.extractvalue(kind.mlir_type, made, [i], loc=loc, ip=ip) for i in range(asm.count)]
    )
    return kind(made) if result is kind else [kind(one) for one in several]
