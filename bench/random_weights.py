"""Random weights, and formats as command lines say them."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import torch

from cute_kernels.formats.weights import WeightFormat, integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.weight import TILE_BYTES, TILE_N, PackedWeight, num_groups, padded_shape
from layouts.weights.hopper import tile_k

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Format:
    """Of a weight of integers, and the dtype of activations, as command lines say them."""

    bits: int = 4
    group_size: int = 128
    zero_point: bool = False
    dtype: str = "bf16"

    @property
    def format(self) -> WeightFormat:
        return integers(self.bits, self.group_size, self.zero_point)

    @property
    def name(self) -> str:
        """As `weight_format` takes it."""
        zero = "z" if self.zero_point else ""
        return f"w{self.bits}g{self.group_size or 'channel'}{zero}-{self.dtype}"

    def num_groups(self, n: int, k: int) -> int:
        """Along K of W [n, k]."""
        return num_groups((n, k), self.group_size or None)

    def problem(self, m: int, n: int, k: int, num_sms: int = LinearProblem.num_sms) -> LinearProblem:
        k_pad = padded_shape((n, k), self.group_size or None)[1]
        return LinearProblem(m, n, k, k_pad, self.format, self.dtype, num_sms=num_sms)


def weight_format(text: str) -> Format:
    """The format that "w4g128z-fp16" names."""
    match = re.fullmatch(r"w(4|8)g(32|64|128|256|channel)(z?)(-fp16|-bf16)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, want one such as w4g128, w8gchannel or w4g64z-fp16")
    size = 0 if match[2] == "channel" else int(match[2])
    return Format(int(match[1]), size, bool(match[3]), (match[4] or "-bf16")[1:])


class Weights:
    """The weight of the layer that was asked for last: random codes, scales that make results of about k block size."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = device
        self._held: tuple[tuple[object, ...], PackedWeight] | None = None

    def of(self, problem: LinearProblem) -> PackedWeight:
        key = problem.n, problem.k, problem.format, problem.dtype
        if self._held is None or self._held[0] != key:
            self._held = None  # its memory may be wanted
            parts = random_parts(problem, (), self.device)
            self._held = key, PackedWeight(*parts, problem.format, (problem.n, problem.k))
        return self._held[1]


def random_parts(
    problem: LinearProblem, lead: tuple[int, ...], device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scales and zeros [*lead, ...] of a packed weight that makes results of about k block size."""
    shape, form, size = (problem.n, problem.k), problem.format, problem.format.group_size
    tiles = padded_shape(shape, size)[0] // TILE_N
    generator = torch.Generator(device).manual_seed(0)
    code_shape = *lead, tiles, problem.k_pad // tile_k(form.bits), TILE_BYTES
    codes = torch.randint(0, 256, code_shape, dtype=torch.uint8, generator=generator, device=device)
    groups = *lead, tiles, num_groups(shape, size), TILE_N
    scale = problem.k**-0.5 / (1 << (form.bits - 1))
    values = scale * (0.5 + torch.rand(groups, generator=generator, device=device))
    scales = form.stored_scales(values, TORCH_DTYPES[problem.dtype])
    zeros = None
    if form.has_zeros:
        zeros = torch.randint(0, 1 << form.bits, groups, dtype=torch.uint8, generator=generator, device=device)
    return codes, scales, zeros
