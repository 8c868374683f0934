"""Rows of a KV cache in registers: a team of lanes turns a row of numbers into a format's bytes, and back.

``lanes`` lanes of a warp (a power of two) share a row; each owns ``head_dim / lanes`` columns in a run, so a group of
columns that shares a scale is a whole number of lanes and its extremes travel by xor shuffles: every lane of the group
ends up with them (FBGEMM's quantiser shuffled down instead, which tells only the first lane). Every division is IEEE's:
codes are bit for bit those of :mod:`layouts.kv` for equal fp32 numbers.

Everything here is straight-line code over DSL scalars; branches are the kernels'.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.device.lanes import in_pairs, neighbours, over_lanes
from cute_kernels.kv_formats import ByteFormat, DenseFormat, Int4Format, format_of
from layouts.kv.e5m2 import E5M2_MAX
from layouts.kv.int4 import FP16_MAX, MAX_CODE
from layouts.kv.scaled import FP32_MAX

CODE_MAX = {"int8": 127.0, "e4m3": 448.0}
VECTOR_BYTES = 16  # of the widest access
# Divisors outside this range are brought nearer to 1, so that no reciprocal and no remainder leaves fp32's range.
SMALL, LARGE, RESCALE = 2.0**-60, 2.0**60, 2.0**64
MAGIC = 0x4B000000  # fp32 2**23: a small integer in its low bits is added to it
MAGIC_VALUE = 8388608.0
MANTISSA = 0x7FFFFF


@dataclass(frozen=True)
class Piece:
    """The runs of bytes that one lane owns of a row, and how they are accessed.

    Args:
        num_bytes: of a run; lane i's begins at ``start + i * num_bytes``.
        start: bytes of the row in front of lane 0's run.
        row_bytes: from one row to the next.
        runs: runs of a lane.
        run_bytes: from one run of a lane to its next.
    """

    num_bytes: int
    start: int
    row_bytes: int
    runs: int = 1
    run_bytes: int = 0

    @property
    def unit(self) -> int:
        """Bytes of one access: the most, up to 16, that every run is aligned to where rows are."""
        return math.gcd(VECTOR_BYTES, self.num_bytes, self.start, self.row_bytes, self.run_bytes)

    @property
    def num_words(self) -> int:
        """Words that hold the lane's runs, each beginning with a word of its own."""
        return self.runs * self.run_words

    @property
    def run_words(self) -> int:
        return -(-self.num_bytes // 4)

    def load(self, row: Int64, lane: Int32, offset: int = 0) -> list[Uint32]:
        """The runs of a lane of the row ``offset`` bytes (known at compile time) past ``row``, in whole words."""
        address, first = row + Int64(lane * self.num_bytes), self.start + offset
        return [word for r in range(self.runs) for word in self._load_run(address, first + r * self.run_bytes)]

    def _load_run(self, address: Int64, first_byte: int) -> list[Uint32]:
        if self.unit >= 4:
            words: list[Any] = []
            for byte in range(0, self.num_bytes, self.unit):
                words += ptx.load_global_words(address, first_byte + byte, self.unit // 4)
            return words
        words = [Uint32(0)] * self.run_words
        for byte in range(0, self.num_bytes, self.unit):
            part = numbers.load_global_part(address, first_byte + byte, self.unit)
            words[byte // 4] = words[byte // 4] | (part << (8 * (byte % 4)))
        return words

    def store(self, row: Int64, lane: Int32, words, offset: int = 0) -> None:
        """Writes the runs of a lane; takes what `load` gives."""
        address, first = row + Int64(lane * self.num_bytes), self.start + offset
        for r in range(self.runs):
            self._store_run(address, first + r * self.run_bytes, words[r * self.run_words : (r + 1) * self.run_words])

    def _store_run(self, address: Int64, first_byte: int, words) -> None:
        for byte in range(0, self.num_bytes, self.unit):
            first = byte // 4
            if self.unit >= 4:
                numbers.store_global_words(address, first_byte + byte, words[first : first + self.unit // 4])
            else:
                part = words[first] >> (8 * (byte % 4))
                numbers.store_global_part(address, first_byte + byte, part, self.unit)


@dataclass(frozen=True)
class Elements:
    """Rows of bf16, fp16 or fp32 numbers as they are: what kernels take in and give out.

    Args:
        dtype: "bf16", "fp16" or "fp32".
        head_dim, lanes: columns of a row and lanes that share it.
        runs: runs of columns that a lane owns, as for `CodedRow`.
    """

    dtype: str
    head_dim: int
    lanes: int
    runs: int = 1

    @property
    def count(self) -> int:
        """Columns of a lane."""
        return self.head_dim // self.lanes

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.width

    @property
    def piece(self) -> Piece:
        return Piece(self.count * self.width // self.runs, 0, self.row_bytes, self.runs, self.row_bytes // self.runs)

    def unpack(self, words) -> list[Float32]:
        """The lane's numbers in fp32, exactly."""
        if self.dtype == "fp32":
            return [numbers.from_bits(words[i]) for i in range(self.count)]
        low, high = {
            "bf16": (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float),
            "fp16": (ptx.half2_low_to_float, ptx.half2_high_to_float),
        }[self.dtype]
        return [half(words[i]) for i in range(self.count // 2) for half in (low, high)]

    def pack(self, values) -> list[Uint32]:
        """fp32 numbers rounded to the dtype, to nearest even."""
        if self.dtype == "fp32":
            return [numbers.bits(values[i]) for i in range(self.count)]
        pair = {"bf16": ptx.pack_bf16x2, "fp16": ptx.pack_f16x2}[self.dtype]
        return [pair(values[i], values[i + 1]) for i in range(0, self.count, 2)]

    def load(self, row: Int64, lane: Int32) -> list[Float32]:
        """The lane's numbers of the row at address ``row``."""
        return self.unpack(self.piece.load(row, lane))


@dataclass(frozen=True)
class DenseRow:
    """A row of bf16 or fp16 cache elements; arguments as for `CodedRow`."""

    kv_format: str
    head_dim: int
    lanes: int
    runs: int = 1

    num_statistics: ClassVar[int] = 0
    num_steps: ClassVar[int] = 0
    has_header: ClassVar[bool] = False
    given_scale: ClassVar[None] = None
    scale_stride: ClassVar[None] = None

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
class CodedRow:
    """Common part of rows of small codes, in front of which a word per group may hold its scale.

    Quantising goes in parts, so that a kernel may branch between them: `measure` what a lane holds, `repair` its values
    if that is `unusual`, `reduce` over the group, and `encode`. Rows of bytes with one divisor, or one per group, go
    another way round: `find_steps`, and if these or what they divide are `awkward`, `tame` both.

    Args:
        kv_format: name of the format.
        head_dim: columns of a row.
        lanes: lanes that share a row.
        runs: runs of neighbouring columns that a lane owns, one of each ``runs``-th of the row.
    """

    kv_format: str
    head_dim: int
    lanes: int
    runs: int = 1

    code_bits: ClassVar[int]
    num_steps: ClassVar[int] = 0
    set_statistics: ClassVar[int]
    """What `measure` says of a lane's values of one set."""

    @property
    def limit(self) -> float:
        """Numbers beyond it saturate, and NaN counts as 0, before anything else."""
        raise NotImplementedError

    @property
    def num_headers(self) -> int:
        """Words in front of the codes, one per group of columns."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """Columns of a lane."""
        return self.head_dim // self.lanes

    @property
    def sets(self) -> int:
        """Sets that the lane's columns fall into, each of another group: its runs, if groups are no larger."""
        return self.runs if self.num_headers >= self.runs else 1

    @property
    def num_statistics(self) -> int:
        """What `measure` says of a lane's values."""
        return self.sets * self.set_statistics

    def of_set(self, values, s: int) -> list:
        """The values of set ``s``."""
        size = self.count // self.sets
        return [values[i] for i in range(s * size, (s + 1) * size)]

    @property
    def given_scale(self) -> str | None:
        return format_of(self.kv_format).given_scale

    @property
    def scale_stride(self) -> int | None:
        """Bytes from the given scale of a head's rows to the next head's; None where rows have none, or several."""
        return {"tensor": 0, "head": 4}.get(self.given_scale or "")

    @property
    def has_header(self) -> bool:
        return self.num_headers > 0

    @property
    def group_lanes(self) -> int:
        """Lanes that share a group of columns."""
        return self.lanes * self.sets // max(self.num_headers, 1)

    @property
    def codes(self) -> Piece:
        """Where a lane's codes lie."""
        row_bytes = format_of(self.kv_format).row_bytes(self.head_dim)
        run_bytes = self.head_dim * self.code_bits // 8 // self.runs
        return Piece(run_bytes // self.lanes, 4 * self.num_headers, row_bytes, self.runs, run_bytes)

    def repair(self, value: Float32) -> Float32:
        """NaN as 0, and everything else within the limits."""
        number = cutlass.select_(value == value, value, Float32(0.0))
        return ptx.fmax(numbers.fmin(number, Float32(self.limit)), Float32(-self.limit))

    def store_header(self, row: Int64, lane: Int32, header: list[Uint32]) -> None:
        """Writes the words of the lane's groups; a group's lanes all write the same, in one access."""
        for s, word in enumerate(header):
            offset = 4 * (self.num_headers // self.sets) * s
            numbers.store_global_words(row + Int64(lane // self.group_lanes * 4), offset, [word])

    def load_header(self, row: Int64, lane: Int32) -> Uint32:
        """The word of the lane's group; for one run only, as `decode` is."""
        return ptx.load_global_words(row + Int64(lane // self.group_lanes * 4), 0, 1)[0]

    def _over_group(self, combine, value: Float32) -> Float32:
        return over_lanes(combine, value, neighbours(self.group_lanes))


@dataclass(frozen=True)
class NibbleRow(CodedRow):
    """:class:`layouts.kv.int4.Int4Row`: a group's word is (fp16 scale, fp16 shift)."""

    code_bits: ClassVar[int] = 4
    set_statistics: ClassVar[int] = 2
    limit: ClassVar[float] = FP16_MAX

    @property
    def num_headers(self) -> int:
        form = format_of(self.kv_format)
        assert isinstance(form, Int4Format)
        return form.num_groups

    def measure(self, values) -> list[Float32]:
        """The smallest and the largest value of each of the lane's sets; NaN if there is one."""
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
        """Codes in whole words, and the words of the lane's groups."""
        rounded, header = [], []
        for s in range(self.sets):
            codes, word = self._encode_set(self.of_set(values, s), statistics[2 * s], statistics[2 * s + 1])
            rounded += codes
            header.append(word)
        size = self.count // self.runs
        runs = [rounded[first : first + size] for first in range(0, self.count, size)]
        return [_pack_nibbles(run[first : first + 8]) for run in runs for first in range(0, size, 8)], header

    def _encode_set(self, values, low: Float32, high: Float32) -> tuple[list[Uint32], Uint32]:
        """Codes, each in the low bits of a word, and the group's word."""
        spread = _over_constant(numbers.add(high, -low), MAX_CODE)
        header = ptx.pack_f16x2(spread, low)
        step, shift = ptx.half2_low_to_float(header), ptx.half2_high_to_float(header)
        # fp16 steps are normal fp32 numbers near 1, so nothing needs rescaling.
        reciprocal = _reciprocal(step)
        # In sixteenths, so that rounding the quotient saturates at 0 for nothing. Powers of 2 change no rounding.
        step, reciprocal = numbers.multiply(step, Float32(16.0)), numbers.multiply(reciprocal, Float32(1.0 / 16.0))
        rounded = []
        for value in values:
            # Every quotient by a zero step is NaN, which saturates to 0, too.
            part = _quotient(numbers.add(value, -shift), step, reciprocal, numbers.fma_in_unit)
            part = numbers.fmin(part, Float32(MAX_CODE / 16.0))
            rounded.append(numbers.bits(numbers.add(part, Float32(numbers.ROUNDER / 16.0))))
        return rounded, header

    def decode(self, words, header, scale) -> list[Float32]:
        step, shift = ptx.half2_low_to_float(header), ptx.half2_high_to_float(header)
        values = []
        for i in range(self.count):
            nibble = (words[i // 8] >> (4 * (i % 8))) & 0xF
            code = numbers.add(numbers.from_bits(nibble | MAGIC), Float32(-MAGIC_VALUE))
            values.append(ptx.fma(code, step, shift))
        return values


@dataclass(frozen=True)
class ByteRow(CodedRow):
    """:class:`layouts.kv.scaled.ScaledRow` and :class:`layouts.kv.e5m2.Fp8E5M2`: a group's word is an fp32 scale."""

    code_bits: ClassVar[int] = 8
    set_statistics: ClassVar[int] = 1

    @property
    def form(self) -> ByteFormat:
        form = format_of(self.kv_format)
        assert isinstance(form, ByteFormat)
        return form

    @property
    def code_name(self) -> str:
        return self.form.codes

    @property
    def limit(self) -> float:
        return E5M2_MAX if self.code_name == "e5m2" else FP32_MAX

    @property
    def num_steps(self) -> int:  # type: ignore[override]
        """Divisors of the lane's values; 0 if there are none, or one for every column."""
        if self.code_name == "e5m2" or self.given_scale == "channel":
            return 0
        return self.sets

    @property
    def num_headers(self) -> int:
        return self.form.header_bytes // 4

    def measure(self, values) -> list[Float32]:
        """The largest magnitude of each of the lane's sets; NaN if there is one."""
        sets = [[ptx.absolute(value) for value in self.of_set(values, s)] for s in range(self.sets)]
        return [in_pairs(numbers.max_or_nan, sizes) for sizes in sets]

    def unusual(self, statistics):
        return ~functools.reduce(operator.and_, [statistics[s] <= self.limit for s in range(self.sets)])

    def reduce(self, statistics) -> list[Float32]:
        """Over the group where the scale comes from it."""
        sizes = [statistics[s] for s in range(self.sets)]
        return [self._over_group(ptx.fmax, size) for size in sizes] if self.has_header else sizes

    def load_scale(self, scale: Int64, head: Int32, lane: Int32):
        """The given scale of a head's columns: one number, or one per column of the lane."""
        if self.given_scale == "channel":
            return Elements("fp32", self.head_dim, self.lanes, self.runs).load(
                scale + Int64(head) * (4 * self.head_dim), lane
            )
        offset = Int64(head) * self.scale_stride if self.scale_stride else Int64(0)
        return [numbers.from_bits(ptx.load_global_words(scale + offset, 0, 1)[0])]

    def find_steps(self, statistics, scale) -> list[Float32]:
        """What the lane's sets are divided by; kept apart from `tame`'s, since headers hold these."""
        if self.has_header:
            return [_over_constant(statistics[s], CODE_MAX[self.code_name]) for s in range(self.sets)]
        return list(scale)

    def awkward(self, statistics, steps):
        """Whether a plain quotient could go wrong, or would saturate: next to never. NaN counts as that, too."""
        plain = [(steps[s] >= SMALL) & (steps[s] <= LARGE) for s in range(self.num_steps)]
        if not self.has_header:
            plain.append(statistics[0] <= numbers.multiply(steps[0], Float32(CODE_MAX[self.code_name])))
        return ~functools.reduce(operator.and_, plain)

    def tame(self, value: Float32, step: Float32) -> tuple[Float32, Float32]:
        """A value and a divisor that are not `awkward`, with the code of those that may be."""
        divisor = _Divisor(step, None if self.has_header else CODE_MAX[self.code_name])
        return divisor.tame(self.repair(value)), divisor.tame_step

    def encode(self, values, statistics, steps, scale) -> tuple[list[Uint32], list[Uint32] | None]:
        """Codes in whole words, and the words of the lane's groups if rows have them.

        steps: `find_steps`', tamed as the values are if they were `awkward`.
        """
        if self.code_name == "e5m2":
            return self._pack([values[i] for i in range(self.count)]), None
        if not self.num_steps:
            divisors = [_Divisor(step, CODE_MAX[self.code_name]) for step in scale]
            ratios = [divisor.divide(values[i]) for i, divisor in enumerate(divisors)]
            return self._pack([d.or_zero(ratio) for d, ratio in zip(divisors, ratios, strict=True)]), None
        ratios = []
        for s in range(self.num_steps):
            reciprocal = _reciprocal(steps[s])
            size = self.count // self.num_steps
            own = [values[i] for i in range(s * size, (s + 1) * size)]
            ratios += [_quotient(value, steps[s], reciprocal) for value in own]
        header = [numbers.bits(step) for step in self.find_steps(statistics, scale)] if self.has_header else None
        return self._pack(ratios), header

    def _pack(self, ratios: list[Float32]) -> list[Uint32]:
        """Ratios rounded to codes, four to a word; the last word of a run may hold fewer."""
        size = self.count // self.runs
        fours = [
            ratios[at : min(at + 4, end + size)]
            for end in range(0, len(ratios), size)
            for at in range(end, end + size, 4)
        ]
        words = []
        for four in fours:
            four = four + [Float32(0.0)] * (4 - len(four))
            if self.code_name == "int8":
                codes = [numbers.bits(numbers.add(ratio, Float32(numbers.ROUNDER))) for ratio in four]
                pairs = [ptx.prmt(codes[i], codes[i + 1], Uint32(0x0040)) for i in (0, 2)]
            else:
                pack = numbers.pack_e4m3x2 if self.code_name == "e4m3" else numbers.pack_e5m2x2
                pairs = [pack(four[i], four[i + 1]) for i in (0, 2)]
            words.append(ptx.prmt(pairs[0], pairs[1], Uint32(0x5410)))
        return words

    def decode(self, words, header, scale) -> list[Float32]:
        codes = self._codes(words)
        if self.code_name == "e5m2":
            return codes
        scales = [numbers.from_bits(header)] if self.has_header else scale
        return [numbers.multiply(code, scales[i % len(scales)]) for i, code in enumerate(codes)]

    def _codes(self, words) -> list[Float32]:
        """The lane's codes as numbers, exactly."""
        values: list[Any] = []
        for word in words:
            if self.code_name == "int8":
                unsigned = word ^ 0x80808080
                for i in range(4):
                    number = numbers.from_bits(ptx.prmt(unsigned, Uint32(MAGIC), Uint32(0x7440 + i)))
                    values.append(numbers.add(number, Float32(-MAGIC_VALUE - 128.0)))
                continue
            if self.code_name == "e4m3":
                pairs = [numbers.e4m3x2_to_f16x2(part) for part in (word, word >> 16)]
            else:  # E5M2 is the upper byte of an fp16
                pairs = [ptx.prmt(word, Uint32(0), Uint32(select)) for select in (0x1404, 0x3424)]
            values += [half(pair) for pair in pairs for half in (ptx.half2_low_to_float, ptx.half2_high_to_float)]
        return values[: self.count]


CacheRow = DenseRow | NibbleRow | ByteRow


def make_row(kv_format: str, head_dim: int, lanes: int, runs: int = 1) -> CacheRow:
    """What a format's rows are to a team of ``lanes`` lanes, each with ``runs`` runs of columns."""
    kinds = {DenseFormat: DenseRow, Int4Format: NibbleRow, ByteFormat: ByteRow}
    return kinds[type(format_of(kv_format))](kv_format, head_dim, lanes, runs)


class _Divisor:
    """A divisor that several numbers are divided by, each quotient rounded as IEEE's.

    A quotient by a divisor that is not above 0 (NaN included) counts as 0: `or_zero` and `tame` see to it.

    Args:
        step: the divisor.
        largest: quotients are wanted up to this magnitude and saturate there; None where none is larger.
    """

    def __init__(self, step: Float32, largest: float | None = None):
        finite = (step > 0.0) & (step < math.inf)
        factor = cutlass.select_(step < SMALL, Float32(RESCALE), Float32(1.0))
        self.factor = cutlass.select_(step > LARGE, Float32(1.0 / RESCALE), factor)
        # Dividing by infinity: 0 for both makes every quotient a zero of the right sign.
        self.step = cutlass.select_(finite, numbers.multiply(step, self.factor), Float32(0.0))
        self.reciprocal = cutlass.select_(finite, _reciprocal(self.step), Float32(0.0))
        self.positive, self.finite = step > 0.0, finite
        self.bound = None if largest is None else numbers.multiply(self.step, Float32(largest))

    def divide(self, value: Float32) -> Float32:
        return _quotient(self._scaled(value), self.step, self.reciprocal)

    def tame(self, value: Float32) -> Float32:
        """What divided by `tame_step` without more ado gives the quotient."""
        value = self._scaled(value)
        value = cutlass.select_(self.finite, value, numbers.multiply(value, Float32(0.0)))
        return self.or_zero(value)

    @property
    def tame_step(self) -> Float32:
        return cutlass.select_(self.finite, self.step, Float32(1.0))

    def _scaled(self, value: Float32) -> Float32:
        value = numbers.multiply(value, self.factor)
        if self.bound is not None:
            value = ptx.fmax(numbers.fmin(value, self.bound), -self.bound)
        return value

    def or_zero(self, quotient: Float32) -> Float32:
        return cutlass.select_(self.positive, quotient, Float32(0.0))


def _reciprocal(divisor: Float32) -> Float32:
    """1 / divisor rounded to nearest, for normal divisors with normal reciprocals: two of Newton's steps.

    They leave one mantissa aside, 0x7FFFFF, for which they may end an ulp low; its reciprocal's is 1.
    """
    guess = ptx.reciprocal(divisor)
    for _ in range(2):
        guess = ptx.fma(ptx.fma(-divisor, guess, Float32(1.0)), guess, guess)
    stubborn = (numbers.bits(divisor) & MANTISSA) == MANTISSA
    return numbers.from_bits(numbers.bits(guess) | cutlass.select_(stubborn, Uint32(1), Uint32(0)))


def _quotient(value: Float32, divisor: Float32, reciprocal: Float32, last=None) -> Float32:
    """value / divisor rounded to nearest, from the divisor's correctly rounded reciprocal (Markstein 1990).

    last: the multiply-add that rounds it, default the plain one.
    """
    quotient = numbers.multiply(value, reciprocal)
    # The remainder's negative: where all is 0 it is +0, times -1 / divisor -0, and the quotient keeps its sign.
    remainder = ptx.fma(divisor, quotient, -value)
    return (last or ptx.fma)(remainder, -reciprocal, quotient)


def _over_constant(value: Float32, divisor: float) -> Float32:
    """value / divisor rounded to nearest, subnormal or not, for finite values and a small whole divisor.

    By an odd number no quotient lies halfway between two subnormals, which a rounded reciprocal could not tell.
    """
    if divisor % 2 == 0:
        return numbers.divide(value, divisor)
    return _quotient(value, Float32(divisor), Float32(1.0 / divisor))


def _pack_nibbles(rounded: list[Uint32]) -> Uint32:
    """Up to 8 codes, each in the low bits of an fp32 `numbers.ROUNDER` / 16 and more, as nibbles of a word."""
    word = rounded[-1]
    for code in reversed(rounded[:-1]):
        word = (word << 4) + code
    surplus = sum((numbers.ROUNDER_BITS - (4 << 23)) << (4 * i) for i in range(len(rounded)))
    return word - Uint32(surplus & 0xFFFFFFFF)
