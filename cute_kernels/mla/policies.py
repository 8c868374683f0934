"""The policies of the kernel for 64 heads, as values. There are no GPU types here.

A load fills tiles. :class:`WholeTiles`, :class:`SplitTiles` and :class:`CooperativeTiles` say which loads, mainloops
and combines can be combined; only these combinations can be expressed. A load also says how many registers each kind of
warpgroup has, and how many arrivals mark a tile as full.
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
    """The load of FP8 tokens that a CTA gathers and decodes by itself.

    Attributes:
        scales: "fp32" or "ue8m0": any scale that a cache may hold is supported. "power_of_2": only powers of 2 up to
            2**7.
        fence: which warps make stores of a tile visible to wgmma: producers ("writer") before they arrive, or consumers
            ("reader") after they have waited.
        prefetch: how many blocks ahead tokens are prefetched into L2; 0: not at all.
        chunk: the largest number of 16-byte pieces that are decoded before new loads into their registers are issued;
            WHOLE: the compiler decides.
        warps: number of producer warps.
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
        """Returns why a field is refused, or None."""
        if self.fence not in FENCES:
            return f"fence is {self.fence!r}; want one of {FENCES}"
        if self.warps not in PRODUCER_WARPS:
            return f"warps is {self.warps}; want one of {PRODUCER_WARPS}"
        return _prefetch_reason(self.prefetch) or _chunk_reason(self.chunk)


@dataclass(frozen=True)
class Crossover:
    """The load of FP8 tokens by a pair of CTAs with different heads. Each CTA decodes half of the tokens and sends them
    to the other CTA. Tiles are whole.

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
        """Returns why a field is refused, or None."""
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
        """Returns None: no field is refused."""
        return None


@dataclass(frozen=True)
class Copies:
    """The load of 16-bit tokens by asynchronous copies. No producer waits for the copies: consumers issue the fence."""

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
        """Returns None: no field is refused."""
        return None


@dataclass(frozen=True)
class TmaTiles:
    """The load of 16-bit tokens by TMA, for pages in which every 64 tokens are contiguous.

    Attributes:
        pair: whether two CTAs with different heads load half of the tokens each, and every load goes to both (TMA
            multicast).
        prefetch: how many blocks ahead tokens are prefetched into L2, 0 or 1.
        eager: whether the right half of a block is added as soon as the left half is. The right part of a tile is then
            released earlier. This helps if loads, and not the tensor cores, are the bottleneck.
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
        """Returns why a field is refused, or None."""
        return None if self.prefetch in (0, 1) else f"prefetch is {self.prefetch}; TMA tiles want 0 or 1"


Load = Decode | Crossover | SplitCrossover | Copies | TmaTiles


@dataclass(frozen=True)
class WholeTiles:
    """The policy of tiles that are loaded and released whole. Partial results are combined by stream-K or a second
    launch, chosen at run time.

    mainloop: "plain" computes all weights of a tile, then P V. "stepped" computes the weights of 16 tokens at a time,
    and requires four producer warps.
    """

    load: Decode | Crossover | Copies
    mainloop: str = MAINLOOPS[0]
    eager: ClassVar[bool] = False
    cooperative: ClassVar[bool] = False

    def reason(self) -> str | None:
        """Returns why a choice is refused, or None."""
        if self.mainloop not in MAINLOOPS:
            return f"mainloop is {self.mainloop!r}; want one of {MAINLOOPS}"
        if self.mainloop == "stepped" and self.load.warps != PRODUCER_WARPS[0]:
            return f"mainloop is {self.mainloop!r}; with {self.load.warps} producer warps products want 'plain'"
        return self.load.reason()


@dataclass(frozen=True)
class SplitTiles:
    """The policy of tiles in two parts. The mainloop "delayed_pv" adds the right half of the values a block later.
    Partial results are combined as in `WholeTiles`."""

    load: SplitCrossover | TmaTiles
    mainloop: ClassVar[str] = "delayed_pv"
    cooperative: ClassVar[bool] = False

    @property
    def eager(self) -> bool:
        return self.load.eager

    def reason(self) -> str | None:
        """Returns why a choice is refused, or None."""
        return self.load.reason()


@dataclass(frozen=True)
class CooperativeTiles:
    """The policy of a cooperative combine. All CTAs of a launch are resident, each has one part of a row, and the CTAs
    combine the parts. The CTAs load whole tiles by crossover, for the mainloop "stepped"."""

    load: Crossover
    kind: str = field(default="cooperative", init=False)
    mainloop: ClassVar[str] = "stepped"
    eager: ClassVar[bool] = False
    cooperative: ClassVar[bool] = True

    def reason(self) -> str | None:
        """Returns why a choice is refused, or None."""
        return self.load.reason()


Tiles = WholeTiles | SplitTiles | CooperativeTiles


def _prefetch_reason(prefetch: int) -> str | None:
    if prefetch == 1 or not 0 <= prefetch <= MAX_PREFETCH:
        return f"prefetch is {prefetch}; want 0 or 2 to {MAX_PREFETCH} blocks"
    return None


def _chunk_reason(chunk: int) -> str | None:
    return None if 1 <= chunk <= WHOLE else f"chunk is {chunk}; want 1 to {WHOLE} pieces"
