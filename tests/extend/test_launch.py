"""What extend attention's launcher keeps and what it looks at again, with CPU tensors for CUDA ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.extend import extend_attention, ops, ragged
from cute_kernels.extend.ragged import ragged_attention
from tests.launchers import recording
from tests.observed import calls_of


@pytest.fixture
def launches():
    """What would be launched."""
    with recording() as recorded:
        yield recorded.launches


def given(num_queries: int, **options: Any) -> dict[str, Any]:
    cache = torch.zeros(2, 128, 2, 64).bfloat16()
    return {
        "q": torch.zeros(num_queries, 4, 64).bfloat16(),
        "k_cache": cache,
        "v_cache": cache,
        "seq_lens": torch.tensor([100, 50], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, num_queries // 2, num_queries], dtype=torch.int32),
        "kv_format": "bf16",
        **options,
    }


def test_a_plan_serves_any_number_of_queries(launches):
    out = extend_attention(**given(6))
    with calls_of(ops.make_plan, ops.make_call) as repeated:
        assert extend_attention(**given(40)).shape == (40, 4, 64) and out.shape == (6, 4, 64)
    assert not repeated
    assert len(launches) == 2 and len(ops.launch.plans) == 1


def test_no_queries_are_checked_and_not_launched(launches):
    extend_attention(**given(6))
    assert extend_attention(**given(0)).shape == (0, 4, 64)
    changed: dict[str, Any] = {**given(0), "seq_lens": torch.zeros(2)}
    with pytest.raises(TypeError, match="seq_lens"):
        extend_attention(**changed)
    assert len(launches) == 1 and len(ops.launch.plans) == 1


def test_what_belongs_to_the_queries_is_counted_in_every_call(launches):
    new = torch.zeros(6, 2, 64).bfloat16()
    extend_attention(**given(6, new_k=new, new_v=new))
    count = len(launches)
    with pytest.raises(ValueError, match="new_k"):
        extend_attention(**given(6, new_k=new[:5], new_v=new))
    with pytest.raises(ValueError, match="new_v"):
        extend_attention(**given(6, new_k=new, new_v=new[:5]))
    assert len(launches) == count


def test_a_scale_that_is_none_is_refused_by_name(launches):
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="softmax_scale"):
            extend_attention(**given(6, softmax_scale=scale))
    with pytest.raises(TypeError, match="softmax_scale"):
        extend_attention(**given(6, softmax_scale="half"))
    assert not launches


def test_ragged_calls_have_plans_of_their_own(launches):
    q, k = torch.zeros(8, 4, 64).bfloat16(), torch.zeros(20, 2, 64).bfloat16()
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 9, 20], dtype=torch.int32)
    for _ in range(2):
        out, lse = ragged.launch(q, k, k, *bounds, None, ops.DEFAULTS)
        assert out.shape == q.shape and lse.shape == (8, 4)
    assert len(launches) == 2 and len(ragged.launch.plans) == 1
    out, lse = ragged.launch(q, k[:0], k[:0], *bounds, None, ops.DEFAULTS)
    assert not out.any() and (lse == -torch.inf).all() and len(launches) == 2
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        ragged.launch(q, k, k, bounds[0], bounds[1][:0], None, ops.DEFAULTS)
    assert ragged_attention(q, k, k, *bounds)[0].shape == q.shape  # on the CPU
