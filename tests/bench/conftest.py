"""A recorded run, made up but of the shape that a real one has."""

import pytest

from bench import steps


@pytest.fixture
def small_steps(monkeypatch):
    """Bare loops with few layers of their own and few distinct rows in caches."""
    monkeypatch.setattr(steps, "DISTINCT", 2)
    monkeypatch.setattr(steps, "FILLED_ROWS", 100)


def row(kv_format, batch, us, floor, suite="main", peers=None, **shape):
    full = {"batch": batch, "seq_len": 8192, "num_q_heads": 8, "num_kv_heads": 1, "head_dim": 128, **shape}
    return {
        "suite": suite,
        "name": f"B={batch} T={full['seq_len']} HQ={full['num_q_heads']} HKV={full['num_kv_heads']} D=128",
        "shape": full,
        "kv_format": kv_format,
        "cache_bytes": 10_000_000 * batch,
        "us": {"median_us": us, "min_us": us * 0.9, "p90_us": us * 1.1, "samples": 15},
        "error": 1e-3,
        "floor": {"us": floor, "kernel": "read", "sweep_us": {"read": floor}},
        "floor_ratio": us / floor,
        "gb_per_s": 10_000_000 * batch / us * 1e-3,
        "peers": peers or {},
    }


@pytest.fixture
def record():
    cudnn = {"SDPA cudnn": {"name": "SDPA cudnn", "us": 480.0, "why_not": ""}}
    absent = {"FBGEMM": {"name": "FBGEMM", "us": None, "why_not": "not installed: import fbgemm_gpu"}}
    return {
        "schema": 1,
        "samples": 15,
        "environment": {
            "gpu": "Test GPU",
            "driver": "1.0",
            "commit": "0123456789abcdef",
            "dirty": False,
            "date": "2026-01-02T03:04:05+00:00",
            "versions": {"torch": "2.13.0"},
        },
        "rows": [
            row("bf16", 512, 470.0, 465.0, peers=cudnn),
            row("int4_g1", 1, 8.5, 4.0),
            row("int4_g1", 512, 140.0, 127.0, peers=absent),
            row("int4_g4", 512, 170.0, 140.0),
            row("int4_g1", 16, 70.0, 60.0, suite="shapes", seq_len=131072),
        ],
        "host_us": {"eager": 5.0},
        "failures": [],
    }
