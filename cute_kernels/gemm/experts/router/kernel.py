"""The two kernels of a router. One chooses experts from hidden states. The other one, for many tokens, chooses experts
from logits.

In `RouterKernel`, each CTA computes the logits of 1, 2, 4 or 8 experts, so all SMs read the router's weight at the same
time. A CTA's warps divide K. Sums over lanes, then over warps, have one order, whatever the number of tokens. Every CTA
publishes its logits in a workspace (:mod:`cute_kernels.device.exchange`). A warp then chooses the experts of one token,
once the token's logits have arrived. The first CTA's warps choose for up to eight tokens.

| who | reads | then |
|---|---|---|
| every thread | its first piece of an expert's weight, before the previous launch ends; then hidden states | sums |
| every CTA | partial sums of its warps, in shared memory, after a barrier | publishes logits |
| a warp for each token | logits, as they come, and puts EMPTY back | stores ids and weights |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.exchange import Poll, Published, publish, reset
from cute_kernels.device.types import extents
from cute_kernels.gemm.experts.router.config import MAX_TOKENS, WARPS, RouterConfig
from cute_kernels.gemm.experts.router.selection import ALL_LANES, Choice, Selection

VECTOR = 8  # elements of a thread's piece of a row: 16 bytes of 16-bit ones


@dataclass(frozen=True)
class Operands:
    """Addresses and sizes of a launch; run-time values."""

    hidden: Int64
    weight: Int64
    workspace: Int64
    tokens: Int32
    vectors: Int32  # of a row
    expert_shift: Int32
    ctas: Int32


class RouterKernel:
    """The kernel from hidden states to experts, as one :class:`RouterConfig` compiles it."""

    def __init__(self, config: RouterConfig):
        self.config = config
        self.selection = Selection(config.lane_experts, config.dtype)

    def launch(self, given, stream):
        """Launches CTAs for all experts. ``given`` has the arguments `ROUTER` of :mod:`.arguments`."""
        tokens, k = extents(given.hidden)
        names = ("weight", "workspace", "expert_shift")
        ctas = (given.experts + (Int32(1) << given.expert_shift) - 1) >> given.expert_shift
        operands = Operands(
            hidden=ptx.address(given.hidden),
            tokens=tokens,
            vectors=k // VECTOR,
            ctas=ctas,
            **{name: getattr(given, name) for name in names},
        )
        self.kernel(operands, Choice.of(given, given.experts)).launch(
            grid=(ctas, 1, 1), block=(self.config.num_threads, 1, 1), min_blocks_per_mp=1, use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, operands, choice):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = cutlass.utils.SmemAllocator()
        partial = smem.allocate(4 * WARPS * MAX_TOKENS, byte_alignment=16).toint()
        self.ask(choice, thread)
        self.multiply(operands, choice, partial, block, warp, lane)
        cute.arch.sync_threads()
        self.publish_logits(operands, choice, partial, block, thread)
        for token in cutlass.range(block * WARPS + warp, operands.tokens, operands.ctas * WARPS, unroll=1):
            self.choose(operands, choice, token, lane)

    @cute.jit
    def ask(self, choice, thread):
        """Prefetches the bias and the correction. Each thread prefetches a line of at least 128 bytes."""
        index = thread * WARP_THREADS
        if index < choice.experts:
            if choice.bias != 0:
                ptx.prefetch_line(choice.bias + Int64(index << (1 + choice.bias_wide)))
            if choice.correction != 0:
                ptx.prefetch_line(choice.correction + Int64(index << (1 + choice.correction_wide)))

    @cute.jit
    def multiply(self, operands, choice, partial, block, warp, lane):
        """Computes a warp's part of its expert's product with each token, and stores it in shared memory, fp32
        [warp][token]."""
        config = self.config
        slot = warp & ((Int32(1) << operands.expert_shift) - 1)
        expert = cutlass.min((block << operands.expert_shift) + slot, choice.experts - 1)
        first = (warp >> operands.expert_shift) * WARP_THREADS + lane
        stride = (Int32(WARPS) >> operands.expert_shift) * WARP_THREADS
        row = operands.weight + Int64(expert) * operands.vectors * self.weight_bytes
        # A thread that has no piece reads the last one, which counts for nothing.
        own = self.load_weight(row, cutlass.min(first, operands.vectors - 1))
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        sums = cute.make_rmem_tensor(config.tile_tokens, Float32)
        for begin in cutlass.range(0, operands.tokens, config.tile_tokens, unroll=1):
            sums.fill(0.0)
            if first < operands.vectors:
                self.add(operands, sums, own, begin, first)
            for piece in cutlass.range(first + stride, operands.vectors, stride, unroll=4):
                self.add(operands, sums, self.load_weight(row, piece), begin, piece)
            value = Float32(0.0)
            for t in cutlass.range_constexpr(config.tile_tokens):
                value = cutlass.select_(lane == t, lanes.lane_sum(sums[t], ALL_LANES), value)
            if lane < config.tile_tokens:
                ptx.store_shared(partial + (warp * MAX_TOKENS + begin + lane) * 4, 0, [value])

    @property
    def weight_bytes(self) -> int:
        """Bytes of a thread's piece of a row."""
        return VECTOR * (4 if self.config.weight == "fp32" else 2)

    def load_weight(self, row, piece) -> list[Any]:
        """Loads the words of a piece of an expert's weight."""
        address = row + Int64(piece) * self.weight_bytes
        return [word for byte in range(0, self.weight_bytes, 16) for word in ptx.load_global_words(address, byte, 4)]

    @cute.jit
    def add(self, operands, sums, words, begin, piece):
        """Adds the products of a piece of the weight with each token of a tile to ``sums``. A tile beyond the last
        token repeats the last token; those sums are ignored."""
        pieces = []
        for t in cutlass.range_constexpr(self.config.tile_tokens):
            token = cutlass.min(begin + t, operands.tokens - 1)
            address = operands.hidden + (Int64(token) * operands.vectors + piece) * (2 * VECTOR)
            pieces.append(ptx.load_global_words(address, 0, 4, constant=False))
        weights = [numbers.from_bits(word) for word in words]
        if const_expr(self.config.weight == "own"):
            weights = self.unpack(words)
        for t in cutlass.range_constexpr(self.config.tile_tokens):
            for x, w in zip(self.unpack(pieces[t]), weights, strict=True):
                sums[t] = ptx.fma(x, w, sums[t])

    def unpack(self, words) -> list[Any]:
        """Converts words, which hold two values of the configuration's dtype each, to fp32."""
        halves = (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float)
        if self.config.dtype == "fp16":
            halves = (ptx.half2_low_to_float, ptx.half2_high_to_float)
        return [half(word) for word in words for half in halves]

    @cute.jit
    def publish_logits(self, operands, choice, partial, block, thread):
        """Publishes the logits of a CTA's experts. A thread publishes one logit, of one token and one expert, at a
        time."""
        shift = operands.expert_shift
        mask = (Int32(1) << shift) - 1
        for pair in cutlass.range(thread, operands.tokens << shift, WARPS * WARP_THREADS, unroll=1):
            token, slot = pair >> shift, pair & mask
            expert = (block << shift) + slot
            if expert < choice.experts:
                logit = Float32(0.0)
                if choice.bias != 0:
                    logit = self.selection.load_number(choice.bias, expert, choice.bias_wide)
                for part in cutlass.range(slot, WARPS, mask + 1, unroll=4):
                    word = ptx.load_shared(partial + (part * MAX_TOKENS + token) * 4, 0)
                    logit = logit + numbers.from_bits(word)
                publish(operands.workspace + Int64(token * choice.experts + expert) * 4, [logit])

    @cute.jit
    def choose(self, operands, choice, token, lane):
        """Chooses a token's experts, once its logits have arrived."""
        first = operands.workspace + Int64(token * choice.experts) * 4
        places = [first + Int64(self.selection.expert(i, lane)) * 4 for i in range(self.selection.count)]
        there = [self.selection.expert(i, lane) < choice.experts for i in range(self.selection.count)]
        words = cute.make_rmem_tensor(self.selection.count, Uint32)
        sources = [Published(place, words=1, wanted=one) for place, one in zip(places, there, strict=True)]
        Poll(sources, together=True).load(words)
        for i in cutlass.range_constexpr(self.selection.count):
            if there[i]:
                reset(places[i], 1)
        logits = cute.make_rmem_tensor(self.selection.count, Float32)
        for i in cutlass.range_constexpr(self.selection.count):
            logits[i] = numbers.from_bits(words[i])
        self.selection.choose(choice, logits, token, lane)


class SelectKernel:
    """The kernel that chooses experts from logits that an earlier product has stored, as one :class:`RouterConfig`
    compiles it. Each token has a warp."""

    def __init__(self, config: RouterConfig):
        self.config = config
        self.selection = Selection(config.lane_experts, config.dtype)

    def launch(self, given, stream):
        """Launches CTAs for all tokens. ``given`` has the arguments `SELECT` of :mod:`.arguments`."""
        tokens, experts = extents(given.logits)
        self.kernel(ptx.address(given.logits), tokens, Choice.of(given, experts)).launch(
            grid=(cute.ceil_div(tokens, WARPS), 1, 1),
            block=(self.config.num_threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, logits: Int64, tokens: Int32, choice):
        block, _, _ = cute.arch.block_idx()
        token = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if token < tokens:
            self.choose(logits + Int64(token) * choice.experts * 4, choice, token, lane)

    @cute.jit
    def choose(self, first, choice, token, lane):
        """Chooses a token's experts by the logits from address ``first`` on."""
        logits = cute.make_rmem_tensor(self.selection.count, Float32)
        for i in cutlass.range_constexpr(self.selection.count):
            expert = self.selection.expert(i, lane)
            logits[i] = Float32(0.0)
            if expert < choice.experts:
                address = first + Int64(expert) * 4
                logits[i] = numbers.from_bits(ptx.load_global_words(address, 0, 1, constant=False)[0])
                if choice.bias != 0:
                    logits[i] = logits[i] + self.selection.load_number(choice.bias, expert, choice.bias_wide)
        self.selection.choose(choice, logits, token, lane)
