"""`Activate`, the device code by which every kernel applies a product's activation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

from cute_kernels.device.float_math import FloatMath
from cute_kernels.gemm.activations.base import ActivationFunction
from cute_kernels.gemm.activations.standard import STANDARD

if TYPE_CHECKING:
    from cute_kernels.device.types import RegisterTensor

MATH = FloatMath()


class Activate:
    """Applies a product's activation: the configuration's own activation or, if there is none, the standard one that an
    argument of the launch selects.

    ``shape.activation`` is the number of a standard activation, or 0 for none.

    Args:
        own: the configuration's own activation; None if the launch selects a standard one, or none.
    """

    def __init__(self, own: ActivationFunction | None):
        self.own = own
        options = STANDARD if own is None else (own,)
        self.gated = tuple(each for each in options if each.gated)
        self.by_feature = tuple(each for each in options if not each.gated)

    def is_none(self, shape) -> Boolean:
        """Whether results have no activation."""
        return shape.activation == 0 if self.own is None else Boolean(False)

    def is_gated(self, shape) -> Boolean:
        """Whether each result is computed from two rows of the weight, gate and up."""
        if self.own is None:
            (gated,) = self.gated
            return shape.activation == gated.number
        return Boolean(self.own.gated)

    def leaves_features(self, shape) -> Boolean:
        """Whether each result is computed from one row of the weight: there is no activation, or none with a gate."""
        if self.own is None:
            (gated,) = self.gated
            return shape.activation != gated.number
        return Boolean(not self.own.gated)

    def of_pair(self, gate: Float32, up: Float32) -> Float32:
        """Computes a gated activation's result from one gate value and one up value."""
        (gated,) = self.gated
        return gated.device(MATH, gate, up)

    def _is(self, shape, one: ActivationFunction) -> Boolean:
        return shape.activation == one.number if self.own is None else Boolean(True)

    @cute.jit
    def features(self, shape, acc: RegisterTensor, first: int, count: int, option: int = 0):
        """Applies an activation without gate, in place, to acc[first : first + count]. option: for recursion."""
        if const_expr(option < len(self.by_feature)):
            if self._is(shape, self.by_feature[option]):
                for i in cutlass.range_constexpr(first, first + count):
                    acc[i] = self.by_feature[option].device(MATH, acc[i])
            else:
                self.features(shape, acc, first, count, option + 1)

    @cute.jit
    def neighbours(self, shape, results: RegisterTensor, count: int):
        """Applies the activation, in place, to ``count`` results of neighbouring rows of the weight. A gated activation
        leaves its results in the first half of ``results``.
        """
        if const_expr(len(self.gated) > 0):
            if self.is_gated(shape):
                for i in cutlass.range_constexpr(count // 2):
                    results[i] = self.of_pair(results[2 * i], results[2 * i + 1])
            else:
                self.features(shape, results, 0, count)
        else:
            self.features(shape, results, 0, count)
