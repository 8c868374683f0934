"""Shared-memory bank model: how many wavefronts one warp access takes, and why.

Shared memory has 32 banks of 4 bytes; byte address a lies in bank ``a // 4 % 32``. In one *wavefront*, every bank
delivers one 4-byte word to all lanes that ask for that word. An access is cut into *phases* of at most 128 bytes:

=====================  =====================================================================
access                 phases
=====================  =====================================================================
1, 2, 4 B per lane     one: all 32 lanes
8 B per lane           two: half-warps
16 B per lane          four: quarter-warps
ldmatrix, stmatrix     one per 8x8 matrix: the 8 row addresses of 16 B that 8 lanes supply
=====================  =====================================================================

The wavefronts of a phase are the largest number of distinct words that it needs from one bank. Two phases of a *load*
of 8 or 16 B join into one if every active lane n asks for the same address as lane ``n ^ 1``, or every active lane n
for the same address as lane ``n ^ 2``. Each word is then returned to two lanes at once (stated by NVIDIA for compute
capability 7.x; see `joins_phases`). ``st.async`` is modelled as a store of the same width into the destination's banks.

The counts are those of ``l1tex__data_pipe_lsu_wavefronts_mem_shared``; ``conflicts`` is the excess over one
wavefront per phase, as in ``l1tex__data_bank_conflicts_pipe_lsu``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

NUM_BANKS = 32
BANK_BYTES = 4
WARP_LANES = 32
WIDTHS = (1, 2, 4, 8, 16)
KINDS = ("ld", "st", "st.async", "ldmatrix", "stmatrix")
MATRIX_ROWS = 8
MATRIX_ROW_BYTES = 16

Addresses = Sequence[int | None] | Callable[[int], int | None]


@dataclass(frozen=True)
class Phase:
    """The lanes that read or write in one phase, and the words that they need of each bank.

    Args:
        lanes: active lanes of the phase.
        words: maps each bank to the distinct indices of 4-byte words that lanes need from it, ascending.
    """

    lanes: tuple[int, ...]
    words: dict[int, tuple[int, ...]]

    @property
    def wavefronts(self) -> int:
        """The largest number of distinct words that the phase needs from one bank; 0 if no lane is active."""
        return max((len(words) for words in self.words.values()), default=0)


@dataclass(frozen=True)
class BankReport:
    """The phases of one warp access, which decide how much it costs.

    Args:
        kind: one of `KINDS`.
        width: number of bytes per address.
        addresses: byte address per lane, None for an inactive lane.
        phases: the access's phases in order, except those without active lanes.
    """

    kind: str
    width: int
    addresses: tuple[int | None, ...]
    phases: tuple[Phase, ...]

    @cached_property
    def wavefronts(self) -> int:
        """Cost of the access in wavefronts (shared-memory cycles)."""
        return sum(phase.wavefronts for phase in self.phases)

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond one per phase."""
        return self.wavefronts - len(self.phases)

    @property
    def minimum(self) -> int:
        """The wavefronts that the access would need if its distinct bytes were spread over all banks."""
        distinct = {word for phase in self.phases for words in phase.words.values() for word in words}
        return -(-len(distinct) // NUM_BANKS)

    @property
    def banks(self) -> tuple[int, ...]:
        """For each phase, how many of the 32 banks it uses."""
        return tuple(len(phase.words) for phase in self.phases)

    def describe(self) -> str:
        """Describes the access as text: its cost, then a line for each phase with its lanes, banks and wavefronts."""
        head = f"{self.kind} {self.width} B: {self.wavefronts} wavefronts, {self.conflicts} conflicts"
        lines = [
            f"  lanes {phase.lanes[0]}-{phase.lanes[-1]}: {len(phase.words)} of {NUM_BANKS} banks, "
            f"{phase.wavefronts} wavefronts"
            for phase in self.phases
        ]
        return "\n".join([head, *lines])


def wavefronts(addresses: Addresses, width: int = 4, kind: str = "ld") -> int:
    """Returns the number of wavefronts of one warp access.

    Args:
        addresses: byte address per lane (None: inactive), or a function of the lane. For ldmatrix and stmatrix the 8,
            16 or 32 row addresses in lane order.
        width: bytes per lane, one of `WIDTHS`; 16 for ldmatrix and stmatrix.
        kind: one of `KINDS`.

    Raises:
        ValueError: unknown kind or width, wrong number of addresses, or an address not aligned to the width.
    """
    return report(addresses, width, kind).wavefronts


def report(addresses: Addresses, width: int = 4, kind: str = "ld") -> BankReport:
    """Returns the phases of one warp access, by which `wavefronts` counts; arguments and errors are those of
    `wavefronts`."""
    lanes = _checked(addresses, width, kind)
    phases = []
    for group in _phase_lanes(lanes, width, kind):
        active = tuple(lane for lane in group if lanes[lane] is not None)
        if active:
            phases.append(Phase(active, _words_by_bank([lanes[lane] for lane in active], width)))
    return BankReport(kind, width, lanes, tuple(phases))


def joins_phases(addresses: Sequence[int | None]) -> bool:
    """Returns whether lanes share addresses in pairs: every lane n with lane ``n ^ 1``, or every lane n with lane ``n ^
    2``. Pairs with an inactive lane are ignored.
    """

    def paired(mask: int) -> bool:
        for lane, address in enumerate(addresses):
            other = addresses[lane ^ mask] if lane ^ mask < len(addresses) else None
            if address is not None and other is not None and other != address:
                return False
        return True

    return paired(1) or paired(2)


def _phase_lanes(addresses: tuple[int | None, ...], width: int, kind: str) -> list[range]:
    if kind in ("ldmatrix", "stmatrix"):
        size = MATRIX_ROWS
    else:
        size = min(WARP_LANES, NUM_BANKS * BANK_BYTES // width)
        if kind == "ld" and width > BANK_BYTES and joins_phases(addresses):
            size *= 2
    return [range(start, min(start + size, len(addresses))) for start in range(0, len(addresses), size)]


def _words_by_bank(addresses: Sequence[int | None], width: int) -> dict[int, tuple[int, ...]]:
    words = {
        word
        for address in addresses
        if address is not None
        for word in range(address // BANK_BYTES, (address + width - 1) // BANK_BYTES + 1)
    }
    by_bank: dict[int, list[int]] = {}
    for word in sorted(words):
        by_bank.setdefault(word % NUM_BANKS, []).append(word)
    return {bank: tuple(found) for bank, found in sorted(by_bank.items())}


def _checked(addresses: Addresses, width: int, kind: str) -> tuple[int | None, ...]:
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; want one of {KINDS}")
    if width not in WIDTHS:
        raise ValueError(f"width is {width} bytes; want one of {WIDTHS}")
    found = [addresses(lane) for lane in range(WARP_LANES)] if callable(addresses) else list(addresses)
    lanes = tuple(None if address is None else int(address) for address in found)
    if kind in ("ldmatrix", "stmatrix"):
        if width != MATRIX_ROW_BYTES or len(lanes) not in (8, 16, 32) or None in lanes:
            raise ValueError(
                f"{kind} got {len(lanes)} addresses of {width} B; want 8, 16 or 32 row addresses of 16 B, none inactive"
            )
    elif not 0 < len(lanes) <= WARP_LANES:
        raise ValueError(f"addresses has {len(lanes)} lanes; want 1 to {WARP_LANES}")
    for lane, address in enumerate(lanes):
        if address is not None and (address < 0 or address % width):
            raise ValueError(f"lane {lane} has byte address {address}; want a non-negative multiple of width {width}")
    return lanes
