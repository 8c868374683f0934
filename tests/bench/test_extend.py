"""What the benchmark of extend attention counts and prints."""

from __future__ import annotations

from bench.extend import FA3_FP8, FP8_PRODUCTS, HEAD_DIM, SHAPES, ExtendShape, markdown, text


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


def test_mixed_batches_are_printed_as_a_share_of_both_in_turn():
    times = {"decode": 300.0, "chunk": 200.0, "in turn": 500.0, "side by side": 400.0}
    row = {"name": "63 decode", "us": {name: {"median_us": us} for name, us in times.items()}}
    assert "0.80" in text({"extend_mixed": [row]})


def test_every_bar_of_the_record_has_its_shape():
    names = {shape.name for shape in SHAPES}
    assert {"1 x 16384 over 16384, 32/8", "1 x 2048 over 32768, 64/8", "32 x 17 over 8192, 32/8"} <= names
    assert len(names) == len(SHAPES)


def test_a_page_shows_the_faster_of_the_peer_s_calls():
    us = {name: {"median_us": value} for name, value in (("bf16", 2_000.0), ("FA3", 4_000.0), ("FA3, cut", 2_500.0))}
    row = {"name": "a shape", "flops": 1e12, "us": us}
    few = {"name": "few", "us": {"1 queries": {"median_us": 10.0}, "4 queries": {"median_us": 12.0}}}
    environment = {"gpu": "a GPU", "driver": "1", "versions": {"torch": "2"}, "date": "2026-11-27", "commit": "a" * 40}
    page = markdown({"extend": [row], "extend_few_queries": [few], "samples": 3, "environment": environment})
    assert "| a shape | 400 | 500 |" in page and "1.20" in page


def test_a_page_shows_the_peer_s_fp8_beside_its_bf16():
    times = {"bf16": 2_000.0, FP8_PRODUCTS: 1_250.0, FA3_FP8: 1_600.0, f"{FA3_FP8}, one split": 1_500.0, "FA3": 2_500.0}
    row = {"name": "a shape", "flops": 1e12, "us": {name: {"median_us": value} for name, value in times.items()}}
    environment = {"gpu": "a GPU", "driver": "1", "versions": {"torch": "2"}, "date": "2026-11-27", "commit": "a" * 40}
    page = markdown({"extend": [row], "samples": 3, "environment": environment})
    assert f"| queries, heads | FlashAttention-3 | FlashAttention-3 in FP8 | bf16 | {FP8_PRODUCTS} |" in page
    assert "| a shape | 400 | 667 | 500 | 800 |" in page
