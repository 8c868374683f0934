"""`CodeDecoder`, with which a consumer warp decodes codes to its A operand and converts stored scales to numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from layouts.weights.hopper import CODE_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cutlass import Float32, Uint32


class PackedMath(Protocol):
    """The interface of decoders' arithmetic for one dtype; `cute_kernels.device.packed_math` implements it."""

    def word(self, value: int | Uint32) -> Uint32: ...

    def bits(self, number: Float32) -> Uint32: ...

    def number(self, bits: Uint32) -> Float32: ...

    def most(self, a: Uint32, b: Uint32) -> Uint32: ...

    def prmt(self, a: Uint32, b: Uint32, selector: Uint32) -> Uint32: ...

    def add(self, a: Uint32, b: Uint32) -> Uint32: ...

    def multiply(self, a: Uint32, b: Uint32) -> Uint32: ...

    def fma(self, a: Uint32, b: Uint32, c: Uint32) -> Uint32: ...

    def scaled(self, number: Float32, factor: float) -> Float32: ...

    def scaled_pair(self, pair: Uint32, factor: Float32) -> Uint32: ...


class ByteDecoder(ABC):
    """Decodes codes of one format to bytes. A byte is a signed integer, 16 times the weight without its scale. In
    formats with `bytes_in_e4m3`, it is an E4M3 number, 2 ** `byte_exponent` times the weight without its scale.

    In formats with zero points, "weight" means here the code minus 8, not the code minus its zero point.
    """

    def masks(self, nothing: Uint32) -> Any:
        """Returns constants for `fragment`, to be made before a loop; nothing: a run-time word that is 0."""
        return None

    @abstractmethod
    def fragment(self, words: Sequence[Uint32], masks: Any) -> list[Uint32]:
        """Returns two registers of the A operand: the bytes of a k16 step for the thread's rows g and g + 8. words: the
        step's codes, one word for 4-bit codes or two words for 8-bit codes.
        """


class E4m3Decoder(ABC):
    """Decodes codes of one format to E4M3, exactly: the A operand of FP8 products.

    With g = lane // 4 and t = lane % 4, a thread has codes of rows g and g + 8 in each k16 step. In each row it has the
    inputs 2t, 2t + 8, 2t + 1 and 2t + 9, in this order of `layouts.weights.hopper`. The activations have the same
    order.

    Attributes:
        slots: issue slots of a warp for decoding 64 codes per thread.
        unit: the value to which 1 is decoded.
        folds: whether `fold` makes `fragment` multiply numbers by the scales of a k block's groups.
    """

    slots: ClassVar[int]
    unit: ClassVar[float] = 1.0
    folds: ClassVar[bool] = False

    def __init__(self, math: PackedMath) -> None:
        self.math = math

    @abstractmethod
    def fragment(self, words: Sequence[Uint32]) -> list[Uint32]:
        """Returns two registers of the A operand, of rows g and g + 8 of a k16 step, from a thread's codes in
        ``words``."""

    def fold(self, scales: Sequence[Uint32]) -> tuple[list[Any], list[Float32]]:
        """Prepares `fragment` to multiply decoded numbers by the scales of a k block's groups.

        scales: for each group, the stored scales of rows g and g + 8.

        Returns (arguments, scales). For each group, ``arguments`` has an argument to pass to `fragment` after
        ``words``. ``scales`` has two scales, for row g and for row g + 8, by which the caller has to multiply the sums.
        """
        raise NotImplementedError

    def permuted(self, a: Uint32, b: Uint32, selector: int) -> Uint32:
        return self.math.prmt(a, b, self.math.word(selector))


class CodeDecoder(ABC):
    """Decodes codes of one format to bf16 or to fp16.

    A thread's 16 bytes of a tile hold the codes of its A fragments for ``steps`` consecutive k16 steps,
    ``words_per_step`` words for each step. A fragment has four registers with two columns each. Registers 0 and 2
    belong to row g, registers 1 and 3 to row g + 8. A word of 4-bit codes has, from the lowest bits on, column 0 of
    registers 0 to 3, then column 1 of registers 0 to 3. A word of 8-bit codes has column 0 of registers 0 and 1, then
    column 1 of these registers. The next word has registers 2 and 3.

    Attributes:
        words_per_step: number of 32-bit registers that hold a thread's codes of a k16 step.
        steps: number of k16 steps whose codes 16 bytes hold.
        scales_weights: whether `fragment` multiplies decoded numbers by scales.
        unit: the value to which 1 is decoded.
        symmetric_zero: the zero point of formats that store none.
    """

    scales_weights = False
    unit = 1.0
    symmetric_zero = 0

    def __init__(self, bits: int) -> None:
        assert bits in CODE_BITS, bits
        self.bits = bits
        self.words_per_step = bits // 4
        self.steps = 4 // self.words_per_step

    def scale_word(self, word: Uint32) -> Uint32:
        """Converts a stored scale. Returns a word whose low 16 bits are the scale in the activations' dtype. word: the
        stored scale, zero-extended."""
        return word

    def masks(self, nothing: Uint32) -> tuple[Uint32, ...]:
        """Returns constants for `fragment`, to be made before a loop; nothing: a run-time word that is 0."""
        return ()

    def row_numbers(self, scales: Sequence[Uint32] | None, points: Sequence[Uint32 | int]) -> Any:
        """Converts the scales and zero points of the thread's two rows to the form that `fragment` takes as ``rows``.

        scales: the rows' scales, as packed pairs of the dtype, or as fp32 if stored scales are fp32; None if scales
            multiply the accumulators instead. points: the rows' zero points, `symmetric_zero` if none are stored.
        """
        return None

    @abstractmethod
    def fragment(
        self, words: Sequence[Uint32], step: int, rows: Any, masks: Sequence[Uint32] | None = None
    ) -> list[Uint32]:
        """Returns the four registers of the A operand of a k16 step.

        Args:
            words: the thread's 16 bytes, four registers.
            rows: as `row_numbers` returns them.
            masks: the result of the method `masks`, or None.
        """
