"""All objects of this package that have names. Each entry can be described, verified and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from layouts import algebra
from layouts.algebra import ComposedLayout, Layout, Swizzle
from layouts.banks import report
from layouts.bitlinear import BitMap
from layouts.decode import CONVERSIONS, Conversion
from layouts.draw import Figure, figures
from layouts.fragments import FRAGMENTS, Fragment
from layouts.kv import Fp8E4M3, Fp8E5M2, Int4Row, Int8, KvRow, MlaDense, MlaFp8, MlaModel1, ZeroPointRow
from layouts.patterns import ACCESSES, Access
from layouts.proofs import Proof, prove
from layouts.transform import Transform
from layouts.weights import fastertransformer, hopper, operand
from layouts.weights.formats import WEIGHT_TILES


@dataclass(frozen=True)
class Entry:
    """One named object.

    Args:
        name: the object's unique name.
        kind: the heading under which the entry is listed.
        subject: the object itself.
        summary: a description in one line.
        verify: a function that proves the object's claims, or raises `ProofError`.
        figure: a function that draws the object.
    """

    name: str
    kind: str
    subject: object
    summary: str
    verify: Callable[[], tuple[Proof, ...]]
    figure: Callable[[], Figure]


def entries() -> dict[str, Entry]:
    """Returns all entries by name, grouped by kind."""
    found = [
        *_swizzles(),
        *_transforms(),
        *_conversions(),
        *_fragments(),
        *_accesses(),
        *_weight_tiles(),
        *_kv_formats(),
    ]
    return {entry.name: entry for entry in found}


# --------------------------------------------------------------------------------------------------------- swizzles

SWIZZLES = {"swizzle_32b": (1, 3, 3), "swizzle_64b": (2, 3, 3), "swizzle_128b": (3, 3, 3)}
"""Shared-memory swizzles of TMA and wgmma for 16-bit elements, in element offsets."""


def _swizzles() -> Iterator[Entry]:
    for name, (bits, base, shift) in SWIZZLES.items():
        swizzle, row = Swizzle(bits, base, shift), (1 << bits) * 8
        yield Entry(
            name,
            "swizzles",
            swizzle,
            f"{algebra.notation(swizzle)}, rows of {row * 2} bytes of 16-bit elements",
            partial(_verify_swizzle, swizzle, row),
            partial(figures.value_grid, _swizzled_rows(swizzle, row), name),
        )


def _swizzled_rows(swizzle: Swizzle, row: int) -> ComposedLayout:
    return algebra.compose(swizzle, Layout((8, row), (row, 1)))


def _verify_swizzle(swizzle: Swizzle, row: int) -> tuple[Proof, ...]:
    width = swizzle.base + swizzle.shift + swizzle.bits
    matrix = BitMap.from_swizzle(swizzle, width)
    involution = prove(
        matrix @ matrix == BitMap.identity(width), "applied twice it is the identity", "matrix", 1 << width
    )
    table = algebra.offsets(_swizzled_rows(swizzle, row)).reshape(row, 8).T * 2
    conflicts = sum(_ldmatrix_conflicts(table[:, column].tolist()) for column in range(0, row, 8))
    plain = sum(_ldmatrix_conflicts([2 * row * i + 2 * column for i in range(8)]) for column in range(0, row, 8))
    claim = f"ldmatrix of 8 rows takes no conflict in any column ({plain} conflicts without the swizzle)"
    return involution, prove(conflicts == 0, claim, "exhaustive", row // 8)


def _ldmatrix_conflicts(rows: list[int]) -> int:
    return report(rows, 16, "ldmatrix").conflicts


# ------------------------------------------------------------------------------------------------------- transforms

_PROVED, _DRAWN = (128, 16), {16: (64, 8), 8: (128, 8)}
"""(K, N) that weight transforms are proved on, and drawn on by activation width: the smallest whole tile."""

_LDMATRIX_ROW = 16
_ARCHITECTURES = {16: (70, 75, 80, 86, 89, 90, 100, 120), 8: (89, 90, 100, 120)}


def _transforms() -> Iterator[Entry]:
    for bits in (8, 4):
        for number, step in enumerate(fastertransformer.steps(*_PROVED, bits, 80)):
            label, name = step.name, f"fastertransformer_w{bits}_{step.name.split()[1]}"
            drawn = fastertransformer.steps(*_DRAWN[16], bits, 80)[number].renamed(name)
            yield _transform_entry(step.renamed(name), drawn, f"step {label} of {bits}-bit weights")
    for bits, activation_bits in ((8, 16), (4, 16), (4, 8)):
        for arch in _ARCHITECTURES[activation_bits]:
            recipe = " > ".join(fastertransformer.RECIPES[fastertransformer.ARCHITECTURES[arch]])
            fp8 = " with FP8 activations" if activation_bits == 8 else ""
            yield _transform_entry(
                fastertransformer.transform(*_PROVED, bits, arch, activation_bits),
                fastertransformer.transform(*_DRAWN[activation_bits], bits, arch, activation_bits),
                f"{bits}-bit weights{fp8} for sm{arch}: {recipe}",
                _row_permutation_proofs(bits, arch, activation_bits),
                line=_LDMATRIX_ROW * 8 // bits,
            )
    for name, conversion in CONVERSIONS.items():
        blob = hopper.transform(hopper.TILE_N, hopper.tile_k(conversion.bits), conversion.bits, name)
        proof = (partial(hopper.prove_thread_load, conversion.bits, name),)
        line = hopper.LOAD_BYTES * 8 // conversion.bits
        yield _transform_entry(blob, blob, f"Hopper weight blob in the order of {name}", proof, line=line, lines=16)


def _row_permutation_proofs(bits: int, arch: int, activation_bits: int) -> tuple[Callable[[], Proof], ...]:
    """Returns the proofs about step S1: that step S1 is right if ldmatrix loads for mma.sync, or that Volta does not
    need step S1. There are no proofs for other architectures.
    """
    recipe = fastertransformer.ARCHITECTURES[arch]
    if recipe == "interleaved":
        return (partial(operand.prove_row_permutation, bits, activation_bits),)
    return (operand.prove_volta_needs_none,) if recipe == "volta" else ()


def _transform_entry(
    proved: Transform,
    drawn: Transform,
    summary: str,
    further: tuple[Callable[[], Proof], ...] = (),
    line: int | None = None,
    lines: int | None = None,
) -> Entry:
    return Entry(
        proved.name,
        "weight transforms",
        proved,
        summary,
        lambda: (*proved.verify(), *(proof() for proof in further)),
        partial(figures.permutation, drawn, line, lines),
    )


# ----------------------------------------------------------------------------- conversions, fragments, banks, KV rows


def _conversions() -> Iterator[Entry]:
    for name, conversion in CONVERSIONS.items():
        yield _plain(
            name, "fast conversions", conversion.describe().split(": ", 1)[1], conversion, figures.register_bits
        )


def _fragments() -> Iterator[Entry]:
    for name, fragment in FRAGMENTS.items():
        summary = algebra.notation(fragment.layout)
        yield _plain(name, "fragments", summary, fragment, figures.fragment_map)


def _plain(
    name: str,
    kind: str,
    summary: str,
    subject: Conversion | Fragment | KvRow,
    draw: Callable[..., Figure],
) -> Entry:
    return Entry(name, kind, subject, summary, subject.verify, partial(draw, subject))


PUBLISHED_BANKS = {
    "gqa_p_load": 4,
    "gqa_p_load_swizzled": 16,
    "gqa_p_store_swizzled": 16,
    "gqa_k_store": 4,
    "gqa_k_store_padded": 32,
    "gqa_k_load": 16,
    "gqa_k_load_padded": 29,
}
"""Banks in parallel that the INT4 grouped-query attention note reports for its accesses."""


def _accesses() -> Iterator[Entry]:
    for name, access in ACCESSES.items():
        found = access.report()
        summary = f"{access.note}; {access.kind} {access.width} B: {found.wavefronts} wavefronts"
        yield Entry(
            name,
            "shared-memory accesses",
            access,
            summary,
            partial(_verify_access, access),
            partial(figures.bank_map, access),
        )


def _verify_access(access: Access) -> tuple[Proof, ...]:
    found = access.report()
    addresses = [address for address in found.addresses if address is not None]
    words = {word for address in addresses for word in range(address // 4, (address + access.width - 1) // 4 + 1)}
    served = {word for phase in found.phases for words_of_bank in phase.words.values() for word in words_of_bank}
    enough = served == words and found.wavefronts >= max(found.minimum, len(found.phases))
    proofs = [prove(enough, f"every word is served, in {found.wavefronts} wavefronts", "exhaustive", len(addresses))]
    if access.name in PUBLISHED_BANKS:
        banks = PUBLISHED_BANKS[access.name]
        claim = f"{banks} banks in parallel, as published"
        proofs.append(prove(found.banks == (banks,), claim, "exhaustive", len(addresses)))
    return tuple(proofs)


def _weight_tiles() -> Iterator[Entry]:
    for tile in WEIGHT_TILES:
        yield Entry(tile.name, "weight tiles", tile, tile.describe(), tile.verify, partial(figures.scale_map, tile))


KV_FORMATS: tuple[KvRow, ...] = (
    *(Int4Row(128, groups) for groups in (1, 2, 4, 8)),
    *(Int8(128, granularity) for granularity in ("tensor", "channel", "head", "token", "token_head")),
    Int8(128, "group", 4),
    *(Fp8E4M3(128, granularity) for granularity in ("tensor", "head", "token_head")),
    Fp8E5M2(128),
    ZeroPointRow(128),
    MlaFp8(),
    MlaModel1(),
    MlaDense("bf16"),
    MlaDense("fp16"),
)
"""One of each KV row format, head_dim 128 where it is free."""


def _kv_formats() -> Iterator[Entry]:
    for fmt in KV_FORMATS:
        summary = f"{fmt.head_dim} elements in {fmt.row_bytes} bytes"
        yield _plain(fmt.name, "KV rows", summary, fmt, figures.byte_map)
