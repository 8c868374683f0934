"""The second launch, which adds up the parts of cut rows. A thread has four columns of some parts of a head.

The first launch writes the parts. The second launch begins before the first one has ended (programmatic dependent
launch), then waits for its end. When it begins, only a few SMs are idle, and small CTAs would all start on these.
Therefore, if few rows are cut into many parts, CTAs are so large that an SM holds only one. Then all SMs load, and all
parts are loaded at once.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import lane_max, lane_sum
from cute_kernels.device.types import extents
from cute_kernels.mla.combine.output import exists_sink
from cute_kernels.mla.config import MAX_PARTS, PARTIALS, V_HEAD_DIM, CombineConfig
from cute_kernels.mla.elements import of_name
from cute_kernels.mla.mainloops.softmax import LOWEST
from cute_kernels.mla.work import MlaSizes, Results, partial_stats, partial_values

ROW_THREADS = V_HEAD_DIM // 4
LANES = (1, 2, 4, 8, 16)  # bits of a lane's number
LANE_PARTS = MAX_PARTS // WARP_THREADS  # whose statistics a lane has


class CombineKernel:
    """The kernel that adds up parts in their order. So results do not depend on which part was done first."""

    def __init__(self, config: CombineConfig):
        self.config = config
        self.form = PARTIALS[config.partials]
        self.numbers = of_name(config.dtype)

    def launch(self, given, stream):
        """Launches the kernel; ``given`` has the arguments of :data:`cute_kernels.mla.arguments.COMBINE`."""
        batch, q_len, num_heads = extents(given.out)[:3]
        shape = MlaSizes(batch * q_len, q_len, num_heads, num_heads, given.num_parts, Int32(0), Float32(0.0))
        results = Results(ptx.address(given.out), given.lse, given.max_logits, given.sinks, given.partials)
        row_bits = given.row_bits
        rows = Int32(1) << row_bits
        self.kernel(results, shape, row_bits).launch(
            grid=((shape.rows * num_heads + rows - 1) >> row_bits, 1, 1),
            block=(self.config.num_threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, results, shape, row_bits: Int32):
        tid = cute.arch.thread_idx()[0]
        slot = cute.arch.make_warp_uniform(tid // ROW_THREADS)
        # Slots of a group of parts lie side by side: the first ones, a row each, write what all have added up.
        group = slot >> row_bits
        rows = Int32(1) << row_bits
        groups = Int32(self.config.slots) >> row_bits
        query_row = (cute.arch.block_idx()[0] << row_bits) + (slot & (rows - 1))
        exists = cutlass.select_(query_row < shape.rows * shape.num_heads, Int32(1), Int32(0))
        column = tid % ROW_THREADS
        acc = self.add_parts(results, shape, query_row, exists, group, groups, column)
        if const_expr(self.config.slots > 1):
            self.add_groups(acc[0], groups, rows, slot, column)
        if (group == 0) & (exists != 0):
            self.write(results, shape, query_row, column, *acc)

    @cute.jit
    def add_parts(self, results, shape, query_row, exists, group, groups, column):
        """Adds up a thread's four columns of the parts ``group``, ``group + groups`` and so on. Returns (fp32 [4]
        accumulators, the row's maximum, the row's total)."""
        stats = partial_stats(results, shape, query_row, 0, self.form)
        values = partial_values(results, shape, query_row, 0, self.form) + column * (4 * self.form.value_bytes)
        acc = cute.make_rmem_tensor(4, Float32)
        acc.fill(0.0)
        # A thread's four values of a part are as many words as a value has bytes.
        words = cute.make_rmem_tensor(self.form.value_bytes * self.config.batch, cutlass.Uint32)
        cute.arch.griddepcontrol_wait()
        self.load_values(words, values, group, groups, shape.num_parts * exists)
        # The compiler would have the values wait until it is known what they are worth.
        cute.arch.sync_warp()
        known = self.load_stats(stats, shape.num_parts * exists, column)
        weights, maximum, total = weigh(known)
        first = group
        while first < shape.num_parts:
            for i in cutlass.range_constexpr(self.config.batch):
                part = first + i * groups
                weight = weight_of(weights, part)
                found = self.values(words, i)
                for j in cutlass.range_constexpr(4):
                    # A part without keys has written no values.
                    value = cutlass.select_(weight > 0.0, found[j], Float32(0.0))
                    acc[j] = ptx.fma(value, weight, acc[j])
            first = first + self.config.batch * groups
            self.load_values(words, values, first, groups, shape.num_parts * exists)
        return acc, maximum, total

    def load_stats(self, stats, num_parts, column) -> list[tuple[Any, Any, Any]]:
        """Loads the statistics of a lane's two parts, ``lane`` and 32 + ``lane``. Returns (maximum, total, factor) for
        each part. The factor belongs to the values in the thread's half of the columns. A missing part has maximum
        LOWEST, so weight 0.
        """
        found = []
        for i in range(LANE_PARTS):
            part = cute.arch.lane_idx() + i * WARP_THREADS
            exists = cutlass.select_(part < num_parts, Int32(1), Int32(0))
            size = self.form.stats_bytes
            words = numbers.load_global_if(exists, stats + part * size, 0, size // 4, constant=False)
            maximum, total, *units = (word.bitcast(Float32) for word in words)
            unit = cutlass.select_(column < ROW_THREADS // 2, *units) if units else Float32(1.0)
            found.append((cutlass.select_(exists != 0, maximum, Float32(LOWEST)), total, unit))
        return found

    def load_values(self, words, values, first, groups, num_parts) -> None:
        """Starts loading a thread's four columns of a batch of parts into ``words``. The parts are ``first``, ``first +
        groups`` and so on."""
        for i in range(self.config.batch):
            part = first + i * groups
            exists = cutlass.select_(part < num_parts, Int32(1), Int32(0))
            place, count = values + Int64(part) * self.form.row_bytes, self.form.value_bytes
            for j, word in enumerate(numbers.load_global_if(exists, place, 0, count, constant=False)):
                words[count * i + j] = word

    def values(self, words, i: int) -> list[Any]:
        """Returns a thread's four values of the ``i``-th part of a batch, in fp32, not yet multiplied by their
        factor."""
        if self.form.value_bytes == 4:
            return [words[4 * i + j].bitcast(Float32) for j in range(4)]
        pairs = [words[2 * i + j] for j in range(2)]
        return [half(pair) for pair in pairs for half in (ptx.half2_low_to_float, ptx.half2_high_to_float)]

    @cute.jit
    def add_groups(self, acc, groups, rows, slot, column):
        """Adds up the accumulators of all thread groups of a row, through shared memory. The threads of the row's first
        group get the sums.
        """
        smem = cutlass.utils.SmemAllocator()
        memory = smem.allocate(self.config.slots * (V_HEAD_DIM * 4), byte_alignment=16).toint()
        place = memory + slot * (V_HEAD_DIM * 4) + column * 16
        ptx.store_shared(place, 0, [acc[i] for i in range(4)])
        cute.arch.sync_threads()
        if slot < rows:
            for group in cutlass.range(1, groups, 1, unroll=1):
                others = ptx.load_shared_vector(place + group * rows * (V_HEAD_DIM * 4), 0, 4)
                for i in cutlass.range_constexpr(4):
                    acc[i] = acc[i] + others[i].bitcast(Float32)

    @cute.jit
    def write(self, results, shape, query_row, column, acc, maximum, total):
        """Writes a thread's four columns. The row's first thread also writes the log-sum-exp, and the largest score if
        ``results`` has an address for it."""
        denominator = total
        if exists_sink(results):
            head = query_row % shape.num_heads
            sink = ptx.load_global_words(results.sinks + Int64(head) * 4, 0, 1)[0].bitcast(Float32)
            denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -maximum))
        words, lse, top = self.outcome(acc, maximum, total, denominator)
        ptx.store_global(results.out + Int64(query_row) * (V_HEAD_DIM * 2) + column * 8, words)
        if column == 0:
            ptx.store_global(results.lse + Int64(query_row) * 4, [lse])
            if results.max_logits != 0:
                ptx.store_global(results.max_logits + Int64(query_row) * 4, [top])

    def outcome(self, acc, maximum, total, denominator) -> tuple[list[Any], Any, Any]:
        """Returns the result of :func:`outcome_of` for four columns."""
        return outcome_of(acc, 4, maximum, total, denominator, self.numbers)


def outcome_of(acc, count: int, maximum, total, denominator, elements) -> tuple[list[Any], Any, Any]:
    """Returns (``count`` normalised columns as words, log-sum-exp, largest score). denominator: the total plus the
    sink's weight."""
    exists = total != 0.0
    lse = cutlass.select_(exists, (maximum + ptx.log2(total)) * ptx.LN_2, Float32(math.inf))
    top = cutlass.select_(exists, maximum * ptx.LN_2, Float32(-math.inf))
    factor = cutlass.select_(exists, ptx.reciprocal(denominator), Float32(0.0))
    return [elements.pack(acc[i] * factor, acc[i + 1] * factor) for i in range(0, count, 2)], lse, top


def weigh(known) -> tuple[list[Any], Any, Any]:
    """Returns (a factor for each of a lane's parts, the row's maximum, the row's total). The caller multiplies a part's
    values by the part's factor before it adds them up. known: the result of `CombineKernel.load_stats`.
    """
    maximum = known[0][0]
    for other, _, _ in known[1:]:
        maximum = ptx.fmax(maximum, other)
    maximum = lane_max(maximum, LANES)
    weights, total = [], Float32(0.0)
    for part_maximum, part_total, unit in known:
        weight = ptx.exp2(part_maximum - maximum)
        weights.append(cutlass.select_(part_total > 0.0, weight * unit, Float32(0.0)))
        total = ptx.fma(weight, part_total, total)
    return weights, maximum, lane_sum(total, LANES)


def weight_of(weights, part):
    """Returns the weight of ``part``, which must be the same in all lanes, from the lane that holds it."""
    own = weights[0]
    for i, weight in enumerate(weights[1:], 1):
        own = cutlass.select_(part >= i * WARP_THREADS, weight, own)
    return cute.arch.shuffle_sync(own, part % WARP_THREADS)
