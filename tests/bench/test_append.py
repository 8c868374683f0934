"""The append benchmark: its shapes, the bytes it counts, its check of what was written, its bars and its table."""

from __future__ import annotations

import pytest
import torch

from bench import append
from bench.__main__ import main
from bench.append import AppendShape
from bench.bars import judge
from bench.suites import WrongOutput
from cute_kernels.formats.kv import FORMATS


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_timing_without_a_gpu_is_refused_in_words(capsys):
    assert main(["append"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_suites_and_batches_choose_the_shapes():
    decode = append.shapes(("decode",), (1, 512))
    assert [(s.tokens, s.num_kv_heads) for s in decode] == [(1, 8), (512, 8), (512, 1)]
    assert {s.suite for s in append.shapes(("decode", "prefill"), (4,))} == {"decode", "prefill"}


@pytest.mark.parametrize("kv_format", append.FORMATS)
@pytest.mark.parametrize("shape", [AppendShape("decode", 3, 4, 2), AppendShape("prefill", 32, 4, 2)], ids=str)
def test_bytes_are_those_of_the_tensors(shape, kv_format):
    call = append.make_call(shape, kv_format, "cpu")
    assert call.q is not None
    row_bytes = call.k_cache.shape[-1] * call.k_cache.element_size()
    dense = 2 * (2 * call.q.numel() + call.k.numel() + call.v.numel())
    assert shape.num_bytes(kv_format) == dense + 2 * shape.tokens * shape.num_kv_heads * row_bytes


@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_check_passes_what_is_right_and_notices_what_is_not(kv_format):
    call = append.make_call(AppendShape("decode", 3, 4, 2), kv_format, "cpu")
    assert append.check(call) < append.TOLERANCE
    call.v_cache.view(torch.uint8).zero_()
    with pytest.raises(WrongOutput, match="relative errors"):
        append.check(call, lambda: None)


def row(suite: str, tokens: int, us: float, **extra: float) -> dict:
    shape = AppendShape(suite, tokens)
    return {
        "name": shape.name,
        "shape": {"suite": suite, "tokens": tokens, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128},
        "kv_format": "int4_g4",
        "bytes": shape.num_bytes("int4_g4"),
        "us": {"median_us": us, "min_us": us, "p90_us": us, "samples": 15},
        "empty_launch_us": 2.0,
        "bytes_us": 2.5,
        **extra,
    }


def test_bars_are_judged_at_their_sizes_and_the_table_has_every_row():
    rows = [row("decode", 512, 5.0), row("decode", 128, 50.0), row("prefill", 65536, 140.0, copy_us=100.0)]
    verdicts = {verdict.what: verdict for verdict in judge({"append": rows})}
    decode, prefill = (next(v for what, v in verdicts.items() if suite in what) for suite in ("decode", "prefill"))
    assert len(verdicts) == 2
    assert decode.met and decode.measured == pytest.approx(1.2) and decode.limit == 1.5
    assert not prefill.met and prefill.measured == pytest.approx(1.4) and prefill.limit == 1.3
    record = {
        "environment": {"gpu": "Test GPU"},
        "append": rows,
        "failures": [],
        "bars": [verdict.as_dict() for verdict in verdicts.values()],
    }
    table = append.text(record)
    assert table.count("int4_g4  ") == 3 and "NOT MET" in table
