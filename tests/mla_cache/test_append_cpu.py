"""The public calls on CPU tensors, the operators behind them, what is wrong with a call, and what a launch is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_kernels
from cute_kernels.kv_cache.config import divisor_of
from cute_kernels.kv_cache.rope import Rope
from cute_kernels.mla.cache import append_mla, ops, quantize_mla_kv
from cute_kernels.mla.cache.call import AppendMlaCall
from cute_kernels.mla.formats import format_of
from tests.launchers import recording
from tests.mla_cache.cases import ROPES, TOKENS, assert_appended, awkward, bytes_of, make_call

every_token = pytest.mark.parametrize(("kv_format", "head_dim"), TOKENS)


def arguments_of(call: AppendMlaCall) -> dict[str, Any]:
    return {name: value for name, value in call._asdict().items() if value is not None}


def small(kv_format: str = "mla_fp8", head_dim: int = 576, **options: Any) -> AppendMlaCall:
    x = torch.randn(6, head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    return make_call(kv_format, head_dim, x, **options)


def test_the_package_offers_them():
    assert cute_kernels.append_mla is append_mla and cute_kernels.quantize_mla_kv is quantize_mla_kv


@every_token
@pytest.mark.parametrize("rope", ROPES)
def test_tokens_go_to_their_slots(kv_format, head_dim, rope):
    call = small(kv_format, head_dim, rope=ROPES[rope], padding=48)
    before = call.cache.clone()
    assert append_mla(**arguments_of(call)) is None
    assert_appended(call, before)


@every_token
def test_quantised_tokens_are_the_formats(kv_format, head_dim):
    form, x = format_of(kv_format), awkward(head_dim, torch.bfloat16).view(2, -1, head_dim)
    rows = quantize_mla_kv(x, kv_format=kv_format)
    assert rows.dtype == form.cache_dtypes[0] and rows.shape == (*x.shape[:2], form.row_elements(head_dim))
    assert torch.equal(bytes_of(rows), bytes_of(form.quantize(x)))
    out = torch.zeros_like(rows)
    assert quantize_mla_kv(x, kv_format=kv_format, out=out) is out
    assert torch.equal(bytes_of(out), bytes_of(rows))


def test_decode_sees_what_was_appended():
    """Append, then attend over it: the two rooms mean the same tokens."""
    call = small(rope=ROPES["interleaved"], lost=0)
    append_mla(**arguments_of(call))
    q = torch.randn(1, 1, 2, 576, generator=torch.Generator().manual_seed(4)).bfloat16()
    out = cute_kernels.sparse_mla_decode(q, call.cache, call.slot_mapping.int().view(1, 1, -1), kv_format="mla_fp8")
    tokens = torch.cat(
        (call.latent, ROPES["interleaved"].apply(call.k_rope.float()[:, None], call.position_ids)[:, 0]), 1
    )  # type: ignore[union-attr]
    weights = torch.softmax(q[0, 0].float() @ tokens.float().T * 576**-0.5, dim=-1)
    torch.testing.assert_close(out[0, 0].float(), weights @ call.latent.float(), rtol=0.05, atol=0.05)


def test_no_tokens_are_no_work():
    call = small()
    before = call.cache.clone()
    nowhere = torch.zeros(0, dtype=torch.int64)
    append_mla(call.latent[:0], call.k_rope[:0], call.cache, kv_format="mla_fp8", slot_mapping=nowhere)
    assert torch.equal(call.cache, before)
    assert quantize_mla_kv(torch.zeros(0, 3, 576), kv_format="mla_fp8").shape == (0, 3, 656)


@every_token
def test_the_operators_pass_opcheck(kv_format, head_dim):
    for rope in (None, Rope(64)):
        call = small(kv_format, head_dim, rope=rope)
        arguments = (*call[:5], None if rope is None else rope.text, call.position_ids)
        torch.library.opcheck(torch.ops.cute_kernels.append_mla.default, arguments)
    torch.library.opcheck(torch.ops.cute_kernels.quantize_mla_kv.default, (torch.randn(3, head_dim), kv_format))


def test_parameters_are_as_good_as_tensors():
    call, other = small(), small()
    wrapped = torch.nn.Parameter(other.latent, requires_grad=False)
    append_mla(**arguments_of(call))
    append_mla(**arguments_of(other._replace(latent=wrapped)))
    assert torch.equal(call.cache, other.cache)


Change = Callable[[AppendMlaCall], AppendMlaCall]
MISTAKES: dict[str, tuple[Change, type[Exception], str]] = {
    "format": (lambda c: c._replace(kv_format="e4m3"), ValueError, "kv_format: got 'e4m3', want one of mla_bf16"),
    "format none": (lambda c: c._replace(kv_format=1), TypeError, "kv_format: got 1"),  # type: ignore[arg-type]
    "latent list": (lambda c: c._replace(latent=[1]), TypeError, "latent: got list"),  # type: ignore[arg-type]
    "latent shape": (lambda c: c._replace(latent=c.latent[:, :448]), ValueError, r"latent: got shape \[6, 448\], want"),
    "latent dtype": (lambda c: c._replace(latent=c.latent.float()), TypeError, "latent: got dtype torch.float32"),
    "latent strides": (
        lambda c: c._replace(latent=c.latent.t().contiguous().t()), ValueError, "latent: got strides .* side by side"
    ),
    "rope shape": (lambda c: c._replace(k_rope=c.k_rope[:, :32]), ValueError, r"k_rope: got shape \[6, 32\]"),
    "rope dtype": (lambda c: c._replace(k_rope=c.k_rope.half()), TypeError, "k_rope: got dtype torch.float16, want"),
    "rope tokens": (lambda c: c._replace(k_rope=c.k_rope[:5]), ValueError, "k_rope: got 5 tokens, want 6"),
    "cache row": (lambda c: c._replace(cache=c.cache[..., :584]), ValueError, "cache: got rows of 584 elements"),
    "cache place": (lambda c: c._replace(cache=c.cache.to("meta")), ValueError, "cache: got a tensor on meta"),
    "slots dtype": (
        lambda c: c._replace(slot_mapping=c.slot_mapping.int()), TypeError, "slot_mapping: got dtype torch.int32"
    ),
    "slots shape": (
        lambda c: c._replace(slot_mapping=c.slot_mapping[:5]), ValueError, r"slot_mapping: got shape \[5\], want \[6\]"
    ),
    "positions alone": (lambda c: c._replace(rope=None), ValueError, "position_ids: got a tensor without rope"),
    "rope alone": (lambda c: c._replace(position_ids=None), ValueError, "position_ids: got None with rope"),
    "rope": (lambda c: c._replace(rope=1e4), TypeError, "rope: got float, want a Rope"),  # type: ignore[arg-type]
    "rotary_dim": (lambda c: c._replace(rope=Rope(32)), ValueError, "rope: got rotary_dim 32, want 64"),
    "positions dtype": (
        lambda c: c._replace(position_ids=torch.zeros(6)), TypeError, "position_ids: got dtype torch.float32"
    ),
    "slot": (
        lambda c: c._replace(slot_mapping=torch.tensor([0, 1, 2, 12, 3, 4])),
        ValueError,
        "slot_mapping: token 3: got 12, want -1 or 0 to 11, the cache's tokens",
    ),
    "slot below": (
        lambda c: c._replace(slot_mapping=torch.tensor([0, 1, 2, -2, 3, 4])),
        ValueError,
        "slot_mapping: token 3: got -2",
    ),
    "slot twice": (
        lambda c: c._replace(slot_mapping=torch.tensor([0, -1, 7, -1, 7, 4])),
        ValueError,
        "slot_mapping: token 2 and token 4 both go to 7",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), MISTAKES.values(), ids=list(MISTAKES))
def test_mistakes_are_named(change, error, words):
    call = change(small(rope=Rope(64)))
    with pytest.raises(error, match=words):
        append_mla(**arguments_of(call))


@pytest.mark.parametrize(
    ("x", "out", "error", "words"),
    [
        (torch.zeros(3, 512), None, ValueError, r"x: got shape \[3, 512\], want \[..., 576\] for mla_fp8"),
        (torch.zeros(3, 576).double(), None, TypeError, "x: got dtype torch.float64"),
        (torch.zeros(576, 3).t(), None, ValueError, "x: got strides"),
        ([1.0], None, TypeError, "x: got list"),
        (torch.zeros(3, 576), torch.zeros(3, 656), TypeError, "out: got dtype torch.float32"),
        (torch.zeros(3, 576), torch.zeros(3, 584).byte(), ValueError, r"out: got shape \[3, 584\], want \[3, 656\]"),
        (torch.zeros(3, 576), torch.zeros(656, 3).byte().t(), ValueError, "out: got strides"),
        (torch.zeros(3, 576), torch.zeros(3, 656, device="meta").byte(), ValueError, "out: got a tensor on meta"),
    ],
)
def test_mistakes_of_bulk_are_named(x, out, error, words):
    with pytest.raises(error, match=words):
        quantize_mla_kv(x, kv_format="mla_fp8", out=out)
    with pytest.raises(TypeError, match="kv_format: got None"):
        quantize_mla_kv(torch.zeros(3, 576), kv_format=None)  # type: ignore[arg-type]


# -- launches ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches():
    """What compiled functions would be called with, and which."""
    found: list[tuple[Any, ...]] = []

    def function_of(spec: Any) -> Callable[..., None]:
        return lambda *arguments: found.append((spec.config, *arguments))

    with recording(function_of):
        yield found


def test_what_an_append_is_given(launches):
    call = small(rope=Rope(64, interleaved=True), positions=torch.int32, padding=32)
    ops.launch_append(call)
    ops.launch_append(call)
    config, latent, k_rope, *addresses = launches[0]
    assert (config.kv_format, config.head_dim, config.dtype, config.rope, config.placed) == (
        "mla_fp8", 576, "bf16", "interleaved", True,
    )  # fmt: skip
    assert latent is call.latent and k_rope is call.k_rope
    steps = call.rope.phase_steps("cpu")  # type: ignore[union-attr]
    tensors = (call.cache, call.slot_mapping, call.position_ids, steps)
    assert addresses[:4] == [x.data_ptr() for x in tensors]  # type: ignore[union-attr]
    assert addresses[4:] == [12, 3, divisor_of(3), 3 * 656 + 32, 656, 1.0, 0]
    assert launches[1] == launches[0] and len(ops.launch_append.plans) == 1
    wide = small(rope=Rope(64, interleaved=True), padding=32)
    ops.launch_append(wide)
    assert launches[2][-1] == 1
    plain = small()
    ops.launch_append(plain)
    assert launches[3][0].rope == "none" and launches[3][5:7] == (0, 0)


def test_what_bulk_is_given(launches):
    x = torch.randn(2, 5, 512)
    rows = ops._launch_quantize(x, "mla_model1")
    config, latent, k_rope, *numbers = launches[0]
    assert (config.dtype, config.placed, config.unit) == ("fp32", False, 8)
    assert (latent.shape, k_rope.shape, latent.data_ptr()) == ((10, 448), (10, 64), x.data_ptr())
    assert numbers == [rows.data_ptr(), 0, 0, 0, 10, 1, divisor_of(1), 584, 584, 1.0, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: c._replace(latent=torch.zeros(6, 1024).bfloat16()[:, 4:516]),
            "latent: got a tensor that starts 8 bytes past",
        ),
        (lambda c: c._replace(latent=torch.zeros(6, 516).bfloat16()[:, :512]), "latent: got strides .* 16 bytes"),
        (lambda c: c._replace(k_rope=torch.zeros(6, 65).bfloat16()[:, :64]), "k_rope: got strides .* 4 bytes"),
        (lambda c: c._replace(cache=torch.zeros(4, 3 * 656 + 8).byte()[:, :1968].view(4, 3, 656)), "got pages 1976"),
    ],
)
def test_what_vectors_cannot_reach_is_refused(change, words, launches):
    with pytest.raises(ValueError, match=words):
        ops.launch_append(change(small()))
    assert not launches


def test_nothing_is_launched_for_nothing(launches):
    call = small()
    empty = torch.zeros(0, dtype=torch.int64)
    ops.launch_append(call._replace(latent=call.latent[:0], k_rope=call.k_rope[:0], slot_mapping=empty))
    ops.launch_append(call._replace(cache=call.cache[:0]))
    ops._launch_quantize(torch.zeros(0, 576), "mla_fp8")
    assert not launches
