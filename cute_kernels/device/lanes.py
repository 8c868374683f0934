"""Reductions over lanes, prefix sums and a transpose by xor shuffles. After a reduction all of its lanes have the
result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.device import ptx

T = TypeVar("T")


def in_pairs(combine: Callable[[T, T], T], values: Sequence[T]) -> T:
    """Reduces a lane's own values with ``combine``, as a binary tree. So the chain of dependent operations has about
    log2(number of values) steps.
    """
    while len(values) > 1:
        pairs = [combine(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = pairs + list(values[len(values) & ~1 :])
    return values[0]


def over_lanes(combine: Callable[[T, T], T], value: T, offsets: Iterable[int]) -> T:
    """Reduces ``value`` with ``combine`` over lanes. offsets: bits of the lane index, such as 1 and 2; lanes whose
    indices differ only in these bits are reduced together.
    """
    for offset in offsets:
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value


def neighbours(count: int) -> list[int]:
    """Returns the bits 1, 2, 4, ... in which the indices of ``count`` neighbouring lanes differ. count: a power of
    two.
    """
    return [1 << bit for bit in range(count.bit_length() - 1)]


def transpose_quad(words: Sequence[Uint32], lane: Int32) -> list[Uint32]:
    """Transposes the 4 x 4 matrix of 4 words in each of 4 neighbouring lanes: lane t's i-th word becomes lane i's t-th
    word."""
    words = list(words)
    for offset in (1, 2):
        upper = (lane & offset) != 0
        for low in range(4):
            if not low & offset:
                high = low | offset
                sent = cutlass.select_(upper, words[low], words[high])
                came = cute.arch.shuffle_sync_bfly(sent, offset)
                words[low] = cutlass.select_(upper, came, words[low])
                words[high] = cutlass.select_(upper, words[high], came)
    return words


def lane_prefix(value: Int32, lane: Int32, none: Int32) -> tuple[Int32, Int32]:
    """Returns (sum over lower lanes, sum over all 32 lanes). none: the zero of the value's type."""
    before = none
    for offset in neighbours(32):
        others = cute.arch.shuffle_sync_bfly(value, offset)
        before = before + cutlass.select_((lane & offset) != 0, others, none)
        value = value + others
    return before, value


def lane_max(value: Float32, offsets: Iterable[int]) -> Float32:
    """Returns the maximum over the lanes whose indices differ only in the bits ``offsets``."""
    return over_lanes(ptx.fmax, value, offsets)


def lane_sum(value: Float32, offsets: Iterable[int]) -> Float32:
    """Returns the sum over the lanes whose indices differ only in the bits ``offsets``."""
    return over_lanes(operator.add, value, offsets)
