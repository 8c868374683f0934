"""Moves packed sub-word elements at memory speed: a digit permutation as word moves and delta swaps.

A packed array of 4- or 8-bit elements is a sequence of machine words. Write the element index in digits; the lowest
digits address elements inside a word. Any reordering of digits then splits into

1. one permutation of whole words (a strided copy),
2. *exchanges*: a digit inside the word and a digit outside it change places, by masked XOR of two words,
3. *delta swaps*: two digits inside the word change places, by masked XOR of a word with the shifted word.

At most log2(elements per word) exchanges and as many swaps are needed, so the cost per byte is almost the same for all
reorderings. (Exchanges and delta swaps are the classic bit-matrix transposition steps, Knuth 7.1.3.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Modes = tuple[tuple[int, int], ...]
WORD_DTYPES = {32: torch.int32, 16: torch.int16, 8: torch.uint8}
CPU_CHUNK_BYTES = 1 << 19
CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class Digit:
    """One digit of the element index: its extent and its stride in the source."""

    extent: int
    stride: int


@dataclass(frozen=True)
class ShufflePlan:
    """How to execute one digit permutation on words of ``word_bits``.

    Args:
        word_bits: width of the words that move.
        element_bits: width of an element.
        shape: source words, slowest digit first.
        order: axes of ``shape`` in the order of the destination, slowest first.
        exchanges: pairs (axis of the destination, digit inside the word) to exchange.
        swaps: pairs of digits inside the word to exchange, in order.
    """

    word_bits: int
    element_bits: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    exchanges: tuple[tuple[int, int], ...]
    swaps: tuple[tuple[int, int], ...]


def make_plan(modes: Modes, element_bits: int) -> ShufflePlan:
    """Returns the plan that moves the widest possible words.

    modes: the modes of the map from destination index to source index, fastest first.

    Raises:
        ValueError: not even single bytes can be moved, since an odd extent splits a byte with two elements.
    """
    for word_bits in WORD_DTYPES:
        if word_bits >= element_bits:
            digits = _split(modes, word_bits // element_bits)
            if digits is not None:
                return _plan(digits, word_bits, element_bits)
    raise ValueError(f"modes {modes} of {element_bits}-bit elements split a byte; want even extents next to each other")


def _split(modes: Modes, per_word: int) -> list[Digit] | None:
    """Returns the modes as digits, fastest first. Modes are split so that all digits inside a source or destination
    word are binary. Returns None if that is impossible.
    """
    digits: list[Digit] = []
    position = 1
    pending = [Digit(extent, stride) for extent, stride in reversed(modes)]
    while pending:
        digit = pending.pop()
        inside = position < per_word or digit.stride < per_word
        if inside and digit.extent > 2:
            if digit.extent % 2:
                return None
            pending.append(Digit(digit.extent // 2, digit.stride * 2))
            digit = Digit(2, digit.stride)
        if inside and (digit.extent != 2 or (digit.stride < per_word and digit.stride & (digit.stride - 1))):
            return None
        digits.append(digit)
        position *= digit.extent
    inside_source = [digit for digit in digits if digit.stride < per_word]
    whole = position % per_word == 0 and len(inside_source) == per_word.bit_length() - 1
    return digits if whole else None


def _plan(digits: list[Digit], word_bits: int, element_bits: int) -> ShufflePlan:
    per_word = word_bits // element_bits
    inner = per_word.bit_length() - 1
    outside = sorted((d for d in digits if d.stride >= per_word), key=lambda d: -d.stride)
    axis_of = {digit: axis for axis, digit in enumerate(outside)}
    wanted_inside, wanted_outside = digits[:inner], digits[inner:]

    entering = {digit: place for place, digit in enumerate(wanted_inside) if digit.stride >= per_word}
    leaving = [digit for digit in wanted_outside if digit.stride < per_word]
    inside: list[Digit] = sorted((d for d in digits if d.stride < per_word), key=lambda d: d.stride)
    stand_in: dict[Digit, Digit] = {}
    for digit in leaving:
        place = inside.index(digit)
        partner = next((x for x, wanted in entering.items() if wanted == place), None) or next(iter(entering))
        del entering[partner]
        stand_in[digit] = partner
        inside[place] = partner

    slow_first = list(reversed(wanted_outside))
    order = tuple(axis_of[stand_in.get(digit, digit)] for digit in slow_first)
    places = {digit.stride: place for place, digit in enumerate(sorted_inside(digits, per_word))}
    exchanges = tuple((axis, places[d.stride]) for axis, d in enumerate(slow_first) if d in stand_in)
    return ShufflePlan(
        word_bits,
        element_bits,
        tuple(digit.extent for digit in outside),
        order,
        exchanges,
        tuple(_transpositions(inside, wanted_inside)),
    )


def sorted_inside(digits: Sequence[Digit], per_word: int) -> list[Digit]:
    """Returns the digits of an element's index within a source word, fastest first."""
    return sorted((d for d in digits if d.stride < per_word), key=lambda d: d.stride)


def _transpositions(have: list[Digit], want: list[Digit]) -> Iterator[tuple[int, int]]:
    have = list(have)
    for place, digit in enumerate(want):
        found = have.index(digit)
        if found != place:
            have[place], have[found] = have[found], have[place]
            yield place, found


def execute(plan: ShufflePlan, data: torch.Tensor, size: int, flip: int = 0) -> torch.Tensor:
    """Reorders a flat contiguous byte tensor that holds a whole number of arrays of ``size`` elements.

    Args:
        plan: from `make_plan`.
        data: uint8, contiguous; not changed.
        size: elements per array.
        flip: constant to XOR into every element.

    Returns:
        uint8 of the same length.
    """
    words = data.view(WORD_DTYPES[plan.word_bits])
    batch = words.numel() * plan.word_bits // (size * plan.element_bits)
    source = words.view(batch, *plan.shape).permute(0, *(axis + 1 for axis in plan.order))
    out = torch.empty(source.shape, dtype=words.dtype, device=words.device)
    flip_word = _lane_mask(plan, list(range(plan.word_bits // plan.element_bits)), flip)
    for index in _chunks(source, {axis + 1 for axis, _ in plan.exchanges}):
        part = out[index]
        staged = _stage(source[index])
        later = []
        for axis, place in plan.exchanges:
            # Either side of the copy will do: prefer the one where the axis is slow, or pairs of words are neighbours.
            early = staged is not None and (
                staged.stride(axis + 1) == 1 or staged.stride(axis + 1) > part.stride(axis + 1)
            )
            if staged is not None and early:
                _exchange(staged, axis + 1, place, plan)
            else:
                later.append((axis + 1, place))
        part.copy_(source[index] if staged is None else staged)
        for axis, place in later:
            _exchange(part, axis, place, plan)
        for low, high in plan.swaps:
            _swap(part, min(low, high), max(low, high), plan)
        if flip:
            part ^= flip_word
    return out.view(-1).view(torch.uint8)


def _stage(source: torch.Tensor) -> torch.Tensor | None:
    """Copies ``source``, on a CPU, into a buffer in which each of its cache lines stays contiguous; None if no copy is
    needed.

    Without this copy, a transposed source that is read in the order of the target costs one cache miss per word.
    """
    run = _source_run(source)
    if source.device.type != "cpu" or not run or run[-1] == source.ndim - 1:
        return None
    order = [axis for axis in range(source.ndim) if axis not in run] + run
    back = [order.index(axis) for axis in range(source.ndim)]
    return source.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _source_run(source: torch.Tensor) -> list[int]:
    """Returns the axes that together form a cache line of contiguous source words, slowest first."""
    run: list[int] = []
    words = 1
    for axis in sorted(range(source.ndim), key=source.stride):
        if source.shape[axis] == 1:
            continue
        if source.stride(axis) != words and run:
            break
        run.insert(0, axis)
        words *= source.shape[axis]
        if words * source.element_size() >= CACHE_LINE_BYTES:
            break
    return run


def _chunks(source: torch.Tensor, whole: set[int]) -> Iterator[tuple[slice, ...]]:
    """Yields the index tuples of parts that fit a CPU cache and read whole cache lines. On a GPU, the only part is the
    whole source.

    Args:
        source: words in the order of the destination.
        whole: axes that may not be cut.
    """
    steps = list(source.shape)
    nbytes = source.numel() * source.element_size()
    run = _source_run(source)
    for axis in range(source.ndim):
        if source.device.type != "cpu" or nbytes <= CPU_CHUNK_BYTES:
            break
        least = 1
        if axis in whole or axis in run[1:]:
            continue
        if run and axis == run[0]:
            least = -(-CACHE_LINE_BYTES // (source.stride(axis) * source.element_size()))
        steps[axis] = min(steps[axis], max(least, steps[axis] * CPU_CHUNK_BYTES // nbytes))
        nbytes = nbytes // source.shape[axis] * steps[axis]
    starts = [range(0, extent, max(1, step)) for extent, step in zip(source.shape, steps, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(start, start + step) for start, step in zip(corner, steps, strict=True))


def _lane_mask(plan: ShufflePlan, places: list[int], element: int | None = None) -> int:
    """Returns a word with ``element`` (default: all ones) at the given places, as a signed integer of the word's
    width."""
    ones = (1 << plan.element_bits) - 1 if element is None else element
    mask = sum(ones << place * plan.element_bits for place in places)
    signed = plan.word_bits > 8 and mask >> (plan.word_bits - 1)
    return mask - (1 << plan.word_bits) if signed else mask


def _exchange(words: torch.Tensor, axis: int, place: int, plan: ShufflePlan) -> None:
    """Exchanges the binary digit of ``axis`` with the digit ``place`` inside the word. Changes ``words``."""
    per_word = plan.word_bits // plan.element_bits
    shift = (1 << place) * plan.element_bits
    low_places = [i for i in range(per_word) if not i >> place & 1]
    pairs = _word_pairs(words, axis)
    if pairs is not None:
        _delta_swap(pairs, 32 - shift, _lane_mask(plan, [i + (1 << place) for i in low_places]) & 0xFFFFFFFF)
        return
    mask = _lane_mask(plan, low_places)
    low, high = words.select(axis, 0), words.select(axis, 1)
    moved = low >> shift
    moved ^= high
    moved &= mask
    high ^= moved
    moved <<= shift
    low ^= moved


def _word_pairs(words: torch.Tensor, axis: int) -> torch.Tensor | None:
    """Returns the two words along ``axis`` as one 64-bit number, the low word first; None if they are not neighbours in
    memory.
    """
    others = [words.stride(i) for i in range(words.ndim) if i != axis and words.shape[i] > 1]
    odd = any(stride % 2 for stride in others) or words.storage_offset() % 2
    if words.dtype != torch.int32 or words.stride(axis) != 1 or odd:
        return None
    moved = words.movedim(axis, -1)
    return moved.as_strided(moved.shape, (*(s + s % 2 for s in moved.stride()[:-1]), 1)).view(torch.int64)


def _swap(words: torch.Tensor, low: int, high: int, plan: ShufflePlan) -> None:
    """Exchanges digits ``low`` and ``high`` inside the word; changes ``words``."""
    per_word = plan.word_bits // plan.element_bits
    shift = ((1 << high) - (1 << low)) * plan.element_bits
    places = [i for i in range(per_word) if i >> low & 1 and not i >> high & 1]
    _delta_swap(words, shift, _lane_mask(plan, places))


def _delta_swap(words: torch.Tensor, shift: int, mask: int) -> None:
    """Exchanges the bits of ``mask`` with the bits ``shift`` places above them; changes ``words``."""
    moved = words >> shift
    moved ^= words
    moved &= mask
    words ^= moved
    moved <<= shift
    words ^= moved
