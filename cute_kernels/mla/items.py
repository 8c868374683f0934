"""What a CTA takes one after the other: shares of the launch, and of each its blocks of tokens.

A CTA stays for several shares, so that its ring of tiles never runs dry: what gathers goes on with the blocks of the
next share right behind those of this one, and finds them by a cursor of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_kernels.mla.config import BLOCK_HEADS
from cute_kernels.mla.locate import Divisor, count_blocks
from cute_kernels.mla.work import Shape, Work

# What a cursor keeps in registers.
INDEX, BLOCK, FOUND, ROW, END, LENGTH, MAIN_BLOCKS, EXTRA_LENGTH = range(8)


@dataclass(frozen=True)
class Counts:
    """How many shares a launch has, in a form that numbers of shares are divided by; found on the host."""

    of_part: Divisor  # shares of the first parts of all rows
    head_blocks: Divisor  # of a row
    request_rows: Divisor
    parts: Divisor

    @staticmethod
    def of(shape: Shape, head_blocks) -> Counts:
        numbers = shape.rows * head_blocks, head_blocks, shape.request_rows, shape.num_parts
        return Counts(*(Divisor.of(Int32(number)) for number in numbers))

    @property
    def shares(self):
        """All of the launch."""
        return self.of_part.value * self.parts.value


@dataclass(frozen=True)
class Items:
    """The shares of a CTA: ``first``, ``first + step`` and so on below ``count``; run-time values.

    A share is a part of a row for 64 of its heads. Blocks of heads come first, so that the CTAs of a cluster, whose
    numbers follow each other, have shares of the same row and part; then rows, then parts.
    """

    shape: Shape
    source: Any
    queries: Any
    locator: Any
    counts: Counts
    first: Any
    step: Any

    @property
    def count(self):
        """Numbers of shares are below it."""
        return self.counts.shares

    def place(self, index) -> tuple[Any, Any, Any]:
        """(row, block of heads, part) of a share."""
        part, rest = self.counts.of_part.divide(Uint32(index))
        row, head_block = self.counts.head_blocks.divide(rest)
        return Int32(row), Int32(head_block), Int32(part)

    def work(self, index) -> Work:
        """A share."""
        row, head_block, part = self.place(index)
        request, _ = self.counts.request_rows.divide(Uint32(row))
        length, extra_length = self.locator.lengths(self.source, Int32(request))
        main_blocks, num_blocks = count_blocks(length, extra_length)
        size, _ = self.counts.parts.divide(Uint32(num_blocks + self.shape.num_parts - 1))
        begin, end = Work.cut(num_blocks, Int32(size), part)
        first_head = head_block * BLOCK_HEADS
        return Work(self.shape, row, first_head, part, begin, end, length, main_blocks, extra_length)


@dataclass(frozen=True)
class Cursor:
    """A block among those of all of a CTA's shares, in order; the same in all lanes of a warp."""

    items: Items
    loader: Any
    leads: Any  # 1 in the thread that has the queries of later shares brought into L2, else 0
    state: Any  # rmem int32 [8]

    @staticmethod
    def before(items: Items, loader, leads) -> Cursor:
        """Before the first block."""
        state = cute.make_rmem_tensor(8, Int32)
        state.fill(0)
        state[INDEX] = items.first - items.step
        return Cursor(items, loader, leads, state)

    @property
    def block(self):
        """Its number in its row."""
        return Int32(self.state[BLOCK])

    @property
    def found(self):
        """How many blocks there were so far, this one included."""
        return Int32(self.state[FOUND])

    @property
    def work(self) -> Work:
        """The share, as far as locators want to know it."""
        row, end, length, main_blocks, extra = (
            Int32(self.state[i]) for i in (ROW, END, LENGTH, MAIN_BLOCKS, EXTRA_LENGTH)
        )
        return Work(self.items.shape, row, None, None, None, end, length, main_blocks, extra)

    @cute.jit
    def advance(self):
        """Goes on to the next block. Behind the last one there is none: its number is not below the share's end."""
        state, items = self.state, self.items
        state[BLOCK] = state[BLOCK] + 1
        while (state[BLOCK] >= state[END]) & (state[INDEX] + items.step < items.count):
            self.take()
        if state[BLOCK] < state[END]:
            state[FOUND] = state[FOUND] + 1

    def take(self) -> None:
        """Begins with the next share."""
        index = self.state[INDEX] + self.items.step
        work = self.items.work(index)
        self.loader.prefetch(self.items.queries, work, self.leads * Int32(index != self.items.first))
        kept = (INDEX, index), (BLOCK, work.begin), (END, work.end), (ROW, work.row), (LENGTH, work.length)
        for i, value in (*kept, (MAIN_BLOCKS, work.main_blocks), (EXTRA_LENGTH, work.extra_length)):
            self.state[i] = value
