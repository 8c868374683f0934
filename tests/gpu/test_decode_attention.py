"""Decode attention on a GPU against fp64 on the dequantised cache, and everything a CPU cannot show of it."""

import math
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cute_kernels
from cute_kernels.attention import decode_attention_splits
from cute_kernels.attention.formats import format_of
from cute_kernels.attention.reference import decode_attention_reference
from cute_kernels.compat.fbgemm import gqa_attn_splitk

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
INT4_FORMATS = ("int4_g1", "int4_g2", "int4_g4", "int4_g8")
DTYPES = {"bf16": (torch.bfloat16,), "fp16": (torch.float16,)}


def make_cache(values: torch.Tensor, kv_format: str) -> torch.Tensor:
    form = format_of(kv_format)
    if form.cache_dtype != torch.uint8:
        return values.to(form.cache_dtype)
    return form.row(values.shape[-1]).quantize(values)  # type: ignore[attr-defined]


Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k_cache, v_cache


def make_call(
    batch, tokens, kv_heads, group, head_dim, kv_format, dtype=torch.bfloat16, *, seed=0, k=None, v=None
) -> Call:
    """Random tensors of a call; ``k``, ``v`` replace the Gaussian cache values [batch, tokens, kv_heads, head_dim]."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def gaussian(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    dtype = DTYPES.get(kv_format, (dtype,))[0]
    q = gaussian(batch, 1, kv_heads * group, head_dim).to(dtype)
    shape = (batch, tokens, kv_heads, head_dim)
    k, v = (make_cache(gaussian(*shape) if x is None else x, kv_format) for x in (k, v))
    return q, k, v


def poison(cache: torch.Tensor, lengths: list[int]) -> None:
    """What lies past a request's end may be anything: NaN, or bytes that make NaN scales."""
    for row, length in zip(cache, lengths, strict=True):
        row[length:] = 0xFF if cache.dtype == torch.uint8 else float("nan")


def lengths_on_gpu(lengths: list[int]) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device="cuda")


def check(q, k, v, lengths: list[int], kv_format: str, **options) -> torch.Tensor:
    """Runs a call into a poisoned output, compares output and LSE with fp64, returns the output."""
    poison(k, lengths)
    poison(v, lengths)
    seq_lens = lengths_on_gpu(lengths)
    out = torch.full_like(q, float("nan"))
    result, lse = cute_kernels.decode_attention(
        q, k, v, seq_lens, kv_format=kv_format, return_lse=True, out=out, **options
    )
    assert result is out
    scale = options.get("softmax_scale")
    want, want_lse = decode_attention_reference(
        q, k, v, seq_lens, kv_format=kv_format, softmax_scale=scale, compute_dtype=torch.float64
    )
    error = (out.double() - want).norm() / want.norm().clamp_min(1e-30)
    assert error <= TOLERANCE[q.dtype], f"relative error {error:.2e}"
    empty = want_lse.isinf()
    assert torch.equal(lse.isinf(), empty)
    assert not out.squeeze(1)[[length == 0 for length in lengths]].any()
    if not empty.all():
        torch.testing.assert_close(lse[~empty].double(), want_lse[~empty], rtol=1e-5, atol=1e-4)
    return out


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_format", ["bf16", "fp16", *INT4_FORMATS])
def test_every_format_and_head_dim_over_ragged_lengths(kv_format, head_dim):
    lengths = [0, 1, 31, 32, 33, 255, 256, 257, 1000, 1024]
    check(*make_call(len(lengths), 1024, 1, 8, head_dim, kv_format), lengths, kv_format)


@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g4", "bf16"])
@pytest.mark.parametrize(
    ("kv_heads", "group"),
    [(1, 1), (1, 16), (1, 24), (1, 64), (1, 80), (3, 5), (8, 8), (10, 4), (12, 1), (32, 1), (16, 16)],
)
def test_head_layouts_from_mha_to_mqa(kv_heads, group, kv_format):
    check(*make_call(3, 520, kv_heads, group, 128, kv_format), [520, 77, 1], kv_format)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_random_shapes(data):
    kv_format = data.draw(st.sampled_from(["bf16", "fp16", *INT4_FORMATS]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    batch, tokens = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3000))
    kv_heads = data.draw(st.sampled_from([1, 2, 8]))
    group = data.draw(st.integers(1, 8))
    lengths = data.draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
    splits = data.draw(st.sampled_from([None, 1, 3, 17]))
    call = make_call(batch, tokens, kv_heads, group, 128, kv_format, dtype, seed=data.draw(st.integers(0, 1 << 30)))
    check(*call, lengths, kv_format, num_splits=splits)


@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g4", "bf16"])
def test_a_request_of_131072_tokens(kv_format):
    check(*make_call(1, 131072, 1, 8, 128, kv_format), [131072], kv_format)
    check(*make_call(1, 131072, 1, 8, 128, kv_format, torch.float16), [131070], kv_format, num_splits=1)


@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g8", "bf16", "fp16"])
class TestValues:
    def values(self, scale=1.0):
        return torch.randn(4, 2000, 1, 128, device="cuda") * scale

    def test_extreme_logits(self, kv_format):
        q, k, v = make_call(4, 2000, 1, 8, 128, kv_format)
        check(q * 60, k, v, [2000, 1999, 500, 1], kv_format)

    def test_one_dominating_token(self, kv_format):
        k = self.values(0.01)
        q, *_ = make_call(4, 2000, 1, 8, 128, kv_format)
        k[:, 1234, 0] = 30 * q[:, 0, 0].float() / q[:, 0, 0].float().norm(dim=-1, keepdim=True)
        q, k, v = q, make_cache(k, kv_format), make_cache(self.values(), kv_format)
        check(q, k, v, [2000] * 4, kv_format)

    def test_constant_rows(self, kv_format):
        k, v = self.values(), self.values()
        k[:, ::3], v[:, ::2] = 0.5, -1.25
        check(*make_call(4, 2000, 1, 8, 128, kv_format, k=k, v=v), [2000, 999, 2, 1], kv_format)

    def test_only_constant_rows(self, kv_format):
        ones = torch.ones(4, 2000, 1, 128, device="cuda")
        check(*make_call(4, 2000, 1, 8, 128, kv_format, k=ones, v=2 * ones), [2000, 999, 2, 1], kv_format)

    def test_rows_of_mixed_magnitude(self, kv_format):
        k, v = self.values(), self.values()
        v *= 10 ** torch.empty(4, 2000, 1, 1, device="cuda").uniform_(-4, 4)
        check(*make_call(4, 2000, 1, 8, 128, kv_format, k=k, v=v), [2000, 1500, 64, 3], kv_format)

    def test_tiny_queries(self, kv_format):
        q, k, v = make_call(4, 2000, 1, 8, 128, kv_format)
        check((q.float() * 1e-3).to(q.dtype), k, v, [2000, 1, 2, 3], kv_format)

    def test_softmax_scale(self, kv_format):
        check(*make_call(2, 500, 1, 8, 128, kv_format), [500, 20], kv_format, softmax_scale=0.3)


def test_caches_that_no_bulk_copy_can_address_take_word_copies():
    """517 tokens of 68 bytes are no multiple of 16; and a cache may start on any multiple of 4."""
    check(*make_call(3, 517, 1, 8, 128, "int4_g1"), [517, 516, 1], "int4_g1")
    q, k, v = make_call(2, 512, 1, 8, 128, "int4_g1")
    shifted = torch.empty(k.numel() + 4, dtype=torch.uint8, device="cuda")[4:].view_as(k).copy_(k)
    check(q, shifted, v, [512, 300], "int4_g1")


def test_offsets_beyond_two_to_the_31():
    """Requests that begin past 2**31 elements and bytes; only the rows that are read are filled."""
    for kv_format, batch in (("int4_g1", 80), ("bf16", 40)):
        form = format_of(kv_format)
        tokens, kv_heads = (131072, 8) if kv_format == "bf16" else (65536, 8)
        shape = (batch, tokens, kv_heads, form.row_elements(128))
        assert math.prod(shape) > 2**31
        q, small_k, small_v = make_call(batch, 64, kv_heads, 1, 128, kv_format)
        caches = []
        for small in (small_k, small_v):
            cache = torch.empty(shape, dtype=form.cache_dtype, device="cuda")
            cache[:, :64] = small
            caches.append(cache)
        seq_lens = lengths_on_gpu([64] * batch)
        got = cute_kernels.decode_attention(q, caches[0], caches[1], seq_lens, kv_format=kv_format)
        want, _ = decode_attention_reference(q, small_k, small_v, seq_lens, kv_format=kv_format)
        error = (got.float() - want).norm() / want.norm()
        assert error <= 4e-3
        del caches, cache


@pytest.mark.parametrize("kv_format", ["int4_g4", "bf16"])
class TestReproducible:
    def test_equal_inputs_give_bitwise_equal_outputs(self, kv_format):
        q, k, v = make_call(5, 4000, 1, 8, 128, kv_format)
        seq_lens = lengths_on_gpu([4000, 1, 999, 0, 2048])
        for splits in (None, 7):
            first = cute_kernels.decode_attention(q, k, v, seq_lens, kv_format=kv_format, num_splits=splits)
            for _ in range(20):
                again = cute_kernels.decode_attention(q, k, v, seq_lens, kv_format=kv_format, num_splits=splits)
                assert torch.equal(first, again)

    def test_with_fixed_splits_a_row_does_not_depend_on_its_batch(self, kv_format):
        q, k, v = make_call(6, 3000, 1, 8, 128, kv_format)
        seq_lens = lengths_on_gpu([3000, 17, 1111, 0, 2999, 256])
        together = cute_kernels.decode_attention(q, k, v, seq_lens, kv_format=kv_format, num_splits=5)
        for i in range(6):
            one = slice(i, i + 1)
            alone = cute_kernels.decode_attention(
                q[one], k[one].clone(), v[one].clone(), seq_lens[one].clone(), kv_format=kv_format, num_splits=5
            )
            assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize(("kv_format", "batch"), [("int4_g1", 4), ("bf16", 3), ("int4_g4", 40)])
class TestGraphsAndStreams:
    def test_one_graph_serves_changing_lengths_between_eager_calls(self, kv_format, batch):
        calls = [make_call(batch, 4096, 1, 8, 128, kv_format, seed=i) for i in range(2)]
        seq_lens = lengths_on_gpu([4096] * batch)
        run = [partial(cute_kernels.decode_attention, *call, seq_lens, kv_format=kv_format) for call in calls]
        run[0]()
        graphs, outputs = [], []
        for f in run:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs.append(f())
            graphs.append(graph)
        for lengths in ([4096] * batch, [1] * batch, list(range(batch)), [4096 - 7 * i for i in range(batch)]):
            seq_lens.copy_(lengths_on_gpu(lengths))
            wanted = [f() for f in run]
            for output in outputs:
                output.fill_(float("nan"))
            for graph in graphs:
                graph.replay()
            run[0]()
            torch.cuda.synchronize()
            for output, want in zip(outputs, wanted, strict=True):
                assert torch.equal(output, want)

    def test_two_streams_at_once(self, kv_format, batch):
        calls = [make_call(batch, 4096, 1, 8, 128, kv_format, seed=i) for i in range(2)]
        seq_lens = lengths_on_gpu([4096 - i for i in range(batch)])
        want = [cute_kernels.decode_attention(*c, seq_lens, kv_format=kv_format) for c in calls]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in calls]
        got = [[], []]
        for _ in range(50):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    got[i].append(cute_kernels.decode_attention(*calls[i], seq_lens, kv_format=kv_format))
        torch.cuda.synchronize()
        assert all(torch.equal(x, want[i]) for i in range(2) for x in got[i])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_second_device():
    q, k, v = (x.to("cuda:1") for x in make_call(3, 1000, 1, 8, 128, "int4_g4"))
    seq_lens = torch.tensor([1000, 3, 500], dtype=torch.int32, device="cuda:1")
    got = cute_kernels.decode_attention(q, k, v, seq_lens, kv_format="int4_g4")
    want, _ = decode_attention_reference(q, k, v, seq_lens, kv_format="int4_g4")
    assert got.device.index == 1
    assert (got.float() - want).norm() / want.norm() < 4e-3


def test_lengths_past_the_cache_are_clamped():
    q, k, v = make_call(3, 256, 1, 8, 128, "int4_g4")
    full = cute_kernels.decode_attention(q, k, v, lengths_on_gpu([256] * 3), kv_format="int4_g4")
    past = cute_kernels.decode_attention(q, k, v, lengths_on_gpu([257, 2**31 - 1, 256]), kv_format="int4_g4")
    assert torch.equal(full, past)
    negative = cute_kernels.decode_attention(q, k, v, lengths_on_gpu([-1, -(2**31), 0]), kv_format="int4_g4")
    assert not negative.any()


def test_debug_mode_reports_lengths_past_the_cache():
    script = (
        "import torch, cute_kernels\n"
        "q = torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16, device='cuda')\n"
        "k = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16, device='cuda')\n"
        "n = torch.tensor([65], dtype=torch.int32, device='cuda')\n"
        "cute_kernels.decode_attention(q, k, k, n, kv_format='bf16')\n"
    )
    environment = os.environ | {"CUTE_KERNELS_DEBUG": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "seq_lens: got lengths from 65 to 65, want 0 to 64" in run.stderr


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda a: a | {"q": a["q"].cpu()}, "k_cache"),
        (lambda a: a | {"k_cache": a["k_cache"].cpu()}, "k_cache"),
        (lambda a: a | {"v_cache": a["v_cache"].cpu()}, "v_cache"),
        (lambda a: a | {"seq_lens": a["seq_lens"].cpu()}, "seq_lens"),
        (lambda a: a | {"seq_lens": a["seq_lens"].long()}, "seq_lens"),
        (lambda a: a | {"seq_lens": a["seq_lens"][:1]}, "seq_lens"),
        (lambda a: a | {"v_cache": a["v_cache"][:, :100].contiguous()}, "v_cache"),
        (lambda a: a | {"k_cache": a["k_cache"].transpose(1, 2).contiguous().transpose(1, 2)}, "k_cache"),
        (lambda a: a | {"q": a["q"].float()}, "q"),
        (lambda a: a | {"q": a["q"][..., :64]}, "q"),
        (lambda a: a | {"out": torch.empty_like(a["q"]).half()}, "out"),
        (lambda a: a | {"out": torch.empty_like(a["q"]).cpu()}, "out"),
        (lambda a: a | {"kv_format": "int4_g2"}, "k_cache"),
        (lambda a: a | {"softmax_scale": -1.0}, "softmax_scale"),
        (lambda a: a | {"num_splits": 0}, "num_splits"),
    ],
)
@pytest.mark.parametrize("seen", [False, True])
def test_bad_input_is_refused_by_name_whether_the_shape_was_seen_before_or_not(change, error, seen):
    q, k, v = make_call(2, 128, 2, 4, 128, "int4_g4")
    good: dict[str, Any] = {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "seq_lens": lengths_on_gpu([128, 5]),
        "kv_format": "int4_g4",
    }
    if seen:
        cute_kernels.decode_attention(**good)
    with pytest.raises((TypeError, ValueError), match=f"^{error}: "):
        cute_kernels.decode_attention(**change(good))
    torch.cuda.synchronize()


def test_compiled_graphs_call_the_operator():
    q, k, v = make_call(3, 700, 1, 8, 128, "int4_g4")
    seq_lens = lengths_on_gpu([700, 0, 3])

    def step(q, k, v, seq_lens):
        return cute_kernels.decode_attention(q * 2, k, v, seq_lens, kv_format="int4_g4") + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, seq_lens), step(q, k, v, seq_lens))
    arguments = (q, k, v, seq_lens, "int4_g4", None, None)
    torch.library.opcheck(torch.ops.cute_kernels.decode_attention.default, arguments)


def test_splits_combine_to_the_output():
    q, k, v = make_call(3, 3000, 1, 8, 128, "int4_g4")
    seq_lens = lengths_on_gpu([3000, 0, 300])
    out, split_out, split_max, split_sum = decode_attention_splits(q, k, v, seq_lens, kv_format="int4_g4", num_splits=6)
    weight = split_sum * (split_max - split_max.amax(1, keepdim=True).clamp_min(-1e30)).exp()
    total = weight.sum(1).clamp_min(1e-30)
    combined = (split_out * weight.unsqueeze(-1)).sum(1) / total.unsqueeze(-1)
    torch.testing.assert_close(combined, out.squeeze(1).float(), rtol=1e-2, atol=4e-3)


def test_fbgemm_interface():
    q, k, v = make_call(3, 1024, 1, 8, 128, "int4_g4")
    positions = lengths_on_gpu([1023, 0, 99])
    out, _, _ = gqa_attn_splitk(q, k, v, positions, 128**-0.5, 8, kv_cache_quant_num_groups=4)
    want, _ = decode_attention_reference(q, k, v, positions + 1, kv_format="int4_g4", compute_dtype=torch.float64)
    assert (out.double() - want).norm() / want.norm() < 4e-3


def test_host_cost_of_a_call(record_property):
    """Microseconds of an eager call with an output to write to, without waiting for the GPU."""
    q, k, v = make_call(1, 256, 1, 8, 128, "int4_g1")
    seq_lens, out = lengths_on_gpu([256]), torch.empty_like(q)

    def cost(call, count=200):
        for _ in range(count):
            call()
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            times.append((time.perf_counter() - start) / count * 1e6)
        return sorted(times)[len(times) // 2]

    ours = cost(lambda: cute_kernels.decode_attention(q, k, v, seq_lens, kv_format="int4_g1", out=out))
    allocating = cost(lambda: cute_kernels.decode_attention(q, k, v, seq_lens, kv_format="int4_g1"))
    torch_add = cost(lambda: torch.add(q, q, out=out))
    record_property("host_us", (ours, allocating, torch_add))
    print(f"\nhost us per call: {ours:.2f} with out, {allocating:.2f} without, torch.add {torch_add:.2f}")
    assert ours < 2 * torch_add + 2
