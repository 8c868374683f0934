"""Checks of the arguments of extend attention, in addition to the checks of :mod:`.checks` that every call has."""

from __future__ import annotations

import torch

from cute_kernels.arguments import check_dtype, check_flag, overlaps, shape_of, strides_of
from cute_kernels.attention import checks
from cute_kernels.attention.extend_policies import EXTEND_HEAD_DIMS, cannot_multiply_fp8, cannot_read, cannot_unpack
from cute_kernels.formats.kv import KvFormat, format_of
from cute_kernels.formats.kv import names as format_names
from cute_kernels.formats.scores import tensors_of
from cute_kernels.runtime.plans import ALIGNMENT

PIECE = ALIGNMENT // 2  # elements: what copies take of a row at once
MAX_ROW_STRIDE = 2**22  # elements from a token to the next one, beside a cache: those of a tile fit 32 bits
MAX_ROWS = 2**31 - 2**16  # queries times heads: rounded up to whole work tiles, they fit 32 bits


def check_formats(kv_format: object) -> tuple[KvFormat, KvFormat]:
    """Returns K's and V's format. Raises ValueError for a format that extend attention does not read; the message lists
    the formats that it reads."""
    forms = checks.check_formats(kv_format)
    for name, form in zip(checks.CACHES, forms, strict=True):
        if cannot_read(form) is not None:
            known = ", ".join(known for known in format_names() if cannot_read(format_of(known)) is None)
            raise ValueError(
                f"kv_format: got {form.name} for {name}, want one of those that extend attention reads: {known}"
            )
    return forms


def check_unpack(forms: tuple[KvFormat, KvFormat]) -> None:
    """Raises ValueError if caches in ``forms`` cannot be unpacked. It is called for calls that ask for unpacking."""
    reason = cannot_unpack(forms[0]) or cannot_unpack(forms[1])
    if forms[0].is_coded != forms[1].is_coded:
        reason = f"K in {forms[0].name} and V in {forms[1].name}, of which one is of 16 bits"
    if reason is not None:
        raise ValueError(f"unpack: got True, want None or False: {reason}")


def check_fp8(asked_for: object, forms: tuple[KvFormat, KvFormat], head_dim: int, unpack: bool | None) -> None:
    """Raises TypeError if ``asked_for`` is no bool, ValueError if it is True and FP8 products are impossible."""
    check_flag("fp8_products", asked_for)
    if not asked_for:
        return
    if (reason := cannot_multiply_fp8(forms, head_dim)) is not None:
        raise ValueError(f"fp8_products: got True, want False: {reason}")
    if unpack is False:
        raise ValueError("unpack: got False beside fp8_products, want None or True: values have to be transposed first")


def check_score_options(names: tuple[str, ...], **others: object) -> None:
    """Raises ValueError for registered options that have a tensor of size q_len. Also raises it for ``others`` that are
    given together with registered options.
    """
    for tensor in tensors_of(names):
        if "q_len" in tensor.shape:
            raise ValueError(
                f"score_options: got {tensor.name!r}, [{', '.join(map(str, tensor.shape))}], want tensors without a "
                "q_len: requests differ in it"
            )
    why = "where new tokens stand in their request is not known to it"
    checks.check_absent(f"score_options {', '.join(names)}", why, others)


def check_new(new_k: torch.Tensor | None, new_v: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns K and V of the queries' own tokens, or None without them. Checks their strides; the caller has checked
    sizes and dtypes."""
    if new_k is None and new_v is None:
        return None
    if new_k is None or new_v is None:
        name = "new_k" if new_k is None else "new_v"
        raise ValueError(f"{name}: got None, want a tensor, as the other of new_k and new_v is one")
    for name, tensor in (("new_k", new_k), ("new_v", new_v)):
        check_rows(name, tensor)
    return new_k, new_v


def check_query(q: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless the kernels can take q."""
    if q.dim() != 3:
        raise ValueError(f"q: got {q.dim()} dimensions, want 3: [total_q, num_q_heads, head_dim]")
    check_dtype("q", q, *checks.Q_DTYPES)
    if q.shape[2] not in EXTEND_HEAD_DIMS:
        raise ValueError(f"q: got head_dim {q.shape[2]}, want one of {', '.join(map(str, EXTEND_HEAD_DIMS))}")
    if q.shape[0] * q.shape[1] > MAX_ROWS:
        raise ValueError(f"q: got {q.shape[0]} queries of {q.shape[1]} heads, want at most {MAX_ROWS} together")
    checks.check_query_strides(q, "queries")


def check_rows(name: str, rows: torch.Tensor) -> None:
    """Raises ValueError unless tensor maps can load ``rows``: K or V outside a cache, [tokens, num_kv_heads, head_dim].
    Maps need contiguous rows on multiples of 16 bytes."""
    if rows.is_contiguous() or not rows.numel():
        return
    found, strides = f"{name}: got strides {rows.stride()} for shape {shape_of(rows)}", strides_of(rows)
    if strides[2] != 1:
        raise ValueError(f"{found}, want rows contiguous: a last stride of 1")
    if any(stride % PIECE for stride in strides[:2]):
        raise ValueError(f"{found}, want rows on multiples of {ALIGNMENT} bytes")
    if overlaps(rows):
        raise ValueError(f"{found}, want rows that do not overlap")
    if strides[0] >= MAX_ROW_STRIDE:
        raise ValueError(f"{found}, want tokens less than {MAX_ROW_STRIDE} elements apart")
