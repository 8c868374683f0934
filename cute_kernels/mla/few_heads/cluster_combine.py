"""The cluster (DSMEM) reduction: the CTAs of a cluster have the parts of a row and add them up without a second launch.

Every CTA of the cluster attends to a part of the row's tokens, and adds up 512 / cluster columns of the row's output.
Each CTA publishes its heads' maxima and totals to the cluster, and multiplies its accumulators by its part's weight in
the row. It stores each product in the shared memory of the CTA that adds up the product's column. Every CTA adds in the
order of the parts, so results do not depend on which part ends first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.device import numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.mla.config import V_HEAD_DIM
from cute_kernels.mla.few_heads.config import VALUE_WARPS, WARP_COLUMNS, FewHeadsConfig

# Bytes between rows of accumulators: 16 lanes' 8 bytes of four heads 2t apart then lie in different banks.
ROW_PADDING = 16


def cluster_sync() -> None:
    """Waits for all threads of the cluster; all their earlier stores are then visible to the whole cluster."""
    cute.arch.sync_warp()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


class ClusterCombine:
    """The cluster reduction of one configuration; see the module's docstring."""

    def __init__(self, config: FewHeadsConfig):
        self.config = config
        self.columns = V_HEAD_DIM // config.cluster  # of the output, that a CTA adds up
        self.pitch = 4 * self.columns + ROW_PADDING
        self.part_bytes = config.heads * self.pitch
        assert config.cluster * self.part_bytes <= config.ring_bytes

    # -- maxima and totals --------------------------------------------------------------------------------------------

    def store_statistics(self, memory, head, maximum, total) -> None:
        """Publishes a head's maximum (as an exponent of 2) and total to the cluster, for use after
        :func:`cluster_sync`."""
        ptx.store_shared(memory.statistics + head * 8, 0, [maximum, total])

    def whole(self, memory, head) -> tuple[Any, Any]:
        """Returns (maximum, total) of a head over all parts."""
        parts = []
        for part in range(self.config.cluster):
            place = numbers.address_in(memory.statistics + head * 8, Int32(part))
            parts.append([word.bitcast(Float32) for word in numbers.load_in_cluster(place, 2)])
        maximum = parts[0][0]
        for other, _ in parts[1:]:
            maximum = ptx.fmax(maximum, other)
        total = Float32(0.0)
        for other, part_total in parts:
            total = ptx.fma(ptx.exp2(other - maximum), part_total, total)
        return maximum, total

    # -- accumulators --------------------------------------------------------------------------------------------------

    def destination(self, memory, warp, lane, part) -> Any:
        """Returns the address for a lane's partial sums: a cluster address in the CTA that adds up the warp's columns.

        With g = lane // 4 and t = lane % 4, it is the address of columns 2g and 2g + 1 of the warp's first chunk, for
        head 2t. part: index of this CTA's part; each part has rows of its own in the receiving CTA's memory.
        """
        owner = warp * self.config.cluster // VALUE_WARPS
        column = warp * WARP_COLUMNS - owner * self.columns + lane // 4 * 2
        place = memory.ring + part * self.part_bytes + lane % 4 * (2 * self.pitch) + column * 4
        return numbers.address_in(place, owner)

    def send(self, place, block: int, chunk: int, c: int, pair: Sequence[Float32]) -> None:
        """Stores two columns of head 8 block + 2t + c in the cluster. place: the result of :meth:`destination`."""
        numbers.store_in_cluster(place, (8 * block + c) * self.pitch + 64 * chunk, pair)

    @cute.jit
    def write(self, work, results, memory, rank, warp, lane):
        """Adds up a CTA's columns and writes them, one head per warp at a time. Runs after :func:`cluster_sync`."""
        for block in cutlass.range_constexpr(self.config.head_blocks):
            head = 8 * block + warp
            if work.first_head + head < work.shape.num_heads:
                place = results.out + Int64(work.query_row(head)) * (V_HEAD_DIM * 2)
                place = place + (rank * self.columns + 2 * lane) * 2
                for first in cutlass.range_constexpr(0, self.columns, 2 * WARP_THREADS):
                    ptx.store_global(place, [self.total(memory, head, first, lane)], offset=2 * first)

    def total(self, memory, head, first: int, lane):
        """Adds up two columns of a head over all parts: ``first + 2 * lane`` and the next. Returns them as a word of
        two bf16."""
        acc: list[Any] = [Float32(0.0)] * 2
        for part in range(self.config.cluster):
            place = memory.ring + head * self.pitch + lane * 8
            words = ptx.load_shared_vector(place, part * self.part_bytes + 4 * first, 2)
            acc = [total + word.bitcast(Float32) for total, word in zip(acc, words, strict=True)]
        return ptx.pack_bf16x2(*acc)
