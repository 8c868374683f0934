"""append_kv on CPU tensors: against a token-by-token oracle, its errors, and the operator under torch.compile."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import dequantize_kv, quantize_kv
from cute_kernels.formats.kv.transforms import parts_of
from cute_kernels.kv_cache import LinearScaling, Llama3Scaling, NtkScaling, Rope, YarnScaling, append_kv
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.ops import reference
from cute_kernels.kv_cache.reference import shaped_scale
from cute_kernels.names import KvFormatName
from tests.kv_cache.cases import ALL_FORMATS, POISON, Shape, clone_caches, make_call, without_requests
from tests.kv_cache.transformed import make_transform, with_transform


def arguments(call: AppendCall) -> dict[str, Any]:
    """A call as `append_kv` takes it."""
    given = call._asdict()
    given["kv_format"] = (given.pop("k_format"), given.pop("v_format"))
    given["qkv_bias"] = tuple(given.pop(name) for name in ("q_bias", "k_bias", "v_bias"))
    return given


def run(call: AppendCall, **changes: Any) -> torch.Tensor | None:
    return append_kv(**(arguments(call) | changes))


# -- results -----------------------------------------------------------------------------------------------------------


def oracle(call: AppendCall) -> tuple[list[torch.Tensor], dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]]:
    """One token at a time, in fp64: q rows, and the (k, v) numbers that go to each (page, row)."""
    bounds = list(range(call.num_tokens + 1)) if call.cu_seqlens is None else call.cu_seqlens.tolist()
    turned, stored = [], {}
    assert call.seq_lens is not None
    for request, length in enumerate(call.seq_lens.tolist()):
        for token in range(bounds[request], bounds[request + 1]):
            place = length - (bounds[request + 1] - token)
            position = place if call.position_ids is None else int(call.position_ids[token])
            if call.slot_mapping is not None:
                where = divmod(int(call.slot_mapping[token]), call.page_size)
            elif call.block_table is not None:
                where = int(call.block_table[request, place // call.page_size]), place % call.page_size
            else:
                where = request, place
            if call.q is not None:
                turned.append(_turn(call, call.q[token], call.q_bias, call.q_norm, position))
            v = call.v[token].double()
            v = v if call.v_bias is None else v + call.v_bias.double().view(v.shape)
            stored[where] = _turn(call, call.k[token], call.k_bias, call.k_norm, position), v
    return turned, stored


def _turn(call: AppendCall, x: torch.Tensor, bias: Any, weight: Any, position: int) -> torch.Tensor:
    x = x.double() if bias is None else x.double() + bias.double().view(x.shape)
    if weight is not None:
        x = x / ((x**2).mean(1, keepdim=True) + call.norm_eps) ** 0.5 * weight.double()
    rope = call.rope
    if rope is None:
        return x
    result = x.clone()
    for pair, frequency in enumerate(rope.frequencies()):
        a, b = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + rope.rotary_dim // 2)
        cos, sin = (f(position * frequency) * rope.attention_factor for f in (math.cos, math.sin))
        result[:, a], result[:, b] = x[:, a] * cos - x[:, b] * sin, x[:, b] * cos + x[:, a] * sin
    return result


ROPES = st.sampled_from([None, Rope(64), Rope(32, 1e6), Rope(64, interleaved=True), Rope(6, interleaved=True)])


@settings(max_examples=60, deadline=None)
@given(
    kv_format=st.tuples(st.sampled_from(ALL_FORMATS), st.sampled_from(ALL_FORMATS)),
    dtype=st.sampled_from(["bf16", "fp16"]),
    new=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    heads=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    place=st.sampled_from(["table", "contiguous", "slots"]),
    layout=st.sampled_from(["NHD", "HND"]),
    page_size=st.sampled_from([16, 48]),
    rope=ROPES,
    bias=st.booleans(),
    norm=st.booleans(),
    positions=st.sampled_from(["none", "int32", "int64"]),
    v_head_dim=st.sampled_from([64, 96]),
    seed=st.integers(0, 2**31),
)
def test_every_token_is_where_and_what_it_should_be(kv_format, new, heads, **options):
    shape = Shape(kv_format, new=tuple(new), num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=64, **options)
    call = make_call(shape)
    turned, stored = oracle(call)
    q_out = run(call)
    if call.q is None:
        assert q_out is None
    else:
        assert q_out is not None and (q_out.shape, q_out.dtype) == (call.q.shape, call.q.dtype)
        tolerance = {"bf16": 2**-8, "fp16": 2**-11}[shape.dtype]
        for got, want in zip(q_out, turned, strict=True):
            assert ((got.double() - want).abs() <= tolerance * want.abs() + 1e-5 * want.abs().max()).all()
    for index, (cache, scale) in enumerate(((call.k_cache, call.k_scale), (call.v_cache, call.v_scale))):
        form = call.formats[index]
        heads_last = cache if call.cache_layout == "NHD" else cache.transpose(1, 2)
        untouched = torch.ones(heads_last.shape[:2], dtype=torch.bool)
        for (page, row), values in stored.items():
            untouched[page, row] = False
            x = values[index]
            want = form.dequantize(
                form.quantize(x, shaped_scale(form, scale)), x.shape[-1], torch.float64, shaped_scale(form, scale)
            )
            got = form.dequantize(heads_last[page, row], x.shape[-1], torch.float64, shaped_scale(form, scale))
            # A value on a tie, or a header that is, may round the other way: a step of the format.
            assert ((got - want).abs() <= 0.13 * want.abs() + 0.14 * x.abs().amax(-1, keepdim=True)).all()
            assert ((got - want).abs().mean() <= 1e-3 * x.abs().max()) or x.numel() < 64
        assert (heads_last[untouched].view(torch.uint8) == POISON).all()


def test_q_out_may_be_given_and_may_be_q_itself():
    call = make_call(Shape(rope=Rope(128)))
    assert call.q is not None
    want = run(clone_caches(call))
    out = torch.zeros_like(call.q)
    assert run(call, q_out=out) is out
    assert want is not None and torch.equal(out, want)
    mine = call.q.contiguous()
    assert run(call, q=mine, q_out=mine) is mine
    assert torch.equal(mine, want)


def test_slots_of_minus_one_are_skipped():
    call = make_call(Shape(place="slots"))
    assert call.slot_mapping is not None
    call.slot_mapping[:] = -1
    before = clone_caches(call)
    run(call)
    assert torch.equal(call.k_cache.view(torch.uint8), before.k_cache.view(torch.uint8))


def test_no_tokens_are_no_work():
    call = make_call(Shape(new=(), num_q_heads=2))
    q_out = run(call)
    assert q_out is not None and q_out.shape == (0, 2, 128)


def test_codes_in_their_own_dtype_are_the_same_bytes():
    for kv_format, dtype in (
        ("int8_head", torch.int8),
        ("e4m3_tensor", torch.float8_e4m3fn),
        ("e5m2", torch.float8_e5m2),
    ):
        call = make_call(Shape(kv_format, rope=Rope(128)))
        typed = clone_caches(call)
        typed = typed._replace(k_cache=typed.k_cache.view(dtype), v_cache=typed.v_cache.view(dtype))
        run(call)
        run(typed)
        assert torch.equal(call.k_cache, typed.k_cache.view(torch.uint8))
        assert torch.equal(call.v_cache, typed.v_cache.view(torch.uint8))


# -- errors ------------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "k in a list": ({"k": [1.0]}, "k: got list, want a torch.Tensor"),
    "no v": ({"v": None}, "v: got NoneType, want a torch.Tensor"),
    "flat k": ({"k": lambda a: a["k"].flatten(1)}, r"k: got shape \[4, 256\], want \[tokens, heads, head_dim\]"),
    "fp32 k": ({"k": lambda a: a["k"].float()}, "k: got dtype torch.float32, want torch.bfloat16 or torch.float16"),
    "other v": ({"v": lambda a: a["v"].half()}, "v: got dtype torch.float16, want torch.bfloat16, that of k"),
    "fewer v": ({"v": lambda a: a["v"][:3]}, "v: got 3 tokens, want 4, those of k"),
    "v of other heads": ({"v": lambda a: a["v"][:, :1]}, "v: got 1 heads, want 2, those of k"),
    "head_dim 72": ({"k": lambda a: a["k"][..., :72]}, "k: got head_dim 72, want one of 64, 80, 96, 128, 192, 256"),
    "columns apart": (
        {"k": lambda a: torch.stack([a["k"]] * 2, -1)[..., 0]},
        r"k: got strides \(512, 256, 2\) for shape \[4, 2, 128\], want the last two dimensions contiguous",
    ),
    "q of other columns": ({"q": lambda a: a["q"][..., :64].contiguous()}, "q: got head_dim 64, want 128, that of k"),
    "q_out without q": ({"q": None, "q_out": lambda a: a["q"]}, "q_out: got a tensor without q, want both or none"),
    "q_out of other heads": (
        {"q_out": lambda a: a["q"][:, :2]},
        r"q_out: got shape \[4, 2, 128\], want \[4, 4, 128\], that of q",
    ),
    "unknown format": ({"kv_format": "int3"}, "kv_format: got 'int3', want one of bf16"),
    "three formats": ({"kv_format": ("bf16",) * 3}, r"kv_format: got \(.* want the name of a format or a pair"),
    "layout in words": ({"cache_layout": "NDH"}, "cache_layout: got 'NDH', want 'NHD' or 'HND'"),
    "flat cache": ({"k_cache": lambda a: a["k_cache"][0]}, r"k_cache: got shape \[16, 2, 128\], want \[num_pages or b"),
    "cache of bytes": (
        {"v_cache": lambda a: a["v_cache"].view(torch.uint8)},
        "v_cache: got dtype torch.uint8, want torch.bfloat16 for bf16",
    ),
    "short rows": (
        {"k_cache": lambda a: a["k_cache"][..., :100]},
        "k_cache: got rows of 100 elements, want 128 for bf16 at head_dim 128",
    ),
    "heads first": ({"cache_layout": "HND"}, r"k_cache: got 16 heads in shape \[6, 16, 2, 128\] \(HND: "),
    "other pages of v": ({"v_cache": lambda a: a["v_cache"][:5]}, "v_cache: got shape .* want that of k_cache"),
    "rows with gaps": (
        {"k_cache": lambda a: torch.stack([a["k_cache"]] * 2, -1)[..., 0]},
        r"k_cache: got strides \(8192, 512, 256, 2\), want rows contiguous",
    ),
    "no lengths": ({"seq_lens": None}, "seq_lens: got None without slot_mapping"),
    "lengths of 64 bits": ({"seq_lens": lambda a: a["seq_lens"].long()}, "seq_lens: got dtype torch.int64, want"),
    "lengths in a row": ({"seq_lens": lambda a: a["seq_lens"][None]}, r"seq_lens: got shape \[1, 4\], want \[batch\]"),
    "fewer lengths": ({"seq_lens": lambda a: a["seq_lens"][:3]}, "seq_lens: got 3 requests for 4 tokens"),
    "bounds alone": (
        {
            "slot_mapping": lambda a: torch.arange(4),
            "block_table": None,
            "seq_lens": None,
            "cu_seqlens": torch.zeros(5).int(),
        },
        "cu_seqlens: got it without seq_lens",
    ),
    "too few bounds": ({"cu_seqlens": torch.zeros(4).int()}, r"cu_seqlens: got shape \[4\], want \[5\], batch \+ 1"),
    "slots of 32 bits": (
        {"slot_mapping": torch.zeros(4).int(), "block_table": None},
        "slot_mapping: got dtype torch.int32",
    ),
    "fewer slots": (
        {"slot_mapping": torch.zeros(3).long(), "block_table": None},
        r"slot_mapping: got shape \[3\], want \[4\]",
    ),
    "slots and a table": ({"slot_mapping": torch.arange(4)}, "block_table: got one together with slot_mapping"),
    "a flat table": ({"block_table": lambda a: a["block_table"].flatten()}, r"block_table: got shape \[8\], want"),
    "an empty table": ({"block_table": lambda a: a["block_table"][:, :0]}, r"block_table: got shape \[4, 0\], want"),
    "no table": ({"block_table": None}, r"k_cache: got 6 requests in shape .* want 4, those of seq_lens"),
    "positions in fp32": ({"position_ids": torch.zeros(4)}, "position_ids: got dtype torch.float32"),
    "fewer positions": ({"position_ids": torch.zeros(3).long()}, r"position_ids: got shape \[3\], want \[4\]"),
    "no positions": (
        {"slot_mapping": lambda a: torch.arange(4), "block_table": None, "seq_lens": None, "rope": Rope(64)},
        "position_ids: got None with rope and slot_mapping",
    ),
    "rope in words": ({"rope": "llama"}, "rope: got str, want a Rope"),
    "rope beyond the head": ({"rope": Rope(256)}, "rope: got rotary_dim 256, want at most 128, k's head_dim"),
    "fp32 bias": ({"qkv_bias": (None, torch.zeros(256), None)}, "k_bias: got dtype torch.float32, want torch.bfloat16"),
    "short bias": ({"qkv_bias": (torch.zeros(8).bfloat16(), None, None)}, r"q_bias: got shape \[8\], want \[512\]"),
    "bias of no q": ({"q": None, "qkv_bias": (torch.zeros(8), None, None)}, "q_bias: got a tensor without q, want"),
    "norm of all heads": ({"k_norm": torch.ones(256).bfloat16()}, r"k_norm: got shape \[256\], want \[128\]"),
    "norm with gaps": ({"q_norm": torch.ones(256).bfloat16()[::2]}, "q_norm: got strides .* want a contiguous tensor"),
    "negative eps": ({"norm_eps": -1.0}, "norm_eps: got -1.0, want a finite number of at least 0"),
    "scale of nothing": ({"k_scale": torch.ones(())}, "k_scale: got a tensor .*want None: bf16 has no such scale"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=list(BAD))
def test_bad_arguments_are_refused_by_name_before_anything_is_written(changes, message):
    call = make_call(Shape(lengths=(1, 2, 3, 32)))
    call = call._replace(k_cache=call.k_cache[:6], v_cache=call.v_cache[:6])
    good = arguments(call)
    spoilt: dict[str, Any] = {name: value(good) if callable(value) else value for name, value in changes.items()}
    before = clone_caches(call)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        append_kv(**(good | spoilt))
    assert torch.equal(call.k_cache.view(torch.uint8), before.k_cache.view(torch.uint8))


def test_tokens_behind_those_of_all_requests_are_not_written():
    """As `extend_attention` has queries: engines pad the tokens of a step."""
    call = make_call(PREFILL)
    want = clone_caches(call)
    reference(want)
    new = {"k": call.k, "v": call.v, "q": call.q}
    pad = {name: torch.cat((x, torch.full_like(x[:2], torch.nan))) for name, x in new.items() if x is not None}
    found = clone_caches(call)._replace(**pad)
    q = reference(found)
    assert torch.equal(found.k_cache, want.k_cache) and torch.equal(found.v_cache, want.v_cache)
    alone = reference(clone_caches(call))
    assert q is not None and alone is not None and torch.equal(q[:-2], alone)


@pytest.mark.parametrize("changes", [{}, {"place": "contiguous"}, {"positions": "int32"}])
def test_a_step_without_requests_writes_nothing(changes):
    """All of its tokens pad it."""
    call = without_requests(make_call(PREFILL.with_(**changes)))
    before = clone_caches(call)
    q = run(call)
    assert q is not None and call.q is not None and q.shape == call.q.shape
    assert torch.equal(call.k_cache, before.k_cache) and torch.equal(call.v_cache, before.v_cache)
    with pytest.raises(ValueError, match="cu_seqlens: got 3 to 3, want it to begin with 0"):
        run(call, cu_seqlens=torch.tensor([3], dtype=torch.int32))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_are_not_positive_are_refused(scale):
    x = torch.ones(1, 8, 2, 64)
    shapes: dict[KvFormatName, tuple[int, ...]] = {"int8_tensor": (), "e4m3_head": (2,), "int8_channel": (2, 64)}
    for kv_format, shape in shapes.items():
        given = torch.ones(shape)
        given.view(-1)[-1] = scale
        with pytest.raises(ValueError, match="scale: got .*, want positive finite numbers"):
            quantize_kv(x, kv_format=kv_format, scale=given)
        with pytest.raises(ValueError, match="scale: got .*, want positive finite numbers"):
            dequantize_kv(x.to(torch.uint8), kv_format=kv_format, head_dim=64, scale=given)
    call = make_call(DECODE.with_(kv_format="int8_head"))
    with pytest.raises(ValueError, match="v_scale: got .*, want positive finite numbers"):
        reference(call._replace(v_scale=torch.full((2,), scale)))


@pytest.mark.parametrize(
    ("kv_format", "scale", "message"),
    [
        ("int8_tensor", None, r"k_scale: got None, want torch.float32 \[\] or \[1\] for int8_tensor"),
        ("int8_head", torch.ones(3), r"k_scale: got shape \[3\], want \[2\] or \[2, 1\] for int8_head"),
        ("int8_channel", torch.ones(2, 64), r"k_scale: got shape \[2, 64\], want \[2, 128\] for int8_channel"),
        ("e4m3_head", torch.ones(2).half(), "k_scale: got dtype torch.float16, want torch.float32"),
        ("e4m3_head", 0.5, "k_scale: got float, want a torch.Tensor"),
    ],
)
def test_given_scales_must_be_those_of_the_format(kv_format, scale, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        run(make_call(Shape(kv_format)), k_scale=scale)


def change(call: AppendCall, name: str, index: Any, value: int) -> AppendCall:
    tensor = getattr(call, name).clone()
    tensor[index] = value
    return call._replace(**{name: tensor})


DECODE = Shape(lengths=(17, 2, 30, 32))
PREFILL = Shape(new=(2, 3), lengths=(17, 20))
SLOTS = Shape(place="slots")


@pytest.mark.parametrize(
    ("shape", "name", "index", "value", "message"),
    [
        (DECODE, "block_table", (0, 1), -1, "block_table: request 0, position 16: got page -1, want 0 to 9"),
        (DECODE, "block_table", (2, 1), 10, "block_table: request 2, position 29: got page 10, want 0 to 9"),
        (PREFILL, "block_table", (1, 1), -7, "block_table: request 1, position 17: got page -7, want 0 to 5"),
        (DECODE, "seq_lens", 1, -1, "seq_lens: request 1: got length -1 after an append of 1 tokens, want at least 1"),
        (PREFILL, "seq_lens", 1, 2, "seq_lens: request 1: got length 2 after an append of 3 tokens, want at least 3"),
        (DECODE, "seq_lens", 3, 33, "seq_lens: request 3, position 32: got length 33, want at most 32, what b"),
        (DECODE.with_(place="contiguous"), "seq_lens", 0, 36, "seq_lens: request 0, position 35: .* 35, what the"),
        (PREFILL, "cu_seqlens", 2, 6, "cu_seqlens: got 0 to 6, want it to begin with 0 and end with at most 5"),
        (PREFILL, "cu_seqlens", 0, 1, "cu_seqlens: got 1 to 5, want it to begin with 0 and end with at most 5"),
        (PREFILL, "cu_seqlens", 1, 6, "cu_seqlens: request 1: got 6 to 5, want no less"),
        (SLOTS, "slot_mapping", 2, -2, "slot_mapping: token 2: got -2, want -1 or 0 to "),
        (SLOTS, "slot_mapping", 3, 10_000, "slot_mapping: token 3: got 10000, want -1 or 0 to "),
    ],
)  # fmt: skip
def test_places_outside_the_cache_name_request_and_position(shape, name, index, value, message):
    call = change(make_call(shape), name, index, value)
    before = clone_caches(call)
    with pytest.raises(ValueError, match=f"^{message}"):
        run(call)
    assert torch.equal(call.k_cache.view(torch.uint8), before.k_cache.view(torch.uint8))


def test_places_that_two_tokens_share_name_both():
    call = make_call(DECODE)
    assert call.block_table is not None and call.seq_lens is not None
    shared = change(call, "block_table", (2, 1), int(call.block_table[3, 1]))
    shared = change(shared, "seq_lens", 3, 30)
    with pytest.raises(ValueError, match=r"^block_table: request 2, position 29 and request 3, position 29 both go to"):
        run(shared)
    slots = make_call(SLOTS)
    assert slots.slot_mapping is not None
    with pytest.raises(ValueError, match=r"^slot_mapping: token 1 and token 3 both go to page \d+, row \d+ \("):
        run(change(slots, "slot_mapping", 3, int(slots.slot_mapping[1])))


# -- the operator ------------------------------------------------------------------------------------------------------

COMPILED = {
    "decode": Shape("int4_g4", rope=Rope(128)),
    "prefill": Shape(("e4m3_head", "int8_channel"), new=(3, 2), rope=Rope(64, interleaved=True), bias=True, norm=True),
    "slots": Shape("bf16", place="slots", layout="HND"),
    "no q": Shape("int8_token_head", place="contiguous", num_q_heads=0),
}
every_compiled = pytest.mark.parametrize("shape", COMPILED.values(), ids=list(COMPILED))


@every_compiled
def test_the_operator_passes_opcheck(shape):
    call = make_call(shape)
    rope = None if call.rope is None else call.rope.text
    operator = torch.ops.cute_kernels.append_kv.default
    torch.library.opcheck(operator, (*call[:7], rope, *call[8:10], *call[11:13], *call.extras))
    if call.q is not None:
        call = with_transform(call, make_transform(call.num_kv_heads, 128, k_rotation=32))
        parts = parts_of(call.transform)
        torch.library.opcheck(operator, (*call[:7], rope, *call[8:10], *call[11:13], *call.extras, *parts))


@every_compiled
def test_it_compiles_without_graph_breaks(shape):
    torch.compiler.reset()
    call = make_call(shape)
    eager, compiled = clone_caches(call), clone_caches(call)

    def step(k, v, q, k_cache, v_cache):
        given = arguments(call) | {"k": k * 2, "v": v + 1, "q": q, "k_cache": k_cache, "v_cache": v_cache}
        q_out = append_kv(**given)
        return (k_cache.float().sum(), None if q_out is None else q_out * 2)

    function = torch.compile(step, fullgraph=True, backend="aot_eager")
    want = step(call.k, call.v, call.q, eager.k_cache, eager.v_cache)
    got = function(call.k, call.v, call.q, compiled.k_cache, compiled.v_cache)
    torch.testing.assert_close(got, want)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(getattr(eager, name).view(torch.uint8), getattr(compiled, name).view(torch.uint8))
        assert not torch.equal(getattr(eager, name).view(torch.uint8), getattr(call, name).view(torch.uint8))


def test_a_transform_compiles_without_graph_breaks():
    """And what it writes beside the cache is written."""
    torch.compiler.reset()
    shape = Shape("int4_g4", rope=Rope(128))
    given = make_transform(2, 128, k_rotation=128, v_rotation=32)
    eager, compiled = (with_transform(make_call(shape), given) for _ in range(2))
    want = run(eager)
    got = torch.compile(lambda: run(compiled), fullgraph=True, backend="aot_eager")()
    assert want is not None and got is not None and torch.equal(got, want)
    assert eager.q_shift is not None and compiled.q_shift is not None
    assert torch.equal(eager.q_shift, compiled.q_shift) and not eager.q_shift.isnan().any()
    assert torch.equal(eager.k_cache, compiled.k_cache) and torch.equal(eager.v_cache, compiled.v_cache)


def test_a_compiled_call_writes_q_out():
    torch.compiler.reset()
    call = make_call(Shape(rope=Rope(128)))
    assert call.q is not None
    want, out = run(clone_caches(call)), torch.zeros_like(call.q)
    torch.compile(lambda: run(call, q_out=out), fullgraph=True, backend="aot_eager")()
    assert want is not None and torch.equal(out, want)


def test_shapes_and_dtypes_without_data():
    call = make_call(COMPILED["prefill"])
    with torch._subclasses.FakeTensorMode() as mode:
        given = {name: mode.from_tensor(x) for name, x in call._asdict().items() if isinstance(x, torch.Tensor)}
        fake = call._replace(**given)
        q_out = run(fake)
    assert q_out is not None and call.q is not None and (q_out.shape, q_out.dtype) == (call.q.shape, call.q.dtype)


def test_a_parameter_is_as_good_as_a_tensor():
    call = make_call(Shape("int4_g4"))
    wrapped = clone_caches(call)._replace(k=torch.nn.Parameter(call.k, requires_grad=False))
    run(call)
    run(wrapped)
    assert torch.equal(call.k_cache, wrapped.k_cache)


def test_the_call_lists_what_append_takes():
    """`AppendCall.extras` counts fields: those from cu_seqlens on."""
    assert AppendCall._fields[14] == "cu_seqlens" and len(AppendCall._fields) == 25
    assert not dataclasses.is_dataclass(AppendCall)  # a tuple: making one costs the host little


SCALINGS = {
    "none": lambda: None,
    "linear": lambda: LinearScaling(2.0),
    "NTK": lambda: NtkScaling(2.0, original_max_position=128, seq_len=256),
    "Llama 3": lambda: Llama3Scaling(8.0, 1.0, 4.0, 8192),
    "YaRN": lambda: YarnScaling(4.0, 4096, mscale=1.0, truncate=False),
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_a_compiled_function_may_make_its_rope(scaling):
    torch.compiler.reset()
    call = make_call(Shape(rope=Rope(128)))
    eager, compiled = clone_caches(call), clone_caches(call)

    def step(given):
        return run(given._replace(rope=Rope(64, 500000, interleaved=True, scaling=scaling())))

    want = step(eager)
    got = torch.compile(lambda: step(compiled), fullgraph=True, backend="aot_eager")()
    other = run(clone_caches(call))
    assert want is not None and got is not None and other is not None
    assert torch.equal(got, want)
    assert torch.equal(eager.k_cache.view(torch.uint8), compiled.k_cache.view(torch.uint8))
    assert not torch.equal(want, other)  # the rope matters
