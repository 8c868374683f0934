"""Calls of the kernel that writes MLA tokens, and the registered operators."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import arguments
from cute_kernels.arguments import (
    Wanted,
    check_aligned,
    check_contiguous,
    check_dtype,
    check_tensors,
    check_wanted,
    shape_of,
)
from cute_kernels.kv_cache.rope import rope_of
from cute_kernels.mla.cache.arguments import WRITE
from cute_kernels.mla.cache.call import (
    BULK_DTYPES,
    MAX_TOKENS,
    AppendMlaCall,
    check_append,
    check_append_values,
)
from cute_kernels.mla.cache.plan import bulk_config, function_of, make_plan, place_arguments
from cute_kernels.mla.cache.reference import append_mla_reference
from cute_kernels.mla.checks import form_of
from cute_kernels.mla.formats import MlaFormat, format_of
from cute_kernels.mla.problem import CacheShape
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.operator import Operator, Plan, launcher, route
from cute_kernels.runtime.plans import key_function
from layouts.kv.mla import ROPE_DIM

# -- append ------------------------------------------------------------------------------------------------------------


def append(call: AppendMlaCall) -> None:
    """Appends tokens on the tensors' device."""
    route(cuda=launch_append, cpu=_append_here, operator=_append_through_operator, **call.tensors)(call)


def _append_through_operator(call: AppendMlaCall) -> None:
    rope = None if call.rope is None else call.rope.text
    _append_operator(*call[:5], rope, call.position_ids)


def _append_here(call: AppendMlaCall) -> None:
    shape = check_append(call)
    check_append_values(call, shape)
    append_mla_reference(call, shape)


def _append_checked(call: AppendMlaCall) -> tuple[AppendMlaCall, CacheShape]:
    shape = check_append(call)
    if arguments.DEBUG:
        check_append_values(call, shape)
    return call, shape


def _append_plan(checked: tuple[AppendMlaCall, CacheShape]) -> Plan[[AppendMlaCall], None] | None:
    call, shape = checked
    return make_plan(call, shape) if call.num_tokens and shape.num_slots else None


launch_append = launcher(
    key_function(AppendMlaCall, rope="{0}.text"), _append_checked, _append_plan, empty=lambda checked: None
)


# -- quantise ----------------------------------------------------------------------------------------------------------


def quantize(x: torch.Tensor, kv_format: str, out: torch.Tensor | None) -> torch.Tensor:
    """Quantises on x's device, as `cute_kernels.mla.cache.quantize_mla_kv` says."""
    return route(cuda=_launch_quantize, cpu=_quantize_here, operator=_quantize_through_operator, x=x)(x, kv_format, out)


def _quantize_through_operator(x: torch.Tensor, kv_format: str, out: torch.Tensor | None) -> torch.Tensor:
    rows = _quantize_operator(x, kv_format)
    return rows if out is None else _bytes_copied(_check_out(out, x, format_of(kv_format)), rows)


def _check_numbers(x: torch.Tensor, kv_format: str) -> MlaFormat:
    form = form_of(kv_format)
    check_tensors(x=x)
    check_dtype("x", x, *BULK_DTYPES)
    if x.dim() < 1 or x.shape[-1] not in form.head_dims:
        wanted = " or ".join(map(str, form.head_dims))
        raise ValueError(f"x: got shape {shape_of(x)}, want [..., {wanted}] for {kv_format}")
    check_contiguous("x", x)
    return form


def _check_out(out: torch.Tensor, x: torch.Tensor, form: MlaFormat) -> torch.Tensor:
    sizes = *x.shape[:-1], form.row_elements(x.shape[-1])
    check_wanted([Wanted("out", out, form.cache_dtypes, sizes, x.device, contiguous=True)])
    arguments.check_apart("out", out, {"x": x})
    return out


def _quantize_here(x: torch.Tensor, kv_format: str, out: torch.Tensor | None = None) -> torch.Tensor:
    form = _check_numbers(x, kv_format)
    return form.quantize(x) if out is None else _bytes_copied(_check_out(out, x, form), form.quantize(x))


def _bytes_copied(out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    out.view(torch.uint8).copy_(rows.view(torch.uint8))
    return out


def _launch_quantize(x: torch.Tensor, kv_format: str, out: torch.Tensor | None = None) -> torch.Tensor:
    form = _check_numbers(x, kv_format)
    if out is None:
        rows = x.new_empty((*x.shape[:-1], form.row_elements(x.shape[-1])), dtype=form.cache_dtypes[0])
    else:
        rows = _check_out(out, x, form)
    if not x.numel():
        return rows
    tokens, config = x.view(-1, x.shape[-1]), bulk_config(x, kv_format)
    if tokens.shape[0] > MAX_TOKENS:
        raise ValueError(f"x: got {tokens.shape[0]} tokens, want at most {MAX_TOKENS}")
    row_bytes = form.row_bytes(x.shape[-1])
    shape = CacheShape(form, tokens.shape[0], 1, row_bytes, row_bytes)  # pages of one token
    latent, k_rope = tokens[:, :-ROPE_DIM], tokens[:, -ROPE_DIM:]
    check_aligned("x", x, 16)
    check_aligned("out", rows, config.unit)
    index = x.get_device()
    unused = {"slots": 0, "position_ids": 0, "phase_steps": 0, "rope_factor": 1.0, "mode": 0}
    send = WRITE.bound(function_of(config, index), place_arguments(shape) | unused)
    with GPU.guard(index):
        send(latent=latent, k_rope=k_rope, cache=rows.data_ptr())
    return rows


# -- the operators -----------------------------------------------------------------------------------------------------


def _call_of(latent, k_rope, cache, slot_mapping, kv_format, rope, position_ids) -> AppendMlaCall:
    """Makes a call from the operator's arguments, whose rope is a text."""
    return AppendMlaCall(
        latent, k_rope, cache, slot_mapping, kv_format, None if rope is None else rope_of(rope), position_ids
    )


def _append_on_meta(*arguments: Any) -> None:
    return None


def _quantize_on_meta(x, kv_format):
    form = format_of(kv_format)
    return x.new_empty((*x.shape[:-1], form.row_elements(x.shape[-1])), dtype=form.cache_dtypes[0])


_append_operator = Operator(
    "append_mla(Tensor latent, Tensor k_rope, Tensor(a!) cache, Tensor slot_mapping, str kv_format, str? rope, "
    "Tensor? position_ids) -> ()",
    cpu=lambda *given: _append_here(_call_of(*given)),
    cuda=lambda *given: launch_append(_call_of(*given)),
    meta=_append_on_meta,
)
_quantize_operator = Operator(
    "quantize_mla_kv(Tensor x, str kv_format) -> Tensor",
    cpu=_quantize_here,
    cuda=_launch_quantize,
    meta=_quantize_on_meta,
)
