"""The kernel that adds up the results of a token's experts, in the order of the token's assignments. A thread adds up
four columns of a token.

Results lie in the order of places, so the results of one token are not neighbours. The products write results to L2,
and this kernel reads them from there and adds them in a fixed order. Atomics in the products' epilogue would save that
write and read, but sums would depend on the order of CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.types import extents
from cute_kernels.gemm.experts.config import COMBINE_BATCH, COMBINE_THREADS, COMBINE_VECTOR, CombineConfig


@dataclass(frozen=True)
class Terms:
    """The terms of a token's sum, in their order: for each assignment, the results of all parts of K."""

    count: Int32
    part_bits: Int32
    part_rows: Int32  # of the results, from a part to the next


class CombineKernel:
    """The kernel that adds up results, as one :class:`CombineConfig` compiles it."""

    def __init__(self, config: CombineConfig):
        self.config = config

    def launch(self, given, stream):
        """Launches a grid over (columns, tokens). ``given`` has the arguments `COMBINE` of :mod:`.arguments`."""
        tokens, n = extents(given.out)
        topk = given.topk
        terms = Terms(topk << given.part_bits, given.part_bits, tokens * topk)
        addresses = given.results, given.places, given.weights, ptx.address(given.out)
        self.kernel(*addresses, n, topk, given.num_experts, terms).launch(
            grid=(cute.ceil_div(n, COMBINE_THREADS * COMBINE_VECTOR), tokens, 1),
            block=(COMBINE_THREADS, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        results: Int64,
        places: Int64,
        weights: Int64,
        out: Int64,
        n: Int32,
        topk: Int32,
        num_experts: Int32,
        terms,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, token, _ = cute.arch.block_idx()
        column = (block * COMBINE_THREADS + thread) * COMBINE_VECTOR
        cute.arch.griddepcontrol_launch_dependents()
        sums = cute.make_rmem_tensor(COMBINE_VECTOR, Float32)
        sums.fill(0.0)
        chosen = cute.make_rmem_tensor(COMBINE_BATCH, Int32)
        shares = cute.make_rmem_tensor(COMBINE_BATCH, Float32)
        first = Int64(token) * topk
        if const_expr(not self.config.id_bits):
            self.wait()
        elif column < n:
            # Ids and weights are older than the products, which have waited for them.
            self.choose(chosen, shares, places, weights, first, Int32(0), terms, num_experts)
            self.wait()
        if column < n:
            for begin in cutlass.range(0, terms.count, COMBINE_BATCH, unroll=1):
                if const_expr(not self.config.id_bits) or begin > 0:
                    self.choose(chosen, shares, places, weights, first, begin, terms, num_experts)
                self.add_batch(sums, results, chosen, shares, column, n)
            self.store(sums, out, Int64(token) * n + column, n - column)

    def wait(self) -> None:
        """Waits for the products' launch."""
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def choose(self, chosen, shares, places, weights, first, begin, terms, num_experts):
        """Loads up to COMBINE_BATCH terms of a token, from term ``begin`` on: the rows of results into ``chosen`` (-1:
        no row), the routing weights into ``shares``. first: index of the token's first assignment.
        """
        share_bytes = 4 if self.config.shares == "fp32" else 2
        places_of, weights_of = places + first * self.place_bytes, weights + first * share_bytes
        for i in cutlass.range_constexpr(COMBINE_BATCH):
            chosen[i] = Int32(-1)
            shares[i] = Float32(0.0)
            if begin + i < terms.count:
                assignment, part_row = self.term(begin + i, terms)
                own = Int32(first) + assignment + part_row
                chosen[i] = self.place_of(places_of + Int64(assignment) * self.place_bytes, own, num_experts)
                shares[i] = self.load_share(weights_of + Int64(assignment) * share_bytes)

    def load_share(self, address) -> Any:
        """Loads a weight and returns it in fp32."""
        if self.config.shares == "fp32":
            return ptx.load_global_words(address, 0, 1, constant=False)[0].bitcast(Float32)
        word = ptx.load_relaxed_part(address, 2)
        return ptx.bf16x2_low_to_float(word) if self.config.shares == "bf16" else ptx.half2_low_to_float(word)

    def term(self, number, terms) -> tuple[Any, Any]:
        """Returns (assignment, row) of the ``number``-th term of a token. assignment: the index of the term's
        assignment among those of the token. row: the first row of the results for the term's part of K.
        """
        if not self.config.id_bits:
            return number, Int32(0)
        assignment = number >> terms.part_bits
        return assignment, (number - (assignment << terms.part_bits)) * terms.part_rows

    @cute.jit
    def add_batch(self, sums, results, chosen, shares, column, n):
        """Adds up to COMBINE_BATCH rows of results, multiplied by their weights, to ``sums``. All rows are loaded
        before the first is used."""
        values = cute.make_rmem_tensor(COMBINE_BATCH * COMBINE_VECTOR, Float32)
        values.fill(0.0)
        for i in cutlass.range_constexpr(COMBINE_BATCH):
            source = results + (Int64(chosen[i]) * n + column) * self.source_bytes
            if (chosen[i] >= 0) & (n % COMBINE_VECTOR == 0):
                loaded = self.load_vector(source)
                for j in cutlass.range_constexpr(COMBINE_VECTOR):
                    values[i * COMBINE_VECTOR + j] = loaded[j]
            elif chosen[i] >= 0:
                for j in cutlass.range_constexpr(COMBINE_VECTOR):
                    if column + j < n:
                        values[i * COMBINE_VECTOR + j] = self.load_one(source, j)
        for i in cutlass.range_constexpr(COMBINE_BATCH):
            if chosen[i] >= 0:  # else a weight of any kind counts for nothing
                for j in cutlass.range_constexpr(COMBINE_VECTOR):
                    sums[j] = ptx.fma(values[i * COMBINE_VECTOR + j], shares[i], sums[j])

    def place_of(self, address, own, num_experts):
        """Returns the row that holds an assignment's results, or -1 if there is none. address: the address of the
        assignment's place or expert id. own: the row, if results lie in the order of assignments.
        """
        low, *high = ptx.load_global_words(address, 0, self.place_bytes // 4, constant=False)
        if not self.config.id_bits:
            return Int32(low)
        known = low < Uint32(num_experts)
        for word in high:
            known = known & (word == 0)
        return cutlass.select_(known, own, Int32(-1))

    @property
    def place_bytes(self) -> int:
        """Bytes of a place, or of an expert's id."""
        return self.config.id_bits // 8 or 4

    @property
    def source_bytes(self) -> int:
        return 4 if self.config.source == "fp32" else 2

    def load_vector(self, source) -> list[Any]:
        """Loads four neighbouring results, in one access."""
        words = ptx.load_global_words(source, 0, COMBINE_VECTOR * self.source_bytes // 4, constant=False)
        if self.config.source == "fp32":
            return [word.bitcast(Float32) for word in words]
        low, high = self.unpack()
        return [unpack(word) for word in words for unpack in (low, high)]

    def load_one(self, source, index: int):
        if self.config.source == "fp32":
            return ptx.load_global_words(source, 4 * index, 1, constant=False)[0].bitcast(Float32)
        # Written by the kernel before this one, which this one has waited for.
        return self.unpack()[0](ptx.load_relaxed_part(source + 2 * index, 2))

    def unpack(self):
        """Returns (low, high): functions that convert the lower and the upper half of a word to fp32."""
        if self.config.source == "bf16":
            return ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float
        return ptx.half2_low_to_float, ptx.half2_high_to_float

    @cute.jit
    def store(self, sums, out, place, count):
        """Stores the first ``count`` of four columns, in one access if their address is aligned."""
        if const_expr(self.config.dtype == "fp32"):
            if (count >= COMBINE_VECTOR) & ((out + place * 4) % 16 == 0):
                ptx.store_global(out + place * 4, [sums[j] for j in range(COMBINE_VECTOR)])
            else:
                for j in cutlass.range_constexpr(COMBINE_VECTOR):
                    if j < count:
                        ptx.store_global(out + (place + j) * 4, [sums[j]])
        else:
            pack = ptx.pack_bf16x2 if self.config.dtype == "bf16" else ptx.pack_f16x2
            words = [pack(sums[0], sums[1]), pack(sums[2], sums[3])]
            if (count >= COMBINE_VECTOR) & ((out + place * 2) % 8 == 0):
                ptx.store_global(out + place * 2, words)
            else:
                for j in cutlass.range_constexpr(COMBINE_VECTOR):
                    if j < count:
                        numbers.store_global_part(out + (place + j) * 2, 0, words[j // 2] >> (16 * (j % 2)), 2)
