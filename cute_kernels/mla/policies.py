"""The policies that a kernel of 64 heads is composed of, as values. There are no GPU types here.

A load says how tiles are filled. :class:`WholeTiles`, :class:`SplitTiles` and :class:`CooperativeTiles` say which
loads, mainloops and ways to combine go together: other combinations cannot be written down. Each load owns its fields,
its part of the kernel's name, the registers of the warpgroups beside it and the arrivals on its barriers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from cute_kernels.device.cuda import WARP_THREADS

PRODUCER_WARPS = (4, 8)  # that a CTA may have: one or two on every scheduler of an SM
FENCES = ("writer", "reader")
MAX_PREFETCH = 16
WHOLE = 16  # pieces of a chunk that has all of a lane's
MAINLOOPS = ("plain", "stepped")  # of whole tiles: `mainloops.serial`, `mainloops.stepped`

# Registers of a thread: with the scores, with the right half of the output, of producers.
Registers = tuple[int, int, int]
OWN_REGISTERS: Registers = (208, 160, 128)
CROSSOVER_REGISTERS: Registers = (208, 160, 136)
EIGHT_WARPS_REGISTERS: Registers = (200, 168, 72)
TMA_REGISTERS: Registers = (256, 184, 64)
SPLIT_REGISTERS: Registers = (240, 176, 88)


@dataclass(frozen=True)
class Decode:
    """FP8 tokens that a CTA gathers and decodes by itself.

    scales: "fp32" or "ue8m0" take any scale a cache may hold; "power_of_2" only powers of 2 up to 2**7.
    fence: who makes stores of a tile visible to wgmma: producers ("writer") before they say so, or consumers
        ("reader") after they have heard.
    prefetch: how many blocks ahead tokens are brought into L2, 0 for not at all.
    chunk: after how many pieces of 16 bytes at the latest the loads that take their place are issued; WHOLE: when the
        compiler wants.
    warps: producer warps.
    """

    scales: str = "fp32"
    fence: str = "writer"
    prefetch: int = 0
    chunk: int = WHOLE
    warps: int = PRODUCER_WARPS[0]
    kind: str = field(default="decode", init=False)
    pair: ClassVar[bool] = False
    fp8: ClassVar[bool] = True

    @property
    def registers(self) -> Registers:
        return OWN_REGISTERS if self.warps == PRODUCER_WARPS[0] else EIGHT_WARPS_REGISTERS

    @property
    def full_arrivals(self) -> int:
        """The number of arrivals on the barrier of a full tile."""
        return self.warps

    def reason(self) -> str | None:
        """Returns why the fields do not go together, or None."""
        if self.fence not in FENCES:
            return f"fence is {self.fence!r}; want one of {FENCES}"
        if self.warps not in PRODUCER_WARPS:
            return f"warps is {self.warps}; want one of {PRODUCER_WARPS}"
        return _prefetch_reason(self.prefetch) or _chunk_reason(self.chunk)


@dataclass(frozen=True)
class Crossover:
    """FP8 tokens of which two CTAs with different heads decode half each; they send them to each other. Whole tiles.

    scales, prefetch, chunk: as in :class:`Decode`.
    """

    scales: str = "fp32"
    prefetch: int = 0
    chunk: int = WHOLE
    kind: str = field(default="crossover", init=False)
    fence: ClassVar[str] = "writer"
    warps: ClassVar[int] = PRODUCER_WARPS[0]
    pair: ClassVar[bool] = True
    fp8: ClassVar[bool] = True
    registers: ClassVar[Registers] = CROSSOVER_REGISTERS
    full_arrivals: ClassVar[int] = warps

    def reason(self) -> str | None:
        """Returns why the fields do not go together, or None."""
        return _prefetch_reason(self.prefetch) or _chunk_reason(self.chunk)


@dataclass(frozen=True)
class SplitCrossover:
    """The load of :class:`Crossover` in tiles of two parts. scales: as in :class:`Decode`."""

    scales: str = "fp32"
    kind: str = field(default="split_crossover", init=False)
    eager: ClassVar[bool] = True  # tiles are what is waited for
    prefetch: ClassVar[int] = 0
    chunk: ClassVar[int] = WHOLE
    fence: ClassVar[str] = "writer"
    warps: ClassVar[int] = PRODUCER_WARPS[0]
    pair: ClassVar[bool] = True
    fp8: ClassVar[bool] = True
    registers: ClassVar[Registers] = SPLIT_REGISTERS
    full_arrivals: ClassVar[int] = warps

    def reason(self) -> str | None:
        """None."""
        return None


@dataclass(frozen=True)
class Copies:
    """16-bit tokens by asynchronous copies, which no producer waits for: consumers make them visible."""

    kind: str = field(default="copies", init=False)
    scales: ClassVar[str] = "fp32"
    prefetch: ClassVar[int] = 0
    chunk: ClassVar[int] = WHOLE
    fence: ClassVar[str] = "reader"
    warps: ClassVar[int] = PRODUCER_WARPS[0]
    pair: ClassVar[bool] = False
    fp8: ClassVar[bool] = False
    registers: ClassVar[Registers] = OWN_REGISTERS
    full_arrivals: ClassVar[int] = warps * (WARP_THREADS + 1)

    def reason(self) -> str | None:
        """None."""
        return None


@dataclass(frozen=True)
class TmaTiles:
    """16-bit tokens that a tensor map loads, of which every 64 are contiguous in a page.

    pair: whether two CTAs with different heads ask for half each, and every copy goes to both (TMA multicast).
    prefetch: whether the next block is brought into L2 ahead of its turn, 0 or 1.
    eager: whether the right half of a block is added as soon as the left one is, which gives its part of a tile back
        early: where tiles are the bottleneck, not the tensor cores.
    """

    pair: bool = False
    prefetch: int = 0
    eager: bool = False
    kind: str = field(default="tma_tiles", init=False)
    scales: ClassVar[str] = "fp32"
    chunk: ClassVar[int] = WHOLE
    fence: ClassVar[str] = "writer"
    warps: ClassVar[int] = PRODUCER_WARPS[0]
    fp8: ClassVar[bool] = False
    registers: ClassVar[Registers] = TMA_REGISTERS
    full_arrivals: ClassVar[int] = 1

    def reason(self) -> str | None:
        """Returns why the fields do not go together, or None."""
        return None if self.prefetch in (0, 1) else f"prefetch is {self.prefetch}; TMA tiles want 0 or 1"


Load = Decode | Crossover | SplitCrossover | Copies | TmaTiles


@dataclass(frozen=True)
class WholeTiles:
    """Tiles that are loaded and released as one. mainloop: "plain": weights, then products with values; "stepped": 16
    tokens at a time, which takes four producer warps. Partial results: stream-K or a second launch, at run time."""

    load: Decode | Crossover | Copies
    mainloop: str = MAINLOOPS[0]
    eager: ClassVar[bool] = False
    cooperative: ClassVar[bool] = False

    def reason(self) -> str | None:
        """Returns why the choices do not go together, or None."""
        if self.mainloop not in MAINLOOPS:
            return f"mainloop is {self.mainloop!r}; want one of {MAINLOOPS}"
        if self.mainloop == "stepped" and self.load.warps != PRODUCER_WARPS[0]:
            return f"mainloop is {self.mainloop!r}; with {self.load.warps} producer warps products want 'plain'"
        return self.load.reason()


@dataclass(frozen=True)
class SplitTiles:
    """Tiles in two parts, by delayed PV: the right half of the values is delayed by a block. Partial results are
    combined as for `WholeTiles`."""

    load: SplitCrossover | TmaTiles
    mainloop: ClassVar[str] = "delayed_pv"
    cooperative: ClassVar[bool] = False

    @property
    def eager(self) -> bool:
        return self.load.eager

    def reason(self) -> str | None:
        """Returns why the choices do not go together, or None."""
        return self.load.reason()


@dataclass(frozen=True)
class CooperativeTiles:
    """The CTAs of a launch are all resident at once, have a part of a row each, and combine the parts themselves. They
    load whole tiles by crossover, stepped."""

    load: Crossover
    kind: str = field(default="cooperative", init=False)
    mainloop: ClassVar[str] = "stepped"
    eager: ClassVar[bool] = False
    cooperative: ClassVar[bool] = True

    def reason(self) -> str | None:
        """Returns why the choices do not go together, or None."""
        return self.load.reason()


Tiles = WholeTiles | SplitTiles | CooperativeTiles


def _prefetch_reason(prefetch: int) -> str | None:
    if prefetch == 1 or not 0 <= prefetch <= MAX_PREFETCH:
        return f"prefetch is {prefetch}; want 0 or 2 to {MAX_PREFETCH} blocks"
    return None


def _chunk_reason(chunk: int) -> str | None:
    return None if 1 <= chunk <= WHOLE else f"chunk is {chunk}; want 1 to {WHOLE} pieces"
