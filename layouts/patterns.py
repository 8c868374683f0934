"""Named warp accesses: those of the published INT4 attention kernel, those of this project, and probes of the bank
model.

Every entry is data: the byte address of each lane, a width and a kind. Its wavefronts can be counted (`Access.report`),
it can be drawn, or it can be replayed on a GPU and compared with the hardware's counters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from layouts.banks import BankReport, report


@dataclass(frozen=True)
class Access:
    """One warp access to shared memory.

    Args:
        name: unique identifier.
        note: a phrase that describes the access.
        width: bytes per lane.
        kind: as in `layouts.banks.KINDS`.
        addresses: byte address per lane, None for an inactive lane.
    """

    name: str
    note: str
    width: int
    kind: str
    addresses: tuple[int | None, ...]

    def report(self) -> BankReport:
        """Returns the bank conflicts of this access, by the bank model."""
        return report(self.addresses, self.width, self.kind)


def _words(address: Callable[[int], int]) -> tuple[int, ...]:
    return tuple(4 * address(lane) for lane in range(32))


def _gqa_int4_accesses() -> list[Access]:
    """Returns shared-memory accesses of the published grouped-query INT4 kernel before and after its optimisations 9
    and 10.

    Tiles are m8n32k16: P is 8 heads x 16 tokens in fp32, K is 32 tokens x 16 and V is 16 tokens x 32, both bf16. Rows
    of K have 16 numbers (8 words), rows of V 32 numbers (16 words). Optimisation 10 pads rows by 2 numbers, to 9 and 17
    words. Each entry is one 4-byte access of the warp: the first of the accesses that load or store the tile.
    """
    split_tokens = 256
    return [
        Access("gqa_p_load", "P fragment, row stride 256 tokens", 4, "ld", _words(lambda t: t // 4 * 256 + t % 4 * 2)),
        Access("gqa_p_load_swizzled", "P fragment, contiguous", 4, "ld", _words(lambda t: 2 * t)),
        Access("gqa_p_load_swizzled_v2", "P fragment, contiguous, 8 bytes", 8, "ld", _words(lambda t: 2 * t)),
        Access(
            "gqa_p_store",
            "QK accumulator, row stride 256 tokens",
            4,
            "st",
            _words(lambda t: t % 4 * 2 * split_tokens + t // 4),
        ),
        Access("gqa_p_store_swizzled", "QK accumulator", 4, "st", _words(lambda t: t % 4 * 16 + t // 4)),
        Access("gqa_k_store", "one token per lane, rows of 16", 4, "st", _words(lambda t: 8 * t)),
        Access("gqa_k_store_padded", "one token per lane, rows of 16 + 2", 4, "st", _words(lambda t: 9 * t)),
        Access("gqa_k_load", "K fragment, rows of 16", 4, "ld", _words(lambda t: t // 4 * 8 + t % 4)),
        Access("gqa_k_load_padded", "K fragment, rows of 16 + 2", 4, "ld", _words(lambda t: t // 4 * 9 + t % 4)),
        Access("gqa_v_store", "two lanes per token, rows of 32", 4, "st", _words(lambda t: t // 2 * 16 + t % 2 * 8)),
        Access(
            "gqa_v_store_padded",
            "two lanes per token, rows of 32 + 2",
            4,
            "st",
            _words(lambda t: t // 2 * 17 + t % 2 * 8),
        ),
        Access("gqa_v_load", "V fragment, rows of 32", 2, "ld", _halves(lambda t: t % 4 * 2 * 32 + t // 4)),
        Access("gqa_v_load_padded", "V fragment, rows of 32 + 2", 2, "ld", _halves(lambda t: t % 4 * 2 * 34 + t // 4)),
    ]


def _halves(element: Callable[[int], int]) -> tuple[int, ...]:
    return tuple(2 * element(lane) for lane in range(32))


def _int4_row_accesses() -> list[Access]:
    """Returns reads of INT4 rows (head_dim 128) as a bulk copy writes them: rows of 68 bytes with 1 group, rows of 80
    bytes with 4 groups.
    """
    return [
        Access("int4_g1_row_per_lane", "lane = token, one word of codes", 4, "ld", _words(lambda t: 17 * t + 1)),
        Access("int4_g1_header", "lane = token, scale and shift", 4, "ld", _words(lambda t: 17 * t)),
        Access("int4_g1_quad", "4 lanes per token, 4 words", 4, "ld", _words(lambda t: t // 4 * 17 + 1 + t % 4)),
        Access("int4_g4_row_per_lane", "lane = token, one word of codes", 4, "ld", _words(lambda t: 20 * t + 4)),
        Access("int4_g4_quad", "4 lanes per token, 4 words", 4, "ld", _words(lambda t: t // 4 * 20 + 4 + t % 4)),
        Access("int4_g4_vec4", "lane = token, 16 bytes of codes", 16, "ld", _words(lambda t: 20 * t + 4)),
        Access("int4_g4_header", "lane = token, 4 scales and shifts", 16, "ld", _words(lambda t: 20 * t)),
    ]


def _probes() -> list[Access]:
    """Returns accesses whose wavefronts show which phase rules the hardware follows."""
    vector: list[tuple[str, str, int, Callable[[int], int]]] = [
        ("linear_4", "consecutive words", 4, lambda t: t),
        ("stride_2", "every second word", 4, lambda t: 2 * t),
        ("stride_32", "all lanes in one bank", 4, lambda t: 32 * t),
        ("stride_33", "a padded column", 4, lambda t: 33 * t),
        ("broadcast_4", "one word", 4, lambda t: 0),
        ("same_bank_pairs", "two words of each of 16 banks", 4, lambda t: t % 2 * 32 + t // 2),
        ("linear_8", "consecutive 8 bytes", 8, lambda t: 2 * t),
        ("stride_8_double", "8 bytes, every second", 8, lambda t: 4 * t),
        ("halves_collide_8", "both half-warps in the same banks, other words", 8, lambda t: t % 16 * 2 + t // 16 * 32),
        ("broadcast_8", "8 bytes, one address", 8, lambda t: 0),
        ("pairs_8", "8 bytes, lanes n and n^1 alike", 8, lambda t: t // 2 * 2),
        ("quads_apart_8", "8 bytes, lanes n and n^2 alike", 8, lambda t: (t // 4 * 2 + t % 2) * 2),
        ("fours_apart_8", "8 bytes, lanes n and n^4 alike: no joining", 8, lambda t: (t // 8 * 4 + t % 4) * 2),
        ("column_8", "8 bytes, one bank pair", 8, lambda t: 32 * t),
        ("linear_16", "consecutive 16 bytes", 16, lambda t: 4 * t),
        ("stride_16_double", "16 bytes, every second", 16, lambda t: 8 * t),
        ("broadcast_16", "16 bytes, one address", 16, lambda t: 0),
        ("pairs_16", "16 bytes, lanes n and n^1 alike", 16, lambda t: t // 2 * 4),
        ("quads_apart_16", "16 bytes, lanes n and n^2 alike", 16, lambda t: (t // 4 * 2 + t % 2) * 4),
        ("column_16", "16 bytes, one bank quad", 16, lambda t: 32 * t),
        ("rows_of_80", "16 bytes, stride 80 bytes", 16, lambda t: 20 * t),
        ("rows_of_144", "16 bytes, stride 144 bytes", 16, lambda t: 36 * t),
    ]
    loads = [Access(f"ld_{n}", note, width, "ld", _words(fn)) for n, note, width, fn in vector]
    distinct = [entry for entry in vector if len(set(_words(entry[3]))) == 32]
    stores = [Access(f"st_{n}", note, width, "st", _words(fn)) for n, note, width, fn in distinct]
    matrices = [
        ("rows_of_16", "matrices of contiguous rows", lambda t: 4 * t),
        ("rows_of_128", "rows of 64 numbers, no swizzle", lambda t: 32 * t),
        ("rows_of_128_swizzled", "rows of 64 numbers, 128-byte swizzle", lambda t: 32 * t + 4 * (t % 8)),
        ("rows_of_144", "rows of 64 numbers + 8", lambda t: 36 * t),
        ("rows_of_64_swizzled", "rows of 32 numbers, 64-byte swizzle", lambda t: 16 * t + 4 * (t // 2 % 4)),
    ]
    ldmatrix = [Access(f"ldmatrix_{n}", note, 16, "ldmatrix", _words(fn)) for n, note, fn in matrices]
    return loads + stores + ldmatrix


ACCESSES: dict[str, Access] = {
    access.name: access for access in [*_gqa_int4_accesses(), *_int4_row_accesses(), *_probes()]
}
"""All named accesses, by name."""
