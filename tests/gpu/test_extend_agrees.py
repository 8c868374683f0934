"""Decode attention and extend attention of the same queries agree as closely as their roundings to 16 bits explain.

Their sums are not the same bits: decode attention's warps take tokens of a split in turn, extend attention's products
blocks of 128, and the reference of a softmax, which says where probabilities are rounded, rises at other tokens.
docs/design/extend_attention.md has what each of them rounds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import decode_attention
from cute_kernels.attention.call import make_extend_call as check_call
from cute_kernels.attention.combine.config import CombineConfig
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.extend_policies import has_channel_scales, has_token_scale
from cute_kernels.attention.plan import configs_of
from cute_kernels.formats.kv import KvFormat, format_of
from cute_kernels.runtime.spec import KernelSpec
from tests.attention.cases import Call as DecodeCall
from tests.extend.cases import FORMATS, Call, make_call
from tests.gpu.specs import decode_spec

pytestmark = [pytest.mark.gpu]

QUERIES = 4
LENGTHS = [700, 1000, 129, 64, 300, 2500]  # no query with so few keys that one of them decides
FP16_QUERIES = ("int8_token_head", "e4m3_tensor", "int4_g1", "int4_g4")  # over which it is measured, too
PAIRS = [("int8_token_head", "int4_g4"), ("bf16", "int4_g4"), ("int8_token_head", "bf16"), ("bf16", "int8_token_head")]
PAIRS += [("fp16", "e4m3_tensor"), ("e4m3_head", "fp16")]
CASES: list[tuple[Any, str]] = [
    *((name, "bf16") for name in FORMATS if name != "fp16"),
    *((name, "fp16") for name in ("fp16", *FP16_QUERIES)),
    *((pair, next((name for name in pair if name in ("bf16", "fp16")), "bf16")) for pair in PAIRS),
]

ROUNDING = {"bf16": 1.66e-3, "fp16": 2.07e-4}  # of normal numbers, in the 2-norm
RANGE = {128: 5.2, 64: 4.7, 32: 4.1, 16: 3.5}  # of so many standard normal numbers
STEP = 12**0.5  # of what is rounded, over the error: as if all steps were alike
SAMPLING = 1.25  # of a few thousand numbers, whose steps are not


def variant(kv_format: Any, q_dtype: str, device: str = "cuda", lengths: list[int] = LENGTHS) -> Call:
    q_lens = [QUERIES] * len(lengths)
    return make_call(kv_format, q_lens, lengths, q_dtype=q_dtype, num_splits=1, unpack=False, device=device)


def decoded(call: Call) -> DecodeCall:
    """The same call of decode attention."""
    options = {name: value for name, value in call.options.items() if name != "unpack"}
    return DecodeCall(call.q.unflatten(0, (-1, QUERIES)), *call.tensors[1:], call.kv_format, options)


def specs() -> list[KernelSpec]:
    """For tests.gpu.prepare."""
    found: dict[KernelSpec, None] = {}
    for case in CASES:
        call = variant(*case, device="cpu")
        (config,) = configs_of(check_call(*call.tensors, **call.keywords))
        combine = AttentionSpec(CombineConfig(config.q_dtype))
        found |= dict.fromkeys([AttentionSpec(config), combine, decode_spec(decoded(call))])
    return list(found)


def of_keys(form: KvFormat) -> float:
    """What extend attention's scores are off by; decode attention's operands are codes, exactly.

    A row's scale moves all of a score. Keys that count have scores of some 2: there the squares e^(2 s) are.
    """
    if has_token_scale(form):
        return ROUNDING["fp16"] * (1 + 1 + 4 / form.num_groups) ** 0.5  # the product with the code; the scale
    return ROUNDING["fp16"] if form.is_coded and form.has_header else 0.0


def of_values(form: KvFormat) -> float:
    """What extend attention's operands of V are off by."""
    if has_token_scale(form):
        return ROUNDING["fp16"] * 2**0.5
    return ROUNDING["fp16"] if form.is_coded and form.has_header else 0.0


def weight_of_codes(form: KvFormat) -> float:
    """Size of what decode attention multiplies rounded probabilities with, over that of V's numbers: nibbles without
    their shift, from 0 to 15 in the range of a group."""
    return (RANGE[128 // form.num_groups] ** 2 / 4 + 1) ** 0.5 if form.code_bits == 4 else 1.0


def explained(forms: tuple[KvFormat, KvFormat], q_dtype: str) -> tuple[float, float, float]:
    """What roundings explain, in the 2-norm: errors of decode and of extend attention, and how far they are apart.

    Both round probabilities, at other references, and the output: two outputs differ by steps of their dtype, which
    they do where a middle between two numbers lies between them.
    """
    k, v = forms
    of_p, out = ROUNDING["fp16" if v.is_coded else v.name], ROUNDING[q_dtype]
    of_q = ROUNDING["fp16"] if has_channel_scales(k) else 0.0  # times K's scales, rounded by either
    one = (of_p * weight_of_codes(v)) ** 2 + of_q**2
    other = of_p**2 + of_q**2 + of_keys(k) ** 2 + of_values(v) ** 2
    step, distance = STEP * out, torch.linspace(0, 5, 1001)
    weights = distance.square().mul(-0.5).exp()
    distance = distance * (one + other) ** 0.5
    part = distance / step % 1
    apart = (weights * (distance**2 + step**2 * part * (1 - part))).sum() / weights.sum()
    return (one + out**2) ** 0.5, (other + out**2) ** 0.5, float(apart) ** 0.5


@pytest.mark.parametrize(("kv_format", "q_dtype"), CASES, ids=str)
def test_it_agrees_with_decode_attention(kv_format: Any, q_dtype: str):
    call = variant(kv_format, q_dtype)
    names = (kv_format, kv_format) if isinstance(kv_format, str) else kv_format
    one = decoded(call)
    out = decode_attention(*one.tensors, kv_format=one.kv_format, **one.options).view_as(call.q).double()
    other, (want, _) = call.run().double(), call.reference()

    def between(a: torch.Tensor, b: torch.Tensor) -> float:
        """Of the worst request."""
        a, b, size = (x.unflatten(0, (-1, QUERIES)).flatten(1) for x in (a, b, want))
        return float(((a - b).norm(dim=1) / size.norm(dim=1)).max())

    found = between(out, want), between(other, want), between(out, other)
    k, v = map(format_of, names)
    bounds = explained((k, v), q_dtype)
    assert all(error <= SAMPLING * bound for error, bound in zip(found, bounds, strict=True)), (found, bounds)
