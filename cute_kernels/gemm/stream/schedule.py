"""Chooses the configuration of a product, and how its weights are cut among CTAs. Plain Python, no GPU.

A memory-bound product reads every byte of its weights once, at the memory's rate. A schedule adds to this time: some
SMs have more weights than others, every group of CTAs reads activations again, and CTAs exchange partial results. The
model adds up these times. Its rates are those of an H200 (docs/design/weight_only_linear.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from cute_kernels.formats.weights import SHIPPED_GROUP_SIZES, integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.stream.config import X_PAD, StreamConfig, StreamStore
from cute_kernels.gemm.wgmma.costs import CLOCKS_PER_US
from cute_kernels.runtime.composed import changed
from layouts.weights.hopper import TILE_N

FEW_ROWS = 8  # columns of mma.m16n8k16: beyond, warpgroup MMAs decode each weight once for all rows
LAUNCH_US = 8.0  # from the launch until memory answers, and from the last products to the end: not in `estimate_us`
MORE_TO_DECODE_US = 0.8  # added for zero points, or groups of less than 128 inputs: an H200, 0 to 3 on two days
MEMORY_BYTES_PER_US = 4.6e6
L2_BYTES_PER_US = 5.5e6
COMBINE_US = 0.4  # to add parts that lie in memory
SLICES_US = 0.5  # to exchange parts that arrive at the same time: a store, a load that sees it,
EACH_SLICE_US = 0.7  # and waiting for the slowest
ACTIVATIONS_SHARE = 1.0  # share of the time to load activations from L2 that is not hidden
STAGE_BYTES = 16 * 1024
# Shared memory that a CTA's activations may take; few sizes, since each makes another kernel.
X_BYTES = (30 * 1024, 80 * 1024, 132 * 1024)
IN_FLIGHT_BYTES = 32 * 1024  # an SM's share of the memory's rate times its latency
MAX_STAGES = 6
FEW_STAGES = 4  # enough for the memory's latency


@dataclass(frozen=True)
class StreamSchedule:
    """How one launch is laid out: weights are cut among ``num_groups`` groups of ``num_slices`` CTAs.

    Attributes:
        config: the compiled variant.
        num_tiles: number of tiles of 64 output features.
        k_blocks: number of k blocks of the padded K.
        num_slices: number of slices of K, one for each CTA of a group.
        num_groups: number of groups of CTAs. A slice's k blocks are numbered through all blocks of output features.
            Each group takes a range of these k blocks; the lengths of ranges differ by at most one.
    """

    config: StreamConfig
    num_tiles: int
    k_blocks: int
    num_slices: int
    num_groups: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks of tiles."""
        return -(-self.num_tiles // self.config.n_tiles)

    @property
    def slice_k_blocks(self) -> int:
        """Number of a slice's k blocks; the last slice may have fewer."""
        return -(-self.k_blocks // self.num_slices)

    @property
    def total(self) -> int:
        """The k blocks of one slice of K, times the number of blocks of output features. They form one sequence, of
        which each group of CTAs takes a range.
        """
        return self.num_blocks * self.slice_k_blocks

    @property
    def max_parts(self) -> int:
        """The largest number of partial results that a block can have."""
        base = self.total // self.num_groups
        return self.num_slices * min(self.num_groups, (self.slice_k_blocks - 1) // base + 2)

    def group_range(self, group: int) -> tuple[int, int]:
        """Returns the range (first, end) of k blocks of a group of CTAs. Indices of k blocks run through all blocks of
        output features.
        """
        base, rest = divmod(self.total, self.num_groups)
        first = group * base + min(group, rest)
        return first, first + base + (group < rest)

    @property
    def sizes(self) -> dict[str, int]:
        """The launch arguments that the schedule decides, by name."""
        names = ("num_tiles", "k_blocks", "num_slices", "num_groups", "max_parts")
        return {name: getattr(self, name) for name in names}

    def workspace_words(self, m: int) -> int:
        """Returns the number of fp32 words that partial results of ``m`` rows take in the workspace. It is 0 if every
        CTA computes its blocks over all of K."""
        whole = all(self.group_range(group)[0] % self.slice_k_blocks == 0 for group in range(self.num_groups))
        if self.num_slices == 1 and whole:
            return 0
        return self.num_blocks * self.max_parts * m * self.config.block_rows


@lru_cache(maxsize=4096)
def make_schedule(problem: LinearProblem) -> StreamSchedule:
    """Returns the fastest schedule by the model.

    Raises ValueError if K is too long for the shared memory of all SMs together.
    """
    options = [schedule for config in candidate_configs(problem) for schedule in schedules(problem, config)]
    if not options:
        raise ValueError(
            f"k: got {problem.k}, want {problem.m} rows of activations to fit in {X_BYTES[-1]} bytes on each of "
            f"{problem.num_sms} SMs"
        )
    return min(options, key=lambda schedule: estimate_us(problem, schedule))


def schedules(problem: LinearProblem, config: StreamConfig) -> Iterator[StreamSchedule]:
    """Yields one schedule for each number of slices of K, if the activations of a slice fit in shared memory."""
    k_blocks = problem.k_pad // config.block_k
    for num_slices in range(1, min(k_blocks, problem.num_sms) + 1):
        slice_k_blocks = -(-k_blocks // num_slices)
        if -(-k_blocks // slice_k_blocks) != num_slices:
            continue  # the last slice would be empty
        if x_bytes_of(problem, slice_k_blocks * config.block_k) > config.x_bytes:
            continue
        schedule = StreamSchedule(config, problem.num_tiles, k_blocks, num_slices, 1)
        yield replace(schedule, num_groups=min(problem.num_sms // num_slices, schedule.total))


def x_bytes_of(problem: LinearProblem, slice_k: int) -> int:
    """Returns the bytes of shared memory that the activations of a slice take."""
    return problem.m * (2 * slice_k + X_PAD)


def launch_us(problem: LinearProblem) -> float:
    """Returns the microseconds of launch overhead, which `estimate_us` does not include."""
    form = problem.format
    more = form.bits == 4 and (form.has_zeros or 0 < form.group_size < 128)
    return LAUNCH_US + (MORE_TO_DECODE_US if more else 0.0)


def estimate_us(problem: LinearProblem, schedule: StreamSchedule) -> float:
    """Returns the microseconds that the model expects, without the launch itself."""
    config = schedule.config
    k_block_bytes = config.k_block_stage_bytes
    ctas = schedule.num_slices * schedule.num_groups
    total_bytes = schedule.num_blocks * schedule.k_blocks * k_block_bytes
    most = -(-schedule.total // schedule.num_groups)  # k blocks of a CTA
    loading = max(total_bytes, most * k_block_bytes * problem.num_sms) / MEMORY_BYTES_PER_US
    decoding = most * config.n_tiles * config.block_k / 128 * config.format.stream_clocks / CLOCKS_PER_US
    streaming = max(loading, decoding)
    activations = ctas * x_bytes_of(problem, schedule.slice_k_blocks * config.block_k) / L2_BYTES_PER_US
    combining = COMBINE_US if schedule.workspace_words(problem.m) else 0.0
    if schedule.num_slices > 1:
        parts = 4 * problem.m * problem.num_tiles * TILE_N * schedule.num_slices
        combining = SLICES_US + EACH_SLICE_US * (schedule.num_slices - 1) + 2 * parts / L2_BYTES_PER_US
    return streaming + ACTIVATIONS_SHARE * activations + combining


# -- configurations ---------------------------------------------------------------------------------------------------


def candidate_configs(problem: LinearProblem) -> list[StreamConfig]:
    """Returns the configurations worth considering: at most one for each number in `X_BYTES`, the bytes of shared
    memory for activations."""
    base = base_config(problem)
    # Three warps along K keep pace with the memory better, where shared memory holds a pipeline of their longer stages.
    more = replace(base, k_warps=3) if base.n_tiles == 2 and base.block_k <= 128 else base
    most = most_x_bytes(base)
    configs = [with_stages(base if x_bytes == X_BYTES[-1] else more, min(x_bytes, most)) for x_bytes in X_BYTES]
    return [config for config in configs if config.can_implement() is None and in_flight(config) >= IN_FLIGHT_BYTES]


def in_flight(config: StreamConfig) -> int:
    """Returns the bytes of codes that are in flight while a stage is consumed."""
    return (config.num_stages - 1) * config.chunk_k_blocks * config.n_tiles * config.k_block_bytes


def base_config(problem: LinearProblem) -> StreamConfig:
    """Returns a configuration whose format, dtype, activation, k block and tiles per warp are those for the problem;
    the other fields are preliminary.

    A warp with two tiles uses each result of ldmatrix twice, and waits half as often.
    """
    block_k = 256 if problem.format.group_size == 256 else 128
    return StreamConfig(
        problem.format,
        problem.dtype,
        store=StreamStore(activation=problem.activation),
        n_tiles=1 if problem.format.bits == 8 or problem.num_tiles == 1 else 2,
        block_k=block_k if problem.k_pad % block_k == 0 else 64,
    )


def most_x_bytes(base: StreamConfig) -> int:
    """Returns the largest number of bytes, in whole KiB, that activations may take. The rest of shared memory then has
    room for a pipeline that loads IN_FLIGHT_BYTES ahead.
    """
    two = replace(with_stages(base, 0), num_stages=2)
    least = replace(two, num_stages=max(2, 1 + -(-IN_FLIGHT_BYTES // in_flight(two))))
    return (least.limits.shared_bytes - least.smem_bytes) // 1024 * 1024


def with_stages(base: StreamConfig, x_bytes: int) -> StreamConfig:
    """Returns the configuration with ``x_bytes`` of shared memory for activations. It has as many stages of about
    STAGE_BYTES as fit, at most MAX_STAGES."""
    chunk = max(base.k_warps, STAGE_BYTES // (base.n_tiles * base.k_block_bytes))
    chunk_k_blocks = chunk // base.k_warps * base.k_warps
    config = changed(base, chunk_k_blocks=chunk_k_blocks, num_stages=2, x_bytes=x_bytes)
    room = (config.limits.shared_bytes - config.smem_bytes) // (config.stage_bytes + 16)
    return replace(config, num_stages=min(FEW_STAGES if x_bytes == X_BYTES[0] else MAX_STAGES, 2 + room))


def shipped_configs() -> list[StreamConfig]:
    """Returns the configurations that ship. They are for integers of 4 and 8 bits, with and without zero points, and
    for 1 and 8 rows of x.

    bf16 has configurations for each of `SHIPPED_GROUP_SIZES` and without groups, fp16 for groups of 128 and without
    groups. For bf16 and groups of 128 without zero points, the configurations for layers with more features ship, too.
    """
    configs: dict[StreamConfig, None] = {}
    formats = [("bf16", group_size) for group_size in (0, *SHIPPED_GROUP_SIZES)] + [("fp16", 0), ("fp16", 128)]
    for bits, (dtype, group_size), zero_point, m in product((4, 8), formats, (False, True), (1, 8)):
        problem = LinearProblem(m, 8192, 8192, 8192, integers(bits, group_size, zero_point), dtype)
        configs[make_schedule(problem).config] = None
        if (dtype, group_size, zero_point) == ("bf16", 128, False):
            configs[make_schedule(replace(problem, n=57344)).config] = None
    return list(configs)
