"""The state that the layers of one cache share. It maps transformers' columns to the cache's tokens.

In transformers a batch is a rectangle of columns, padding included, and a mask says which columns are tokens. The cache
holds only tokens. Token t of a request is row t, whatever padding stands before it. Attention needs only the request's
length. So ragged batches take no additional time, and padding is never seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

UNKNOWN = object()
"""Stands for unknown padding: the mask says what is seen, but not which columns are tokens. All columns then count as
tokens."""
GRANULE = 256
"""A cache's capacity grows to a multiple of this many tokens."""


class NotStaticError(RuntimeError):
    """The error for a decode step that cannot be recorded, because its path depends on the step."""


class BegunStep(Protocol):
    """A step that began before it was asked for; see `ahead`."""

    def call_back(self, columns: Columns) -> None: ...


class Columns:
    """The columns of a batch.

    Attributes:
        count: number of columns in the cache, including those of the current pass.
        new: number of columns of the current pass, or of the last one.
        capacity: number of rows of each request that the layers have room for.
        seq_lens: int32 [batch]: number of tokens of each request, at a fixed address as long as the batch size does not
            change.
        static: whether a decode step is being recorded. Kernels then read the lengths on the device, and the numbers on
            the host do not change.
        before: int64 []: the number of columns before a recorded step, for models that read this number; see
            `place_before`.
        graphs: recorded steps by key, then by whether the step also writes the next step's inputs. A key has a step's
            arguments.
        epoch: identifies the state of the model for which ``graphs`` were recorded.
        kept: int64 [batch, older columns]: if the pass hides tokens, the order of the rows, visible ones first; else
            None.
        is_left: whether all padding precedes the tokens; distances between tokens then equal those between columns.
        is_certain: whether every pass said which columns are tokens. Columns with `UNKNOWN` padding are treated as
            tokens.
        fresh: bool [batch, new]: which of the new columns are tokens; None if all are.
        begun: a step in flight that `generate` has not asked for; ``seq_lens`` already includes its tokens. None if
            there is none.
    """

    @torch.inference_mode(False)  # what a call in inference mode makes, another one may write
    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        self.count = 0
        self.new = 0
        self.capacity = capacity
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.before = torch.zeros((), dtype=torch.int64, device=device)
        self._before: int | None = None  # what the device's is once all that it was given is done; None: unknown
        self.static = False
        self.graphs: dict[Any, Any] = {}
        self.epoch: object = None
        self.kept: torch.Tensor | None = None
        self.begun: BegunStep | None = None
        self._tokens: torch.Tensor | None = None  # bool [batch, the first columns]; what follows are tokens
        self.is_left = True
        self.is_certain = True
        self._padding_was_given = False
        self.fresh: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        self._is_open = False

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for `pickle` and `copy`, without recorded steps, which belong to this process and its
        tensors."""
        self.call_back()
        return vars(self) | {"graphs": {}, "epoch": None, "_before": None}

    @property
    def batch(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def all_tokens(self) -> bool:
        """Whether there is no padding at all."""
        return self._tokens is None

    def is_told(self, padding: torch.Tensor | None) -> bool:
        """Returns whether the cache has recorded this padding; None stands for no padding. If it has not, only the
        layer's mask says which columns are visible.
        """
        return padding is None or self._padding_was_given

    @property
    def is_whole(self) -> bool:
        """Whether all new columns are tokens."""
        return self.fresh is None

    def call_back(self) -> None:
        """Discards a step that began before it was asked for. Must run before anything else reads or changes the
        cache."""
        if self.begun is not None:
            begun, self.begun = self.begun, None
            begun.call_back(self)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin(self, new: int) -> None:
        """Begins a forward pass over ``new`` columns; called when the pass reaches its first layer."""
        if not self.static:
            self.call_back()
        self.new, self.kept = new, None
        self._is_open = True
        if self.static:
            self.fresh = None
        else:
            self.count += new

    def settle(self, padding: object) -> None:
        """Applies the padding of the pass's mask. Every layer calls it, and only the first call has an effect.

        padding: bool [batch, count], True for columns that are tokens; None if all are; or `UNKNOWN`. Raises
        ValueError, and undoes the pass, if the padding shows columns that older masks hide.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._slots = None
        if self.static:
            self.seq_lens.add_(self.new)
            return
        try:
            fresh = self._take(padding)
        except ValueError:
            self.count -= self.new
            raise
        self.fresh = fresh
        if fresh is None:
            self.seq_lens.add_(self.new)
        else:
            self.seq_lens.add_(fresh.sum(1, dtype=torch.int32))

    def _take(self, padding: object) -> torch.Tensor | None:
        """Notes the padding of a pass. Returns bool [batch, new], True for new columns that are tokens; None if all
        are."""
        old = self.count - self.new
        self._padding_was_given = isinstance(padding, torch.Tensor)
        self.is_certain = self.is_certain and padding is not UNKNOWN
        if padding is UNKNOWN or (padding is None and self._tokens is None):
            return None
        if not isinstance(padding, torch.Tensor):
            raise ValueError("attention_mask: got None, want the mask of all columns: the cache holds a padded batch")
        if tuple(padding.shape) != (self.batch, self.count):
            raise ValueError(f"attention_mask: got shape {list(padding.shape)}, want {[self.batch, self.count]}")
        padding = padding.to(device=self.seq_lens.device, dtype=torch.bool)
        if not self.is_known(padding[:, :old]):
            self._hide(padding[:, :old])
        if bool(padding.all()):
            return None
        self._tokens = padding
        self.is_left = bool((padding[:, 1:] >= padding[:, :-1]).all())
        fresh = padding[:, old:]
        return None if bool(fresh.all()) else fresh

    def is_known(self, older: torch.Tensor) -> bool:
        """Returns whether ``older`` equals what earlier masks said of these columns. Waits for the device."""
        return torch.equal(older.to(torch.bool), self.tokens(older.shape[1]))

    def _hide(self, older: torch.Tensor) -> None:
        """Hides older tokens that the mask no longer shows, such as those generated after the end of a request.

        Layers then move the request's other rows together. Raises ValueError for a mask that shows columns without
        cached tokens.
        """
        held, columns = self.tokens(older.shape[1]), older.shape[1]
        if bool((older & ~held).any()):
            raise ValueError(
                f"attention_mask: got another mask of the first {columns} columns, want one that shows none but those "
                "whose keys are cached"
            )
        rows = torch.where(held, held.cumsum(1) - 1, columns)
        seen = held.new_zeros(self.batch, columns + 1).scatter_(1, rows, older)[:, :columns]
        self.kept = (~seen).to(torch.uint8).argsort(dim=1, stable=True)
        self.seq_lens.sub_((held & ~older).sum(1, dtype=torch.int32))

    def tokens(self, columns: int) -> torch.Tensor:
        """Returns which of the first ``columns`` columns are tokens, bool [batch, columns]."""
        everything = torch.ones(self.batch, columns, dtype=torch.bool, device=self.seq_lens.device)
        if self._tokens is not None:
            known = min(columns, self._tokens.shape[1])
            everything[:, :known] = self._tokens[:, :known]
        return everything

    @property
    def slots(self) -> torch.Tensor:
        """int64 [batch * new]: the slot of each new column, request * capacity + row; -1 for padding."""
        if self._slots is None:
            device = self.seq_lens.device
            ends = self.seq_lens.long()[:, None]
            starts = torch.arange(self.batch, device=device)[:, None] * self.capacity
            if self.fresh is None:
                rows = ends - self.new + torch.arange(self.new, device=device)
                self._slots = (starts + rows).flatten()
            else:
                rows = ends - self.fresh.sum(1, keepdim=True) + self.fresh.cumsum(1) - 1
                self._slots = torch.where(self.fresh, starts + rows, -1).flatten()
        return self._slots

    def older_rows(self) -> torch.Tensor | None:
        """Returns the row of each older column, int64 [batch, older columns]; None if column i is in row i. A column of
        padding has an arbitrary row."""
        old = self.count - self.new
        return None if self._tokens is None else (self.tokens(old).cumsum(1) - 1).clamp_(min=0)

    # -- a recorded step ----------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Marks a pass over one column as recorded or replayed, within the context. Only state on the device then
        changes."""
        self.static = True
        try:
            yield
        finally:
            self.static = False
            self._is_open = False
            self._before = None

    def place_before(self) -> None:
        """Sets ``before`` to the number of columns before a recorded step.

        Each recorded step adds one to ``before`` on the device. So the host writes the number only if the device's
        number differs.
        """
        if self._before != self.count:
            self.before.fill_(self.count)
        self._before = self.count + 1

    def advance(self) -> None:
        """Records on the host that a replay has added one token to each request; the device's state already has it."""
        self.count += 1
        self.new = 1
        self.fresh = self._slots = None

    # -- the batch ----------------------------------------------------------------------------------------------------

    def forget(self, columns: int) -> None:
        """Forgets the newest columns."""
        self.call_back()
        kept = self.count - columns
        self.seq_lens.sub_(self.tokens(self.count)[:, kept:].sum(1, dtype=torch.int32))
        if self._tokens is not None:
            self._tokens = self._tokens[:, :kept]
        self.count = kept

    def reset(self) -> None:
        """Forgets all columns and keeps the memory."""
        self.call_back()
        self.count = self.new = 0
        self.seq_lens.zero_()
        self._tokens, self.is_left, self.is_certain = None, True, True
        self.fresh = self._slots = None
        self._is_open = False
        self._before = None

    def select(self, requests: torch.Tensor) -> None:
        """Gives request b the state of request requests[b]. ``seq_lens`` keeps its address if the batch size does not
        change."""
        self.call_back()
        with torch.inference_mode(False):
            chosen = self.seq_lens.index_select(0, requests)
        if self._tokens is not None:
            self._tokens = self._tokens.index_select(0, requests)
        if chosen.shape == self.seq_lens.shape:
            self.seq_lens.copy_(chosen)
        else:
            self.seq_lens = chosen
            self.graphs.clear()
