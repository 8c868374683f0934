"""Keys in blocks of tokens on a GPU: attention against fp64, appends against the reference, steps in a graph."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cute_kernels.attention import decode_attention
from cute_kernels.attention.call import make_call
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_schedule import make_schedule
from cute_kernels.attention.plan import problem_of
from cute_kernels.formats.kv import WAITING, format_of
from cute_kernels.kv_cache import Rope, append_kv
from cute_kernels.kv_cache import channel_blocks as host
from cute_kernels.kv_cache.compile import AppendSpec, FillSpec
from cute_kernels.kv_cache.config import AppendConfig, RowPrologue, WrittenRows
from cute_kernels.runtime import KernelSpec
from layouts.kv.channel_blocks import TAIL_TOKENS
from tests.attention.channel_cases import KEYS, attention, make_cached
from tests.kv_cache.channel_fills import CASES, clone, fill_of

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 31, 32, 33, 63, 100, 255, 256, 257, 640, 2999]
SHAPES = [  # head_dim, KV heads, q heads, V's format
    (128, 1, 8, "int4_g4"),
    (128, 8, 64, "int4_g4"),
    (128, 2, 32, "int4_g1"),
    (64, 3, 9, "int4_g2"),
    (64, 2, 16, "int8_token_head"),
]
PAGES = [(64, "NHD"), (32, "HND"), (None, "NHD")]
CASES_OF_ATTENTION = [(shape, PAGES[0]) for shape in SHAPES]
CASES_OF_ATTENTION += [(SHAPES[i], pages) for i in (1, 3) for pages in PAGES[1:]]
MORE = ((1, None), (1, 70), (3, None))  # q_len and window: of the second shape, others have the first
TOLERANCE = 4e-3


def specs() -> list[KernelSpec]:
    """The kernels of this module: attention over caches that are built in vain here, and both launches of appends."""
    found: dict[KernelSpec, None] = {}
    smaller = [((128, 1, 8, "int4_g4"), PAGES[0]), ((128, 2, 8, "int4_g4"), PAGES[0])]
    for shape, pages in (*CASES_OF_ATTENTION, *smaller):
        head_dim, num_kv_heads, num_q_heads, v_format = shape
        cached = make_cached([65] * len(LENGTHS), head_dim, num_kv_heads, v_format, *pages)
        tokens = 3008 if (shape, pages) in CASES_OF_ATTENTION else 128
        options = dict(cached.arguments)
        if pages[0] is None:
            for name in ("k_cache", "v_cache"):
                size = list(options[name].shape)
                size[1] = tokens
                options[name] = options[name].new_empty(size)
        else:
            options["block_table"] = options["block_table"].new_zeros(len(LENGTHS), tokens // pages[0])
        tensors = [options.pop(name) for name in ("k_cache", "v_cache", "seq_lens")]
        for q_len, window in MORE if shape == SHAPES[1] else MORE[:1]:
            q = torch.empty(len(LENGTHS), q_len, num_q_heads, head_dim, dtype=torch.bfloat16)
            call = make_call(q, *tensors, window_size=window, **options)
            for num_splits in (None, 1, 5):
                found[AttentionSpec(make_schedule(problem_of(call), num_splits).config)] = None
    found.update(dict.fromkeys(FillSpec(WrittenRows(KEYS, head_dim)) for head_dim in (64, 128)))
    for rope in (RowPrologue(), RowPrologue("half", 128)):
        rows = WrittenRows(WAITING.name, 128), WrittenRows("int4_g4", 128)
        config = AppendConfig(*rows, dtype="bf16", prologue=rope)
        found.update(dict.fromkeys(AppendSpec(each) for each in (config, config.for_decode())))
    return list(found)


def errors(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square, of the largest of a row."""
    top = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    return float(((out.double().cpu() - wanted) / top).square().mean().sqrt())


@pytest.mark.parametrize(("shape", "pages"), CASES_OF_ATTENTION, ids=str)
def test_attention_is_that_over_the_values(shape, pages):
    head_dim, num_kv_heads, num_q_heads, v_format = shape
    cached = make_cached(LENGTHS, head_dim, num_kv_heads, v_format, *pages)
    generator = torch.Generator().manual_seed(1)
    for q_len, window in MORE if shape == SHAPES[1] else MORE[:1]:
        q = torch.randn(len(LENGTHS), q_len, num_q_heads, head_dim, generator=generator).bfloat16()
        wanted = attention(q, cached, window)
        for num_splits in (None, 1, 5):
            out = decode_attention(q.cuda(), window_size=window, num_splits=num_splits, **cached.to("cuda"))
            assert torch.isfinite(out).all()
            assert errors(out, wanted) <= TOLERANCE, (q_len, window, num_splits)
            assert (out[0] == 0).all()


def test_keys_at_the_limit_and_far_below_one():
    cached = make_cached([64, 90], num_kv_heads=1)
    for scale in (2.0**-9, 2.0**9):
        a = dict(cached.arguments)
        keys = (cached.keys * scale).clamp(-4094, 4094)
        form = format_of(KEYS)
        flat = form.quantize(keys.float())
        a["k_cache"][a["block_table"].long()] = flat.view(2, -1, 64, 1, flat.shape[3])
        a["k_tail"][a["tail_slots"][1].long(), torch.arange(64, 90) % TAIL_TOKENS] = keys[1, 64:90].half()
        cached.keys = form.dequantize(flat, 128, torch.float64)
        cached.keys[1, 64:] = keys[1, 64:].half().double()
        q = (torch.randn(2, 1, 8, 128, generator=torch.Generator().manual_seed(3)) / scale).bfloat16()
        out = decode_attention(q.cuda(), **cached.to("cuda"))
        assert errors(out, attention(q, cached)) <= TOLERANCE
        cached = make_cached([64, 90], num_kv_heads=1)


@pytest.mark.parametrize(("counts", "starts"), [*CASES, ((700,), (33,)), ((1,) * 70, tuple(range(70)))], ids=str)
@pytest.mark.parametrize(("head_dim", "layout", "paged"), [(128, "NHD", True), (64, "HND", True), (64, "NHD", False)])
def test_blocks_are_filled_as_the_reference_does(counts, starts, head_dim, layout, paged):
    fill = fill_of(counts, starts, head_dim, layout, paged)
    want = clone(fill)
    host.reference(*want)
    moved = {name: x.cuda() for name, x in fill._asdict().items() if isinstance(x, torch.Tensor)}
    own = fill._replace(**moved)
    host.launch(*own)
    assert torch.equal(own.k_tail.cpu(), want.k_tail)
    assert torch.equal(own.k_cache.cpu(), want.k_cache)


def test_appends_are_those_of_the_reference():
    generator = torch.Generator().manual_seed(4)
    rope, lengths = Rope(128), torch.tensor([40, 3, 96], dtype=torch.int32)
    cached = make_cached([96, 96, 96])
    cpu, gpu = dict(cached.arguments), cached.to("cuda")
    for counts in ((40, 3, 90), (1, 1, 1), (1, 1, 1), (30, 0, 2)):
        lengths = (
            lengths + torch.tensor(counts, dtype=torch.int32) if counts != (40, 3, 90) else torch.tensor([40, 3, 90])
        )
        lengths = lengths.to(torch.int32)
        one_each = counts == (1, 1, 1)
        bounds = None if one_each else torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        q, k, v = (torch.randn(sum(counts), heads, 128, generator=generator).bfloat16() for heads in (4, 2, 2))
        found = []
        for at, arguments in (("cpu", cpu), ("cuda", gpu)):
            given = arguments | {"seq_lens": lengths, "cu_seqlens": bounds}
            moved: dict[str, Any] = {n: x.to(at) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
            found.append(append_kv(k.to(at), v.to(at), q=q.to(at), rope=rope, **moved))
        assert float((found[0].double() - found[1].double().cpu()).abs().max()) <= 2.0**-6
        assert torch.equal(cpu["v_cache"], gpu["v_cache"].cpu())
        rings = cpu["k_tail"].double(), gpu["k_tail"].double().cpu()
        assert float((rings[0] - rings[1]).abs().max()) <= 2.0**-9
        assert float((cpu["k_tail"] != gpu["k_tail"].cpu()).float().mean()) < 1e-3
        assert float((cpu["k_cache"] != gpu["k_cache"].cpu()).float().mean()) < 1e-3


def test_steps_in_a_graph_follow_the_lengths_on_the_device():
    """100 tokens appended by one captured graph: blocks fill where the device's lengths say so."""
    generator = torch.Generator().manual_seed(6)
    cached = make_cached([128, 128])
    gpu = cached.to("cuda")
    keys, values = (torch.randn(100, 2, 2, 128, generator=generator).bfloat16() for _ in range(2))
    lengths, k, v = torch.zeros(2, dtype=torch.int32, device="cuda"), keys[0].cuda(), values[0].cuda()
    q = torch.randn(2, 1, 8, 128, generator=generator).bfloat16().cuda()
    gpu["seq_lens"] = lengths

    def step() -> torch.Tensor:
        append_kv(k, v, **gpu)
        return decode_attention(q, **gpu)

    lengths += 1
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lengths.zero_()
    form, v_form = format_of(KEYS), format_of("int4_g4")
    for i in range(100):
        k.copy_(keys[i])
        v.copy_(values[i])
        lengths += 1
        graph.replay()
        if i in (0, 30, 31, 32, 63, 64, 99):
            full = (i + 1) // 32 * 32
            so_far = keys[: i + 1].transpose(0, 1)
            seen = so_far.half().double()
            if full:
                seen[:, :full] = form.dequantize(form.quantize(so_far[:, :full]), 128, torch.float64)
            cached.keys, cached.lengths = seen, [i + 1] * 2
            rows = v_form.quantize(values[: i + 1].transpose(0, 1))
            cached.values = v_form.dequantize(rows, 128, torch.float64)
            assert errors(out, attention(q.cpu(), cached)) <= TOLERANCE, i
