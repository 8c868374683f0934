"""Finds the expert of an entry among unsorted assignments. Every warp of a CTA makes the same search.

Sorting assignments by expert would take another launch. For the few assignments of a decoding step, a search in every
warp is faster. Each lane has one or two assignments, and lanes with the same expert find each other.

Lane l's ``i``-th assignment is assignment 32 i + l. A set of assignments is a list of words: bit l of the ``i``-th word
stands for assignment 32 i + l. The place of an assignment is its index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS

ALL_LANES = 0xFFFFFFFF
NO_ID = 0xFFFFFFFF  # as a word: larger than any expert's


@dataclass(frozen=True)
class AssignedEntry:
    """Rows of an expert that are multiplied together; run-time integers, the same in all lanes.

    words: the expert's assignments, from the entry's first assignment on, as a set of bits.
    """

    expert: Int32
    words: Sequence[Uint32]
    rows: Int32

    def place(self, row):
        """Returns the place of the entry's ``row``-th row: the index of an assignment."""
        place, before = nth_bit(self.words[0], row), count_bits(self.words[:1])
        for i in range(1, len(self.words)):
            behind = row >= before
            later = i * WARP_THREADS + nth_bit(self.words[i], cutlass.select_(behind, row - before, Int32(0)))
            place = cutlass.select_(behind, later, place)
            before = before + count_bits(self.words[i : i + 1])
        return place


@dataclass(frozen=True)
class AssignmentFinder:
    """Finds entries among all assignments. All lanes of a warp hold a finder and call it together.

    The sequences below have one element for each assignment of a lane.

    Attributes:
        experts: the assignment's expert.
        peers: all assignments of that expert, as words of bits.
        begins: whether the assignment is the first of an entry.
        numbers: the index of the entry that the assignment begins. Undefined for assignments that begin no entry.
        total: number of all entries.
        entry_rows: the largest number of rows of an entry, a power of two.
    """

    experts: Sequence[Int32]
    peers: Sequence[Sequence[Uint32]]
    begins: Sequence[Int32]
    numbers: Sequence[Int32]
    total: Int32
    entry_rows: int

    @staticmethod
    def of(experts: Sequence[Any], num_experts, lane, entry_rows: int) -> AssignmentFinder:
        """Makes a warp's finder. experts: the expert of each of the lane's assignments, from `load_expert`."""
        earlier = (Uint32(1) << Uint32(lane)) - Uint32(1)
        peers = peers_of(experts, num_experts)
        ranks = [count_bits([*words[:i], words[i] & earlier]) for i, words in enumerate(peers)]
        begins = [
            (expert < num_experts) & ((rank & (entry_rows - 1)) == 0)
            for expert, rank in zip(experts, ranks, strict=True)
        ]
        first = [Uint32(cute.arch.vote_ballot_sync(one)) for one in begins]
        numbers = [count_bits([*first[:i], word & earlier]) for i, word in enumerate(first)]
        total = cute.arch.make_warp_uniform(count_bits(first))
        return AssignmentFinder(experts, peers, begins, numbers, total, entry_rows)

    def find(self, number) -> AssignedEntry:
        """Returns the ``number``-th entry, if there is one."""
        found = [
            Uint32(cute.arch.vote_ballot_sync(begins & (own == number)))
            for begins, own in zip(self.begins, self.numbers, strict=True)
        ]
        # Of the words one has the lane that begins the entry; assignments before it are of earlier entries.
        owner, expert, peers, rest = found[0], self.experts[0], self.peers[0], [Uint32(0) - found[0]]
        rest += [Uint32(ALL_LANES)] * (len(found) - 1)
        for i in range(1, len(found)):
            here = found[i] != 0
            begun = [Uint32(0)] * i + [Uint32(0) - found[i]] + [Uint32(ALL_LANES)] * (len(found) - 1 - i)
            owner = cutlass.select_(here, found[i], owner)
            expert = cutlass.select_(here, self.experts[i], expert)
            peers = [cutlass.select_(here, a, b) for a, b in zip(self.peers[i], peers, strict=True)]
            rest = [cutlass.select_(here, a, b) for a, b in zip(begun, rest, strict=True)]
        lane, uniform = Int32(31) - Int32(cute.arch.clz(Uint32(owner))), cute.arch.make_warp_uniform
        words = [Uint32(cute.arch.shuffle_sync(a, lane)) & Uint32(b) for a, b in zip(peers, rest, strict=True)]
        rows = cutlass.min(count_bits(words), self.entry_rows)
        expert = cute.arch.shuffle_sync(expert, lane)
        return AssignedEntry(uniform(expert), [uniform(word) for word in words], uniform(rows))


def peers_of(experts: Sequence[Any], num_experts) -> list[list[Any]]:
    """Returns, for each of the lane's one or two assignments, which of the warp's assignments have the same expert. The
    result for one assignment is a list of words, as many as a lane has assignments: bit l of word i stands for lane l's
    ``i``-th assignment.

    experts: the experts' ids of the lane's assignments. num_experts: the number of experts, above all ids.
    """
    if len(experts) == 1:
        return [[Uint32(cute.arch.match_sync(ALL_LANES, experts[0]))]]
    first, second = experts
    words = peers_by_votes(first, second, num_experts)
    return [list(words[:2]), list(words[2:])]


@cute.jit
def peers_by_votes(first, second, num_experts):
    """Returns the result of `peers_of` for two assignments a lane, by a vote on each bit of the expert ids. match.sync
    compares only one value of each lane, so it cannot compare two.
    """
    words = [Uint32(ALL_LANES) for _ in range(4)]
    low, high, low_of_second, high_of_second = words
    left, own, other = Uint32(num_experts), Uint32(first), Uint32(second)
    while left != 0:
        lows = Uint32(cute.arch.vote_ballot_sync((own & 1) != 0))
        highs = Uint32(cute.arch.vote_ballot_sync((other & 1) != 0))
        # All bits are set where the lane's own bit is not: then those without it are its peers.
        turned, turned_other = (own & 1) - 1, (other & 1) - 1
        low = low & (lows ^ turned)
        high = high & (highs ^ turned)
        low_of_second = low_of_second & (lows ^ turned_other)
        high_of_second = high_of_second & (highs ^ turned_other)
        left, own, other = left >> 1, own >> 1, other >> 1
    return low, high, low_of_second, high_of_second


def count_bits(words: Sequence[Any]):
    """Returns the number of set bits in all ``words`` together."""
    return sum((Int32(cute.arch.popc(word)) for word in words), Int32(0))


@cute.jit
def nth_bit(bits, number):
    """Returns the position of the ``number``-th set bit, counted from the lowest set bit."""
    rest = Uint32(bits)
    for _ in cutlass.range(number, unroll=1):
        rest = rest & (rest - 1)
    return Int32(31) - Int32(cute.arch.clz(rest & (Uint32(0) - rest)))


def load_expert(ids, number, count, id_words, num_experts):
    """Returns the expert of an assignment, or num_experts if the assignment or the expert does not exist.

    ids: address of ``count`` ids of 32 or 64 bits, ``id_words`` words each.
    """
    low, high = load_id(ids, number, count, id_words)
    return expert_of(low, high, num_experts)


@cute.jit
def load_id(ids, number, count, id_words):
    """Loads the lower and the upper word of an assignment's id. If the assignment does not exist, returns the words of
    an id that no expert has."""
    low, high = Uint32(NO_ID), Uint32(0)
    if number < count:
        address = ids + Int64(number * id_words) * 4
        (low,) = ptx.load_global_words(address, 0, 1, constant=False)
        if id_words > 1:
            (high,) = ptx.load_global_words(address, 4, 1, constant=False)
    return low, high


def expert_of(low, high, num_experts):
    """Returns the expert whose id has these two words, or num_experts if no expert has this id."""
    known = (low < Uint32(num_experts)) & (high == 0)
    return cutlass.select_(known, Int32(low), Int32(num_experts))
