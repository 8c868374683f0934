"""What rows of q, k and v meet before RoPE: biases, and the norm of q and k.

A team of a decode step has one to four rows, each of which it works on once. Biases and the norm's weights are then
asked for along with the rows: where they are used, each would be a latency of its own. Prefill has rows to work on
meanwhile, and fewer registers to spare.
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
from cute_kernels.kv_cache.config import AppendConfig


@dataclass(frozen=True)
class Asked:
    """Words that are on their way: biases of a team's next rows, a lane's weights of the norm; one word where none."""

    bias: RegisterTensor[Uint32]
    norm: RegisterTensor[Uint32]


class RowExtras:
    """Biases and norms of a configuration."""

    def __init__(self, config: AppendConfig, k_elements: Elements, v_elements: Elements):
        self.config, self.k_elements, self.v_elements = config, k_elements, v_elements
        self.row_words = max(k_elements.piece.num_words, v_elements.piece.num_words)
        self.ahead = max(config.rows_in_flight, config.q_rows_in_flight)
        self.asks_bias, self.asks_norm = config.decode and config.has_bias, config.decode and config.has_norm

    def registers(self) -> Asked:
        """Room for what is asked for."""
        bias = self.ahead * self.row_words if self.asks_bias else 1
        norm = self.k_elements.piece.num_words if self.asks_norm else 1
        return Asked(cute.make_rmem_tensor(bias, Uint32), cute.make_rmem_tensor(norm, Uint32))

    @cute.jit
    def ask(self, asked: Asked, extras, heads, is_q, is_v, lane):
        """Asks for the biases of a team's first rows, and for the norm's weights."""
        if const_expr(self.asks_bias):
            base = cutlass.select_(is_q, extras.q_bias, cutlass.select_(is_v, extras.v_bias, extras.k_bias))
            most = cutlass.select_(is_q, Int32(self.config.q_rows_in_flight), Int32(self.config.rows_in_flight))
            count = cutlass.min(heads.count, most)
            if const_expr(self.k_elements == self.v_elements):  # one copy of the code for all
                self.ask_bias(asked, base, self.k_elements, heads.first, self.ahead, count, lane)
            elif is_v:
                self.ask_bias(asked, base, self.v_elements, heads.first, self.config.rows_in_flight, count, lane)
            else:
                self.ask_bias(asked, base, self.k_elements, heads.first, self.ahead, count, lane)
        if const_expr(self.asks_norm):
            weight = cutlass.select_(is_q, extras.q_norm, cutlass.select_(is_v, Int64(0), extras.k_norm))
            self.ask_norm(asked, weight, lane)

    @cute.jit
    def ask_norm(self, asked: Asked, weight, lane):
        """Asks for the norm's weights at an address, if it is one."""
        if const_expr(self.asks_norm):
            if weight != 0:
                for i, word in enumerate(self.k_elements.piece.load(weight, lane)):
                    asked.norm[i] = word

    @cute.jit
    def ask_bias(self, asked: Asked, base, elements: Elements, head, ahead, count, lane):
        """Asks for the biases of the next ``count`` heads from ``head`` on, at most ``ahead``."""
        if const_expr(self.asks_bias):
            if base != 0:
                first = base + Int64(head) * elements.row_bytes
                for u in cutlass.range_constexpr(ahead):
                    if u < count:
                        for i, word in enumerate(elements.piece.load(first, lane, u * elements.row_bytes)):
                            asked.bias[u * self.row_words + i] = word

    @cute.jit
    def add_bias(self, values, asked: Asked, base, elements: Elements, head, ahead, lane):
        """Adds the bias of ``head`` to a row's values; of `ask_bias`, the next one's comes up, of ``ahead``."""
        if const_expr(self.config.has_bias):
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
        """RMS norm of a q or k row over the head's columns."""
        if const_expr(self.config.has_norm):
            if weight != 0:
                elements = self.k_elements
                total = Float32(0.0)
                for i in cutlass.range_constexpr(elements.count):
                    total = ptx.fma(values[i], values[i], total)
                total = lane_sum(total, neighbours(self.config.lanes))
                root = numbers.reciprocal_root(total * (1.0 / self.config.head_dim_k) + eps)
                if const_expr(self.asks_norm):
                    factors = elements.unpack([asked.norm[i] for i in range(elements.piece.num_words)])
                else:
                    factors = elements.load(weight, lane)
                for i in cutlass.range_constexpr(elements.count):
                    values[i] = values[i] * root * factors[i]
