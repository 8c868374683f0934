"""Needles in attention alone: a key among many whose value names one of 64 words, asked for by a query of its own.

Each of 64 queries has a key that scores ``margin`` above 8 rivals with other words; all others are hay. A query finds
its needle if its output is nearest to the needle's word. `emulated` is the arithmetic of extend attention's FP8
products: q and probabilities in E4M3, 32 products at a time into accumulators of 14 bits that cut off, which are added
to fp32 after 128 keys ("two levels"), or never.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DIM, QUERIES, RIVALS, BLOCK, STEP, BITS = 128, 64, 8, 128, 32, 14
GREATEST = 2.0**8  # of probabilities, and of queries' numbers


@dataclass(frozen=True)
class Hay:
    """q [64, 128]; k, v [tokens, 128] as E4M3 reads them, with scale 1; words [64, 128]: query i's needle says i."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    words: torch.Tensor

    def hits(self, out: torch.Tensor) -> float:
        """Share of the queries whose output [64, 128] is nearest to their own word."""
        return float((self.margins(out) > 0).double().mean())

    def margins(self, out: torch.Tensor) -> torch.Tensor:
        """By how much each query's output [64, 128] is nearer to its own word than to the best other one: fp64 [64]."""
        said = (out.double() - 1) @ self.words.double().T
        others = said.clone().fill_diagonal_(-torch.inf)
        return said.diagonal() - others.amax(1)


def in_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def make_hay(tokens: int, weight: float, margin: float = 1.0, seed: int = 0) -> Hay:
    """Hay of standard normal keys and values of mean 1; a needle has about ``weight`` of its query's attention."""
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(tokens, DIM, generator=draw) for _ in range(2))
    q = torch.randn(QUERIES, DIM, generator=draw)
    words = torch.randint(0, 2, (QUERIES, DIM), generator=draw) * 2.0 - 1
    v = 1 + v / 2
    hay = tokens * torch.tensor(0.5).exp()  # of standard normal scores
    score = float((weight / (1 - weight) * hay).log())
    places = torch.randperm(tokens, generator=draw)[: QUERIES * (1 + RIVALS)].view(QUERIES, -1)
    for i in range(QUERIES):
        direction = q[i] / q[i].norm() ** 2 * DIM**0.5  # k . q / sqrt(128) = 1
        for j, place in enumerate(places[i]):
            k[place] = direction * (score - margin * (j > 0)) + (k[place] - direction * (k[place] @ q[i]) / DIM**0.5)
            v[place] = 1 + words[(i + j) % QUERIES]
    return Hay(q.bfloat16().float(), in_e4m3(k), in_e4m3(v), words)


def exact(hay: Hay, p_dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Attention over the cache as it is: in fp64, or with probabilities of 16 bits."""
    p = torch.softmax(hay.q.double() @ hay.k.double().T * DIM**-0.5, -1)
    return p.to(p_dtype).double() @ hay.v.double()


def cut(x: torch.Tensor) -> torch.Tensor:
    """fp64 to so many bits, toward zero."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(mantissa * 2**BITS), exponent - BITS)


def products(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """a [rows, n] times b [n, columns] as the tensor cores add them, to ``start``."""
    total = torch.zeros(len(a), b.shape[1], dtype=torch.float64) if start is None else start
    for i in range(0, a.shape[1], STEP):
        total = cut(total + a[:, i : i + STEP] @ b[i : i + STEP])
    return total


def emulated(hay: Hay, two_levels: bool = True) -> torch.Tensor:
    """Attention by FP8 products."""
    power = torch.exp2(torch.floor(torch.log2(GREATEST / hay.q.abs().amax(1, keepdim=True))))
    q, k, v = in_e4m3(hay.q * power).double(), hay.k.double(), hay.v.double()
    v = torch.cat((v, torch.full((len(v), 1), 0.25, dtype=torch.float64)), 1)  # whose products are the row's sum
    top = torch.full((QUERIES, 1), -torch.inf, dtype=torch.float64)
    sums = torch.zeros(QUERIES, DIM + 1, dtype=torch.float64)
    for i in range(0, len(k), BLOCK):
        scores = products(q, k[i : i + BLOCK].T) / power * (DIM**-0.5 / torch.tensor(2.0).log())
        new = torch.maximum(top, scores.amax(1, keepdim=True))
        factor, top = torch.exp2(top - new), new
        p = in_e4m3((torch.exp2(scores - top) * GREATEST).float()).double()
        if two_levels:
            sums = (sums * factor + products(p, v[i : i + BLOCK])).float().double()
        else:
            sums = products(p, v[i : i + BLOCK], cut(sums * factor))
    return sums[:, :-1] / (4 * sums[:, -1:])
