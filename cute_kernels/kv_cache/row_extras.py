"""`RowExtras`, the steps on rows of q, k and v before RoPE: biases, and the norm of q and k.

In decode, a team of lanes has one to four rows. It loads biases and norm weights together with the rows, since later
loads would add their latency. In prefill, biases and norm weights are loaded where they are used: other rows hide the
latency, and registers are scarce.

If branches on addresses decided which steps are applied, the compiler would copy the loop over rows for each case. In
decode a warp runs its code once, and would wait for the copies to be fetched. With ``one_code`` there are no such
branches: a missing bias is replaced by zeros, missing norm weights by numbers that change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.lanes import lane_sum, neighbours
from cute_kernels.device.rows import Elements
from cute_kernels.device.types import RegisterTensor
from cute_kernels.kv_cache.config import Q_ROWS_IN_FLIGHT, ROWS_IN_FLIGHT, AppendConfig

NO_BIAS = 0x80008000  # minus zero, twice, of either dtype
ONES = {"bf16": 0x3F803F80, "fp16": 0x3C003C00}


@dataclass(frozen=True)
class Asked:
    """The registers of loads in flight.

    Attributes:
        bias: biases of a team's next rows.
        norm: the lane's norm weights.

    If there is nothing to load, each of them has one unused word.
    """

    bias: RegisterTensor[Uint32]
    norm: RegisterTensor[Uint32]


class RowExtras:
    """The biases and norms of a configuration. one_code: whether missing biases and norms are applied as numbers that
    change nothing, instead of being skipped by branches; see the module's docstring.
    """

    def __init__(self, config: AppendConfig, k_elements: Elements, v_elements: Elements, one_code: bool = False):
        self.config, self.k_elements, self.v_elements = config, k_elements, v_elements
        self.row_words = max(k_elements.piece.num_words, v_elements.piece.num_words)
        self.ahead = Q_ROWS_IN_FLIGHT  # the most rows that a team has in flight
        self.asks_bias = config.decode and config.prologue.has_bias
        self.asks_norm = config.decode and config.prologue.has_norm
        self.one_code = one_code and self.asks_bias

    def registers(self) -> Asked:
        """Makes the registers for biases and norm weights."""
        bias = self.ahead * self.row_words if self.asks_bias else 1
        norm = self.k_elements.piece.num_words if self.asks_norm else 1
        asked = Asked(cute.make_rmem_tensor(bias, Uint32), cute.make_rmem_tensor(norm, Uint32))
        if self.one_code:
            asked.norm.fill(ONES[self.config.dtype])
        return asked

    @cute.jit
    def ask(self, asked: Asked, extras, heads, is_q, is_v, lane):
        """In decode, starts loading the biases of a team's first rows, and the norm weights. Otherwise does nothing."""
        if const_expr(self.asks_bias):
            base = cutlass.select_(is_q, extras.q_bias, cutlass.select_(is_v, extras.v_bias, extras.k_bias))
            most = cutlass.select_(is_q, Int32(Q_ROWS_IN_FLIGHT), Int32(ROWS_IN_FLIGHT))
            count = cutlass.min(heads.count, most)
            if const_expr(self.k_elements == self.v_elements):  # one copy of the code for all
                self.ask_bias(asked, base, self.k_elements, heads.first, self.ahead, count, lane)
            elif is_v:
                self.ask_bias(asked, base, self.v_elements, heads.first, ROWS_IN_FLIGHT, count, lane)
            else:
                self.ask_bias(asked, base, self.k_elements, heads.first, self.ahead, count, lane)
        if const_expr(self.asks_norm):
            weight = cutlass.select_(is_q, extras.q_norm, cutlass.select_(is_v, Int64(0), extras.k_norm))
            self.ask_norm(asked, weight, lane)

    @cute.jit
    def ask_norm(self, asked: Asked, weight, lane):
        """Starts loading the norm weights at address ``weight``, unless it is 0."""
        if const_expr(self.asks_norm):
            if weight != 0:
                for i, word in enumerate(self.k_elements.piece.load(weight, lane)):
                    asked.norm[i] = word

    @cute.jit
    def ask_bias(self, asked: Asked, base, elements: Elements, head, ahead, count, lane):
        """Starts loading the biases of ``count`` heads from ``head`` on, at most ``ahead``: ``asked`` has registers for
        as many. base: the address of all heads' biases, or 0."""
        if const_expr(self.one_code):
            piece = elements.piece
            first = ptx.pinned(base + Int64(head * elements.row_bytes + lane * piece.num_bytes))
            count = cutlass.select_(base != 0, count, Int32(0))
            for u in cutlass.range_constexpr(ahead):
                for i in cutlass.range_constexpr(piece.num_words):
                    asked.bias[u * self.row_words + i] = Uint32(NO_BIAS)
                if u < count:
                    for i, word in enumerate(piece.load(first, Int32(0), u * elements.row_bytes)):
                        asked.bias[u * self.row_words + i] = word
        elif const_expr(self.asks_bias):
            if base != 0:
                first = base + Int64(head) * elements.row_bytes
                for u in cutlass.range_constexpr(ahead):
                    if u < count:
                        for i, word in enumerate(elements.piece.load(first, lane, u * elements.row_bytes)):
                            asked.bias[u * self.row_words + i] = word

    @cute.jit
    def add_bias(self, values, asked: Asked, base, elements: Elements, head, ahead, lane):
        """Adds the bias of ``head`` to a row's values. If ``asked`` holds prefetched biases, drops the used bias and
        moves each remaining bias one row forward.
        """
        if const_expr(self.one_code):
            for i, term in enumerate(elements.unpack([asked.bias[i] for i in range(elements.piece.num_words)])):
                values[i] = numbers.add(values[i], term)
            for i in cutlass.range_constexpr((ahead - 1) * self.row_words):
                asked.bias[i] = asked.bias[i + self.row_words]
        elif const_expr(self.config.prologue.has_bias):
            if base != 0:
                if const_expr(self.asks_bias):
                    terms = elements.unpack([asked.bias[i] for i in range(elements.piece.num_words)])
                    for i in range((ahead - 1) * self.row_words):
                        asked.bias[i] = asked.bias[i + self.row_words]
                else:
                    terms = elements.load(base + Int64(head) * elements.row_bytes, lane)
                for i in cutlass.range_constexpr(elements.count):
                    values[i] = numbers.add(values[i], terms[i])

    @cute.jit
    def normalise(self, values, asked: Asked, weight, eps, lane):
        """Applies the RMS norm to a q or k row, over the head's columns."""
        if const_expr(self.one_code and self.asks_norm):
            root = cutlass.select_(weight != 0, self.root_of(values, eps), Float32(1.0))
            factors = self.k_elements.unpack([asked.norm[i] for i in range(self.k_elements.piece.num_words)])
            for i, factor in enumerate(factors):
                values[i] = values[i] * root * factor
        elif const_expr(self.config.prologue.has_norm):
            if weight != 0:
                elements = self.k_elements
                root = self.root_of(values, eps)
                if const_expr(self.asks_norm):
                    factors = elements.unpack([asked.norm[i] for i in range(elements.piece.num_words)])
                else:
                    factors = elements.load(weight, lane)
                for i in cutlass.range_constexpr(elements.count):
                    values[i] = values[i] * root * factors[i]

    def root_of(self, values, eps):
        """Returns 1 / sqrt(mean square of a row + eps)."""
        total = Float32(0.0)
        for i in range(self.k_elements.count):
            total = ptx.fma(values[i], values[i], total)
        total = lane_sum(total, neighbours(self.config.lanes))
        return numbers.reciprocal_root(total * (1.0 / self.config.k.head_dim) + eps)
