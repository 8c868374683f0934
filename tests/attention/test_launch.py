"""What a call on a GPU launches depends on that call alone, whatever was launched before: plans are never mistaken.

With compiled functions that launch nothing (`tests.host_functions`), so that no GPU is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels.attention import decode_attention, ops
from cute_kernels.attention.arguments import BIAS_STRIDES, decode_arguments
from cute_kernels.attention.call import Given
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_config import CTAS_SHIFT
from cute_kernels.attention.options import NO_OPTIONS
from cute_kernels.formats.scores.features import Features
from cute_kernels.runtime import native
from tests.attention.cases import ALL_FORMATS, make_call
from tests.launchers import assert_launched_alike_after_any_other, outcome, recording
from tests.observed import calls_of
from tests.tensors import among_others, apart, fused, offset, padded, side_by_side

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")

Arguments = dict[str, Any]


def function_of(spec: AttentionSpec) -> Any:
    from tests.host_functions import attention_function

    return attention_function(spec.config)


@pytest.fixture
def launches():
    with recording(function_of) as recorded:
        yield recorded.launches


def arguments(kv_format: Any = "int4_g4", lengths: tuple[int, ...] = (64, 5), **options: Any) -> Arguments:
    call = make_call(kv_format, lengths, num_kv_heads=2, group=4, head_dim=64, **options)
    names = ("q", "k_cache", "v_cache", "seq_lens")
    return dict(zip(names, call.tensors, strict=True)) | {"kv_format": kv_format} | call.options


def interleaved(given: Arguments, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a call as halves of one tensor."""
    return side_by_side(given["k_cache"], given["v_cache"], dim)


def but(change: Callable[[Arguments], Arguments], *of: Any, **options: Any) -> Arguments:
    given = arguments(*of, **options)
    return given | change(given)


CALLS: dict[str, Callable[[], Arguments]] = {
    "plain": arguments,
    "one request": lambda: arguments(lengths=(64,)),
    "one request, of odd strides": lambda: but(
        lambda a: {name: odd(a[name]) for name in ("q", *CACHES)}, lengths=(64,)
    ),
    "more tokens": lambda: arguments(lengths=(5, 640)),
    "fp16": lambda: arguments(q_dtype="fp16"),
    "fewer query heads": lambda: but(lambda a: {"q": a["q"][:, :, :4].contiguous()}),
    "queries of one dimension": lambda: but(lambda a: {"q": a["q"].flatten()}),
    "queries of none": lambda: but(lambda a: {"q": a["q"].flatten()[0]}),
    "queries with gaps": lambda: but(lambda a: {"q": apart(a["q"])}),
    "queries of a fused projection": lambda: but(lambda a: {"q": fused(a["q"])}),
    "queries of a fused projection, off vectors": lambda: but(lambda a: {"q": fused(a["q"], 4)}),
    "misaligned queries": lambda: but(lambda a: {"q": offset(a["q"], 2)}),
    "keys with gaps": lambda: but(lambda a: {"k_cache": apart(a["k_cache"])}),
    "keys with large gaps": lambda: but(lambda a: {"k_cache": apart(a["k_cache"], 160)}),
    "blocks apart": lambda: but(lambda a: dict(zip(CACHES, interleaved(a, 1), strict=True))),
    "blocks of values apart": lambda: but(lambda a: {"v_cache": interleaved(a, 1)[1]}),
    "blocks apart by words": lambda: but(lambda a: {"v_cache": padded(a["v_cache"], 4)}),
    "tokens apart": lambda: but(lambda a: dict(zip(CACHES, interleaved(a, 2), strict=True))),
    "heads apart": lambda: but(lambda a: dict(zip(CACHES, interleaved(a, 3), strict=True))),
    "bf16": lambda: arguments("bf16"),
    "bf16, heads apart": lambda: but(lambda a: dict(zip(CACHES, interleaved(a, 3), strict=True)), "bf16"),
    "bf16, off vectors": lambda: but(lambda a: {"k_cache": padded(a["k_cache"], 4)}, "bf16"),
    "pages apart": lambda: but(lambda a: dict(zip(CACHES, interleaved(a, 1), strict=True)), page_size=16),
    "pages apart, heads first": lambda: but(
        lambda a: dict(zip(CACHES, interleaved(a, 1), strict=True)), page_size=16, cache_layout="HND"
    ),
    "a wider table": lambda: but(lambda a: {"block_table": apart(a["block_table"])}, page_size=16),
    "rows at words": lambda: but(lambda a: {"v_cache": offset(a["v_cache"], 4)}),
    "rows at halves of words": lambda: but(lambda a: {"v_cache": offset(a["v_cache"], 2)}),
    "signed rows": lambda: but(lambda a: {"k_cache": a["k_cache"].view(torch.int8)}),
    "values of fewer tokens": lambda: but(lambda a: {"v_cache": a["v_cache"][:, :32].contiguous()}),
    "lengths of 64 bits": lambda: but(lambda a: {"seq_lens": a["seq_lens"].long()}),
    "more lengths": lambda: but(lambda a: {"seq_lens": a["seq_lens"].repeat(2)}),
    "another format": lambda: arguments("int4_g2"),
    "the wrong format": lambda: but(lambda a: {"kv_format": "int4_g2"}),
    "a pair": lambda: arguments(("int4_g4", "int4_g2")),
    "wider values": lambda: arguments(v_head_dim=128),
    "int8": lambda: arguments("int8_tensor"),
    "int8, signed": lambda: but(
        lambda a: {name: a[name].view(torch.int8) for name in ("k_cache", "v_cache")}, "int8_tensor"
    ),
    "e4m3 of as many bytes": lambda: arguments("e4m3_tensor"),
    "e4m3, typed": lambda: but(lambda a: {"k_cache": a["k_cache"].view(torch.float8_e4m3fn)}, "e4m3_tensor"),
    "scales of heads": lambda: arguments("int8_head"),
    "scales of heads, apart": lambda: but(lambda a: {"k_scale": apart(a["k_scale"][:, None])}, "int8_head"),
    "scales of columns": lambda: arguments("int8_channel"),
    "scales of columns, heads apart": lambda: but(lambda a: {"k_scale": padded(a["k_scale"], 4)}, "int8_channel"),
    "misaligned scales": lambda: but(lambda a: {"v_scale": offset(a["v_scale"], 4)}, "int8_channel"),
    "no scale": lambda: but(lambda a: {"k_scale": None}, "int8_tensor"),
    "splits": lambda: arguments() | {"num_splits": 3},
    "no splits": lambda: arguments() | {"num_splits": 0},
    "a scale": lambda: arguments() | {"softmax_scale": 0.5},
    "lse": lambda: arguments() | {"return_lse": True},
    "out": lambda: but(lambda a: {"out": torch.empty_like(a["q"])}),
    "out of floats": lambda: but(lambda a: {"out": a["q"].float()}),
    "out with gaps": lambda: but(lambda a: {"out": apart(a["q"])}),
    "out with requests apart": lambda: but(lambda a: {"out": fused(a["q"])}),
    "4 queries": lambda: arguments(q_len=4),
    "4 queries that see everything": lambda: arguments(q_len=4, causal=False),
    "pages": lambda: arguments(page_size=16),
    "a table in a list": lambda: arguments(page_size=16) | {"block_table": [[0]]},
    "a table of 64 bits": lambda: but(lambda a: {"block_table": a["block_table"].long()}, page_size=16),
    "fewer pages": lambda: but(lambda a: {"block_table": a["block_table"][:, :2].contiguous()}, page_size=16),
    "heads first": lambda: arguments(page_size=16, cache_layout="HND"),
    "window": lambda: arguments(window_size=9),
    "a wider window": lambda: arguments(window_size=10),
    "a window of everything": lambda: arguments(window_size=1000),
    "soft cap": lambda: arguments(softcap=9.0),
    "sinks": lambda: arguments(sinks=True),
    "sinks, a parameter": lambda: but(lambda a: {"sinks": torch.nn.Parameter(a["sinks"])}, sinks=True),
    "sinks with gaps": lambda: but(lambda a: {"sinks": a["sinks"].repeat_interleave(2)[::2]}, sinks=True),
    "slopes": lambda: arguments(alibi=True),
    "bias": lambda: arguments(attn_bias="fp32"),
    "bias of heads": lambda: arguments(attn_bias="fp32", bias_dims="hj"),
    "bias of bf16": lambda: arguments(attn_bias="bf16"),
}


def odd(x: torch.Tensor) -> torch.Tensor:
    """One request whose stride no kernel could go by."""
    return x.as_strided(x.shape, (x.stride(0) + 1, *x.stride()[1:]))


CACHES = ("k_cache", "v_cache")
made = functools.cache(lambda name: CALLS[name]())


def run(launches: list[Any], given: Arguments) -> Any:
    return outcome(launches, lambda: decode_attention(**given), given)


def test_a_call_launches_the_same_after_any_other(launches):
    assert_launched_alike_after_any_other(CALLS, lambda call: run(launches, made(call)), ops.launch.plans)


IN_PLACE = ["one request", "more tokens", "fewer query heads", "queries with gaps", "misaligned queries"]
IN_PLACE += ["keys with gaps", "rows at words", "rows at halves of words", "values of fewer tokens", "more lengths"]
IN_PLACE += ["another format", "a pair", "wider values"]


@pytest.mark.parametrize("name", IN_PLACE)
def test_tensors_that_were_changed_in_place_are_looked_at_again(name, launches):
    """By `set_`, which also gives them other shapes and strides."""
    changed = made(name)
    want = run(launches, changed)
    ops.launch.plans.clear()
    given = arguments()
    run(launches, given)
    for argument, tensor in given.items():
        if isinstance(tensor, torch.Tensor):
            tensor.set_(changed[argument])  # type: ignore[call-overload]
    assert run(launches, given | {"kv_format": changed["kv_format"]}) == want


def test_tensors_of_any_class_count_by_their_properties(launches):
    """The operator gets those of a subclass as they are. A key that holds one would make a plan for each."""

    class Parameter(torch.nn.Parameter):
        pass

    for _ in range(2):
        call = make_call("int4_g4", (64,), num_kv_heads=2, head_dim=64, sinks=True)
        options = NO_OPTIONS | call.options | {"sinks": Parameter(call.options["sinks"])}
        ops.launch(Given(*call.tensors, "int4_g4", options=options))
    assert len(launches) == 2 and len(ops.launch.plans) == 1


@pytest.mark.parametrize("name", ["plain", "lse", "out", "int8", "pages", "sinks"])
def test_a_repeated_call_is_not_checked_again_and_needs_no_plan(name, launches):
    given = made(name)
    want = run(launches, given)
    assert len(want) == 1
    with calls_of(ops.make_call, ops.make_plan) as repeated:
        assert run(launches, given) == want
    assert not repeated


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_columns_that_do_not_lie_side_by_side_are_refused(name, launches):
    """The kernel would read what lies behind each head's first one."""
    given: dict[str, Any] = arguments("int8_channel")
    scale = given[name]
    for wrong in (scale.t().contiguous().t(), scale[:, :1].expand(scale.shape), padded(scale, 2)):
        with pytest.raises(ValueError, match=f"{name}: got strides .* want a KV head's columns side by side"):
            other: Arguments = given | {name: wrong}
            decode_attention(**other)
    assert not launches
    run(launches, given | {name: padded(scale, 4)})
    assert len(launches) == 1


def test_results_are_new_and_contiguous(launches):
    given = made("wider values")
    first, lse = decode_attention(**given, return_lse=True)
    assert first.shape == (2, 1, 8, 128) and first.is_contiguous() and first.dtype == torch.bfloat16
    assert lse.shape == (2, 1, 8) and lse.is_contiguous() and lse.dtype == torch.float32
    assert decode_attention(**given).data_ptr() != first.data_ptr()


def test_the_kernel_reads_a_wider_table_where_it_is(launches):
    """It gets the columns that a request has, and how far apart the rows lie."""
    given: dict[str, Any] = arguments(page_size=16)
    table = given["block_table"]
    columns = table.shape[1]
    for part in (table, apart(table), table.new_full((2, columns + 5), -1)[:, 3:-2]):
        arguments_now: dict[str, Any] = given | {"block_table": part.copy_(table)}
        decode_attention(**arguments_now)
        assert launches[-1].arguments[16:19] == (part.data_ptr(), columns, part.stride(0))


def test_strided_caches_and_queries_are_read_where_they_are(launches):
    for name in ("blocks apart", "tokens apart", "heads apart", "pages apart", "queries of a fused projection"):
        given = made(name)
        run(launches, given)
        for tensor, got in zip((given[x] for x in ("q", *CACHES)), launches[-1].arguments, strict=False):
            assert (got.data_ptr(), got.stride()) == (tensor.data_ptr(), tensor.stride()), name


@pytest.mark.parametrize(("num_sms", "most"), [(132, 64), (114, 32), (16, 8), (1, 1)])
def test_combiners_that_wait_for_each_other_fit_half_of_the_gpu(num_sms, most):
    """The mode of a launch says how many CTAs may combine a row: so many that two launches go on beside each other."""
    given: Arguments = arguments() | {"num_splits": 8}
    with recording(function_of, num_sms=lambda device: num_sms) as recorded:
        decode_attention(**given)
    launches = recorded.launches
    per_sm = int(launches[-1].symbol.partition("_r")[2].partition("c")[2][0])
    combiners = 1 << (launches[-1].arguments[13] >> CTAS_SHIFT)
    assert most <= combiners <= max(1, num_sms * per_sm // 2)


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
@pytest.mark.parametrize("cache_layout, num_kv_heads", [("NHD", 1), ("HND", 3), ("NHD", 3), ("HND", 8)])
def test_every_format_is_launched_for(kv_format, cache_layout, num_kv_heads, launches):
    """Rows of 68 or 132 bytes begin on words: the compiled function must not ask for more than the copies do."""
    dtype = kv_format if kv_format in ("bf16", "fp16") else "bf16"
    for page_size in (None, 16):
        call = make_call(
            kv_format, (64, 5), num_kv_heads=num_kv_heads, group=2, page_size=page_size, q_dtype=dtype,
            cache_layout=cache_layout, blank=True,
        )  # fmt: skip
        for dim in (None, 1, 2, 3):
            caches = [call.k_cache, call.v_cache]
            if dim is not None:
                caches = [among_others(cache, dim)[0] for cache in caches]
            given = dict(zip(("q", "k_cache", "v_cache", "seq_lens"), (call.q, *caches, call.seq_lens), strict=True))
            assert isinstance(run(launches, given | {"kv_format": kv_format} | call.options), list)


def test_strides_of_single_requests_and_tokens_do_not_matter(launches):
    """torch lets them be anything."""
    for kv_format in ("int4_g4", "bf16"):
        given = but(lambda a: {name: odd(a[name]) for name in ("q", *CACHES)}, kv_format, lengths=(64,))
        assert all(given[name].stride(0) % 8 for name in ("q", *CACHES)) and isinstance(run(launches, given), list)


def test_every_number_of_a_launch_stands_where_the_kernel_takes_it(launches):
    """By the declared names: the compiler gives the kernel the same ones."""
    given = arguments(page_size=16, window_size=9, softcap=3.0, sinks=True, alibi=True, attn_bias="fp32", q_len=2)
    decode_attention(**given, num_splits=3, softmax_scale=0.25)
    features = Features(
        queries=True, causal=True, window=True, soft_cap=True, sinks=True, alibi=True, bias="fp32", paged=True
    )
    (launch,) = launches
    found = dict(zip(decode_arguments(features, True).names, launch.arguments, strict=True))
    table, bias = given["block_table"], given["attn_bias"]
    numbers = {
        "num_splits": 3,
        "softmax_scale": 0.25,
        "window": 9,
        "soft_cap": 3.0,
        "lse": 0,
        "k_scale": 0,
        "more_rows": 0,
    }
    numbers |= {"max_pages": table.shape[1], "table_stride": table.stride(0)}
    numbers |= {name: given[name].data_ptr() for name in ("block_table", "sinks", "alibi_slopes")}
    numbers |= {"bias": bias.data_ptr(), **dict(zip(BIAS_STRIDES, bias.stride(), strict=True))}
    assert {name: found[name] for name in numbers} == numbers
    assert found["k_cache"].data_ptr() == given["k_cache"].data_ptr() and found["mode"] >> CTAS_SHIFT
