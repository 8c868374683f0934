"""The benchmark of MLA decode: its shapes, what it counts, its inputs, checks, kernels, bars, tables and figure."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from bench import mla, mla_append, mla_peers, mla_workloads
from bench.__main__ import main
from bench.bars import MLA_BARS, judge
from bench.floor import Floor
from bench.mla_append import MlaAppendShape
from bench.mla_peers import MlaPeer, Prepared
from bench.mla_workloads import DENSE, SPARSE, MlaShape, make_inputs
from bench.record import Recorder
from bench.report import OURS
from bench.suites import Bench, WrongOutput
from bench.timing import Protocol, ticking
from cute_kernels.families import shipped_specs
from cute_kernels.mla import sparse_mla_decode
from simulator import stand_in
from tests.bench.clocks import every_call_takes

SMALL_SPARSE = MlaShape("mla_fp8", batch=3, num_heads=5, q_len=2, seq_len=130, topk=70)
SMALL_DENSE = MlaShape("mla_bf16", batch=3, num_heads=5, q_len=2, seq_len=130)
SMALL_PREFILL = MlaShape("mla_bf16", batch=3, num_heads=5, seq_len=130, topk=70, shared=True)
SMALL = pytest.mark.parametrize(
    "shape",
    [
        SMALL_SPARSE,
        SMALL_DENSE,
        SMALL_PREFILL,
        replace(SMALL_DENSE, kv_format="mla_fp8"),
        replace(SMALL_DENSE, kv_format="mla_fp16"),
        replace(SMALL_SPARSE, kv_format="mla_model1"),
    ],
    ids=lambda shape: shape.name,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_timing_without_a_gpu_is_refused_in_words(capsys):
    assert main(["mla", "--suite", "sparse"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


# -- what is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "us", "tflops", "tb_per_s"),
    [  # FlashMLA on an H200, whose rates were counted independently
        (SPARSE[0], 414.4, 352, None),
        (SPARSE[3], 115.4, 316, None),
        (SPARSE[5], 25.2, 90, None),
        (DENSE[1], 310.4, 471, 3.892),
        (DENSE[2], 309.2, 118, 3.907),
        (DENSE[3], 68.7, 133, 0.549),
    ],
    ids=lambda value: value.name if isinstance(value, MlaShape) else "",
)
def test_rates_are_those_of_known_times(shape, us, tflops, tb_per_s):
    found = mla.rates({"flops": shape.flops, "gathered_bytes": shape.gathered_bytes}, us)
    assert found[0] == pytest.approx(tflops, rel=0.01)
    assert tb_per_s is None or found[1] == pytest.approx(tb_per_s, abs=1e-3)


def test_bytes_by_hand():
    assert SPARSE[4].gathered_bytes == 128 * 2048 * 656
    assert SPARSE[0].gathered_bytes == 2 * 128 * 2048 * 656
    assert DENSE[2].gathered_bytes == 128 * 8192 * 1152
    assert MlaAppendShape("mla_fp8", 3).num_bytes == 3 * (1152 + 16 + 656)


@SMALL
def test_inputs_are_what_the_shape_says(shape):
    inputs = make_inputs(shape, "cpu")
    assert inputs.q.shape == (3, shape.q_len, 5, {"mla_model1": 512}.get(shape.kv_format, 576))
    assert inputs.q.dtype == (torch.float16 if shape.kv_format == "mla_fp16" else torch.bfloat16)
    row = inputs.cache.shape[2] * inputs.cache.element_size()
    pages = 3 * shape.contexts
    assert inputs.cache.shape[:2] == (pages, 64) and row == shape.token_bytes
    assert sorted(inputs.block_table[: shape.contexts].flatten().tolist()) == list(range(pages))
    # A request's tokens are its pages' first ones, and nobody else's unless all have the same.
    slots = [{page * 64 + t for page in table for t in range(64)} for table in inputs.block_table.tolist()]
    if inputs.indices is None:
        read = 3 * 130
    else:
        assert inputs.indices.shape == (3, shape.q_len, 70) and inputs.indices.dtype == torch.int32
        chosen = [[set(query) for query in request] for request in inputs.indices.tolist()]
        assert all(len(query) == 70 and query <= own for r, own in zip(chosen, slots, strict=True) for query in r)
        requests = [set().union(*queries) for queries in chosen]
        read = len(set().union(*requests))
    num_bytes = read * row + inputs.q.numel() * 2
    assert num_bytes <= inputs.read_bytes() < num_bytes + 1024 and inputs.read_bytes() % 1024 == 0


def test_a_query_may_choose_the_last_token_but_none_beyond_it():
    inputs = make_inputs(replace(SMALL_SPARSE, topk=130), "cpu")
    assert inputs.indices is not None
    for request, table in zip(inputs.indices, inputs.block_table.tolist(), strict=True):
        whole = sorted(table[t // 64] * 64 + t % 64 for t in range(130))
        assert all(sorted(query.tolist()) == whole for query in request)


# -- outputs ----------------------------------------------------------------------------------------------------------


@SMALL
def test_a_sample_has_the_same_results(shape):
    inputs = make_inputs(shape, "cpu")
    out, lse = inputs.run(return_lse=True)
    rows, few = inputs.sample(2)
    assert rows.tolist() == [0, 2]
    want = few.reference()
    assert want[0].dtype == torch.float64
    close = mla.check((out, lse), want, rows)
    assert close.outside == 0 and close.distance < mla.DISTANCE and close.compared == 2 * shape.q_len * 5 * 513


def test_the_check_notices_what_is_wrong():
    inputs = make_inputs(SMALL_SPARSE, "cpu")
    found = inputs.run(return_lse=True)
    rows, few = inputs.sample(2)
    want = few.reference()
    for where, value in ((0, 1e3), (1, torch.nan), (0, -1e3)):  # request 1 is not in the sample, but NaN is NaN
        out = found[0].clone()
        out[where, 0, 0, 0] = value
        with pytest.raises(WrongOutput):
            mla.check((out, found[1]), want, rows)
    with pytest.raises(WrongOutput, match="elements outside"):
        mla.check((found[0], found[1] + 0.01), want, rows)
    assert inputs.indices is not None
    lost = inputs.indices.clone()
    lost[2, 1, :3] = -1
    out, lse = sparse_mla_decode(
        inputs.q, inputs.cache, lost, kv_format="mla_fp8", softmax_scale=mla_workloads.SOFTMAX_SCALE, return_lse=True
    )
    with pytest.raises(WrongOutput):
        mla.check((out, lse), want, rows)


def test_distance_is_that_of_cosines():
    a, b = torch.randn(2, 1000, dtype=torch.float64)
    b *= a.norm() / b.norm()
    assert mla.distance(a, b) == pytest.approx(1 - float(torch.cosine_similarity(a, b, dim=0)))


# -- FlashMLA ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def flash_mla():
    """FlashMLA's interface, served by this package's."""
    import cute_kernels.compat.flash_mla as stand_in

    return mla_peers.flash_mla_peer(lambda: stand_in)


@SMALL
def test_flash_mla_gets_the_same_problem(shape, flash_mla):
    inputs = make_inputs(shape, "cpu")
    assert flash_mla.missing() is None
    if shape.suite == "dense" and shape.kv_format == "mla_fp8":
        assert flash_mla.refuses(shape) == "no dense decode over FP8 tokens"
        return
    prepared = flash_mla.prepare(inputs)
    labels = {"sparse": "padded to 64 heads", "dense": "", "prefill": "flash_mla_sparse_fwd"}
    assert prepared.label == labels[shape.suite]
    for found, own in zip(prepared.result(prepared.call()), inputs.run(return_lse=True), strict=True):
        assert found.shape == own.shape
        torch.testing.assert_close(found, own, rtol=1e-2, atol=1e-4)


def test_where_flash_mla_is_absent_every_place_is_named():
    places = ("no_such_module", "json")
    reason = mla_peers.flash_mla_peer(lambda: mla_peers.import_flash_mla(places)).missing()
    assert reason is not None and "import no_such_module: ModuleNotFoundError" in reason
    assert "import json: no flash_mla_with_kvcache" in reason


def test_a_peer_that_is_wrong_or_fails_is_not_timed(flash_mla):
    inputs = make_inputs(SMALL_SPARSE, "cpu")
    out = inputs.run()
    rows, few = inputs.sample()
    want = few.reference()

    def prepared(change: float, ours: torch.Tensor) -> tuple[dict, dict]:
        right = flash_mla.prepare(inputs)
        wrong = Prepared(right.call, lambda result: (right.result(result)[0] + change, right.result(result)[1]))
        peer = MlaPeer("other", lambda: None, lambda shape: None, lambda inputs: wrong)
        found: dict = {"us": None, "why_not": None}
        return mla._prepared(peer, inputs, ours, want, rows, found), found

    calls, found = prepared(0, out)
    assert list(calls) == ["other"] and found["why_not"] is None and found["distance_from_ours"] < mla.MUTUAL_DISTANCE
    calls, found = prepared(0.1, out)
    assert not calls and "WrongOutput" in found["why_not"]
    calls, found = prepared(0, out * 1.1)
    assert not calls and "from ours" in found["why_not"]


# -- append -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", mla_append.FORMATS)
def test_appends_are_checked(kv_format):
    call = mla_append.make_call(MlaAppendShape(kv_format, 70), "cpu")
    assert len(set(call.slot_mapping.tolist())) == 70
    assert mla_append.check(call) <= mla_append.ROTATION_TOLERANCE
    with pytest.raises(WrongOutput, match="latent columns"):
        mla_append.check(call, append=lambda: None)


def test_an_append_without_its_rope_is_noticed():
    call = mla_append.make_call(MlaAppendShape("mla_fp8", 70), "cpu")
    append = mla_append.bind(call._replace(rope=None, position_ids=None))
    with pytest.raises(WrongOutput, match="0 latent columns"):
        mla_append.check(call, append)


# -- a run ------------------------------------------------------------------------------------------------------------


RUN = [SMALL_SPARSE, replace(SMALL_DENSE, batch=1)]
APPENDS = (MlaAppendShape("mla_fp8", 3), MlaAppendShape("mla_bf16", 200))


@pytest.fixture
def bench():
    """A bench whose clock makes every call take 50 us; what is timed is run all the same, on the CPU."""

    floors = lambda flush, protocol, quick: lambda num_bytes: Floor(num_bytes, 10.0, "read")  # noqa: E731
    with ticking(every_call_takes(50.0)):
        yield Bench(
            Recorder(None),
            Protocol(samples=1),
            say=print,
            device="cpu",
            flush=lambda: None,
            make_floor=stand_in(floors),
        )


def test_a_run_checks_times_and_records_every_shape(bench, flash_mla):
    mla.run_shapes(bench, RUN, [flash_mla])
    mla_append.run(bench, APPENDS)
    assert bench.recorder.data["failures"] == []
    sparse, dense = bench.recorder.data["mla"]
    assert sparse["name"] == SMALL_SPARSE.name and sparse["us"]["median_us"] == 50.0 and sparse["floor_ratio"] == 5
    assert "graph_us" in dense and "graph_us" not in sparse
    for row in (sparse, dense):
        assert row["error"]["outside"] == 0
        peer = row["peers"]["FlashMLA"]
        assert peer["us"] == 50.0 and peer["tflops"] == row["tflops"] and peer["error"]["outside"] == 0
    few, many = bench.recorder.data["mla_append"]
    assert few["graph_us"] and "graph_us" not in many
    for report in (mla.text, mla.markdown):
        assert "padded" in report(bench.recorder.data) or report is mla.markdown


def test_where_ours_fails_the_peer_still_has_a_time(bench, flash_mla, monkeypatch):
    def fail(self, **options):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(mla_workloads.MlaInputs, "run", fail)
    mla.run_shapes(bench, RUN, [flash_mla])
    assert [failure["error"] for failure in bench.recorder.data["failures"]] == ["NotImplementedError: no kernel"] * 2
    for row in bench.recorder.data["mla"]:
        assert row["why_not"] == "NotImplementedError: no kernel" and "us" not in row
        assert row["peers"]["FlashMLA"]["us"] == 50.0 and row["floor"]["us"] == 10.0
    assert "no kernel" in mla.text(bench.recorder.data)


# -- kernels, bars, reports -------------------------------------------------------------------------------------------


def test_only_kernels_that_ship_are_run():
    found = mla.specs()
    assert found and set(found) <= set(shipped_specs())
    assert set(mla.specs(["append"])) == set(mla_append.specs()) < set(found)


def test_every_bar_is_of_a_shape():
    names = [shape.name for shape in mla_workloads.shapes(mla_workloads.SUITES)]
    assert set(MLA_BARS) <= set(names) and len(set(names)) == len(names)
    assert set(mla_workloads.QUICK) <= {*SPARSE, *DENSE}


def row(shape: MlaShape, us: float, peer_us: float | None, outside: int = 0) -> dict:
    found = {"name": shape.name, "suite": shape.suite, "kv_format": shape.kv_format, "shape": shape.as_dict()}
    found |= {"flops": shape.flops, "gathered_bytes": shape.gathered_bytes, "read_bytes": 1 << 20}
    found |= {"us": {"median_us": us, "min_us": us}, "floor": {"us": 10.0}, "floor_ratio": us / 10}
    found["error"] = {"distance": 1e-6, "outside": outside, "compared": 1000}
    found["tflops"], found["tb_per_s"] = mla.rates(found, us)
    peer: dict = {"us": peer_us, "why_not": None if peer_us else "no dense decode over FP8 tokens"}
    if peer_us:
        peer["tflops"], peer["tb_per_s"] = mla.rates(found, peer_us)
    return found | {"peers": {mla_peers.FLASH_MLA: peer}}


def record(*rows: dict, append: tuple[dict, ...] = ()) -> dict:
    environment = {"gpu": "GPU", "versions": {"torch": "2"}, "commit": "0", "date": "2026"}
    data = {"schema": 1, "kind": "mla", "environment": environment, "mla": list(rows), "rows": [], "failures": []}
    data["mla_append"] = list(append)
    return data | {"bars": [verdict.as_dict() for verdict in judge(data)], "samples": 3}


def appended(tokens: int, us: float) -> dict:
    shape = MlaAppendShape("mla_fp8", tokens)
    found = {"name": shape.name, "shape": asdict(shape), "bytes": shape.num_bytes, "copy_us": 30.0}
    return found | {"us": {"median_us": us, "min_us": us}, "empty_launch_us": 2.0}


def test_bars():
    rows = row(SPARSE[0], 300.0, 414.0), row(SPARSE[4], 100.0, 90.0, outside=3), row(SPARSE[5], 21.0, None)
    found = record(*rows, row(DENSE[4], 900.0, None), append=(appended(1, 99.0), appended(65536, 33.0)))
    first, second, third, _ = (row["name"] for row in found["mla"])
    assert {bar["what"]: bar["met"] for bar in found["bars"]} == {
        f"{first}: rate": True,
        f"{first}: time over FlashMLA's": True,
        f"{second}: rate": False,
        f"{second}: time over FlashMLA's": False,
        f"{third}: time": False,
        "MLA decode: elements outside FlashMLA's tolerances": False,
        "append mla_fp8 65536 tokens: time over a copy of its bytes": True,
    }


def test_tables_and_figure(tmp_path):
    failed = row(DENSE[0], 1.0, 900.0)
    for key in ("us", "tflops", "tb_per_s", "error", "floor_ratio"):
        del failed[key]
    failed["why_not"] = "NotImplementedError: no kernel"
    data = record(row(SPARSE[0], 300.0, 414.4), row(DENSE[4], 900.0, None), failed, append=(appended(1, 3.0),))
    lines = mla.text(data).splitlines()
    wanted = ["300.0", "300.0", "-", "487", "1.15"]
    assert any(line.startswith(SPARSE[0].name) and line.split()[6:11] == wanted for line in lines)
    assert "FlashMLA (dense mla_fp8): no dense decode over FP8 tokens" in lines
    assert f"{DENSE[0].name}: NotImplementedError: no kernel" in lines
    assert any(line.startswith("append mla_fp8 1 token ") for line in lines)
    table = mla.markdown(data)
    assert "| mla_fp8 | 128 | 128 | 2 | 2048 of 32768 | 10.0 | **300.0** | 487 | 1.15 | 414.4 (352) |" in table
    assert DENSE[0].kv_format not in table
    with pytest.raises(ValueError, match="no measured row"):
        mla.markdown(record())
    pytest.importorskip("matplotlib")
    from bench import plots

    (path,) = plots.plot(data, tmp_path)
    assert path.name == "mla_rates.svg"
    assert all(word in path.read_text() for word in (OURS, "FlashMLA", SPARSE[0].name))
