"""Layers as other projects store them, written one code at a time from the descriptions of their formats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Layer:
    """What a layer means. codes [N][K] and zeros [N][G] unsigned, scales [N, G], group_of [K].

    `dense` is W [N, K] in fp64, where every product is exact.
    """

    codes: list[list[int]]
    zeros: list[list[int]]
    scales: torch.Tensor
    group_of: list[int]
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), len(self.codes[0])

    @property
    def groups(self) -> int:
        return self.scales.shape[1]

    @property
    def dense(self) -> torch.Tensor:
        n, k = self.shape
        scales = self.scales.double().tolist()
        w = [
            [(self.codes[i][j] - self.zeros[i][self.group_of[j]]) * scales[i][self.group_of[j]] for j in range(k)]
            for i in range(n)
        ]
        return torch.tensor(w, dtype=torch.float64)


def layer(
    n: int = 72,
    k: int = 128,
    group: int = 32,
    bits: int = 4,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
    lowest_zero: int = 0,
    seed: int = 0,
) -> Layer:
    rng = np.random.default_rng(seed)
    groups = -(-k // group)
    codes = rng.integers(0, 1 << bits, (n, k)).tolist()
    zeros = rng.integers(lowest_zero, 1 << bits, (n, groups)).tolist()
    if symmetric:
        zeros = [[1 << (bits - 1)] * groups for _ in range(n)]
    scales = torch.from_numpy(rng.uniform(0.002, 0.02, (n, groups))).to(dtype)
    group_of = [j // group for j in range(k)]
    if act_order:
        group_of = rng.permutation(group_of).tolist()
    return Layer(codes, zeros, scales, group_of, bits)


def int32(words: list[list[int]]) -> torch.Tensor:
    """int32 [rows, words] of numbers below 2**32."""
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


def pack_rows(rows: list[list[int]], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Words of 32 / bits neighbours in a row, lowest first, in the order given; the last word is filled with zeros."""
    per_word = 32 // bits
    words = []
    for row in rows:
        filled = row + [0] * (-len(row) % per_word)
        line = []
        for start in range(0, len(filled), per_word):
            word = 0
            for place in range(per_word):
                word |= filled[start + (place if order is None else order[place])] << (bits * place)
            line.append(word)
        words.append(line)
    return int32(words)


def transposed(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def awq(golden: Layer) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack_rows(transposed(golden.codes), 4, AWQ_ORDER),
        "qzeros": pack_rows(transposed(golden.zeros), 4, AWQ_ORDER),
        "scales": golden.scales.T.contiguous(),
    }


def gptq(golden: Layer, version: int = 1) -> dict[str, torch.Tensor]:
    """v1 stores z - 1, which wants z >= 1."""
    stored = [[zero - (version == 1) for zero in row] for row in transposed(golden.zeros)]
    assert all(zero >= 0 for row in stored for zero in row)
    return {
        "qweight": pack_rows(golden.codes, golden.bits).T.contiguous(),
        "qzeros": pack_rows(stored, golden.bits),
        "scales": golden.scales.T.contiguous(),
        "g_idx": torch.tensor(golden.group_of, dtype=torch.int32),
    }


def compressed_tensors(golden: Layer) -> dict[str, torch.Tensor]:
    """Signed numbers with 8 (128) added are the unsigned codes."""
    return {
        "weight_packed": pack_rows(golden.codes, golden.bits),
        "weight_scale": golden.scales,
        "weight_zero_point": pack_rows(transposed(golden.zeros), golden.bits).T.contiguous(),
        "weight_shape": torch.tensor(golden.shape),
        "weight_g_idx": torch.tensor(golden.group_of, dtype=torch.int32),
    }


def hqq(golden: Layer) -> dict[str, torch.Tensor]:
    """Groups are rows: the first half of them in the high nibbles, the second half in the low ones."""
    n, k = golden.shape
    size = k // golden.groups
    groups = [row[start : start + size] for row in golden.codes for start in range(0, k, size)]
    if golden.bits == 4:
        half = len(groups) // 2
        groups = [[groups[r][c] << 4 | groups[r + half][c] for c in range(size)] for r in range(half)]
    return {
        "W_q": torch.tensor(groups, dtype=torch.uint8),
        "scale": golden.scales.reshape(n * golden.groups, 1),
        "zero": torch.tensor(golden.zeros, dtype=golden.scales.dtype).reshape(n * golden.groups, 1),
    }


def tinygemm(golden: Layer, inner_k_tiles: int = 8) -> dict[str, torch.Tensor]:
    """Lane t of a tile of 8 rows and 16 * inner_k_tiles inputs; W = (q - 8) * s + z, z rounded to the scales' dtype."""
    n, k = golden.shape
    packed = []
    for n_tile in range(n // 8):
        for k_tile in range(k // (16 * inner_k_tiles)):
            for t in range(32):
                row = golden.codes[8 * n_tile + t // 4]
                for word in range(inner_k_tiles // 2):
                    base = k_tile * 16 * inner_k_tiles + 32 * word + t % 4 * 2
                    v = [row[base + offset] for offset in (0, 1, 8, 9, 16, 17, 24, 25)]
                    places = (v[0], v[2], v[4], v[6], v[1], v[3], v[5], v[7])
                    packed.append(sum(value << 4 * place for place, value in enumerate(places)))
    shape = (n // 8, k // (16 * inner_k_tiles), 32, inner_k_tiles // 2)
    shift = (8 - torch.tensor(golden.zeros)) * golden.scales.double()
    pair = torch.stack((golden.scales, shift.to(golden.scales.dtype)), dim=-1)
    return {"packed_weight": int32([packed]).view(shape), "scale_and_zero": pair.transpose(0, 1).contiguous()}
