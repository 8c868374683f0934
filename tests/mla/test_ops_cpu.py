"""The public calls on CPU tensors, and the operators behind them under torch.compile."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
import torch

import cute_kernels
import cute_kernels.mla
from cute_kernels import arguments
from cute_kernels.mla import mla_decode, ops, sparse_mla_decode
from cute_kernels.mla.arguments import arguments_of
from cute_kernels.mla.problem import SparseExtras
from cute_kernels.mla.reference import mla_decode_reference, sparse_mla_decode_reference
from tests.launchers import Launch, recording
from tests.mla.cases import FORMATS, DenseCall, SparseCall, as_flash_mla, make_dense, make_sparse
from tests.observed import calls_of

every_format = pytest.mark.parametrize("kv_format", FORMATS)
EVERYTHING: dict[str, Any] = {"length": True, "sinks": True, "extra": (4, 2, 5), "extra_length": True}


def run_dense(call: DenseCall, **options: Any) -> Any:
    return mla_decode(
        call.q, call.cache, call.seq_lens, block_table=call.block_table, kv_format=call.kv_format, **options
    )


def run_sparse(call: SparseCall, **options: Any) -> Any:
    return sparse_mla_decode(*call.tensors, kv_format=call.kv_format, **(call.options | options))


def test_the_package_offers_them():
    assert cute_kernels.mla_decode is mla_decode
    assert cute_kernels.sparse_mla_decode is sparse_mla_decode


@every_format
def test_they_are_the_reference_rounded_to_the_dtype_of_q(kv_format):
    dense = make_dense(kv_format, [0, 3, 17], q_len=2)
    out, lse = as_flash_mla(*run_dense(dense, return_lse=True))
    wanted, wanted_lse = mla_decode_reference(*dense.tensors, kv_format=kv_format)
    assert (out.dtype, out.shape) == (dense.q.dtype, (3, 2, 4, 512))
    assert torch.equal(out, wanted.to(out.dtype)) and torch.equal(lse, wanted_lse)
    sparse = make_sparse(kv_format, **EVERYTHING)
    out, lse = as_flash_mla(*run_sparse(sparse, return_lse=True))
    wanted, wanted_lse, _ = sparse_mla_decode_reference(*sparse.tensors, kv_format=kv_format, **sparse.options)
    assert (out.dtype, out.shape) == (sparse.q.dtype, (3, 2, 4, 512))
    assert torch.equal(out, wanted.to(out.dtype)) and torch.equal(lse, wanted_lse)


@every_format
def test_a_query_that_sees_nothing_gives_zero_and_minus_infinity(kv_format):
    out, lse = run_dense(make_dense(kv_format, [0, 1], q_len=2), return_lse=True)
    assert not out[0].any() and not out[1, 0].any() and out[1, 1].any()
    assert torch.all(lse[0] == -math.inf) and torch.all(lse[1, 0] == -math.inf) and lse[1, 1].isfinite().all()
    call = make_sparse(kv_format, sinks=True)
    call.indices.fill_(-1)
    out, lse = run_sparse(call, return_lse=True)
    assert not out.any() and torch.all(lse == -math.inf)


def test_only_the_output_comes_back_unless_the_lse_is_asked_for():
    dense, sparse = make_dense("mla_fp8", [5]), make_sparse("mla_fp8")
    assert torch.equal(run_dense(dense), run_dense(dense, return_lse=True)[0])
    assert torch.equal(run_sparse(sparse), run_sparse(sparse, return_lse=True)[0])


def test_out_is_written_and_returned():
    cases: list[tuple[Any, Any]] = [
        (make_dense("mla_fp8", [5, 0]), run_dense),
        (make_sparse("mla_model1"), run_sparse),
    ]
    for call, run in cases:
        out = torch.full((*call.q.shape[:3], 512), torch.nan, dtype=call.q.dtype)
        assert run(call, out=out) is out
        assert torch.equal(out, run(call))


def test_causal_queries_see_no_later_token():
    call = make_dense("mla_bf16", [9], q_len=3)
    last = run_dense(call)[:, -1]
    assert torch.equal(run_dense(call, causal=False)[:, -1], last)
    alone = DenseCall(call.q[:, :1], call.cache, call.block_table, call.seq_lens - 2, "mla_bf16")
    torch.testing.assert_close(run_dense(alone)[:, 0], run_dense(call)[:, 0], rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kv_format", ["mla_fp8", "mla_model1"])
def test_bytes_may_come_as_any_dtype_of_one(kv_format, dtype):
    call = make_sparse(kv_format)
    other = SparseCall(call.q, call.cache.view(dtype), call.indices, kv_format, call.options)
    assert torch.equal(run_sparse(call), run_sparse(other))


def test_empty_batches_caches_and_choices():
    out, lse = run_dense(make_dense("mla_fp8", []), return_lse=True)
    assert out.shape == (0, 1, 4, 512) and lse.shape == (0, 1, 4)
    out, lse = run_dense(make_dense("mla_bf16", [0], spare_pages=0), return_lse=True)
    assert not out.any() and torch.all(lse == -math.inf)
    call = make_sparse("mla_bf16", topk=0)
    assert not run_sparse(call).any()
    none = SparseCall(call.q, call.cache[:0], torch.zeros(3, 2, 5, dtype=torch.int32), "mla_bf16", {})
    assert not run_sparse(none).any()


def test_a_parameter_is_as_good_as_a_tensor():
    call = make_dense("mla_bf16", [5])
    wrapped = DenseCall(torch.nn.Parameter(call.q, requires_grad=False), *call.tensors[1:], "mla_bf16")
    assert torch.equal(run_dense(wrapped), run_dense(call))


# -- the operators -----------------------------------------------------------------------------------------------------


def operator_arguments(call: DenseCall | SparseCall, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The operator of a call and its arguments."""
    if isinstance(call, DenseCall):
        return torch.ops.cute_kernels.mla_decode.default, (*call.tensors, call.kv_format, None, True)
    extras = SparseExtras(**call.options)
    return torch.ops.cute_kernels.sparse_mla_decode.default, (
        *call.tensors, call.kv_format, 0.2, *extras, options.get("with_max", False)
    )  # fmt: skip


@every_format
def test_the_operators_pass_opcheck(kv_format):
    torch.library.opcheck(*operator_arguments(make_dense(kv_format, [3, 9], q_len=2)))
    torch.library.opcheck(*operator_arguments(make_sparse(kv_format)))
    torch.library.opcheck(*operator_arguments(make_sparse(kv_format, **EVERYTHING), with_max=True))


@pytest.mark.parametrize("call", [make_dense("mla_fp8", [3]), make_sparse("mla_model1", **EVERYTHING)])
def test_meta_tensors_have_the_shapes(call):
    operator, arguments = operator_arguments(call, with_max=True)
    moved = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    for found, wanted in zip(operator(*moved), operator(*arguments), strict=True):
        assert (found.shape, found.dtype, found.device.type) == (wanted.shape, wanted.dtype, "meta")


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
def test_compiled_calls_give_the_same():
    dense, sparse = make_dense("mla_fp8", [3, 9], q_len=2), make_sparse("mla_fp8", **EVERYTHING)

    def both() -> tuple[torch.Tensor, ...]:
        return *run_dense(dense, return_lse=True), *run_sparse(sparse, return_lse=True)

    for found, wanted in zip(torch.compile(both, fullgraph=True)(), both(), strict=True):
        assert torch.equal(found, wanted)


# -- the kernels' side -------------------------------------------------------------------------------------------------


@pytest.fixture
def launches():
    pytest.importorskip("cutlass")
    with recording() as recorded:
        yield recorded.launches


def by_name(tokens: str, launch: Launch) -> dict[str, Any]:
    """The arguments of a launch as the compiler gives them to the kernel."""
    return dict(zip(arguments_of(tokens).names, launch.arguments, strict=True))


def test_what_a_dense_launch_is_given(launches):
    call = make_dense("mla_fp8", [3, 9], q_len=2, page_size=5, padding=32)
    result, lse = ops.launch_dense(ops.DenseCall(*call.tensors, "mla_fp8", None, True))
    assert result.shape == (2, 2, 4, 512) and lse.shape == (2, 2, 4)
    found = by_name("paged", launches[0])
    assert found["q"] is call.q and found["softmax_scale"] == 576**-0.5
    wanted = {"out": result.data_ptr(), "lse": lse.data_ptr(), "max_logits": 0, "sinks": 0}
    wanted |= {"cache": call.cache.data_ptr(), "page_stride": 3312, "token_stride": 656, "page_size": 5}
    wanted |= {"num_pages": call.cache.shape[0], "table": call.block_table.data_ptr(), "table_stride": 3}
    wanted |= {"max_pages": 3, "seq_lens": call.seq_lens.data_ptr(), "causal": 1}
    assert {name: found[name] for name in wanted} == wanted
    launches.clear()
    out = torch.empty_like(result)
    with calls_of(ops._dense_plan) as made:
        assert ops.launch_dense(ops.DenseCall(*call.tensors, "mla_fp8", 0.5, True, out))[0] is out
    assert not made, "the plan is kept"
    found = by_name("paged", launches[0])
    assert found["softmax_scale"] == 0.5 and found["out"] == out.data_ptr()
    launches.clear()
    single = make_dense("mla_fp8", [3], q_len=1)
    ops.launch_dense(ops.DenseCall(*single.tensors, "mla_fp8", None, True))
    assert by_name("paged", launches[0])["causal"] == 0  # one query has no later token


def test_what_a_sparse_launch_is_given(launches):
    call = make_sparse("mla_model1", page_size=2, **EVERYTHING)
    extras = SparseExtras(**call.options)
    with pytest.raises(ValueError, match="extra_cache: got pages 2920 bytes apart"):
        ops.launch_sparse(ops.SparseCall(*call.tensors, "mla_model1", None, extras, False, None))
    call = make_sparse("mla_model1", page_size=2, padding=8, length=True, sinks=True, extra=(4, 2, 5))
    with pytest.raises(ValueError, match="cache: got pages 1176 bytes apart"):
        ops.launch_sparse(ops.SparseCall(*call.tensors, "mla_model1", None, SparseExtras(), False, None))
    assert not launches
    call = make_sparse("mla_model1", page_size=2, length=True, sinks=True, extra=(4, 2, 6), extra_length=True)
    extras = SparseExtras(**call.options)
    *_, top = ops.launch_sparse(ops.SparseCall(*call.tensors, "mla_model1", 0.1, extras, True, None))
    assert top.shape == (3, 2, 4)
    found = by_name("sparse", launches[0])
    assert found["q"] is call.q and found["softmax_scale"] == 0.1
    addresses = {"cache": call.cache, "indices": call.indices, "max_logits": top, "topk_length": extras.topk_length}
    addresses |= {name: getattr(extras, name) for name in ("sinks", "extra_cache", "extra_indices")}
    addresses["extra_topk_length"] = extras.extra_topk_length
    assert {name: found[name] for name in addresses} == {name: x.data_ptr() for name, x in addresses.items()}
    numbers = {"topk": 7, "extra_topk": 4, "page_size": 2, "extra_page_size": 6, "page_stride": 2 * 584}
    assert {name: found[name] for name in numbers} == numbers
    launches.clear()
    ops.launch_sparse(ops.SparseCall(*call.tensors, "mla_model1", 0.1, SparseExtras(), False, None))
    found = by_name("sparse", launches[0])
    nothing = {"extra_cache": 0, "extra_topk": 0, "extra_page_size": 1, "sinks": 0, "max_logits": 0, "topk_length": 0}
    assert {name: found[name] for name in nothing} == nothing


@pytest.mark.parametrize("run, call", [(run_dense, make_dense("mla_fp8", [3])), (run_sparse, make_sparse("mla_fp8"))])
def test_a_repeated_call_s_out_and_scale_are_refused_as_a_first_one_s(run, call, launches):
    good = run(call)
    run(call, out=torch.empty_like(good), softmax_scale=0.5)
    wide = torch.empty(*good.shape[:-1], 1024, dtype=good.dtype)
    refused = {"dtype": good.float(), "shape": good[..., :256], "strides": wide[..., :512], "list": [good]}
    for word, out in refused.items():
        with pytest.raises((TypeError, ValueError), match=f"out: got .*{word}"):
            run(call, out=out)
    for scale in (0, -1.0, math.nan, True, "1"):
        with pytest.raises((TypeError, ValueError), match="softmax_scale: got"):
            run(call, softmax_scale=scale)
    assert len(launches) == 2
    assert run(call, out=good, softmax_scale=1) is good, "an int is a number"


def test_nothing_is_launched_where_there_is_nothing_to_see(launches):
    out, lse = ops.launch_dense(
        ops.DenseCall(*make_dense("mla_bf16", [0], spare_pages=0).tensors, "mla_bf16", None, True)
    )
    assert not out.any() and torch.all(lse == math.inf)
    call = make_sparse("mla_bf16", topk=0)
    out, lse, top = ops.launch_sparse(ops.SparseCall(*call.tensors, "mla_bf16", None, SparseExtras(), True, None))
    assert not out.any() and torch.all(lse == math.inf) and torch.all(top == -math.inf)
    assert not launches


def test_debug_mode_looks_at_indices():
    call = make_sparse("mla_fp8", extra=(4, 2, 3))
    call.indices.fill_(-1)
    run_sparse(call)
    call.options["extra_indices"].fill_(0)
    with arguments.checking_values():
        run_sparse(call)
        call.indices[1, 0, 5] = 15
        with pytest.raises(ValueError, match="indices: got 15 for request 1, query 0, position 5, want -1 or 0 to 14"):
            run_sparse(call)
        assert run_sparse(call, topk_length=torch.full((3,), 5, dtype=torch.int32)) is not None
        with pytest.raises(ValueError, match="topk_length: got 8 for request 0, want 0 to 7"):
            run_sparse(call, topk_length=torch.tensor([8, 0, 0], dtype=torch.int32))
        call.indices.fill_(-1)
        call.options["extra_indices"][2, 1, 3] = -2
        with pytest.raises(ValueError, match="extra_indices: got -2 for request 2, query 1, position 3"):
            run_sparse(call)
