"""`KVCache`, the paged KV cache of a model, for authors of inference engines.

It owns the memory and knows in which pages tokens lie. The engine decides which sequence runs when.

    formats = ("int8_token_head", "int4_g4")  # of K and of V
    cache = KVCache(num_layers, num_pages, 64, num_kv_heads, head_dim, kv_format=formats, device="cuda")
    batch = cache.make_batch(max_batch)
    cache.allocate("a", prompt_len)                      # pages for the prompt
    batch.update(["a"], [prompt_len])                    # prefill: append its K and V, layer by layer
    ...
    cache.extend_all(running)                            # each step: one token more for every running sequence,
    batch.update(running)                                # its addresses and lengths to the device,
    for layer in range(num_layers):                      # and per layer
        q = cache.append(layer, batch, k, v, q=q, rope=rope)
        out = cache.attend(layer, batch, q[:, None])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch

from cute_kernels import attention
from cute_kernels.arguments import check_count
from cute_kernels.attention.checks import CACHES, check_layout, check_readable
from cute_kernels.attention.transformed import restore
from cute_kernels.formats.kv import KvFormat, told_formats
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.kv_cache.batch import Batch
from cute_kernels.kv_cache.cache_checks import (
    check_max_seqs,
    check_new_tokens,
    check_sizes,
    is_transformed,
    layers_formats,
)
from cute_kernels.kv_cache.constants import CacheConstants, constants_of
from cute_kernels.kv_cache.exported import ExportedSequence
from cute_kernels.kv_cache.layer_constants import LayerConstants
from cute_kernels.kv_cache.memory import MemoryReport
from cute_kernels.kv_cache.pages import PageCopy, PageTable, SeqId
from cute_kernels.kv_cache.step import append_and_decode, append_kv
from cute_kernels.kv_cache.tails import KeyTails, append_then_attend
from cute_kernels.names import CacheLayout, KvFormats
from cute_kernels.runtime.device import device_of

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Unpack

    from cute_kernels.kv_cache.options import AppendOptions, AttendOptions, StepAttendOptions


def _pages(
    forms: Sequence[KvFormat], shape: tuple[int, ...], head_dim: int, device: torch.device | None
) -> torch.Tensor:
    """Makes pages of zeros for K or for V of all layers: a tensor [layers, *shape, row], or a tuple of tensors [*shape,
    row] if layers differ in format."""
    alike = all(form == forms[0] for form in forms)
    made = tuple(
        torch.zeros(*layers, *shape, form.row_elements(head_dim), dtype=form.cache_dtype, device=device)
        for layers, form in ([((len(forms),), forms[0])] if alike else [((), form) for form in forms])
    )
    return made[0] if alike else cast("torch.Tensor", made)


class KVCache:
    """The pages of K and V of all layers, and the sequences that own them.

    A sequence has the same page indices in every layer. Its length is the number of tokens that it has pages for;
    `allocate` and `extend` increase it. Call `extend` once per step, before any layer's `append`; `append` writes the
    rows of a sequence's last tokens. `fork` shares pages; a partly filled shared page is copied for the sequence that
    extends into it. Every method that takes pages succeeds, or raises `OutOfPagesError` and changes nothing.

    Not thread-safe; run all of a cache's device work on one stream, so that a page is not reused before its last reader
    is done.

    Args:
        num_layers: number of layers of the model.
        num_pages: number of pages of each layer.
        page_size: tokens per page, a multiple of 16 from 16 to 256.
        num_kv_heads: number of KV heads.
        head_dim: number of columns of K's heads; V's heads have ``v_head_dim`` columns (default: head_dim).
        kv_format: a name in `cute_kernels.formats.kv.FORMATS`; "int4", "int8" or "fp8" for the recommended format of
            that kind; or a pair of names for K and V. To choose by layer, pass a mapping from a layer's number (-1: all
            other layers) to a name or pair, or the path of a file (``*.json``, see `LayerFormats`).
        cache_layout: "NHD" ([num_pages, page_size, num_kv_heads, row] in a layer) or "HND" ([num_pages, num_kv_heads,
            page_size, row]).
        dtype: the dtype of q, k and v, bf16 or fp16. A 16-bit format must have this dtype.
        device: where the pages lie. On a CPU the reference implementations run.
        max_seq_len: the largest number of tokens of a sequence, which sets the block table's width; default: the tokens
            of all pages.
        max_seqs: the largest number of sequences at a time. Only for keys in blocks ("int4_channel32"), whose newest
            rows are kept outside the pages.
        transform: the transform of K and V before they are written: a `CacheTransform` for all layers, or a sequence
            with a transform or None for each layer. `set_constants` sets the result of a calibration.

    Attributes:
        k_pages, v_pages: the caches of all layers, as `append_kv` and `decode_attention` take them: one tensor
            [num_layers, *a layer's cache], or a tuple of tensors if layers differ in format.
        layer_formats: (K's format, V's format) of each layer.
        tails: the newest keys if keys are in blocks (`KeyTails`); else None.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kv_format: KvFormats | Mapping[int, KvFormats] | Path,
        v_head_dim: int | None = None,
        cache_layout: CacheLayout = "NHD",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        max_seq_len: int | None = None,
        max_seqs: int | None = None,
        transform: CacheTransform | Sequence[CacheTransform | None] | None = None,
    ) -> None:
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_sizes(num_layers, num_pages, page_size, num_kv_heads, (head_dim, v_head_dim), max_seq_len)
        check_layout(cache_layout)
        self.kv_format = told_formats(kv_format)
        self.layer_formats = layers_formats(self.kv_format, num_layers, dtype)
        keys = self.layer_formats[0][0]
        check_max_seqs(keys, max_seqs)
        for pair in self.layer_formats:
            for name, form, dim in zip(CACHES, pair, (head_dim, v_head_dim), strict=True):
                check_readable(name, form, dim)
        self.num_layers, self.num_kv_heads = num_layers, num_kv_heads
        self.head_dims = (head_dim, v_head_dim)
        self.cache_layout, self.dtype = cache_layout, dtype
        self._pages = PageTable(num_pages, page_size, max_seq_len)
        where = device_of(device)
        inner = (page_size, num_kv_heads) if cache_layout == "NHD" else (num_kv_heads, page_size)
        self.k_pages, self.v_pages = (
            _pages(forms, (num_pages, *inner), dim, where)
            for forms, dim in zip(zip(*self.layer_formats, strict=True), self.head_dims, strict=True)
        )
        self.device = self.k_pages[0].device
        self.tails: KeyTails | None = None
        if max_seqs is not None:
            self.tails = KeyTails(keys, (num_layers, max_seqs, num_kv_heads, head_dim), page_size, where)
        self._constants = LayerConstants(
            self.layer_formats, (num_layers, num_kv_heads, head_dim, v_head_dim), self.device
        )
        self._constants.transforms = self._constants.checked_transforms("transform", transform)

    @property
    def transforms(self) -> tuple[CacheTransform | None, ...]:
        """The transform of each layer, or None."""
        return self._constants.transforms

    # -- sequences ----------------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._pages.page_size

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence has."""
        return self._pages.num_free

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        """All sequences, oldest first."""
        return tuple(self._pages)

    def seq_len(self, seq_id: SeqId) -> int:
        """Returns the number of tokens of a sequence. Raises ValueError if the sequence is unknown."""
        return self._pages[seq_id].length

    def page_ids(self, seq_id: SeqId) -> tuple[int, ...]:
        """Returns the pages of a sequence, in token order."""
        return tuple(self._pages[seq_id].pages)

    def allocate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Makes a sequence with pages for ``num_tokens`` tokens, which `append` then writes.

        Raises:
            OutOfPagesError: there are not enough free pages.
            ValueError: the name is taken, or num_tokens is negative or above max_seq_len.
        """
        if self.tails is not None:
            self.tails.check_free("seq_id", seq_id)
        self._pages.allocate(seq_id, num_tokens)
        if self.tails is not None:
            self.tails.add(seq_id)
            self.tails.lengthened(self._pages, [seq_id])

    def extend(self, seq_id: SeqId, num_tokens: int = 1) -> None:
        """Lengthens one sequence, as `extend_all` does."""
        self.extend_all([seq_id], num_tokens)

    def extend_all(self, seq_ids: Sequence[SeqId], num_tokens: int | Sequence[int] = 1) -> None:
        """Lengthens sequences by ``num_tokens`` tokens: one count for all sequences, or one for each. If it raises, no
        sequence has changed.

        Raises:
            OutOfPagesError: there are not enough free pages for all.
            ValueError: an unknown sequence, one named twice, or a length above max_seq_len.
        """
        self._copy_pages(self._pages.extend(seq_ids, num_tokens))
        if self.tails is not None:
            self.tails.lengthened(self._pages, seq_ids)

    def fork(self, seq_id: SeqId, new_id: SeqId) -> None:
        """Makes a sequence ``new_id`` that shares all tokens of ``seq_id``. No page is taken until one of the two is
        extended."""
        if self.tails is not None:
            self.tails.check_free("new_id", new_id)
        self._pages.fork(seq_id, new_id)
        if self.tails is not None:
            self.tails.fork(seq_id, new_id)

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Cuts a sequence back to its first ``num_tokens`` tokens, as speculative decoding does when it rejects tokens.

        With keys in blocks, up to 32 tokens can always be removed; more only if ``num_tokens`` is a multiple of 32.
        Raises ValueError otherwise.
        """
        if self.tails is not None and seq_id in self._pages and isinstance(num_tokens, int):
            self.tails.check_truncate(seq_id, num_tokens)
        self._pages.truncate(seq_id, num_tokens)
        if self.tails is not None:
            self.tails.truncated(seq_id, num_tokens)

    def free(self, seq_id: SeqId) -> None:
        """Forgets a sequence. Its pages become free if no other sequence refers to them."""
        self._pages.free(seq_id)
        if self.tails is not None:
            self.tails.free(seq_id)

    def make_batch(self, max_batch: int) -> Batch:
        """Allocates device buffers for batches of up to ``max_batch`` sequences; see `Batch`."""
        return Batch(self._pages, max_batch, self.device, None if self.tails is None else self.tails.slot)

    # -- the model's layers -------------------------------------------------------------------------------------------

    def append(
        self, layer: int, batch: Batch, k: torch.Tensor, v: torch.Tensor, **options: Unpack[AppendOptions]
    ) -> torch.Tensor | None:
        """Writes the batch's new tokens into a layer: `append_kv` with the cache's arguments filled in.

        Args:
            layer: 0 to num_layers - 1.
            batch: as updated for this step. k and v hold the batch's new tokens, sequence by sequence.
            k, v: bf16 or fp16 [tokens, num_kv_heads, head_dim], before RoPE if ``rope`` is given.
            options: ``q``, ``q_out``, ``qkv_bias``, ``rope``, ``position_ids``, ``q_norm``, ``k_norm``, ``norm_eps``,
                ``q_shift`` of `append_kv`.

        Returns:
            The rotated q, or None without q. If the layer has a transform, q is transformed, too.

        Raises:
            ValueError: sequences have changed since the batch was updated, the batch's new tokens lie in shared pages,
                or a scale was never given. Further errors are those of `append_kv`.
        """
        self._check_append(layer, batch)
        given: dict[str, Any] = {**self._layer(layer, batch), **options}
        return append_kv(k, v, seq_lens=batch.seq_lens, cu_seqlens=batch.cu_seqlens, **given)

    @overload
    def attend(
        self,
        layer: int,
        batch: Batch,
        q: torch.Tensor,
        *,
        q_transformed: bool | None = ...,
        return_lse: Literal[False] = ...,
        **options: Unpack[AttendOptions],
    ) -> torch.Tensor: ...

    @overload
    def attend(
        self,
        layer: int,
        batch: Batch,
        q: torch.Tensor,
        *,
        q_transformed: bool | None = ...,
        return_lse: Literal[True],
        **options: Unpack[AttendOptions],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def attend(
        self,
        layer: int,
        batch: Batch,
        q: torch.Tensor,
        *,
        q_transformed: bool | None = ...,
        return_lse: bool,
        **options: Unpack[AttendOptions],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def attend(
        self, layer: int, batch: Batch, q: torch.Tensor, *, q_transformed: bool | None = None, **options: Any
    ) -> Any:
        """Computes attention of the newest tokens' queries over a layer: `decode_attention` with the cache's arguments
        filled in.

        Args:
            layer: 0 to num_layers - 1.
            batch: as updated for this step.
            q: [batch.size, q_len, num_q_heads, head_dim], queries of each sequence's last q_len tokens, rotated.
            q_transformed: whether q is transformed already; required for a layer with a transform, None for other
                layers. True: q is a result of `append`. False: q has only been rotated, and is transformed here in a
                few more launches.
            options: further arguments of `decode_attention`: ``softmax_scale``, ``window_size``, ``return_lse``,
                ``out`` and so on. With transformed queries a soft cap, sinks, ``score_options`` and the log-sum-exp
                need ``q_shift``, as `append` has written it.

        Returns:
            The result of `decode_attention`: out [batch.size, q_len, num_q_heads, v_head_dim], with ``return_lse`` also
            lse.

        Raises:
            ValueError: sequences have changed since the batch was updated, a scale was never given, or the layer's
                transform needs ``q_transformed`` or ``q_shift``. Further errors are those of `decode_attention`.
        """
        self._check_step(layer, batch)
        operands = self._layer(layer, batch)
        transform: CacheTransform | None = operands.pop("transform")
        if transform is None:
            return attention.decode_attention(q, seq_lens=batch.seq_lens, **operands, **options)
        is_done = is_transformed(layer, transform, q_transformed, options)
        undone = {} if is_done else {"transform": transform}
        found = attention.decode_attention(q, seq_lens=batch.seq_lens, **operands, **undone, **options)
        if not (is_done and transform.changes_values):
            return found
        if isinstance(found, tuple):
            return restore(transform, found[0], options.get("out")), found[1]
        return restore(transform, found, options.get("out"))

    @overload
    def append_and_attend(
        self,
        layer: int,
        batch: Batch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[StepAttendOptions],
    ) -> torch.Tensor: ...

    @overload
    def append_and_attend(
        self,
        layer: int,
        batch: Batch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        return_lse: Literal[True],
        **options: Unpack[StepAttendOptions],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def append_and_attend(
        self,
        layer: int,
        batch: Batch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        return_lse: bool,
        **options: Unpack[StepAttendOptions],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def append_and_attend(
        self, layer: int, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> Any:
        """Appends and attends in one call, in which both run concurrently: `append_and_decode` with the cache's
        arguments filled in.

        Args:
            layer: 0 to num_layers - 1.
            batch: as updated for this step, with q_len new tokens of every sequence.
            q: [batch.size, q_len, num_q_heads, head_dim], before RoPE if ``rope`` is given.
            k, v: [batch.size, q_len, num_kv_heads, head_dim] of the new tokens, sequence by sequence.
            options: further arguments of `append_and_decode`: ``rope``, ``qkv_bias``, ``window_size``, ``return_lse``
                and so on.

        Returns:
            As `append_and_decode`: out [batch.size, q_len, num_q_heads, v_head_dim], with ``return_lse`` also lse.

        Raises:
            ValueError: a sequence has not exactly q_len new tokens. Further errors are those of `append` and `attend`.
        """
        self._check_append(layer, batch)
        check_new_tokens(batch.num_new_tokens, q)
        if self.tails is not None:
            append, attend = partial(self.append, layer, batch), partial(self.attend, layer, batch)
            return append_then_attend(append, attend, self.transforms[layer], (q, k, v), options)
        return append_and_decode(q, k, v, seq_lens=batch.seq_lens, **self._layer(layer, batch), **options)

    def set_scales(
        self, layer: int, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None
    ) -> None:
        """Copies a layer's scales into the cache, for formats with a scale beside the cache.

        Args:
            layer: 0 to num_layers - 1.
            k_scale, v_scale: results of `compute_kv_scale`: [] or [1] per tensor, [num_kv_heads] or [num_kv_heads, 1]
                per head, [num_kv_heads, head_dim] per channel. None for a format without such a scale.

        Raises:
            ValueError: a scale is missing, is given for a format without one, or has a wrong shape, or is not positive
                and finite; or the cache holds sequences, whose rows were written with the old scales.
        """
        self._check_layer(layer)
        self._check_empty(f"layer: got {layer}")
        self._constants.set_scales({layer: (k_scale, v_scale)})

    def set_constants(self, constants: CacheConstants | str | Path) -> None:
        """Sets the constants of a calibration for all layers: transforms, and scales that are kept outside the pages.

        Args:
            constants: the constants, or the path of a file that `cute-kernels calibrate` has written.

        Raises:
            FileNotFoundError, ConstantsError: there is no such file, or the file holds no constants.
            ValueError: the number of layers or the sizes differ; a scale is missing, or is given for a format without
                one; or the cache holds sequences, whose rows were written with the old constants.
        """
        constants = constants_of(constants)
        self._check_empty("constants: got some")
        transforms = self._constants.checked_transforms("constants", constants.transforms)
        scales = constants.scales or ((None, None),) * self.num_layers
        self._constants.set_scales(dict(enumerate(scales)))
        self._constants.transforms = transforms

    # -- moving sequences ---------------------------------------------------------------------------------------------

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns each layer's key, a string. If layers of two caches have equal keys, each can read the other's rows.
        Waits for the device.
        """
        return self._constants.keys

    def export_sequence(self, seq_id: SeqId) -> ExportedSequence:
        """Copies a sequence's rows of all layers, and `keys`, for another cache's `import_sequence`. Raises ValueError
        if the sequence is unknown, the cache's K is in blocks, or layers differ in format."""
        sequence = self._pages[seq_id]
        if self.tails is not None:
            raise ValueError(
                f"seq_id: got {seq_id!r} of a cache of {self.layer_formats[0][0].name} keys, whose newest lie beside "
                "the pages; want a cache of another format"
            )
        whole = self._one_tensor_each(f"seq_id: got {seq_id!r}")
        pages = torch.tensor(sequence.pages, dtype=torch.int64, device=self.device)
        k, v = (self._rows(held[:, pages], sequence.length) for held in whole)
        return ExportedSequence(k, v, self.keys)

    def import_sequence(self, seq_id: SeqId, exported: ExportedSequence) -> None:
        """Makes a sequence from rows that another cache's `export_sequence` has copied.

        Raises:
            TypeError: ``exported`` is no `ExportedSequence`.
            ValueError: the rows were written with another format, scale or transform than this cache's, or `allocate`
                refuses the sequence.
            OutOfPagesError: there are not enough free pages.
        """
        if not isinstance(exported, ExportedSequence):
            raise TypeError(f"exported: got {type(exported).__name__}, want an ExportedSequence")
        if self.tails is not None:
            raise ValueError(
                f"exported: got rows for a cache of {self.layer_formats[0][0].name} keys, want another format's"
            )
        k_pages, v_pages = self._one_tensor_each("exported: got rows")
        exported.check_for(self.keys, {"k": k_pages, "v": v_pages}, self.num_kv_heads)
        self.allocate(seq_id, exported.num_tokens)
        pages = torch.tensor(self._pages[seq_id].pages, dtype=torch.int64, device=self.device)
        for held, rows in ((k_pages, exported.k), (v_pages, exported.v)):
            tokens = torch.arange(exported.num_tokens, device=self.device)
            page, row = pages[tokens // self.page_size], tokens % self.page_size
            target = held.transpose(2, 3) if self.cache_layout == "HND" else held
            target[:, page, row] = rows.to(self.device)

    # -- looking in ---------------------------------------------------------------------------------------------------

    def read(self, layer: int, seq_id: SeqId, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a sequence's K and V, dequantised and with the transform undone: [seq_len, num_kv_heads, head_dim]
        each.

        Waits for the device.
        """
        self._check_layer(layer)
        sequence = self._pages[seq_id]
        pages = torch.tensor(sequence.pages, dtype=torch.int64, device=self.device)
        operands = zip(
            (self.k_pages, self.v_pages),
            self.layer_formats[layer],
            self.head_dims,
            self._constants.scales(layer),
            strict=True,
        )
        transform = self.transforms[layer]
        wide = dtype or self.dtype if transform is None else torch.float32
        k, v = (
            form.dequantize(
                self._rows(held[layer][None, pages], sequence.length // form.block_tokens * form.block_tokens)[0],
                head_dim,
                wide,
                scale,
            )
            for held, form, head_dim, scale in operands
        )
        if self.tails is not None:
            k = torch.cat((k, self.tails.waiting(layer, seq_id, sequence.length).to(wide)))
        if transform is not None:
            k, v = (x.to(dtype or self.dtype) for x in (transform.original_keys(k), transform.restore(v)))
        return k, v

    def memory_report(self) -> MemoryReport:
        """Returns the bytes and pages in use now."""
        names = dict.fromkeys(" + ".join(dict.fromkeys(form.name for form in pair)) for pair in self.layer_formats)
        rows = sum(
            form.row_bytes(dim) for pair in self.layer_formats for form, dim in zip(pair, self.head_dims, strict=True)
        )
        return MemoryReport(
            kv_format=", ".join(names),
            layer_bytes=tuple(k.nbytes + v.nbytes for k, v in zip(self.k_pages, self.v_pages, strict=True)),
            scale_bytes=self._constants.nbytes,
            tail_bytes=0 if self.tails is None else self.tails.rows.nbytes,
            page_size=self.page_size,
            pages=self._pages.num_pages,
            pages_used=self._pages.num_pages - self._pages.num_free,
            pages_shared=self._pages.num_shared,
            sequences=len(self._pages),
            tokens=sum(self.seq_len(seq_id) for seq_id in self._pages),
            tokens_stored=self._pages.stored_tokens(),
            token_bytes=self.num_kv_heads * rows,
            token_bytes_bf16=self.num_layers * self.num_kv_heads * 2 * sum(self.head_dims),
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for source, target in copies:
            for held in (self.k_pages, self.v_pages):  # all layers in one launch, where they are one tensor
                for part in [pages[None] for pages in held] if isinstance(held, tuple) else [held]:
                    part[:, target].copy_(part[:, source])

    def _layer(self, layer: int, batch: Batch) -> dict[str, Any]:
        """Returns the arguments that describe a layer's cache. Append and attention both take them."""
        k_scale, v_scale = self._constants.scales(layer)
        tails = {}
        if self.tails is not None:
            tails = {"k_tail": self.tails.rows[layer], "tail_slots": batch.tail_slots}
        return tails | {
            "k_cache": self.k_pages[layer],
            "v_cache": self.v_pages[layer],
            "kv_format": tuple(form.name for form in self.layer_formats[layer]),
            "block_table": batch.block_table,
            "cache_layout": self.cache_layout,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "transform": self.transforms[layer],
        }

    def _rows(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        """Copies the rows of pages [layers, pages, ...] to a tensor [layers, length, num_kv_heads, row]."""
        pages = pages.transpose(2, 3) if self.cache_layout == "HND" else pages
        return pages.flatten(1, 2)[:, :length].contiguous()

    def _one_tensor_each(self, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K's and V's pages, one tensor each. Raises ValueError if layers differ in format."""
        if isinstance(self.k_pages, tuple) or isinstance(self.v_pages, tuple):
            raise ValueError(f"{what} for a cache whose layers differ in format, want one format in all of them")
        return self.k_pages, self.v_pages

    def _check_empty(self, what: str) -> None:
        if len(self._pages):
            raise ValueError(f"{what} for a cache with {len(self._pages)} sequences, want an empty cache")

    def _check_step(self, layer: int, batch: Batch) -> None:
        self._check_layer(layer)
        if not isinstance(batch, Batch):
            raise TypeError(f"batch: got {type(batch).__name__}, want a Batch, as from make_batch")
        if not batch.is_of(self._pages):
            raise ValueError("batch: got one of another KVCache, want one of this cache's make_batch")
        if batch.version != self._pages.version:
            raise ValueError(
                "batch: got one whose sequences have changed since its last update, want batch.update(...)"
            )
        self._constants.check_given(layer)

    def _check_append(self, layer: int, batch: Batch) -> None:
        self._check_step(layer, batch)
        if batch.shared is not None:
            raise ValueError(
                f"batch: got new tokens of {batch.shared!r} in pages that it shares, want the sequence extended first"
            )

    def _check_layer(self, layer: int) -> None:
        check_count("layer", layer, 0, self.num_layers - 1)
