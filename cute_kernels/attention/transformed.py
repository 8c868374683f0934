"""Attention over a transformed cache: the PyTorch operations before and after the kernels.

The cache has K minus its center, so every score lacks a term. For decode attention q is transformed to q', and the
kernel adds the missing terms to the scores.

For extend attention the cache and the new tokens have to be in one basis: q is transformed to q', and new K and V to k'
and v', rounded to 16 bits. The result is transformed back. The missing terms are added to the log-sum-exp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_kernels.arguments import check_tensors
from cute_kernels.attention.checks import check_cache, check_formats, check_layout, check_query, head_dim_of_row
from cute_kernels.attention.reference import apply_sinks
from cute_kernels.formats.kv.transforms import CacheTransform, check_transform


@torch.no_grad()
def transform_query(
    transform: CacheTransform,
    q: torch.Tensor,
    q_shift: torch.Tensor | None,
    caches: tuple[torch.Tensor, torch.Tensor],
    kv_format: object,
    layout: str,
    sees_shift: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Transforms q for decode attention. Returns (q', q_shift or None). sees_shift: whether attention's result depends
    on the shift.

    Raises:
        TypeError, ValueError: the transform does not fit the caches, or ``q_shift`` is given, which belongs to a q that
            is already transformed.
    """
    k_cache, v_cache = caches
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if q_shift is not None:
        raise ValueError("q_shift: got a tensor together with transform, which makes it; want one of them")
    forms = check_formats(kv_format)
    check_layout(layout)
    for name, cache, form in zip(("k_cache", "v_cache"), caches, forms, strict=True):
        check_cache(name, cache, form, "[num_pages or batch, ..., row]")
    check_query(q, forms)
    transform.validate(
        k_cache.shape[1 if layout == "HND" else 2], q.shape[3], head_dim_of_row(forms[1], v_cache.shape[3])
    )
    if transform.device not in (None, q.device):
        raise ValueError(f"transform: got one on {transform.device}, want it on {q.device}, where q is")
    shift = transform.shift(q) if sees_shift else None
    return transform.queries(q), shift


def restore(transform: CacheTransform, result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Undoes V's transform in ``result``. Returns the new result, in ``out`` if given."""
    restored = transform.restore(result)
    return restored if out is None else out.copy_(restored)


class Inputs(NamedTuple):
    """The kernels' inputs. shift: q . k_center of each query, [total_q, num_q_heads]; None if no result depends on
    it.
    """

    q: torch.Tensor
    new_k: torch.Tensor | None
    new_v: torch.Tensor | None
    shift: torch.Tensor | None


@torch.no_grad()
def inputs_of(transform: CacheTransform, q: torch.Tensor, options: dict[str, Any], return_lse: bool) -> Inputs:
    """Returns the transformed inputs of a call of extend attention.

    Raises:
        TypeError, ValueError: ``transform`` is no transform, does not fit, or would have to be undone inside the
            kernel.
    """
    check_transform("transform", transform)
    new_k, new_v = options["new_k"], options["new_v"]
    given = {"q": q, "new_k": new_k, "new_v": new_v}
    check_tensors(**{name: x for name, x in given.items() if x is not None or name == "q"})
    for name, x in given.items():
        if x is not None and transform.device not in (None, x.device):
            raise ValueError(f"transform: got one on {transform.device}, want it on {x.device}, where {name} is")
    centred = transform.k_center is not None
    if centred and options["softcap"] is not None:
        raise ValueError(
            f"softcap: got {options['softcap']} over a cache with a k_center, whose part of the scores comes before "
            "the cap; want a transform without a center, or decode_attention"
        )
    if centred and options.get("score_options"):
        raise ValueError(
            f"score_options: got {', '.join(options['score_options'])} over a cache with a k_center, whose part of the "
            "scores comes before them; want a transform without a center, or decode_attention"
        )
    sees_shift = centred and (return_lse or options["sinks"] is not None)
    return Inputs(
        q=transform.queries(q),
        new_k=None if new_k is None else transform.keys(new_k).contiguous(),
        new_v=None if new_v is None else transform.values(new_v).contiguous(),
        shift=transform.shift(q) if sees_shift else None,
    )


def results_of(
    transform: CacheTransform,
    inputs: Inputs,
    result: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (out, lse) as if K and V had not been transformed, from the kernels' ``result`` and ``lse``. sinks: sinks
    that the kernels have not applied."""
    if inputs.shift is not None:
        assert lse is not None
        scale = result.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        lse = lse + scale * inputs.shift
    restored = transform.restore(result)
    if sinks is not None:
        assert lse is not None
        restored = apply_sinks(restored.float(), lse, sinks).to(result.dtype)
    return restored, lse
