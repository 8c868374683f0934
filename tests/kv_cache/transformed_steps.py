"""Steps over transformed caches, and what they should give: attention in fp64 over what the caches stand for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cute_kernels import append_and_decode
from cute_kernels.attention.reference import fetch
from cute_kernels.formats.kv import format_of, format_pair
from cute_kernels.kv_cache import CacheTransform, Rope, step_ops
from cute_kernels.kv_cache import reference as append_reference
from cute_kernels.kv_cache.reference import shaped_scale
from tests import observed
from tests.kv_cache.cases import Shape
from tests.kv_cache.steps import Arguments, make_step
from tests.kv_cache.transformed import make_transform
from tests.launchers import recording

LENGTHS = (4, 31, 33, 64, 129, 257, 0, 700, 1025)
# q' is rounded to 16 bits, and the rounding of a channel goes into all of its block.
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3}  # relative, of a request's outputs
LSE_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 8e-3}  # absolute, for scores of a few units


@dataclass(frozen=True)
class Case:
    shape: Shape
    of_transform: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS
    q_len: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def step(self, device: str, *, blank: bool = False) -> Arguments:
        step = make_step(self.shape, self.lengths, self.q_len, device, blank=True, **self.options)
        if not blank:
            fill(step)
        if self.options.get("sinks"):
            step["sinks"] = torch.linspace(-2, 2, self.shape.num_q_heads, device=device)
        given: Arguments = {"transform": self.transform(device), "return_lse": True}
        return step | given

    def of_keys(self) -> Case:
        """The same with the transform's part of K alone."""
        return replace(self, of_transform=self.of_transform | {"v_rotation": 1, "parts": "center factor"})

    def transform(self, device: str) -> CacheTransform:
        shape = self.shape
        return make_transform(shape.num_kv_heads, shape.head_dim, shape.v_head_dim, device, **self.of_transform)


def fill(step: Arguments) -> None:
    """Rows of normal numbers everywhere, which no kernel has made: k' and v' are any."""
    generator = torch.Generator(step["q"].device).manual_seed(5)
    for of, name in zip("kv", format_pair(step["kv_format"]), strict=True):
        cache, form, scale = step[f"{of}_cache"], format_of(name), step[f"{of}_scale"]
        cache = cache.transpose(1, 2) if step["cache_layout"] == "HND" else cache
        x = torch.randn(*cache.shape[:3], step[of].shape[3], generator=generator, device=cache.device)
        rows = form.quantize(x.to(form.cache_dtype if name in ("bf16", "fp16") else x.dtype), shaped_scale(form, scale))
        cache.view(torch.uint8).copy_(rows.view(torch.uint8))


BOTH: dict[str, Any] = {"k_rotation": 32, "v_rotation": 64}
BASE = Shape("int4_g4", rope=Rope(128, theta=500000.0), num_q_heads=8, num_kv_heads=2, page_size=16)
NAMES = ("bf16", "fp16", "int4_g1", "int4_g2", "int4_g4", "int4_g8", "int8_token_head", "int8_channel", "e4m3_head",
         "e4m3_token_head", "e5m2")  # fmt: skip
FORMATS = {name: Case(BASE.with_(kv_format=name, dtype="fp16" if name == "fp16" else "bf16"), BOTH) for name in NAMES}
OTHERS = {
    "only a center": Case(BASE, {"parts": "center"}),
    "only a rotation of K": Case(BASE, {"parts": "", "k_rotation": 128}),
    "only a rotation of V": Case(BASE, {"parts": "", "v_rotation": 128}),
    "V of 64 columns, contiguous, many splits": Case(
        BASE.with_(head_dim=64, rope=Rope(64), place="contiguous", num_q_heads=2), {"v_rotation": 64}, (9000, 3), 1
    ),
    "V of 64 columns, 5 splits": Case(BASE.with_(head_dim=64, rope=None), {"v_rotation": 16}, (3000, 70), 2,
                                      {"num_splits": 5}),
    "factors": Case(BASE, {"parts": "factor v_factor"}),
    "K transformed, V in 8 bits": Case(BASE.with_(kv_format=("int4_g4", "int8_token_head")),
                                       {"parts": "center", "k_rotation": 128}),
    "V transformed, K in 8 bits": Case(BASE.with_(kv_format=("int8_token_head", "int4_g4")),
                                       {"parts": "v_factor", "v_rotation": 32}),
    "head_dim 64": Case(BASE.with_(head_dim=64, rope=Rope(64)), {"k_rotation": 64, "v_rotation": 16}),
    "head_dim 256": Case(BASE.with_(head_dim=256, rope=Rope(256)), {"k_rotation": 256, "v_rotation": 256}),
    "head_dim 80": Case(BASE.with_(head_dim=80, rope=Rope(80), kv_format="int8_token_head"), {}),
    "part of a head turned": Case(BASE.with_(head_dim=256, v_head_dim=128, rope=Rope(64)), {"k_rotation": 64}),
    "no rope": Case(BASE.with_(rope=None), BOTH),
    "pairs side by side": Case(BASE.with_(rope=Rope(128, interleaved=True)), BOTH),
    "bias, norms, positions": Case(BASE.with_(bias=True, norm=True, positions="int64"), BOTH),
    "4 new tokens": Case(BASE, BOTH, q_len=4),
    "4 new tokens, a cap": Case(BASE, BOTH, q_len=4, options={"softcap": 20.0}),
    "a cap": Case(BASE, BOTH, options={"softcap": 5.0}),
    "a cap, contiguous": Case(BASE.with_(place="contiguous"), BOTH, options={"softcap": 5.0}),
    "sinks": Case(BASE, BOTH, options={"sinks": True}),
    "sinks, a cap, a window": Case(BASE, BOTH, options={"sinks": True, "softcap": 20.0, "window_size": 100}),
    "many splits": Case(BASE, BOTH, (5000, 1, 700), options={"num_splits": 9}),
    "one token": Case(BASE, BOTH, (700,)),
    "contiguous": Case(BASE.with_(place="contiguous"), BOTH),
    "heads first": Case(BASE.with_(layout="HND"), BOTH),
    "32 queries of a head": Case(BASE.with_(kv_format="int4_g1", num_q_heads=32, num_kv_heads=1), BOTH),
    "32 queries of a head, a cap": Case(BASE.with_(kv_format="int4_g1", num_q_heads=32, num_kv_heads=1), BOTH,
                                        options={"softcap": 20.0}),
    "fp16": Case(BASE.with_(dtype="fp16"), BOTH),
}  # fmt: skip
CASES = FORMATS | OTHERS


def expected(step: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp64: attention of q after RoPE over what the step's caches, after it, stand for."""
    transform = step["transform"]
    append, attention = calls_of(step)
    given = append._replace(transform=None, q_shift=None)
    positions = append_reference.places(given)[0]
    q, _, _ = append_reference.transform(given, positions, torch.float64)
    assert q is not None
    q = q.view(attention.q.shape)
    keys_at = torch.arange(min(attention.max_seq_len, int(step["seq_lens"].max())), device=q.device)
    keys = transform.original_keys(fetch(attention, attention.k, keys_at, torch.float64))
    values = transform.restore(fetch(attention, attention.v, keys_at, torch.float64))
    keys, values = (x.repeat_interleave(attention.group, dim=2) for x in (keys, values))
    scores = torch.einsum("bihd,bthd->biht", q, keys) * attention.softmax_scale
    if attention.soft_cap is not None:
        scores = attention.soft_cap * torch.tanh(scores / attention.soft_cap)
    at = step["seq_lens"].long()[:, None] - attention.q_len + torch.arange(attention.q_len, device=q.device)
    distance = at[:, :, None] - keys_at
    seen = (distance >= 0) & (distance < (attention.window or 2**31))
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    lse = scores.logsumexp(-1)
    total = lse if attention.sinks is None else torch.logaddexp(lse, attention.sinks.double())
    weights = torch.exp(scores - total[..., None]).nan_to_num(0.0)
    return torch.einsum("biht,bthd->bihd", weights, values.nan_to_num(0.0)), lse


def calls_of(step: Arguments) -> tuple[Any, Any]:
    """The two calls that a step stands for. Nothing is launched: results are made where q is, and stay as they are."""
    device = step["q"].device

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    with recording(empty=empty), observed.calls_of(step_ops.make_calls) as found:
        append_and_decode(**step)
    return step_ops.make_calls(found[0].arguments["step"])


def assert_near(out: torch.Tensor, lse: torch.Tensor | None, want: torch.Tensor, want_lse: torch.Tensor) -> None:
    error = (out.double() - want).norm() / want.norm()
    assert error <= TOLERANCE[out.dtype], f"relative error {float(error):.2e}"
    if lse is not None:
        nothing = want_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, nothing)
        off = (lse - want_lse).masked_fill(nothing, 0).abs().max()
        assert off <= LSE_TOLERANCE[out.dtype] * want_lse.masked_fill(nothing, 0).abs().max().clamp(min=1), float(off)
