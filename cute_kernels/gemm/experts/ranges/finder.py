"""Finds the expert of an entry, in every warp, from all experts' offsets in the warp's registers.

Every warp reads the offsets, four experts a lane at a time. It counts entries by a scan over its lanes, and finds an
entry's expert by a vote. No warp makes a table in shared memory for which other warps would wait: time before the first
load of weights makes a launch longer. For the same reason there are few instructions: each is fetched from global
memory when it runs for the first time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.gemm.experts.ranges.config import LANE_EXPERTS, ROUND_EXPERTS


@dataclass(frozen=True)
class Entry:
    """Rows of an expert that are multiplied together; run-time integers, the same in all lanes."""

    expert: Int32
    first_place: Int32
    rows: Int32

    def place(self, row):
        """Returns the place of the entry's ``row``-th row."""
        return self.first_place + row


@dataclass(frozen=True)
class ExpertFinder:
    """Finds entries among all experts. All lanes of a warp hold a finder and call it together.

    Attributes:
        places: a list for each round: the first place of each of the lane's experts, then the end of the last expert's
            places.
        before: lists like ``places``: the number of entries before each of these places.
        total: number of all entries.
        entry_rows: the largest number of rows of an entry, a power of two.
    """

    places: list[list[Int32]]
    before: list[list[Int32]]
    total: Int32
    lane: Int32
    entry_rows: int

    @staticmethod
    def of(places: list[list[Any]], lane, entry_rows: int) -> ExpertFinder:
        """Makes the finder of a warp. places: as `load_places` returns them."""
        before, total = [], Int32(0)
        bits = entry_rows.bit_length() - 1
        for ends in places:
            counts = [(end - begin + (entry_rows - 1)) >> bits for begin, end in pairwise(ends)]
            earlier, all_ = sums_before(sum(counts, Int32(0)), lane)
            reached = [total + earlier]
            for count in counts:
                reached.append(reached[-1] + count)
            before.append(reached)
            total = total + all_
        return ExpertFinder(places, before, cute.arch.make_warp_uniform(total), lane, entry_rows)

    def find(self, number) -> Entry:
        """Returns the ``number``-th entry, if there is one."""
        has, expert, first, end = Int32(0), Int32(0), Int32(0), Int32(0)
        for i, (places, before) in enumerate(zip(self.places, self.before, strict=True)):
            within = (before[0] <= number) & (number < before[-1])
            has = cutlass.select_(within, Int32(1), has)
            chosen = [Int32(i * ROUND_EXPERTS) + self.lane * LANE_EXPERTS, before[0], places[0], places[1]]
            for j in range(1, LANE_EXPERTS):
                behind = number >= before[j]
                later = [chosen[0] + 1, before[j], places[j], places[j + 1]]
                chosen = [cutlass.select_(behind, b, a) for a, b in zip(chosen, later, strict=True)]
            start = chosen[2] + ((number - chosen[1]) << (self.entry_rows.bit_length() - 1))
            expert = cutlass.select_(within, chosen[0], expert)
            first = cutlass.select_(within, start, first)
            end = cutlass.select_(within, chosen[3], end)
        owner = Int32(31) - Int32(cute.arch.clz(Uint32(cute.arch.vote_ballot_sync(has != 0))))
        expert, first, end = (cute.arch.shuffle_sync(value, owner) for value in (expert, first, end))
        rows = cutlass.min(end - first, self.entry_rows)
        return Entry(*(cute.arch.make_warp_uniform(value) for value in (expert, first, rows)))


@cute.jit
def sums_before(count, lane):
    """Sums ``count``, a value of each lane that is not negative. Returns (sum over the lanes before, sum over all
    lanes).

    It takes one vote for each bit of the largest value; most values have one or two bits. A scan by shuffles would take
    five rounds, and its instructions would be fetched from global memory.
    """
    before, total = Int32(0), Int32(0)
    earlier = (Uint32(1) << Uint32(lane)) - Uint32(1)
    rest, shift = Uint32(count), Uint32(0)
    while cute.arch.vote_any_sync(rest != 0):
        lanes = Uint32(cute.arch.vote_ballot_sync((rest & 1) != 0))
        before = before + Int32(Uint32(cute.arch.popc(lanes & earlier)) << shift)
        total = total + Int32(Uint32(cute.arch.popc(lanes)) << shift)
        rest = rest >> 1
        shift = shift + 1
    return before, total


@cute.jit
def load_places(offsets, num_experts, rounds: int, lane):
    """Loads the places of a lane's experts. Returns a list for each round: the first place of each of the lane's
    experts, then the end of the last expert's places. For experts that do not exist, all are 0.

    offsets: address, a multiple of 16 bytes, of int32 [num_experts + 1]. num_experts is a multiple of `LANE_EXPERTS`
    and at most ``rounds`` times `ROUND_EXPERTS`.
    """
    places = []
    for i in cutlass.range_constexpr(rounds):
        first = i * ROUND_EXPERTS + lane * LANE_EXPERTS
        ends = cute.make_rmem_tensor(LANE_EXPERTS + 1, Int32)
        ends.fill(0)
        if first < num_experts:
            address = offsets + Int64(first) * 4
            begins = ptx.load_global_words(address, 0, LANE_EXPERTS, constant=False)
            (end,) = ptx.load_global_words(address, 4 * LANE_EXPERTS, 1, constant=False)
            for j, word in enumerate([*begins, end]):
                ends[j] = Int32(word)
        places.append([ends[j] for j in range(LANE_EXPERTS + 1)])
    return places
