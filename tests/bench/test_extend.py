"""What the benchmark of extend attention counts and prints."""

from __future__ import annotations

from bench.extend import HEAD_DIM, ExtendShape, text


def test_flops_are_those_of_keys_that_queries_see():
    shape = ExtendShape(2, 3, 5, num_q_heads=4, num_kv_heads=2)
    seen = sum(1 for query in range(3) for key in range(5) if key <= 2 + query)
    assert shape.flops == 2 * 4 * seen * (2 * HEAD_DIM) * 2  # requests, heads, products, multiplication and sum


def test_the_table_has_tflops_of_every_call():
    row = {"name": "a shape", "flops": 5e12, "us": {"bf16": {"median_us": 10_000.0}, "FA3": {"median_us": 8_000.0}}}
    other = {"name": "another", "flops": 1e12, "us": {"bf16": {"median_us": 2_000.0}}}
    printed = text({"extend": [row, other]})
    assert "a shape" in printed and "500" in printed and "625" in printed
    assert len(printed.splitlines()) >= 3
