"""Shapes of decode attention apart from the main table: skewed batches, short contexts, heads, pages, chosen blocks.

Bars over the floor of the bytes: skewed batches 1.15 and 5 us, heads 1.15 and 3 us, chosen blocks 1.15 (of those).
Pages of 64 cost at most 3 % over contiguous rows. Cases of several KV heads have a row for each layout of the cache in
which a format may be faster; a bar is for the better one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.kernels import needed_by_cases
from bench.suites import Bench, run_rows
from bench.workloads import DecodeShape, make_inputs
from cute_kernels.formats.kv import format_of
from cute_kernels.runtime import KernelSpec

FORMATS = ("bf16", "e4m3_tensor", "int4_g4")
PAGE_SIZE = 64
HEADS = ((8, 1), (32, 8))
SHORT = (256, 1024, 4096)


@dataclass(frozen=True)
class MixedShape(DecodeShape):
    """Requests with lengths of their own in pages. mix: (requests, tokens of each), the longest among them seq_len."""

    label: str = ""
    mix: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(label: str, mix: Iterable[tuple[int, int]], heads: tuple[int, int]) -> MixedShape:
        mix = tuple(mix)
        batch, longest = sum(count for count, _ in mix), max(tokens for _, tokens in mix)
        return MixedShape(batch, longest, *heads, page_size=PAGE_SIZE, ragged=True, label=label, mix=mix)

    @property
    def lengths(self) -> list[int]:
        return [tokens for count, tokens in self.mix for _ in range(count)]

    @property
    def case(self) -> str:
        return f"{self.label} HQ={self.num_q_heads} HKV={self.num_kv_heads} D={self.head_dim}"


@dataclass(frozen=True)
class BlockShape(DecodeShape):
    """Each KV head of a request reads blocks of its own, ``chosen`` of ``block_tokens`` tokens, the last among them."""

    chosen: int = 32
    block_tokens: int = 64

    def cache_bytes(self, kv_format: str) -> int:
        """Of the chosen blocks."""
        rows = 2 * self.batch * self.chosen * self.block_tokens * self.num_kv_heads
        return rows * format_of(kv_format).row_bytes(self.head_dim)

    @property
    def case(self) -> str:
        return f"{super().case}, {self.chosen} blocks of {self.block_tokens}"

    def own_options(self, device: torch.device | str, generator: torch.Generator) -> dict[str, Any]:
        heads, blocks = (self.batch, self.num_kv_heads), self.seq_len // self.block_tokens
        ranks = torch.rand((*heads, blocks - 1), generator=generator, device=device).argsort(-1)
        earlier = ranks[..., : self.chosen - 1].sort(-1).values
        last = torch.full((*heads, 1), blocks - 1, device=device)
        return {
            "block_list": torch.cat((earlier, last), -1).to(torch.int32),
            "block_counts": torch.full(heads, self.chosen, dtype=torch.int32, device=device),
            "block_tokens": self.block_tokens,
        }


def lognormal(batch: int = 64, median: int = 2048, sigma: float = 1.2, most: int = 65536) -> list[tuple[int, int]]:
    """Lengths as served prompts have them, the same in every run: one request each."""
    draw = random.Random(0)
    return [(1, min(most, max(64, int(median * draw.lognormvariate(0.0, sigma))))) for _ in range(batch)]


def skewed_shapes() -> list[DecodeShape]:
    mixes = {
        "1 x 128k + 31 x 4k": [(1, 131072), (31, 4096)],
        "1 x 32k + 127 x 1k": [(1, 32768), (127, 1024)],
        "64 lognormal": lognormal(),
    }
    return [MixedShape.of(label, mix, heads) for label, mix in mixes.items() for heads in HEADS]


def short_shapes() -> list[DecodeShape]:
    return [DecodeShape(1, tokens, 32, 8) for tokens in SHORT]


def head_shapes() -> list[DecodeShape]:
    """32 requests of 8k of models with several KV heads: query heads, KV heads, head_dim."""
    sizes = ((32, 8, 128), (64, 8, 64), (16, 8, 256), (32, 8, 96), (24, 2, 128), (16, 2, 512))
    return [DecodeShape(32, 8192, *size, page_size=PAGE_SIZE) for size in sizes]


def page_shapes() -> list[DecodeShape]:
    """Rows one after the other, and the same in pages."""
    return [DecodeShape(128, page_size=size) for size in (0, PAGE_SIZE)]


def block_shapes() -> list[DecodeShape]:
    """2048 tokens of 32k, at one request and at many."""
    sizes = ((32, 64), (16, 128))
    return [BlockShape(b, 32768, 32, 8, 128, 1, 64, chosen=n, block_tokens=t) for b in (1, 32) for n, t in sizes]


SUITES = {
    "skewed": (skewed_shapes, FORMATS),
    "short": (short_shapes, FORMATS[:2]),
    "heads": (head_shapes, ("bf16", "int8_token_head", "int4_g1")),
    "pages": (page_shapes, ("bf16", "e4m3_tensor", "int8_token_head", "int4_g1", "int4_g4")),
    "blocks": (block_shapes, FORMATS),
}
HEADS_FIRST: dict[str, tuple[str, ...]] = {"skewed": (), "heads": ("bf16",), "blocks": ("bf16",)}
"""Suites that measure head-major pages, too: of formats with scales in their rows, and of these."""


Case = tuple[str, DecodeShape, str]
"""Suite, shape and format."""


def cases(suites: Iterable[str], formats: Iterable[str] | None = None, only: str = "") -> list[Case]:
    """The rows of the suites, in their own formats or in those that are given, whose "FORMAT NAME" has ``only``, a
    regular expression."""
    formats = None if formats is None else tuple(formats)
    known = [(name, *SUITES[name]) for name in suites if name in SUITES]
    given = [(name, shape, form) for name, make, usual in known for shape in make() for form in formats or usual]
    every = [(name, one, form) for name, shape, form in given for one in in_layouts(name, shape, form)]
    return [case for case in every if re.search(only, f"{case[2]} {case[1].name}")]


def in_layouts(suite: str, shape: DecodeShape, kv_format: str) -> list[DecodeShape]:
    """The shape in each layout of the cache that is measured. With one KV head both are the same."""
    others = HEADS_FIRST.get(suite)
    if others is None or shape.num_kv_heads == 1 or not (format_of(kv_format).has_header or kv_format in others):
        return [shape]
    return [shape, shape.heads_first]


def run(bench: Bench, chosen: Sequence[Case], peers: bool, seconds: float) -> None:
    """The rows of some cases. After so many seconds the rest is left out, which is said. Peers run over NHD alone."""
    for number, (suite, shape, kv_format) in enumerate(chosen):
        if bench.recorder.seconds() > seconds:
            bench.say(f"{len(chosen) - number} rows are left out after {seconds:.0f} s, from {suite} on")
            return
        run_rows(bench, suite, [shape], [kv_format], peers and suite != "blocks" and shape.cache_layout == "NHD")


def specs(chosen: Iterable[Case], bench: Bench) -> list[KernelSpec]:
    """The kernels of all calls, found by calls with the same shapes."""

    def calls_of(_: str, shape: DecodeShape, kv_format: str) -> list[Callable[[], object]]:
        inputs = make_inputs(shape, kv_format, device=bench.device, filled=False)
        return [bench.entry.bind(inputs, out=torch.empty_like(inputs.q))]

    return needed_by_cases(partial(calls_of, *case) for case in chosen)
