"""Rows of a KV cache in registers. Several lanes convert a row of numbers to a format's bytes, and back.

``lanes`` lanes of a warp (a power of two) share a row; each has ``head_dim / lanes`` neighbouring columns. So a group,
the columns that share a scale, belongs to a whole number of lanes, and xor shuffles leave the group's extremes in every
lane. (FBGEMM's quantiser shuffles down instead, which leaves the extremes in the first lane only.) Every division is
rounded as IEEE 754 says: for equal fp32 numbers, codes equal those of :mod:`layouts.kv` bit for bit.

A format names the class of its rows (`cute_kernels.formats.kv.KvFormat.writer`): `DenseRow` for plain elements, a
subclass of `ScaledRow` for codes with an fp32 scale, or any other class.

Everything here is straight-line code over DSL scalars; only kernels branch.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.device.lanes import in_pairs, neighbours, over_lanes
from cute_kernels.device.quotients import LARGE, SMALL, Divisor, over_constant, quotient_of, reciprocal_of
from cute_kernels.device.rows import Elements, Piece
from cute_kernels.formats.kv import KvFormat, format_of, load_code
from layouts.kv.channel_blocks import LIMIT
from layouts.kv.e5m2 import E5M2_MAX
from layouts.kv.int4 import FP16_MAX, MAX_CODE
from layouts.kv.scaled import FP32_MAX

MAGIC = 0x4B000000  # fp32 2**23: a small integer in its low bits is added to it
MAGIC_VALUE = 8388608.0


@dataclass(frozen=True)
class DenseRow:
    """A row of bf16 or fp16 cache elements. Its arguments are those of `CodedRow`."""

    kv_format: str
    head_dim: int
    lanes: int
    runs: int = 1

    by_token: ClassVar[bool] = False
    num_statistics: ClassVar[int] = 0
    num_steps: ClassVar[int] = 0
    has_header: ClassVar[bool] = False
    given_scale: ClassVar[None] = None

    @property
    def elements(self) -> Elements:
        return Elements(self.kv_format, self.head_dim, self.lanes, self.runs)

    @property
    def count(self) -> int:
        return self.elements.count

    @property
    def codes(self) -> Piece:
        return self.elements.piece

    def encode(self, values, statistics, steps, scale) -> tuple[list[Uint32], None]:
        return self.elements.pack(values), None

    def decode(self, words, header, scale) -> list[Float32]:
        return self.elements.unpack(words)


@dataclass(frozen=True)
class WaitingRow(DenseRow):
    """A row of keys in fp16, which waits until its block is full (`layouts.kv.channel_blocks`). Numbers saturate, and
    NaN becomes 0."""

    by_token: ClassVar[bool] = True

    @property
    def elements(self) -> Elements:
        return Elements("fp16", self.head_dim, self.lanes, self.runs)

    def encode(self, values, statistics, steps, scale) -> tuple[list[Uint32], None]:
        within = []
        for i in range(self.count):
            number = cutlass.select_(values[i] == values[i], values[i], Float32(0.0))
            within.append(ptx.fmax(numbers.fmin(number, Float32(LIMIT)), Float32(-LIMIT)))
        return self.elements.pack(within), None


@dataclass(frozen=True)
class CodedRow:
    """The base of rows of codes. A row may have a header: a word for each group of columns, with the group's scale.

    A kernel quantises in steps, between which it may branch. It calls `measure` for a lane's values, `repair` if the
    result is `unusual`, `reduce` over the group, then `encode`. Rows of bytes whose values share divisors have two more
    steps: `find_steps`, and `tame` if a divisor or value is `awkward`.

    Args:
        kv_format: name of the format.
        head_dim: number of columns of a row.
        lanes: number of lanes that share a row.
        runs: number of runs of neighbouring columns that a lane has, one in each of ``runs`` equal parts of the row.
    """

    kv_format: str
    head_dim: int
    lanes: int
    runs: int = 1

    by_token: ClassVar[bool] = False
    set_statistics: ClassVar[int]
    """The number of statistics that `measure` returns for one set of a lane's values."""

    @property
    def form(self) -> KvFormat:
        return format_of(self.kv_format)

    @property
    def limit(self) -> float:
        """The largest magnitude that can be encoded. Before all other steps, larger numbers saturate, and NaN becomes
        0."""
        raise NotImplementedError

    @property
    def num_steps(self) -> int:
        """Number of divisors that `find_steps` returns; 0 if `encode` computes divisors itself."""
        return 0

    @property
    def num_headers(self) -> int:
        """Number of header words in front of the codes: one for each group of columns."""
        return self.form.header_bytes // 4

    @property
    def count(self) -> int:
        """Number of columns of a row that a lane has."""
        return self.head_dim // self.lanes

    @property
    def sets(self) -> int:
        """Number of sets of a lane's columns. A *set* consists of the lane's columns in one group."""
        return self.runs if self.num_headers >= self.runs else 1

    @property
    def num_statistics(self) -> int:
        """Number of statistics that `measure` returns for all of a lane's values."""
        return self.sets * self.set_statistics

    def of_set(self, values, s: int) -> list:
        """Returns the values of set ``s``."""
        size = self.count // self.sets
        return [values[i] for i in range(s * size, (s + 1) * size)]

    @property
    def given_scale(self) -> str | None:
        return self.form.given_scale

    @property
    def has_header(self) -> bool:
        return self.num_headers > 0

    @property
    def group_lanes(self) -> int:
        """Number of lanes that share a group of columns."""
        return self.lanes * self.sets // max(self.num_headers, 1)

    @property
    def codes(self) -> Piece:
        """The bytes of a row that hold a lane's codes."""
        row_bytes = self.form.row_bytes(self.head_dim)
        run_bytes = self.head_dim * self.form.code_bits // 8 // self.runs
        return Piece(run_bytes // self.lanes, 4 * self.num_headers, row_bytes, self.runs, run_bytes)

    def repair(self, value: Float32) -> Float32:
        """Replaces NaN by 0, and clamps all other values to ``limit``."""
        number = cutlass.select_(value == value, value, Float32(0.0))
        return ptx.fmax(numbers.fmin(number, Float32(self.limit)), Float32(-self.limit))

    def store_header(self, row: Int64, lane: Int32, header: list[Uint32]) -> None:
        """Writes the header words of the lane's groups. All lanes of a group write the group's word, in one access."""
        for s, word in enumerate(header):
            offset = 4 * (self.num_headers // self.sets) * s
            numbers.store_global_words(row + Int64(lane // self.group_lanes * 4), offset, [word])

    def load_header(self, row: Int64, lane: Int32) -> Uint32:
        """Loads the header word of the lane's group. Lanes must have one run of columns, as for `decode`."""
        return ptx.load_global_words(row + Int64(lane // self.group_lanes * 4), 0, 1)[0]

    def _over_group(self, combine, value: Float32) -> Float32:
        return over_lanes(combine, value, neighbours(self.group_lanes))


@dataclass(frozen=True)
class NibbleRow(CodedRow):
    """Rows of :class:`layouts.kv.int4.Int4Row`; the header word of a group is (fp16 scale, fp16 shift)."""

    set_statistics: ClassVar[int] = 2

    @property
    def limit(self) -> float:
        return FP16_MAX

    def measure(self, values) -> list[Float32]:
        """Returns the smallest and the largest value of each of the lane's sets. Both are NaN if the set has a NaN."""
        found = []
        for own in (self.of_set(values, s) for s in range(self.sets)):
            found += [in_pairs(numbers.min_or_nan, own), in_pairs(numbers.max_or_nan, own)]
        return found

    def unusual(self, statistics):
        # Each comparison is false for NaN.
        usual = [(statistics[2 * s] >= -self.limit) & (statistics[2 * s + 1] <= self.limit) for s in range(self.sets)]
        return ~functools.reduce(operator.and_, usual)

    def reduce(self, statistics) -> list[Float32]:
        combine = (numbers.fmin, ptx.fmax)
        return [self._over_group(combine[i % 2], statistics[i]) for i in range(self.num_statistics)]

    def encode(self, values, statistics, steps, scale) -> tuple[list[Uint32], list[Uint32]]:
        """Returns (the lane's codes packed into words, header words of the lane's groups)."""
        rounded, header = [], []
        for s in range(self.sets):
            codes, word = encode_nibbles(self.of_set(values, s), statistics[2 * s], statistics[2 * s + 1])
            rounded += codes
            header.append(word)
        size = self.count // self.runs
        runs = [rounded[first : first + size] for first in range(0, self.count, size)]
        return [pack_nibbles(run[first : first + 8]) for run in runs for first in range(0, size, 8)], header

    def decode(self, words, header, scale) -> list[Float32]:
        step, shift = ptx.half2_low_to_float(header), ptx.half2_high_to_float(header)
        values = []
        for i in range(self.count):
            nibble = (words[i // 8] >> (4 * (i % 8))) & 0xF
            code = numbers.add(numbers.from_bits(nibble | MAGIC), Float32(-MAGIC_VALUE))
            values.append(ptx.fma(code, step, shift))
        return values


@dataclass(frozen=True)
class ScaledRow(CodedRow):
    """Rows of codes times an fp32 scale. The scales are header words, one for each group, or are passed to the kernel
    as an argument.

    Subclasses say how codes are packed into words and unpacked.
    """

    set_statistics: ClassVar[int] = 1

    @property
    def limit(self) -> float:
        return FP32_MAX

    @property
    def code_max(self) -> float:
        """The largest code."""
        assert self.form.code_max is not None, f"{self.kv_format} says no code_max"
        return self.form.code_max

    @property
    def num_steps(self) -> int:
        """Number of divisors of a lane's values, one for each of its `sets`. It is 0 without a scale, or if every
        column has its own scale.
        """
        return self.sets if self.has_header or self.given_scale in ("tensor", "head") else 0

    def pack(self, ratios: list[Float32]) -> list[Uint32]:
        """Rounds ratios, whose magnitudes are at most `code_max`, to codes (ties to even). Packs the codes in the row's
        order, from bit 0 on. Returns the words of one run; the last word may be partly filled."""
        raise NotImplementedError

    def unpack(self, words, count: int) -> list[Float32]:
        """Returns the first ``count`` codes in a run's words as fp32 numbers, exactly."""
        raise NotImplementedError

    def measure(self, values) -> list[Float32]:
        """Returns the largest magnitude of each of the lane's sets. It is NaN if the set has a NaN."""
        sets = [[ptx.absolute(value) for value in self.of_set(values, s)] for s in range(self.sets)]
        return [in_pairs(numbers.max_or_nan, sizes) for sizes in sets]

    def unusual(self, statistics):
        return ~functools.reduce(operator.and_, [statistics[s] <= self.limit for s in range(self.sets)])

    def reduce(self, statistics) -> list[Float32]:
        """If rows have header words, reduces statistics over the lanes of each group; otherwise returns them
        unchanged."""
        sizes = [statistics[s] for s in range(self.sets)]
        return [self._over_group(ptx.fmax, size) for size in sizes] if self.has_header else sizes

    def load_scale(self, scale: Int64, head: Int32, lane: Int32):
        """Loads the scale of a head, for formats whose scales are not in the rows: one scale, or one for each column of
        the lane.
        """
        if self.given_scale == "channel":
            return Elements("fp32", self.head_dim, self.lanes, self.runs).load(
                scale + Int64(head) * (4 * self.head_dim), lane
            )
        offset = Int64(head) * 4 if self.given_scale == "head" else Int64(0)
        return [numbers.from_bits(ptx.load_global_words(scale + offset, 0, 1)[0])]

    def find_steps(self, statistics, scale) -> list[Float32]:
        """Returns the divisors of the lane's sets. Headers store these divisors, even where `tame` replaces one for the
        division.
        """
        if self.has_header:
            return [over_constant(statistics[s], self.code_max) for s in range(self.sets)]
        return list(scale)

    def awkward(self, statistics, steps):
        """Returns whether a value is NaN, or `quotient_of` could make a quotient that is inexact or saturates. This is
        rare.
        """
        plain = [(steps[s] >= SMALL) & (steps[s] <= LARGE) for s in range(self.num_steps)]
        if not self.has_header:
            plain.append(statistics[0] <= numbers.multiply(steps[0], Float32(self.code_max)))
        return ~functools.reduce(operator.and_, plain)

    def tame(self, value: Float32, step: Float32) -> tuple[Float32, Float32]:
        """Replaces a value and a divisor by a pair that is not `awkward` and that has the same code."""
        divisor = Divisor(step, None if self.has_header else self.code_max)
        return divisor.tame(self.repair(value)), divisor.tame_step

    def encode(self, values, statistics, steps, scale) -> tuple[list[Uint32], list[Uint32] | None]:
        """Returns (the lane's codes packed into words, header words of the lane's groups or None).

        values, steps: the values and the result of `find_steps`. If they were `awkward`, both have gone through `tame`.
        """
        if not self.has_header and self.given_scale is None:
            return self._pack([values[i] for i in range(self.count)]), None
        if not self.num_steps:
            divisors = [Divisor(step, self.code_max) for step in scale]
            ratios = [divisor.divide(values[i]) for i, divisor in enumerate(divisors)]
            return self._pack([d.or_zero(ratio) for d, ratio in zip(divisors, ratios, strict=True)]), None
        ratios = []
        for s in range(self.num_steps):
            reciprocal = reciprocal_of(steps[s])
            size = self.count // self.num_steps
            own = [values[i] for i in range(s * size, (s + 1) * size)]
            ratios += [quotient_of(value, steps[s], reciprocal) for value in own]
        header = [numbers.bits(step) for step in self.find_steps(statistics, scale)] if self.has_header else None
        return self._pack(ratios), header

    def _pack(self, ratios: list[Float32]) -> list[Uint32]:
        """Rounds and packs all of the lane's ratios, run by run."""
        size = self.count // self.runs
        return [word for end in range(0, len(ratios), size) for word in self.pack(ratios[end : end + size])]

    def decode(self, words, header, scale) -> list[Float32]:
        codes = self.unpack(words, self.count)
        if not self.has_header and self.given_scale is None:
            return codes
        scales = [numbers.from_bits(header)] if self.has_header else scale
        return [numbers.multiply(code, scales[i % len(scales)]) for i, code in enumerate(codes)]


@dataclass(frozen=True)
class ByteRow(ScaledRow):
    """Writes the rows of :class:`layouts.kv.scaled.ScaledRow` and :class:`layouts.kv.e5m2.Fp8E5M2`, four codes to a
    word."""

    @property
    def limit(self) -> float:
        return E5M2_MAX if self.form.codes == "e5m2" else FP32_MAX

    def pack(self, ratios: list[Float32]) -> list[Uint32]:
        words = []
        for four in (ratios[at : at + 4] for at in range(0, len(ratios), 4)):
            four = four + [Float32(0.0)] * (4 - len(four))
            if self.form.codes == "int8":
                codes = [numbers.bits(numbers.add(ratio, Float32(numbers.ROUNDER))) for ratio in four]
                pairs = [ptx.prmt(codes[i], codes[i + 1], Uint32(0x0040)) for i in (0, 2)]
            else:
                pack = numbers.pack_e4m3x2 if self.form.codes == "e4m3" else numbers.pack_e5m2x2
                pairs = [pack(four[i], four[i + 1]) for i in (0, 2)]
            words.append(ptx.prmt(pairs[0], pairs[1], Uint32(0x5410)))
        return words

    def unpack(self, words, count: int) -> list[Float32]:
        values: list[Any] = []
        for word in words:
            if self.form.codes == "int8":
                unsigned = word ^ 0x80808080
                for i in range(4):
                    number = numbers.from_bits(ptx.prmt(unsigned, Uint32(MAGIC), Uint32(0x7440 + i)))
                    values.append(numbers.add(number, Float32(-MAGIC_VALUE - 128.0)))
                continue
            if self.form.codes == "e4m3":
                pairs = [numbers.e4m3x2_to_f16x2(part) for part in (word, word >> 16)]
            else:  # E5M2 is the upper byte of an fp16
                pairs = [ptx.prmt(word, Uint32(0), Uint32(select)) for select in (0x1404, 0x3424)]
            values += [half(pair) for pair in pairs for half in (ptx.half2_low_to_float, ptx.half2_high_to_float)]
        return values[:count]


CacheRow = DenseRow | CodedRow


def make_row(kv_format: str, head_dim: int, lanes: int, runs: int = 1) -> CacheRow:
    """Makes the row object of a format, for a team of ``lanes`` lanes with ``runs`` runs of columns each."""
    return load_code(format_of(kv_format).writer)(kv_format, head_dim, lanes, runs)


def encode_nibbles(values, low: Float32, high: Float32) -> tuple[list[Uint32], Uint32]:
    """Encodes finite numbers from ``low`` to ``high`` in 4 bits. Returns codes for `pack_nibbles`, and the header word
    (fp16 scale, fp16 shift)."""
    spread = over_constant(numbers.add(high, -low), MAX_CODE)
    header = ptx.pack_f16x2(spread, low)
    step, shift = ptx.half2_low_to_float(header), ptx.half2_high_to_float(header)
    # fp16 steps are normal fp32 numbers near 1, so nothing needs rescaling.
    reciprocal = reciprocal_of(step)
    # In sixteenths, so that rounding the quotient saturates at 0 for nothing. Powers of 2 change no rounding.
    step, reciprocal = numbers.multiply(step, Float32(16.0)), numbers.multiply(reciprocal, Float32(1.0 / 16.0))
    rounded = []
    for value in values:
        # Every quotient by a zero step is NaN, which saturates to 0, too.
        part = quotient_of(numbers.add(value, -shift), step, reciprocal, numbers.fma_in_unit)
        part = numbers.fmin(part, Float32(MAX_CODE / 16.0))
        rounded.append(numbers.bits(numbers.add(part, Float32(numbers.ROUNDER / 16.0))))
    return rounded, header


def pack_nibbles(rounded: list[Uint32]) -> Uint32:
    """Packs up to 8 codes into the nibbles of a word. A code is given as the bits of the fp32 number (`numbers.ROUNDER`
    + code) / 16, whose low bits are the code."""
    word = rounded[-1]
    for code in reversed(rounded[:-1]):
        word = (word << 4) + code
    surplus = sum((numbers.ROUNDER_BITS - (4 << 23)) << (4 * i) for i in range(len(rounded)))
    return word - Uint32(surplus & 0xFFFFFFFF)
