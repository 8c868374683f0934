"""`PageTable`, which knows the pages of each sequence, the pages' reference counts and the free pages. It lives on the
host and holds no tensors.

Pages are shared as in vLLM's PagedAttention (Kwon et al., 2023): a fork refers to its parent's pages. A sequence that
is about to write into a page of several sequences first gets its own copy of the page.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cute_kernels.arguments import check_count

SeqId = Hashable


class OutOfPagesError(RuntimeError):
    """A call needs more pages than are free. The call has changed nothing.

    Attributes:
        needed: number of pages that the call needs.
        free: number of pages that were free.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"out of pages: {needed} needed, {free} free; free or truncate sequences, or add pages")
        self.needed = needed
        self.free = free


class PageCopy(NamedTuple):
    """A copy of a shared page that the caller must make before the next write."""

    source: int
    target: int


@dataclass
class SequencePages:
    """One sequence: its pages in token order, its length in tokens, and a stamp that identifies this list of pages."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    stamp: int = 0


class PageTable:
    """The pages of all sequences. A method that takes pages either succeeds, or raises and changes nothing.

    Args:
        num_pages: number of pages.
        page_size: number of tokens of a page.
        max_seq_len: the largest number of tokens of a sequence; default: the tokens of all pages.

    Attributes:
        version: a counter that every change of a sequence increases.
        num_shared: number of pages that more than one sequence refers to.
    """

    def __init__(self, num_pages: int, page_size: int, max_seq_len: int | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_seq_len = num_pages * page_size if max_seq_len is None else max_seq_len
        self.version = 0
        self.num_shared = 0
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: what was freed last is taken first
        self._references = [0] * num_pages
        self._sequences: dict[SeqId, SequencePages] = {}
        self._stamps = 0

    # -- looking ------------------------------------------------------------------------------------------------------

    def __contains__(self, seq_id: SeqId) -> bool:
        return seq_id in self._sequences

    def __iter__(self) -> Iterator[SeqId]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, seq_id: SeqId) -> SequencePages:
        """Returns the sequence called ``seq_id``. Raises ValueError if the name is unknown, TypeError if it cannot be a
        name."""
        check_name("seq_id", seq_id)
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise ValueError(f"seq_id: got {seq_id!r}, want one of the cache's {len(self)} sequences") from None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        """Returns how many sequences refer to a page."""
        return self._references[page]

    def first_shared(self, seq_ids: Sequence[SeqId], num_tokens: Sequence[int]) -> SeqId | None:
        """Returns the first sequence that has one of its last ``num_tokens`` tokens in a shared page, or None."""
        if not self.num_shared:
            return None
        for seq_id, count in zip(seq_ids, num_tokens, strict=True):
            sequence = self[seq_id]
            written = sequence.pages[(sequence.length - count) // self.page_size :] if count else ()
            if any(self._references[page] > 1 for page in written):
                return seq_id
        return None

    def stored_tokens(self) -> int:
        """Returns the number of tokens in pages; a token that several sequences share is counted once."""
        filled: dict[int, int] = {}
        for sequence in self._sequences.values():
            for number, page in enumerate(sequence.pages):
                tokens = min(self.page_size, sequence.length - number * self.page_size)
                filled[page] = max(filled.get(page, 0), tokens)
        return sum(filled.values())

    # -- changing -----------------------------------------------------------------------------------------------------

    def allocate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Makes a sequence with pages for ``num_tokens`` tokens (0 is allowed)."""
        self._check_new("seq_id", seq_id)
        check_count("num_tokens", num_tokens, 0)
        self._check_length(seq_id, num_tokens)
        needed = self._pages_for(num_tokens)
        self._check_free(needed)
        self._sequences[seq_id] = SequencePages([self._take() for _ in range(needed)], num_tokens, self._stamp())
        self.version += 1

    def extend(self, seq_ids: Sequence[SeqId], num_tokens: int | Sequence[int]) -> list[PageCopy]:
        """Lengthens all of the sequences or, if it raises, none. Returns the copies of pages to make before the new
        tokens are written.

        A sequence whose last page is partly filled and shared gets a page of its own. If only sequences of this call
        share the page, the last of them keeps it.
        """
        counts = self._counts(seq_ids, num_tokens)
        needed = 0
        leaving: dict[int, int] = {}  # shared page -> sequences that this call takes off it
        for seq_id, count in zip(seq_ids, counts, strict=True):
            sequence = self[seq_id]
            self._check_length(seq_id, sequence.length + count)
            needed += self._pages_for(sequence.length + count) - len(sequence.pages)
            page = self._page_written_next(sequence)
            if count and page is not None and self._references[page] - leaving.get(page, 0) > 1:
                leaving[page] = leaving.get(page, 0) + 1
                needed += 1
        self._check_free(needed)
        copies = [self._extend(self[seq_id], count) for seq_id, count in zip(seq_ids, counts, strict=True) if count]
        self.version += 1
        return [copy for copy in copies if copy is not None]

    def fork(self, seq_id: SeqId, new_id: SeqId) -> None:
        """Makes a sequence ``new_id`` with all tokens of ``seq_id``, in the same pages."""
        parent = self[seq_id]
        self._check_new("new_id", new_id)
        for page in parent.pages:
            self._references[page] += 1
            self.num_shared += self._references[page] == 2
        self._sequences[new_id] = SequencePages(list(parent.pages), parent.length, self._stamp())
        self.version += 1

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Shortens a sequence to its first ``num_tokens`` tokens, and drops its references to the pages after them."""
        sequence = self[seq_id]
        check_count("num_tokens", num_tokens, 0)
        if num_tokens > sequence.length:
            raise ValueError(f"num_tokens: got {num_tokens}, want at most {sequence.length}, the length of {seq_id!r}")
        kept = self._pages_for(num_tokens)
        if kept < len(sequence.pages):
            self._release(sequence.pages[kept:])
            del sequence.pages[kept:]
            sequence.stamp = self._stamp()
        sequence.length = num_tokens
        self.version += 1

    def free(self, seq_id: SeqId) -> None:
        """Forgets a sequence. Its pages become free if no other sequence refers to them."""
        self._release(self[seq_id].pages)
        del self._sequences[seq_id]
        self.version += 1

    # -- inside -------------------------------------------------------------------------------------------------------

    def _extend(self, sequence: SequencePages, num_tokens: int) -> PageCopy | None:
        copy = None
        page = self._page_written_next(sequence)
        if page is not None and self._references[page] > 1:
            copy = PageCopy(page, self._take())
            self._release([page])
            sequence.pages[-1] = copy.target
            sequence.stamp = self._stamp()
        missing = self._pages_for(sequence.length + num_tokens) - len(sequence.pages)
        if missing:
            sequence.pages += (self._take() for _ in range(missing))
            sequence.stamp = self._stamp()
        sequence.length += num_tokens
        return copy

    def _page_written_next(self, sequence: SequencePages) -> int | None:
        """Returns the partly filled page into which the next token is written; None if the next token needs a new
        page."""
        return sequence.pages[-1] if sequence.length % self.page_size else None

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            self.num_shared -= self._references[page] == 1
            if not self._references[page]:
                self._free.append(page)

    def _stamp(self) -> int:
        self._stamps += 1
        return self._stamps

    def _counts(self, seq_ids: Sequence[SeqId], num_tokens: int | Sequence[int]) -> Sequence[int]:
        check_distinct(seq_ids)
        return per_sequence("num_tokens", num_tokens, len(seq_ids))

    def _check_new(self, name: str, seq_id: SeqId) -> None:
        check_name(name, seq_id)
        if seq_id in self._sequences:
            raise ValueError(f"{name}: got {seq_id!r}, which the cache already holds; want a new one")

    def _check_length(self, seq_id: SeqId, num_tokens: int) -> None:
        if num_tokens > self.max_seq_len:
            raise ValueError(
                f"num_tokens: got {num_tokens} tokens for {seq_id!r}, want at most max_seq_len {self.max_seq_len}"
            )

    def _check_free(self, needed: int) -> None:
        if needed > len(self._free):
            raise OutOfPagesError(needed, len(self._free))


def per_sequence(name: str, counts: int | Sequence[int], num_sequences: int) -> list[int]:
    """Returns a count for each sequence. counts: one count for all sequences, or one for each. Raises TypeError or
    ValueError for anything else."""
    if not isinstance(counts, Sequence):
        check_count(name, counts, 0)
        return [counts] * num_sequences
    if len(counts) != num_sequences:
        raise ValueError(f"{name}: got {len(counts)} counts, want {num_sequences}, one per sequence")
    for count in counts:
        check_count(name, count, 0)
    return list(counts)


def check_name(name: str, seq_id: object) -> None:
    """Raises TypeError for values that cannot be a sequence's name."""
    try:
        hash(seq_id)
    except TypeError:
        raise TypeError(f"{name}: got {seq_id!r}, want what a dict takes as a key, a str or an int") from None


def check_distinct(seq_ids: Sequence[SeqId]) -> None:
    """Raises TypeError for values that cannot be sequences' names, ValueError if a sequence is named twice."""
    if not isinstance(seq_ids, Sequence):
        raise TypeError(f"seq_ids: got {seq_ids!r}, want a sequence of those that the cache holds")
    for seq_id in seq_ids:
        check_name("seq_ids", seq_id)
    if len(set(seq_ids)) < len(seq_ids):
        twice = next(seq_id for number, seq_id in enumerate(seq_ids) if seq_id in seq_ids[:number])
        raise ValueError(f"seq_ids: got {twice!r} twice, want every sequence once")
