"""Stores results of products from fp32 sums, four neighbouring output features of a token at a time, with bias,
activation and residual.

Every kernel's epilogue uses `Results` for outputs that the kernel's own fast code does not support.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.gemm.activate import Activate
from cute_kernels.gemm.activations.base import ActivationFunction
from cute_kernels.gemm.out_kinds import BF16, FP32

VECTOR = 4  # neighbouring output features of a token that a thread takes


@dataclass(frozen=True)
class Target:
    """The position of neighbouring results in the weight, the output and the biases; run-time integers."""

    row: Int32  # of W
    place: Int64  # of the first in the output, elements
    count: Int32  # outputs, 0 or less after the last row
    bias: Int32  # of the first among the biases, elements


class Results:
    """The loads and stores of four neighbouring results of a token, of any output dtype and alignment.

    Args:
        dtype: of biases, "bf16" or "fp16".
        activation: a configuration's own activation. None: the launch selects a standard one, or none.
    """

    def __init__(self, dtype: str, activation: ActivationFunction | None):
        self.dtype, self.activate = dtype, Activate(activation)

    def target(self, shape, token, row, bias):
        """Returns the `Target` of a token's results for the output features of four rows of the weight, from ``row``
        on. bias: the index of the first row's bias."""
        halves = cutlass.select_(self.activate.is_gated(shape), Int32(1), Int32(0))
        place = Int64(token) * (shape.n >> halves) + (row >> halves)
        return Target(row, place, cutlass.min(shape.n - row, VECTOR) >> halves, bias)

    @cute.jit
    def load_extras(self, operands, shape, target, extras):
        """Loads what is added to four neighbouring results: biases into extras[:4], residuals into extras[4:]. Loads
        zeros if there is no bias or residual.
        """
        extras.fill(0.0)
        if operands.bias != 0:
            for i in cutlass.range_constexpr(VECTOR):
                if target.row + i < shape.n:
                    extras[i] = self.load_bias(operands.bias + Int64(target.bias + i) * 2)
        if operands.residual != 0:
            for i in cutlass.range_constexpr(VECTOR):
                if i < target.count:
                    extras[VECTOR + i] = self.load_element(operands.residual, target.place + i, shape.out_kind)

    @cute.jit
    def store(self, operands, shape, target, results, extras):
        """Applies activation and residual to four neighbouring results of a token, and stores them."""
        for i in cutlass.range_constexpr(VECTOR):
            results[i] = results[i] + extras[i]
        self.activate.neighbours(shape, results, VECTOR)
        for i in cutlass.range_constexpr(VECTOR):
            results[i] = results[i] + extras[VECTOR + i]
        self.store_elements(operands.out, target.place, results, target.count, shape.out_kind)

    def load_bias(self, address):
        word = numbers.load_global_part(address, 0, 2)
        return ptx.bf16x2_low_to_float(word) if self.dtype == "bf16" else ptx.half2_low_to_float(word)

    @cute.jit
    def load_element(self, base, index, kind):
        """Loads an element and returns it as fp32. An earlier kernel or this thread may have written the element. kind:
        its dtype, an integer of `.out_kinds`."""
        result = Float32(0.0)
        if kind == FP32:
            result = ptx.load_relaxed_part(base + index * 4, 4).bitcast(Float32)
        else:
            word = ptx.load_relaxed_part(base + index * 2, 2)
            result = ptx.half2_low_to_float(word)
            if kind == BF16:
                result = ptx.bf16x2_low_to_float(word)
        return result

    @cute.jit
    def store_elements(self, base, index, results, count, kind):
        """Stores the first ``count`` of four results. Two or four results are stored in one access if their address is
        aligned to its width."""
        if kind == FP32:
            address = base + index * 4
            if (count == VECTOR) & (address % 16 == 0):
                ptx.store_global(address, [results[i] for i in range(VECTOR)])
            else:
                for i in cutlass.range_constexpr(VECTOR):
                    if i < count:
                        ptx.store_global(address + 4 * i, [results[i]])
        else:
            pairs = [[results[0], results[1]], [results[2], results[3]]]
            words = cute.make_rmem_tensor(2, Uint32)
            for i in cutlass.range_constexpr(2):
                words[i] = ptx.pack_f16x2(*pairs[i])
                if kind == BF16:
                    words[i] = ptx.pack_bf16x2(*pairs[i])
            address = base + index * 2
            if (count == VECTOR) & (address % 8 == 0):
                ptx.store_global(address, [words[0], words[1]])
            elif (count == 2) & (address % 4 == 0):
                ptx.store_global(address, [words[0]])
            else:
                for i in cutlass.range_constexpr(VECTOR):
                    if i < count:
                        half = words[i // 2] >> (16 * (i % 2))
                        numbers.store_global_part(address + 2 * i, 0, half, 2)
