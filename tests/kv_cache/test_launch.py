"""What an append on a GPU launches depends on that call alone, whatever was launched before: plans are never mistaken.

With compiled functions that launch nothing (`tests.host_functions`), so that no GPU is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels.kv_cache import CacheTransform, Rope, append_kv, ops
from cute_kernels.kv_cache.call import NUM_USUAL, AppendCall
from cute_kernels.runtime import native
from tests.kv_cache.cases import Shape, make_call, without_requests
from tests.kv_cache.test_append_cpu import arguments
from tests.kv_cache.transformed import make_transform
from tests.launchers import assert_launched_alike_after_any_other, outcome, recording
from tests.observed import calls_of
from tests.tensors import apart, offset, padded

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")

Arguments = dict[str, Any]
PLAIN = Shape("int4_g4", rope=Rope(128))
TURNED = make_transform(2, 128, k_rotation=32)


@pytest.fixture
def launches():
    from tests.host_functions import append_function

    with recording(lambda spec: append_function(spec.config)) as recorded:
        yield recorded.launches


def of(shape: Shape = PLAIN, **changes: Any) -> Arguments:
    return arguments(make_call(shape.with_(**changes)))


def but(change: Callable[[Arguments], Arguments], **changes: Any) -> Arguments:
    given = of(**changes)
    return given | change(given)


def typed(a: Arguments, dtype: torch.dtype) -> Arguments:
    return {name: a[name].view(dtype) for name in ("k_cache", "v_cache")}


CALLS: dict[str, Callable[[], Arguments]] = {
    "plain": of,
    "another rope": lambda: of(rope=Rope(128, theta=1e6)),
    "rope of a part": lambda: of(rope=Rope(64)),
    "no rope": lambda: of(rope=None),
    "rope in words": lambda: of() | {"rope": "half"},
    "more requests": lambda: of(new=(1,) * 6),
    "a prefill": lambda: of(new=(3, 9)),
    "fp16": lambda: of(dtype="fp16"),
    "no q": lambda: of(num_q_heads=0),
    "q_out without q": lambda: but(lambda a: {"q": None, "q_out": torch.empty_like(a["q"])}),
    "no q, wider keys": lambda: of(num_q_heads=0, head_dim=256, v_head_dim=128),
    "more q heads": lambda: of(num_q_heads=8),
    "more heads": lambda: of(num_kv_heads=4),
    "wider values": lambda: of(v_head_dim=256),
    "unfused": lambda: of(fused=False),
    "q_out": lambda: but(lambda a: {"q_out": torch.empty_like(a["q"])}),
    "q_out of floats": lambda: but(lambda a: {"q_out": a["q"].float()}),
    "misaligned k": lambda: but(lambda a: {"k": offset(a["k"], 8)}),
    "columns apart": lambda: but(lambda a: {"v": torch.stack([a["v"]] * 2, -1)[..., 0]}),
    "another format": lambda: of(kv_format="int4_g2"),
    "the wrong format": lambda: of() | {"kv_format": "int4_g2"},
    "a pair": lambda: of(kv_format=("int4_g4", "int8_g2")),
    "int8": lambda: of(kv_format="int8_tensor"),
    "int8, signed": lambda: but(lambda a: typed(a, torch.int8), kv_format="int8_tensor"),
    "e4m3 of as many bytes": lambda: of(kv_format="e4m3_tensor"),
    "e4m3, typed": lambda: but(lambda a: typed(a, torch.float8_e4m3fn), kv_format="e4m3_tensor"),
    "e4m3, one typed": lambda: but(lambda a: typed(a, torch.float8_e4m3fn) | {"v_cache": a["v_cache"]},
                                   kv_format="e4m3_tensor"),
    "signed rows": lambda: but(lambda a: typed(a, torch.int8)),
    "scales of columns": lambda: of(kv_format="int8_channel"),
    "misaligned scales": lambda: but(lambda a: {"v_scale": offset(a["v_scale"], 4)}, kv_format="int8_channel"),
    "no scale": lambda: of(kv_format="int8_tensor") | {"k_scale": None},
    "heads first": lambda: of(layout="HND"),
    "a layout in a list": lambda: of() | {"cache_layout": ["NHD"]},
    "contiguous": lambda: of(place="contiguous"),
    "contiguous, of fewer requests": lambda: but(
        lambda a: {name: a[name][:2] for name in ("k_cache", "v_cache")}, place="contiguous"
    ),
    "slots": lambda: of(place="slots"),
    "slots of 32 bits": lambda: but(lambda a: {"slot_mapping": a["slot_mapping"].int()}, place="slots"),
    "slots without lengths": lambda: of(place="slots", positions="int64") | {"seq_lens": None},
    "wide positions": lambda: of(positions="int64"),
    "positions": lambda: of(positions="int32"),
    "lengths of 64 bits": lambda: but(lambda a: {"seq_lens": a["seq_lens"].long()}),
    "lengths in a list": lambda: of() | {"seq_lens": [1, 1, 1, 1]},
    "more lengths": lambda: but(lambda a: {"seq_lens": a["seq_lens"].repeat(2)}),
    "a table with gaps": lambda: but(lambda a: {"block_table": a["block_table"].repeat(1, 2)[:, ::2]}),
    "a wider table": lambda: but(lambda a: {"block_table": apart(a["block_table"])}),
    "pages apart": lambda: but(lambda a: {name: padded(a[name], 16) for name in ("k_cache", "v_cache")}),
    "pages apart by words": lambda: but(lambda a: {"k_cache": padded(a["k_cache"], 4)}),
    "pages apart by bytes": lambda: but(lambda a: {"k_cache": padded(a["k_cache"], 2)}),
    "a short table": lambda: but(lambda a: {"block_table": a["block_table"][:2]}),
    "values of fewer pages": lambda: but(lambda a: {"v_cache": a["v_cache"][:2]}),
    "pages with gaps": lambda: but(lambda a: {"k_cache": torch.cat([a["k_cache"]] * 2, 1)[:, :16]}),
    "bias": lambda: of(bias=True),
    "misaligned bias": lambda: but(lambda a: {"qkv_bias": (None, offset(a["qkv_bias"][1], 2), None)}, bias=True),
    "norm": lambda: of(norm=True),
    "norm of k alone": lambda: of(norm=True) | {"q_norm": None},
    "a transform": lambda: of() | {"transform": TURNED},
    "one of other constants": lambda: of() | {"transform": make_transform(2, 128, k_rotation=32, seed=1)},
    "a narrower one": lambda: of() | {"transform": make_transform(2, 128, k_rotation=16)},
    "one that centres alone": lambda: of() | {"transform": make_transform(2, 128, parts="center")},
    "one that changes nothing": lambda: of() | {"transform": CacheTransform()},
    "one of other heads": lambda: of() | {"transform": make_transform(3, 128)},
    "a transform in words": lambda: of() | {"transform": "hadamard"},
    "a transform for prefill": lambda: of(new=(3, 9)) | {"transform": TURNED},
    "a transform and shifts": lambda: of() | {"transform": TURNED, "q_shift": torch.zeros(4, 4)},
    "shifts of halves": lambda: of() | {"transform": TURNED, "q_shift": torch.zeros(4, 4).half()},
    "shifts without a transform": lambda: of() | {"q_shift": torch.zeros(4, 4)},
    "shifts without a center": lambda: of() | {"transform": make_transform(2, 128, parts=""),
                                               "q_shift": torch.zeros(4, 4)},
    "a transform without q": lambda: of(num_q_heads=0) | {"transform": TURNED},
    "a rotation of 96 columns": lambda: of(head_dim=96, rope=None) | {
        "transform": make_transform(2, 96, k_rotation=32)
    },
    "a negative eps": lambda: of() | {"norm_eps": -1.0},
}  # fmt: skip

made = functools.cache(lambda name: CALLS[name]())


def run(launches: list[Any], given: Arguments) -> Any:
    return outcome(launches, lambda: append_kv(**given), given)


def test_a_call_launches_the_same_after_any_other(launches):
    assert_launched_alike_after_any_other(CALLS, lambda call: run(launches, made(call)), ops.launch.plans)


@pytest.mark.parametrize("name", ["plain", "q_out", "no q", "int8", "slots", "bias"])
def test_a_repeated_call_is_not_checked_again_and_needs_no_plan(name, launches):
    given = made(name)
    want = run(launches, given)
    assert len(want) == 1
    with calls_of(ops.check_append, ops.make_plan) as repeated:
        assert run(launches, given) == want
    assert not repeated


def test_a_new_q_is_contiguous_and_a_given_one_comes_back(launches):
    given = made("plain")
    q_out = append_kv(**given)
    assert q_out is not None and q_out.is_contiguous()
    assert (q_out.shape, q_out.dtype) == (given["q"].shape, given["q"].dtype)
    given = made("q_out")
    assert append_kv(**given) is given["q_out"]


def test_a_step_without_requests_launches_nothing(launches):
    """The kernel would look for its tokens' requests before the first one."""
    given = arguments(without_requests(make_call(PLAIN.with_(new=(3, 9)))))
    q_out = append_kv(**given)
    assert not launches and q_out is not None and q_out.shape == given["q"].shape


def test_most_calls_have_no_extras():
    assert AppendCall._fields[NUM_USUAL - 2 : NUM_USUAL] == ("block_table", "transform")
    assert make_call(PLAIN).extras == (None,) * (len(AppendCall._fields) - NUM_USUAL)


def test_a_scale_per_head_may_start_on_any_float(launches):
    """As a layer's do, which lie behind those of the layers before it; the kernel reads them one by one."""
    for place in (4, 8, 12):
        given = but(lambda a, place=place: {"v_scale": offset(a["v_scale"], place)}, kv_format="e4m3_head")
        append_kv(**given)
    assert len(launches) == 3


def test_a_scale_per_channel_must_start_on_a_vector(launches):
    given = but(lambda a: {"k_scale": offset(a["k_scale"], 4)}, kv_format="int8_channel")
    with pytest.raises(ValueError, match="k_scale: got a tensor that starts .* bytes past a multiple of 16"):
        append_kv(**given)
