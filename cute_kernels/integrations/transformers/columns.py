"""Maps transformers' columns to the tokens of a cache: the state that the layers of one cache share.

transformers counts padding as tokens: a batch is a rectangle of columns, and a mask says which of them are tokens. The
cache holds tokens only. Token t of a request is row t, whatever stands between it and the one before; the request's
length is all that attention needs to know. So ragged batches cost nothing, and padding is never seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

UNKNOWN = object()
"""Padding that nobody told: the mask says what is seen, but not which columns are tokens. All are taken for tokens."""
GRANULE = 256
"""Tokens by whose multiples a cache grows."""


class NotStaticError(RuntimeError):
    """A decode step cannot be recorded, because its path depends on the step."""


class BegunStep(Protocol):
    """A step that was begun before it was asked for; see `ahead`."""

    def call_back(self, columns: Columns) -> None: ...


class Columns:
    """The columns of a batch.

    Attributes:
        count: columns in the cache, those of the pass under way among them.
        new: columns of the pass under way, or of the last one.
        capacity: rows of each request that the layers have room for.
        seq_lens: int32 [batch]: tokens of each request, in the same place as long as the batch is the same.
        static: whether a decode step is being recorded: the host's numbers stand still then, and what they say is
            read on the device.
        before: int64 []: columns before the step, for models that ask in a recorded one; see `place_before`.
        graphs: recorded steps, by what they were called with, and whether they make the next one's inputs.
        epoch: stands for the model that they are of, as it stood; another state of it has another one.
        kept: int64 [batch, older columns]: the rows of a pass that hides tokens, those that it still sees first; None
            for a pass that hides none.
        is_left: whether all padding is in front of a request: distances between tokens are those between columns then.
        is_certain: whether it was told of all columns which of them are tokens; what was not is taken for tokens.
        fresh: bool [batch, new]: which of the new columns are tokens; None where all are.
        begun: a step under way that nobody has asked for, whose tokens ``seq_lens`` counts already; None for none.
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
        """The state for `pickle` and `copy`, without what belongs to this process and to these tensors."""
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
        """Whether the layer whose mask has this padding settled the pass; else its mask alone says what is visible."""
        return padding is None or self._padding_was_given

    @property
    def is_whole(self) -> bool:
        """Whether all new columns are tokens."""
        return self.fresh is None

    def call_back(self) -> None:
        """Forgets a step that was begun before it was asked for: before anything else reads or changes the cache."""
        if self.begun is not None:
            begun, self.begun = self.begun, None
            begun.call_back(self)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin(self, new: int) -> None:
        """Begins a forward pass over ``new`` columns, when it reaches its first layer."""
        if not self.static:
            self.call_back()
        self.new, self.kept = new, None
        self._is_open = True
        if self.static:
            self.fresh = None
        else:
            self.count += new

    def settle(self, padding: object) -> None:
        """Applies the padding of the pass's mask; every layer calls it, and the first call counts.

        padding: bool [batch, count], True where a column is a token; None where all are; or `UNKNOWN`.

        Raises ValueError, and forgets the pass, if that shows columns that older masks hide.
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
        """The new columns that are tokens, None for all."""
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
        """Whether ``older`` is the mask of these columns in earlier passes. Waits for the device."""
        return torch.equal(older.to(torch.bool), self.tokens(older.shape[1]))

    def _hide(self, older: torch.Tensor) -> None:
        """Hides older tokens that are not seen any more, as those generated after the end of a row. Layers move the
        row's others together. Raises ValueError for a mask that shows columns that hold no tokens."""
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
        """bool [batch, columns]: which of the first ones are tokens."""
        everything = torch.ones(self.batch, columns, dtype=torch.bool, device=self.seq_lens.device)
        if self._tokens is not None:
            known = min(columns, self._tokens.shape[1])
            everything[:, :known] = self._tokens[:, :known]
        return everything

    @property
    def slots(self) -> torch.Tensor:
        """int64 [batch * new]: where each new column goes, request * capacity + row; -1 for padding."""
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
        """Returns int64 [batch, older columns]: the row of each, any row for padding; None where rows are columns."""
        old = self.count - self.new
        return None if self._tokens is None else (self.tokens(old).cumsum(1) - 1).clamp_(min=0)

    # -- a recorded step ----------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, a pass over one column is recorded or replayed: only what is on the device changes."""
        self.static = True
        try:
            yield
        finally:
            self.static = False
            self._is_open = False
            self._before = None

    def place_before(self) -> None:
        """Sets ``before`` to the number of columns before a recorded step, if the last step, which adds one, did not
        leave it so."""
        if self._before != self.count:
            self.before.fill_(self.count)
        self._before = self.count + 1

    def advance(self) -> None:
        """Notes that a replay has added one token to each request; the device has done so."""
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
        """Forgets all columns, keeps the memory."""
        self.call_back()
        self.count = self.new = 0
        self.seq_lens.zero_()
        self._tokens, self.is_left, self.is_certain = None, True, True
        self.fresh = self._slots = None
        self._is_open = False
        self._before = None

    def select(self, requests: torch.Tensor) -> None:
        """Makes request b what request requests[b] was; in place if the batch stays as large."""
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
