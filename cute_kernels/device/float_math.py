"""`FloatMath`, the fp32 functions that activations use besides Python's operators."""

from __future__ import annotations

from cutlass import Float32, Numeric

from cute_kernels.device import numbers, ptx

Number = Numeric | float


class FloatMath:
    """The fp32 functions of activations, on sm_90 and later. An activation receives this object as an argument, so that
    the activation's file can be imported without the compiler."""

    def number(self, value: Number) -> Float32:
        return Float32(value)

    def exp2(self, x: Float32) -> Float32:
        return ptx.exp2(x)

    def sigmoid(self, x: Float32, factor: float = 1.0) -> Float32:
        """Returns 1 / (1 + exp(-factor * x))."""
        return ptx.reciprocal(Float32(1.0) + ptx.exp2(x * (-ptx.LOG2_E * factor)))

    def absolute(self, x: Float32) -> Float32:
        return ptx.absolute(x)

    def fma(self, a: Number, b: Float32, c: Number) -> Float32:
        """Returns a * b + c, rounded once."""
        return ptx.fma(Float32(a), b, Float32(c))

    def max(self, a: Float32, b: Number) -> Float32:
        """Returns the larger number; if one is NaN, the other."""
        return ptx.fmax(a, Float32(b))

    def max_or_nan(self, a: Float32, b: Number) -> Float32:
        return numbers.max_or_nan(a, Float32(b))

    def min_or_nan(self, a: Float32, b: Number) -> Float32:
        return numbers.min_or_nan(a, Float32(b))
