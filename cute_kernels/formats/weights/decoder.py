"""`CodeDecoder`, by which a consumer warp makes its A operand of codes, and numbers of stored scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from cute_kernels.formats.weights.base import CODE_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cutlass import Float32, Uint32


class PackedMath(Protocol):
    """The arithmetic of decoders for one dtype: see `cute_kernels.device.packed_math`, which has two."""

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
    """Decodes 4-bit codes of one format to signed bytes: 16 times the weight without its scale.

    Of formats with zero points it is the code less 8, instead of less its zero point.
    """

    def masks(self, nothing: Uint32) -> Any:
        """Returns constants for `fragment`, to be made before a loop; nothing: a run-time word that is 0."""
        return None

    @abstractmethod
    def fragment(self, word: Uint32, masks: Any) -> list[Uint32]:
        """Returns two registers of the A operand: bytes of a k16 step of the thread's rows g and g + 8; word: its
        codes."""


class E4m3Decoder(ABC):
    """Decodes codes of one format to E4M3, exactly: the A operand of FP8 products.

    A thread's codes of a k16 step, in the blob of `layouts.weights.hopper`, are those of its rows g and g + 8 for
    inputs 2t, 2t + 8, 2t + 1 and 2t + 9, which is the order in which x lies for these products.

    Attributes:
        slots: issue slots of a warp that decoding 64 codes a thread takes.
        unit: the value of a decoded 1.
        folds: whether `fold` multiplies scales of a k block's groups into the numbers.
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
        """Returns, for each group of a k block, what `fragment` takes besides ``words``; and the scales that two rows
        are left with. scales: stored ones, of each group's rows g and g + 8."""
        raise NotImplementedError

    def permuted(self, a: Uint32, b: Uint32, selector: int) -> Uint32:
        return self.math.prmt(a, b, self.math.word(selector))


class CodeDecoder(ABC):
    """Decodes codes of one format to one 16-bit float.

    A thread's 16 bytes of a tile are its A fragments of ``steps`` consecutive k16 steps, ``words_per_step`` registers
    each. Of 4-bit codes a register's fields, lowest first, are columns 0 and 1 of fragment registers in this order:
    column 0 of registers 0 to 3, then column 1. Of 8-bit codes a word has registers 0 and 1, the next one 2 and 3:
    column 0 of both, then column 1. Fragment registers 0 and 2 are of row g, 1 and 3 of row g + 8.

    Attributes:
        words_per_step: 32-bit registers that hold a thread's codes of a k16 step.
        steps: k16 steps of 16 bytes.
        scales_weights: whether `fragment` scales what it decodes.
        unit: the value of a decoded 1.
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
        """Returns a word whose low 16 bits are a scale in the activations' dtype; word: a stored scale,
        zero-extended."""
        return word

    def masks(self, nothing: Uint32) -> tuple[Uint32, ...]:
        """Returns constants for `fragment`, to be made before a loop; nothing: a run-time word that is 0."""
        return ()

    def row_numbers(self, scales: Sequence[Uint32] | None, points: Sequence[Uint32 | int]) -> Any:
        """Returns the numbers of the thread's two rows that `fragment` needs.

        scales: of the rows, packed pairs of the dtype (fp32 where stored ones are), or None for those that meet the
            accumulators; points: their zero points, `symmetric_zero` where none are stored.
        """
        return None

    @abstractmethod
    def fragment(
        self, words: Sequence[Uint32], step: int, rows: Any, masks: Sequence[Uint32] | None = None
    ) -> list[Uint32]:
        """Returns the four registers of the A operand of a k16 step.

        words: the thread's 16 bytes, four registers. rows: as `row_numbers` returns them. masks: as
        `masks` returns them, or None.
        """
