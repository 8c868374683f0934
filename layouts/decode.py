"""Fast conversions of packed 8- and 4-bit numbers to fp16 and bf16: what they compute and in which order.

Each conversion is an instruction sequence on one 32-bit register, executed bit by bit by `layouts.isa`. It has two
phases. *Extraction* (prmt, lop3, shift) moves bits and mixes in constants: it is an affine map over F2. So its matrix
is found from 32 unit vectors, but is true for all 2**32 registers. The matrix shows which output lane depends on which
input field. *Arithmetic* then computes each lane separately, so trying all 256 or 16 codes of a field proves the value.
The matrix decides in which order elements must be stored, so that the resulting lanes are in order.

The sequences are those of FasterTransformer's interleaved converters (magic numbers 0x6400, 0x4300, 0x4B000000), their
signed variants, and plain bit placement for FP8.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from layouts.algebra import Layout
from layouts.bitlinear import BitMap
from layouts.isa import BF16, F16, FloatFormat, Machine, lanes, splat
from layouts.proofs import Proof, prove

AND_OR = (0xF0 & 0xCC) | 0xAA
AND_XOR = (0xF0 & 0xCC) ^ 0xAA
AND = 0xF0 & 0xCC
XOR = 0xF0 ^ 0xCC
NIBBLES_LOW, NIBBLES_HIGH = 0x000F000F, 0x00F000F0

Words = list[np.ndarray]


@dataclass(frozen=True)
class Conversion:
    """The conversion of a 32-bit register of ``32 / bits`` codes to as many 16-bit floats.

    Args:
        name: unique identifier.
        bits: width of a code.
        target: floating format of the result.
        lane_bits: width of a lane after extraction (32 if arithmetic is in fp32).
        extract: the function from a register to words of lanes. It only moves bits and adds constant bits.
        finish: the function from words of lanes to words of two 16-bit results. It computes each lane separately.
        value: the function from a code to the number that the code stands for; NaN for codes that the sequence does not
            convert correctly.
        note: a remark for readers.
        lane_exponents: the conversion returns value * 2**lane_exponents[n] in lane n; whoever uses the results has to
            undo this factor. Default: no factors.
    """

    name: str
    bits: int
    target: FloatFormat
    lane_bits: int
    extract: Callable[[Machine, np.ndarray], Words]
    finish: Callable[[Machine, Words], Words]
    value: Callable[[np.ndarray], np.ndarray]
    note: str = ""
    lane_exponents: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Codes per register."""
        return 32 // self.bits

    def run(self, registers: np.ndarray, machine: Machine | None = None) -> np.ndarray:
        """Converts registers, uint32 [...]. Returns the result lanes in order, uint16 [..., count]."""
        machine = machine or Machine()
        registers = np.asarray(registers, dtype=np.uint32)
        words = self.finish(machine, self.extract(machine, registers))
        return np.stack([half for word in words for half in lanes(word)], axis=-1)

    def values(self, registers: np.ndarray) -> np.ndarray:
        """Returns the numbers that registers [...] stand for, in order, float64 [..., count]. The factors of
        `lane_exponents` are undone."""
        lanes_found = self.target.decode(self.run(registers))
        with np.errstate(invalid="ignore"):
            return np.ldexp(lanes_found, [-exponent for exponent in self.lane_exponents or (0,)])

    def instructions(self) -> Counter[str]:
        """Returns the number of instructions per register, by mnemonic."""
        machine = Machine()
        self.run(np.zeros(1, dtype=np.uint32), machine)
        return machine.counts

    def extraction(self) -> tuple[BitMap, np.ndarray]:
        """Returns (matrix over F2, constant words) of the extraction. Bit ``n * lane_bits + j`` of its output is bit j
        of lane n."""
        units = np.concatenate(([0], 1 << np.arange(32, dtype=np.uint64))).astype(np.uint32)
        words = self.extract(Machine(), units)
        constant = np.array([word[0] for word in words])
        columns = [sum(int(word[i + 1] ^ word[0]) << 32 * place for place, word in enumerate(words)) for i in range(32)]
        return BitMap(tuple(columns), 32 * len(words)), constant

    def lane_of_field(self) -> tuple[int, ...]:
        """Returns the result lane of each field of the register, the lowest field first.

        Raises:
            ValueError: no lane depends on a field, or several lanes do.
        """
        matrix, _ = self.extraction()
        found = []
        for field in range(self.count):
            bits = 0
            for column in matrix.columns[field * self.bits : (field + 1) * self.bits]:
                bits |= column
            reached = [n for n in range(self.count) if bits >> n * self.lane_bits & ((1 << self.lane_bits) - 1)]
            if len(reached) != 1:
                raise ValueError(f"{self.name}: field {field} reaches lanes {reached}; want one")
            found.append(reached[0])
        return tuple(found)

    def stored_order(self) -> tuple[int, ...]:
        """Returns the element to store in each field, the lowest field first, so that the results come out in order."""
        return self.lane_of_field()

    def register_layout(self) -> Layout:
        """Returns `stored_order` as a layout from field to element."""
        columns = [self.stored_order()[1 << i] for i in range(self.count.bit_length() - 1)]
        layout = BitMap(tuple(columns), self.count.bit_length() - 1).to_layout()
        if tuple(layout(i) for i in range(self.count)) != self.stored_order():
            raise ValueError(f"{self.name}: stored order {self.stored_order()} is no layout")
        return layout

    def describe(self) -> str:
        """Describes the conversion in a line: name, instruction counts and stored order."""
        counts = ", ".join(f"{n} {op}" for op, n in sorted(self.instructions().items()))
        order = ",".join(map(str, self.stored_order()))
        return f"{self.name}: {counts} per {self.count} codes; stored order {order}. {self.note}".rstrip()

    def verify(self) -> tuple[Proof, ...]:
        """Proves the order and the values of results; raises `ProofError` if one of them is wrong."""
        return (self._verify_affine(), self._verify_independence(), self._verify_values())

    def _verify_affine(self) -> Proof:
        """Proves that the extraction is affine over F2: all coefficients of degree 2 and 3 of its algebraic normal form
        are 0. A coefficient is the XOR of the extraction over all subsets of two or three input bits.

        Each instruction sequence joins at most two words that vary. So its degree is at most 2, and the test is
        complete.
        """
        groups = [*itertools.combinations(range(32), 2), *itertools.combinations(range(32), 3)]
        affine = True
        for size in (2, 3):
            chosen = np.array([group for group in groups if len(group) == size], dtype=np.uint64)
            coefficient: Words | None = None
            for subset in itertools.product((0, 1), repeat=size):
                x = ((np.uint64(1) << chosen) * np.array(subset, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
                words = self.extract(Machine(), x)
                coefficient = words if coefficient is None else [c ^ w for c, w in zip(coefficient, words, strict=True)]
            affine = affine and coefficient is not None and not any(word.any() for word in coefficient)
        return prove(affine, "extraction is affine over F2: no term of degree 2 or 3", "exhaustive", len(groups))

    def _verify_independence(self) -> Proof:
        lanes_found = self.lane_of_field()
        holds = sorted(lanes_found) == list(range(self.count))
        return prove(holds, "every lane depends on one field alone, for all 2**32 registers", "matrix", 32)

    def _verify_values(self) -> Proof:
        codes = np.arange(1 << self.bits, dtype=np.uint32)
        expected = self.value(codes)
        kept = ~np.isnan(expected)
        holds = True
        for field, lane in enumerate(self.lane_of_field()):
            got = self.values(codes << np.uint32(field * self.bits))[:, lane]
            holds = holds and bool(np.array_equal(got[kept], expected[kept]))
        return prove(holds, "every code of every field comes out as its value", "exhaustive", self.count * codes.size)


# ------------------------------------------------------------------------------------------------- 8-bit integers


def _bytes_to_f16(machine: Machine, x: np.ndarray) -> Words:
    return [machine.prmt(x, 0x64646464, selector) for selector in (0x5250, 0x5351)]


def _bytes_to_f32(machine: Machine, x: np.ndarray) -> Words:
    return [machine.prmt(x, 0x4B000000, selector) for selector in (0x7650, 0x7652, 0x7651, 0x7653)]


def _flip_signs(extract: Callable[[Machine, np.ndarray], Words]) -> Callable[[Machine, np.ndarray], Words]:
    return lambda machine, x: extract(machine, machine.lop3(x, 0x80808080, 0, XOR))


def _subtract_1152(machine: Machine, words: Words) -> Words:
    return [machine.sub2(word, 0x6480, F16) for word in words]


def _subtract_in_f32(machine: Machine, words: Words) -> Words:
    a, b, c, d = (machine.sub_f32(word, 8388736.0) for word in words)
    return [machine.prmt(a, b, 0x7632), machine.prmt(c, d, 0x7632)]


# ------------------------------------------------------------------------------------------------- 4-bit integers


def _nibbles_to_f16(table: int, low: int, high: int) -> Callable[[Machine, np.ndarray], Words]:
    def extract(machine: Machine, x: np.ndarray) -> Words:
        top = machine.shr(x, 8)
        return [
            machine.lop3(word, mask, splat(magic), table)
            for word in (x, top)
            for mask, magic in ((NIBBLES_LOW, low), (NIBBLES_HIGH, high))
        ]

    return extract


def _subtract_1032_or_72(machine: Machine, words: Words) -> Words:
    sixteenth, minus_72, bias = 0x2C00, 0xD480, 0x6408
    return [
        machine.sub2(word, bias, F16) if i % 2 == 0 else machine.fma2(word, sixteenth, minus_72, F16)
        for i, word in enumerate(words)
    ]


def _nibbles_to_bf16(table: int, magic: int) -> Callable[[Machine, np.ndarray], Words]:
    def extract(machine: Machine, x: np.ndarray) -> Words:
        shifted = [x, *(machine.shr(x, 4 * i) for i in (1, 2, 3))]
        return [machine.lop3(word, NIBBLES_LOW, splat(magic), table) for word in shifted]

    return extract


def _subtract_136(machine: Machine, words: Words) -> Words:
    one, minus_136 = 0x3F80, 0xC308
    return [machine.fma2(word, one, minus_136, BF16) for word in words]


def _nibbles_to_subnormals(machine: Machine, x: np.ndarray) -> Words:
    top = machine.shr(x, 8)
    return [machine.lop3(word, mask, 0, AND) for word in (x, top) for mask in (NIBBLES_LOW, NIBBLES_HIGH)]


def _bytes_to_subnormals(machine: Machine, x: np.ndarray) -> Words:
    return [machine.lop3(x, 0x00FF00FF, 0, AND), machine.prmt(x, 0, 0x4341)]


def _less_half(factors: tuple[int, ...], minus_half: int, form: FloatFormat) -> Callable[[Machine, Words], Words]:
    """Returns the arithmetic that scales subnormal numbers and subtracts half the range of codes. One multiply-add does
    both exactly.

    factors: the factors, as 16-bit patterns. Word i is multiplied by factor i % len(factors). minus_half: the addend,
    as a 16-bit pattern.
    """

    def finish(machine: Machine, words: Words) -> Words:
        return [machine.fma2(word, factors[i % len(factors)], minus_half, form) for i, word in enumerate(words)]

    return finish


# ------------------------------------------------------------------------------------------------------------- FP4


def _e2m1_to_bf16(machine: Machine, x: np.ndarray) -> Words:
    """Moves the sign of each code to bit 15 of a bf16, and the code's exponent and mantissa to bits 8 to 6."""
    signs, rest = splat(0x8000), splat(0x01C0)
    words = []
    for pair in (*(machine.shl(x, place) for place in (12, 8, 4)), x):
        words.append(machine.lop3(pair, signs, machine.lop3(machine.shr(pair, 6), rest, 0, AND), AND_OR))
    return words


def _times_two_to_126(machine: Machine, words: Words) -> Words:
    return [machine.mul2(word, 0x7E80, BF16) for word in words]


# ------------------------------------------------------------------------------------------------------------- FP8


def _e4m3_to_bf16(machine: Machine, x: np.ndarray) -> Words:
    """Moves the sign of each code to bit 15 of a bf16, and the code's exponent and mantissa to bits 10 to 4. The first
    word has the codes of bytes 0 and 2, the second those of bytes 1 and 3.
    """
    high = machine.shl(x, 8)
    pairs = [(high, machine.shl(x, 4)), (x, machine.shr(x, 4))]
    signs, rest = splat(0x8000), splat(0x07F0)
    return [machine.lop3(sign, signs, machine.lop3(body, rest, 0, AND), AND_OR) for sign, body in pairs]


def _times_two_to_120(machine: Machine, words: Words) -> Words:
    return [machine.mul2(word, 0x7B80, BF16) for word in words]


def _e5m2_to_f16(machine: Machine, x: np.ndarray) -> Words:
    return [machine.prmt(x, 0, selector) for selector in (0x1404, 0x3424)]


def _unchanged(_: Machine, words: Words) -> Words:
    return words


# ---------------------------------------------------------------------------------------------------------- values


def biased_value(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function from unsigned codes to the numbers that they stand for, ``code - 2**(bits - 1)``."""
    return lambda code: code.astype(np.float64) - (1 << (bits - 1))


def signed_value(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function from two's complement codes of ``bits`` bits to their numbers."""
    return lambda code: ((code.astype(np.int64) ^ (1 << (bits - 1))) - (1 << (bits - 1))).astype(np.float64)


def e2m1_value(code: np.ndarray) -> np.ndarray:
    """Returns the numbers of FP4 E2M1 codes: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7]
    return np.where(code & 8, -numbers, numbers)


def e4m3_value(code: np.ndarray) -> np.ndarray:
    """Returns the numbers of FP8 E4M3 codes; 0x7F and 0xFF are NaN, and there is no infinity."""
    code = code.astype(np.int64)
    exponent, mantissa = code >> 3 & 15, (code & 7).astype(np.float64)
    magnitude = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    magnitude = np.where(code & 0x7F == 0x7F, np.nan, magnitude)
    return np.where(code & 0x80, -magnitude, magnitude)


def e5m2_value(code: np.ndarray) -> np.ndarray:
    """Returns the numbers of FP8 E5M2 codes, each of which is the high byte of an fp16."""
    return (code.astype(np.uint16) << 8).view(np.float16).astype(np.float64)


CONVERSIONS: dict[str, Conversion] = {
    c.name: c
    for c in (
        Conversion("u8_f16", 8, F16, 16, _bytes_to_f16, _subtract_1152, biased_value(8), "Codes hold value + 128."),
        Conversion("u8_bf16", 8, BF16, 32, _bytes_to_f32, _subtract_in_f32, biased_value(8), "Codes hold value + 128."),
        Conversion("s8_f16", 8, F16, 16, _flip_signs(_bytes_to_f16), _subtract_1152, signed_value(8)),
        Conversion("s8_bf16", 8, BF16, 32, _flip_signs(_bytes_to_f32), _subtract_in_f32, signed_value(8)),
        Conversion(
            "u4_f16",
            4,
            F16,
            16,
            _nibbles_to_f16(AND_OR, 0x6400, 0x6400),
            _subtract_1032_or_72,
            biased_value(4),
            "Codes hold value + 8.",
        ),
        Conversion(
            "u4_bf16",
            4,
            BF16,
            16,
            _nibbles_to_bf16(AND_OR, 0x4300),
            _subtract_136,
            biased_value(4),
            "Codes hold value + 8.",
        ),
        Conversion(
            "u4_f16_subnormal",
            4,
            F16,
            16,
            _nibbles_to_subnormals,
            _unchanged,
            lambda code: code.astype(np.float64),
            "No arithmetic: a masked nibble is an fp16 subnormal; the MMA's other operand takes in 2**24 or 2**20.",
            (-24, -24, -20, -20) * 2,
        ),
        Conversion(
            "s4_f16", 4, F16, 16, _nibbles_to_f16(AND_XOR, 0x6408, 0x6480), _subtract_1032_or_72, signed_value(4)
        ),
        Conversion("s4_bf16", 4, BF16, 16, _nibbles_to_bf16(AND_XOR, 0x4308), _subtract_136, signed_value(4)),
        Conversion(
            "e4m3_bf16",
            8,
            BF16,
            16,
            _e4m3_to_bf16,
            _times_two_to_120,
            e4m3_value,
            "A scale multiplies into the 2**120 factor; NaN codes come out as +-480.",
        ),
        Conversion(
            "u4_bf16_centred",
            4,
            BF16,
            16,
            _nibbles_to_subnormals,
            _less_half((0x7F00, 0x7D00), 0xBE00, BF16),
            biased_value(4),
            "In units of 2**-6, which the scale takes in; one more multiply-add scales and shifts.",
            (-6,) * 8,
        ),
        Conversion(
            "u8_bf16_centred",
            8,
            BF16,
            16,
            _bytes_to_subnormals,
            _less_half((0x7F00,), 0xC000, BF16),
            biased_value(8),
            "As u4_bf16_centred, of bytes: in units of 2**-6.",
            (-6,) * 4,
        ),
        Conversion(
            "e2m1_bf16",
            4,
            BF16,
            16,
            _e2m1_to_bf16,
            _times_two_to_126,
            e2m1_value,
            "MXFP4 and NVFP4.",
        ),
        Conversion("e5m2_f16", 8, F16, 16, _e5m2_to_f16, _unchanged, e5m2_value, "Inf and NaN are kept."),
    )
}
"""All conversions, by name."""
