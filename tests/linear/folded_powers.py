"""Counts what FP8 products with MXFP4 weights change when they fold powers of two into codes.

128 inputs of a row have four scales. A number of a group 2^11 or less below the largest is exact. Further down halves
become zero, which is "flushed", and beyond 2^12 other numbers are those of 2^12 below, which is "enlarged". No other
format folds: its scales multiply sums in fp32. `python -m tests.linear.folded_powers` counts SmolLM2's layers.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bench import smollm2
from cute_kernels import PackedWeight, quantize_weight
from cute_kernels.formats.weights.fp4 import E4M3_SPREAD, LEAST_BASE
from cute_kernels.gemm.weight import rows_of

GROUP, BLOCK = 32, 128


class Folded(NamedTuple):
    """Numbers of a weight, of those that are flushed and enlarged, and the groups by powers below their largest."""

    numbers: int
    flushed: int
    enlarged: int
    groups: Counter[int]


def count(weight: PackedWeight) -> Folded:
    """Counts a weight in MXFP4."""
    n, k = weight.shape
    powers = rows_of(weight.scales)[:n, : -(-k // GROUP)].int()
    padded = torch.nn.functional.pad(powers, (0, -powers.shape[1] % (BLOCK // GROUP)))
    largest = padded.view(n, -1, BLOCK // GROUP).amax(-1).clamp(min=LEAST_BASE)
    below = largest.repeat_interleave(BLOCK // GROUP, 1)[:, : powers.shape[1]] - powers
    magnitudes = torch.cat([weight.unpack_tiles(i, i + 1) for i in range(weight.codes.shape[0])])[:n, :k] & 7
    of_numbers = below.repeat_interleave(GROUP, 1)[:, :k]
    flushed = (of_numbers >= E4M3_SPREAD) & (magnitudes == 1)
    enlarged = (of_numbers > E4M3_SPREAD) & (magnitudes > 1)
    return Folded(n * k, int(flushed.sum()), int(enlarged.sum()), Counter(below.flatten().tolist()))


def total(counts: list[Folded]) -> Folded:
    """The sums over layers."""
    groups = sum((one.groups for one in counts), Counter[int]())
    numbers, flushed, enlarged = (sum(each) for each in zip(*(one[:3] for one in counts), strict=True))
    return Folded(numbers, flushed, enlarged, groups)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    layers = dict(smollm2.read_model(smollm2.find()).named_modules())
    dense = [layer.weight.data for layer in layers.values() if isinstance(layer, torch.nn.Linear)]
    found = total([count(quantize_weight(weight.bfloat16(), format="mxfp4")) for weight in dense])
    print(f"{found.numbers} numbers: {found.flushed} flushed, {found.enlarged} enlarged")
    print("groups by powers below the largest:", sorted(found.groups.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
