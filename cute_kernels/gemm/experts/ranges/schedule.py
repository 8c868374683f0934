"""Chooses the layout of a grouped product by work ranges: each CTA gets a range of consecutive blocks of output
features, each block as a whole. Plain Python, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.experts.ranges import config as ranges
from cute_kernels.gemm.experts.schedule import usual_entries, usual_rows
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.stream.config import StreamConfig, StreamStore
from cute_kernels.gemm.stream.schedule import MEMORY_BYTES_PER_US
from cute_kernels.runtime.composed import changed
from layouts.weights.hopper import TILE_N

STAGES_BYTES = 104 * 1024  # the most weights in a pipeline: no more loads are in flight than needed
LEAST_STAGES_BYTES = 48 * 1024  # bytes in flight to an SM, and one more stage for each warpgroup
EPILOGUE_WARPS = 2
SPARE_BYTES = 1024  # bytes of shared memory that alignment may take


class RangeShape(NamedTuple):
    """How the warps of a CTA divide a block; fields as in `RangeConfig`."""

    n_tiles: int
    k_warps: int
    chunk_k_blocks: int


SHAPES = (RangeShape(1, 3, 2), RangeShape(2, 3, 1))  # each was the fastest for some product
# For groups of less than a k block, and for E4M3: each, or each MMA, has accumulators of its own, for which three
# warpgroups lack registers.
SMALL_GROUP_SHAPES = (RangeShape(2, 2, 1),)
PARTS = (2, 4)  # parts of K, where shared memory has no room for all of it
# Times of an H200, fitted to measurements (tests/facts/moe.json).
START_US = 7.2  # from the launch to the first weights, and from the last product to the end
BLOCK_US = 0.08  # for a block, beyond the memory's time for it
LEAST_SHARE = 0.5  # of a round's time, however few CTAs have one block more


@dataclass(frozen=True)
class RangeLayout:
    """The layout of a launch of work ranges.

    Attributes:
        config: the compiled variant.
        num_tiles: number of tiles of 64 output features for each expert.
        k_blocks: k blocks of the padded K, or of one part of it.
        num_ctas: number of CTAs, one for each SM. CTAs without a block end at once.
        x_slots: number of entries, 1 or 2, for whose limbs a CTA has room at a time.
        parts: number of parts into which K is cut. Each part's results are stored, and `COMBINE` adds them up. Only
            products of unsorted assignments have more than one part.
    """

    config: ranges.RangeConfig
    num_tiles: int
    k_blocks: int
    num_ctas: int
    x_slots: int
    parts: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments of a launch that the layout decides, by name."""
        return {name: getattr(self, name) for name in ("num_tiles", "k_blocks", "num_ctas", "x_slots")}

    @property
    def num_blocks(self) -> int:
        """Number of blocks of output features that an expert's weight has."""
        return -(-self.num_tiles // self.config.n_tiles)

    @property
    def part_bits(self) -> int:
        """log2 of ``parts``."""
        return self.parts.bit_length() - 1


def has_few_rows(problem: GroupedProblem) -> bool:
    """Returns whether an expert usually has at most `ROWS` rows, and a layout by work ranges exists."""
    return usual_rows(problem) <= ranges.ROWS and any(layouts(problem))


def make_ranges(problem: GroupedProblem) -> RangeLayout:
    """Returns the fastest layout by the model. `has_few_rows` must accept the problem."""
    return _fastest(problem, layouts(problem))


def make_parts(problem: GroupedProblem) -> RangeLayout | None:
    """Returns a layout that cuts K into as few parts as possible, at least two: the fastest of such layouts by the
    model. Products whose limbs over all of K exceed shared memory need such a layout. Returns None if experts usually
    have more rows than `ROWS`, or if no number of parts is possible.
    """
    if usual_rows(problem) > ranges.ROWS:
        return None
    found = (list(layouts(problem, parts)) for parts in PARTS)
    return next((_fastest(problem, some) for some in found if some), None)


def _fastest(problem: GroupedProblem, found: Iterable[RangeLayout]) -> RangeLayout:
    return min(found, key=lambda layout: estimate_us(problem, layout))


def among_assignments(layout: RangeLayout, count: int) -> RangeLayout | None:
    """Returns the layout for ``count`` unsorted assignments. Returns None if there are too many assignments, or if the
    kernel cannot find entries with so many rows."""
    if count > ranges.MOST_ASSIGNMENTS:
        return None
    lanes = next(number for number in ranges.LANE_ASSIGNMENTS if count <= number * WARP_THREADS)
    config = changed(layout.config, lane_assignments=lanes, expert_rounds=1)
    return replace(layout, config=config) if config.can_implement() is None else None


def row_factor(assignments: int) -> int:
    """Returns `AssignedSizes.row_factor` for a product in which ``assignments`` neighbouring assignments share a row of
    x.
    """
    return -(-(1 << ranges.ROW_BITS) // assignments)


def estimate_us(problem: GroupedProblem, layout: RangeLayout) -> float:
    """Returns the microseconds that the model expects, launch included.

    The numbers of blocks of two CTAs differ by at most one. An SM loads weights faster if not all SMs load.
    """
    rows = ranges.entry_rows(problem.format)
    entries = problem.num_experts * usual_entries(problem.places / problem.num_experts, rows)
    rounds, rest = divmod(entries * layout.parts * layout.num_blocks / layout.num_ctas, 1)
    block_bytes = layout.k_blocks * layout.config.k_block_stage_bytes
    block = layout.num_ctas * block_bytes / MEMORY_BYTES_PER_US + BLOCK_US
    return START_US + block * (rounds + max(rest, LEAST_SHARE if rest else 0.0))


def layouts(problem: GroupedProblem, parts: int = 1) -> Iterator[RangeLayout]:
    """Yields all possible layouts in ``parts`` parts of K."""
    small = problem.format.bytes_in_e4m3 or problem.format.group_size < ranges.BLOCK_K
    for shape in SMALL_GROUP_SHAPES if small else SHAPES:
        layout = make_layout(problem, shape, parts)
        if layout is not None and counts(problem, layout) <= ranges.MOST_DIVIDED:
            yield layout


def counts(problem: GroupedProblem, layout: RangeLayout) -> int:
    """Returns an upper bound of dividend times divisor in the calls of `.work.quotient` in a launch with this
    layout."""
    blocks = problem.max_entries(ranges.entry_rows(problem.format)) * layout.parts * layout.num_blocks
    return blocks * max(layout.num_ctas, layout.num_blocks)


def make_layout(problem: GroupedProblem, shape: RangeShape, parts: int = 1) -> RangeLayout | None:
    """Returns the layout of a shape, or None if no pipeline fits. The layout has room for the limbs of two entries, or
    of one entry if two would shorten the pipeline."""
    k_blocks, rest = divmod(problem.k_pad, parts * ranges.BLOCK_K)
    half_last = parts == 1 and rest == ranges.BLOCK_K // 2
    k_blocks += half_last
    if (rest and not half_last) or k_blocks % shape.chunk_k_blocks or problem.num_experts % ranges.LANE_EXPERTS:
        return None
    found = [
        RangeLayout(config, -(-problem.n // TILE_N), k_blocks, problem.num_sms, x_slots, parts)
        for x_slots in (2, 1)
        if (config := config_of(problem, shape, x_slots * k_blocks, half_last))
    ]
    return max(found, key=lambda layout: layout.config.num_stages, default=None)


def config_of(
    problem: GroupedProblem, shape: RangeShape, room_k_blocks: int, half_last: bool = False
) -> ranges.RangeConfig | None:
    """Returns a configuration with room for limbs of ``room_k_blocks`` k blocks. Returns None if the remaining shared
    memory has no room for a pipeline.
    """
    rounds = next((count for count in ranges.ROUNDS if problem.num_experts <= count * ranges.ROUND_EXPERTS), None)
    if rounds is None:
        return None
    config: ranges.RangeConfig = StreamConfig(
        problem.format,
        problem.dtype,
        block_k=ranges.BLOCK_K,
        store=StreamStore(EPILOGUE_WARPS, activation=problem.activation),
        num_stages=shape.k_warps,
        activations=ranges.EntryLimbs(expert_rounds=rounds, half_last=half_last),
        **shape._asdict(),
    )
    config = changed(config, x_bytes=room_k_blocks * config.activations.k_block_bytes(config))
    stage = config.stage_bytes
    room = config.limits.shared_bytes - SPARE_BYTES - (config.smem_bytes - config.stages_bytes)
    stages = min(STAGES_BYTES // stage, room // (stage + 16)) // shape.k_warps * shape.k_warps
    if stages * stage < LEAST_STAGES_BYTES:
        return None
    config = replace(config, num_stages=stages)
    return config if config.can_implement() is None else None
