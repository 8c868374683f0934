"""Which expert a row of work is of, among assignments as a router leaves them: for layers of no more than a warp's.

Sorting assignments by expert is a launch of its own, which takes longer than a decoding step's few assignments would
take in every warp: each lane has one, and lanes with the same expert find each other. Places are the assignments' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx

ALL_LANES = 0xFFFFFFFF


@dataclass(frozen=True)
class AssignedEntry:
    """Rows of an expert that are multiplied together; run-time integers, the same in all lanes.

    bits: a bit for each assignment of the expert, from the entry's first one on.
    """

    expert: Any
    bits: Any
    rows: Any

    def place(self, row):
        """Of its ``row``-th row: the number of the assignment."""
        return nth_bit(self.bits, row)


@dataclass(frozen=True)
class AssignmentFinder:
    """The entries of all assignments, by the first of each; all lanes of a warp have one, and ask together.

    Attributes:
        expert: of the lane's assignment.
        peers: a bit for each assignment of that expert.
        begins: whether the lane's is the first of an entry,
        number: and of which; others have any number.
        total: of all entries.
        entry_rows: that an entry may have, a power of two.
    """

    expert: Any
    peers: Any
    begins: Any
    number: Any
    total: Any
    lane: Any
    entry_rows: int

    @staticmethod
    def of(expert, num_experts, lane, entry_rows: int) -> AssignmentFinder:
        """expert: of the lane's assignment, `load_expert`'s."""
        peers = Uint32(cute.arch.match_sync(ALL_LANES, expert))
        earlier = (Uint32(1) << Uint32(lane)) - Uint32(1)
        rank = cute.arch.popc(peers & earlier)
        begins = (expert < num_experts) & ((rank & (entry_rows - 1)) == 0)
        first = Uint32(cute.arch.vote_ballot_sync(begins))
        return AssignmentFinder(
            expert=expert,
            peers=peers,
            begins=begins,
            number=Int32(cute.arch.popc(first & earlier)),
            total=cute.arch.make_warp_uniform(Int32(cute.arch.popc(first))),
            lane=lane,
            entry_rows=entry_rows,
        )

    def find(self, number) -> AssignedEntry:
        """The ``number``-th entry, if there is one."""
        first = Uint32(cute.arch.vote_ballot_sync(self.begins & (self.number == number)))
        owner = Int32(31) - Int32(cute.arch.clz(first))
        expert = cute.arch.shuffle_sync(self.expert, owner)
        # Those before it in the entry's expert are in earlier lanes.
        bits = Uint32(cute.arch.shuffle_sync(self.peers, owner)) & (Uint32(0) - first)
        rows = cutlass.min(Int32(cute.arch.popc(bits)), self.entry_rows)
        uniform = cute.arch.make_warp_uniform
        return AssignedEntry(uniform(expert), uniform(bits), uniform(rows))


@cute.jit
def nth_bit(bits, number):
    """The place of the ``number``-th bit that is set, from the lowest on."""
    rest = Uint32(bits)
    for _ in cutlass.range(number, unroll=1):
        rest = rest & (rest - 1)
    return Int32(31) - Int32(cute.arch.clz(rest & (Uint32(0) - rest)))


@cute.jit
def load_expert(ids, count, id_words, num_experts, lane):
    """The expert of the lane's assignment, num_experts if there is none or its id is none of an expert.

    ids: address of ``count`` ids of 32 or 64 bits, ``id_words`` words; at most `MOST_ASSIGNMENTS`, a lane each.
    """
    expert = Int32(num_experts)
    address = ids + Int64(lane * id_words) * 4
    if lane < count:
        (low,) = ptx.load_global_words(address, 0, 1, constant=False)
        high = Uint32(0)
        if id_words > 1:
            (high,) = ptx.load_global_words(address, 4, 1, constant=False)
        expert = cutlass.select_((low < Uint32(num_experts)) & (high == 0), Int32(low), expert)
    return expert
