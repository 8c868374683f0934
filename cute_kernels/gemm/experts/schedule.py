"""Lays out a grouped product by upper bounds alone: which rows go where is known on the device only.

A launch with so many entries (:mod:`.work`) is cut like a dense product with the blocks of all entries, so what is
proved for :class:`cute_kernels.gemm.stream.schedule.StreamSchedule` holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.stream.config import X_PAD, StreamConfig
from cute_kernels.gemm.stream.schedule import IN_FLIGHT_BYTES, StreamCut, candidate_configs, in_flight
from layouts.weights.hopper import TILE_N

EXPERTS_PER_LANE = 16  # of the warp that counts entries
MAX_EXPERTS = EXPERTS_PER_LANE * WARP_THREADS
TABLE_ENTRIES = 64  # of a CTA, in shared memory
TABLE_ENTRY_BYTES = 16  # expert, first row, rows, and a word that is not used
TABLE_BYTES = TABLE_ENTRIES * TABLE_ENTRY_BYTES
MOST_DIVIDED = 2**31 - 1  # a count times what it is divided by
MAX_WORKSPACE_WORDS = 1 << 24  # of partial results of slices; more entries are computed by further launches
CAPACITY = 8  # rows of an entry, at most
MOST_DEVIATIONS = 8  # beyond the mean, of an expert's rows: with room for routing that is far from even
# Partial results cost as long as an SM takes for so many bytes of codes: within them blocks stay whole.
SLACK_BYTES = 24 * 1024


@dataclass(frozen=True)
class GroupedSchedule(StreamCut):
    """How the launches of one product are laid out: each as `StreamCut` says, its tiles those of one expert, its groups
    those of all blocks.

    Attributes:
        entry_rows: rows that an entry may have, a power of two: what a set of activations has room for.
        x_slots: sets of activations that a CTA has room for, 1 or 2.
        max_entries: the most entries that one launch computes.
        num_launches: how many launches compute as many entries as there can be.
        slack: k blocks that a group may have beyond its share so that blocks stay whole; -1: they are cut.
    """

    entry_rows: int
    x_slots: int = 1
    max_entries: int = 1
    num_launches: int = 1
    slack: int = -1

    @property
    def max_parts(self) -> int:
        """The most partial results of a block. Blocks have most where k blocks are fewest, with one entry."""
        base = max(1, self.num_blocks * self.slice_k_blocks // self.num_groups)
        return self.num_slices * min(self.num_groups, (self.slice_k_blocks - 1) // base + 2)

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of a launch that it decides, by name, except its first entry."""
        names = ("num_tiles", "k_blocks", "num_slices", "num_groups", "x_slots", "max_entries", "max_parts", "slack")
        return {"entry_shift": self.entry_rows.bit_length() - 1, **{name: getattr(self, name) for name in names}}

    @property
    def workspace_words(self) -> int:
        """fp32 words of partial results: a part for each CTA; with slices parts for every block."""
        parts = self.num_groups if self.num_slices == 1 else self.max_entries * self.num_blocks * self.max_parts
        return parts * self.entry_rows * self.config.block_rows


@lru_cache(maxsize=4096)
def make_schedule(problem: GroupedProblem) -> GroupedSchedule:
    """The schedule of a product.

    Raises ValueError if K is too long for the shared memory of all SMs together.
    """
    options = list(schedules(problem))
    if not options:
        raise ValueError(f"k: got {problem.k}, want rows of activations that fit on {problem.num_sms} SMs")
    # Each further slice is a partial result of every output; the second slot spares a wait at the end of an entry.
    return min(options, key=lambda one: (one.num_slices, -one.x_slots, one.config.x_bytes))


def usual_rows(problem: GroupedProblem) -> float:
    """Rows that few experts exceed, if rows are distributed at random: mean and two standard deviations."""
    mean = problem.places / problem.num_experts
    return min(problem.places, mean + 2 * math.sqrt(mean))


def usual_entries(mean: float, capacity: int) -> float:
    """Entries of up to ``capacity`` rows that an expert takes on average; its rows are Poisson-distributed."""
    chance, total = math.exp(-mean), 0.0
    for rows in range(1, math.ceil(mean + 8 * math.sqrt(mean)) + 2):
        chance *= mean / rows
        total += chance * -(-rows // capacity)
    return total


def most_rows(problem: GroupedProblem) -> int:
    """Rows that hardly any expert exceeds, if rows are distributed at random, as a power of two.

    Where those are fewer than the columns of an MMA, the room of the other rows goes to a longer pipeline.
    """
    mean = problem.places / problem.num_experts
    rows = math.ceil(min(problem.places, mean + MOST_DEVIATIONS * math.sqrt(mean)))
    return 1 << (rows - 1).bit_length()


def schedules(problem: GroupedProblem) -> Iterator[GroupedSchedule]:
    """All schedules that are possible."""
    rows = min(CAPACITY, most_rows(problem))
    for candidate in candidate_configs(problem.dense(CAPACITY)):
        config = with_table(candidate)
        if in_flight(config) < IN_FLIGHT_BYTES:
            continue
        k_blocks = problem.k_pad // config.block_k
        for num_slices in range(1, min(k_blocks, problem.num_sms) + 1):
            slice_k_blocks = -(-k_blocks // num_slices)
            if -(-k_blocks // slice_k_blocks) != num_slices:
                continue  # the last slice would be empty
            slot_bytes = rows * (2 * slice_k_blocks * config.block_k + X_PAD)
            if slot_bytes <= config.x_bytes:
                slack = SLACK_BYTES // (config.n_tiles * config.k_block_bytes) if num_slices == 1 else -1
                schedule = GroupedSchedule(config, -(-problem.n // TILE_N), k_blocks, num_slices, 1, rows, slack=slack)
                slots = 2 if 2 * slot_bytes <= config.x_bytes and may_take_turns(schedule) else 1
                if most_entries(replace(schedule, num_groups=problem.num_sms)):  # else an expert of 60 GB
                    yield with_launches(replace(schedule, x_slots=slots), problem)


def with_table(config: StreamConfig) -> StreamConfig:
    """The configuration with room for a table of the entries of a CTA."""
    while config.smem_bytes + TABLE_BYTES > config.limits.shared_bytes:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def may_take_turns(schedule: GroupedSchedule) -> bool:
    """Whether two slots for activations can be filled in turn without waiting until one is free.

    The entry before the last has been multiplied when the weights of the last one, between the two, are more than the
    pipeline holds: a stage is filled when its last contents have been used.
    """
    shortest = schedule.k_blocks - (schedule.num_slices - 1) * schedule.slice_k_blocks
    chunks = schedule.num_blocks * -(-shortest // schedule.config.chunk_k_blocks)
    return chunks >= schedule.config.num_stages


def most_entries(schedule: GroupedSchedule) -> int:
    """Entries of a launch whose k blocks and blocks are counted in numbers that `work.quotient`
    takes."""
    divisor = max(schedule.num_groups, schedule.slice_k_blocks)
    of_entry = schedule.num_blocks * max(schedule.slice_k_blocks * divisor, schedule.num_blocks)
    return (MOST_DIVIDED - divisor**2) // of_entry


def with_launches(schedule: GroupedSchedule, problem: GroupedProblem) -> GroupedSchedule:
    """The schedule with as many groups as there are SMs for, and as many launches as entries take."""
    bound = problem.max_entries(schedule.entry_rows)
    block_k_blocks = schedule.num_blocks * schedule.slice_k_blocks
    schedule = replace(schedule, num_groups=min(problem.num_sms // schedule.num_slices, bound * block_k_blocks))
    # A run of 1 / num_groups of all k blocks touches at most 2 entries more than its share.
    entries = min(bound, (TABLE_ENTRIES - 3) * schedule.num_groups, most_entries(schedule))
    if schedule.num_slices > 1:
        of_entry = replace(schedule, max_entries=1).workspace_words
        entries = min(entries, max(1, MAX_WORKSPACE_WORDS // of_entry))
    return replace(schedule, max_entries=entries, num_launches=-(-bound // entries))
