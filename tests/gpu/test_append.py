"""append_kv on a GPU is the reference, in every format, place and order; what a call does besides computing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cute_kernels.arguments
from cute_kernels.formats.kv import HEAD_DIMS
from cute_kernels.kv_cache import Rope, YarnScaling, append_kv, ops
from cute_kernels.kv_cache.call import NUM_USUAL, AppendCall
from cute_kernels.kv_cache.compile import AppendSpec, shipped_specs
from cute_kernels.runtime import arch_of, load_many
from tests.gpu.host_cost import host_us
from tests.gpu.specs import append_specs
from tests.kv_cache.cases import ALL_FORMATS, POISON, Shape, assert_appended, clone_caches, make_call
from tests.kv_cache.test_append_cpu import arguments

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("append_kernels")]

CUDA = "cuda"
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
LLAMA = Rope(128, theta=500000.0)
HOST_COST = 4.0  # of torch.add, an operator that allocates its output


FORMATS_OF_DIMS = ("fp16", "int4_g1", "int4_g8", "int8_g4", "int8_channel", "e4m3_token_head")
ROPES = (
    Rope(64, theta=1e6),
    Rope(36),
    Rope(2),
    Rope(128, interleaved=True),
    Rope(48, interleaved=True),
    Rope(20, interleaved=True),
    Rope(128, scaling=YarnScaling(8.0, 2048)),
)
DIMS_OF_K_AND_V = ((192, 128), (128, 192), (64, 256), (256, 64), (80, 256), (96, 192), (80, 64))
RANDOM_FORMATS = ("bf16", "int4_g1", "int4_g4", "int8_token_head", "int8_head", "e4m3_tensor", "e5m2")


def of_format(kv_format: str, dtype: str) -> list[Shape]:
    """Decode and prefill, with RoPE and without."""
    return [
        Shape(kv_format, dtype, new, num_q_heads=8, num_kv_heads=2, rope=rope)
        for rope in (LLAMA, None)
        for new in ((1,) * 37, (5, 0, 1, 130, 64))
    ]


def of_head_dim(kv_format: str, head_dim: int) -> list[Shape]:
    """Prefill and decode."""
    shape = Shape(kv_format, head_dim=head_dim, rope=Rope(head_dim), new=(3, 40, 6), num_q_heads=3, num_kv_heads=3)
    return [shape, shape.with_(new=(1,) * 49)]


def of_rope(rope: Rope) -> Shape:
    return Shape("fp16", "fp16", (50, 1, 13), rope=rope)


def of_dims(head_dim: int, v_head_dim: int) -> list[Shape]:
    return [
        Shape(kv_format, head_dim=head_dim, v_head_dim=v_head_dim, rope=Rope(64), bias=True, new=(9, 4, 70))
        for kv_format in (("int8_token_head", "int4_g8"), ("e5m2", "e4m3_head"))
    ]


def specs() -> list[AppendSpec]:
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""
    shapes = [shape for name in ALL_FORMATS for dtype in ("bf16", "fp16") for shape in of_format(name, dtype)]
    shapes += [shape for name in FORMATS_OF_DIMS for head_dim in HEAD_DIMS for shape in of_head_dim(name, head_dim)]
    shapes += [of_rope(rope) for rope in ROPES]
    shapes += [shape for dims in DIMS_OF_K_AND_V for shape in of_dims(*dims)]
    shapes += [
        Shape(name, new=new, rope=rope, bias=bias, norm=norm)
        for name in RANDOM_FORMATS
        for new in ((1,), (2,))
        for rope in (None, LLAMA)
        for bias in (False, True)
        for norm in (False, True)
    ]
    return append_specs(shapes)


@pytest.fixture(scope="session")
def append_kernels() -> None:
    """Every append kernel of these tests, in memory: from a bundle or the cache, or compiled in parallel now."""
    load_many(specs(), arch_of())


def run(call: AppendCall, **changes: Any) -> torch.Tensor | None:
    return append_kv(**(arguments(call) | changes))


def on(call: AppendCall, device: str) -> AppendCall:
    moved = {name: x.to(device) for name, x in call._asdict().items() if isinstance(x, torch.Tensor)}
    return call._replace(**moved)


def check(shape: Shape, call: AppendCall | None = None) -> torch.Tensor | None:
    """Runs the call of a shape (or one given) on the GPU and compares with the CPU's reference."""
    host = make_call(shape) if call is None else call
    device = host._replace(**{name: _like(x) for name, x in host._asdict().items() if isinstance(x, torch.Tensor)})
    q_out = None if device.q is None else torch.full(device.q.shape, torch.nan, dtype=device.q.dtype, device=CUDA)
    result = run(device, q_out=q_out)
    assert result is q_out
    assert_appended(on(device, "cpu"), host, None if q_out is None else q_out.cpu())
    return q_out


def _like(x: torch.Tensor) -> torch.Tensor:
    """The tensor on the GPU with its strides: `to` would make views of a fused tensor contiguous."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    flat = x.as_strided((span,), (1,)).to(CUDA)
    return flat.as_strided(x.shape, x.stride()) if x.numel() else torch.empty_like(x, device=CUDA)


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_format_of_both_dtypes(kv_format, dtype):
    """Where rows are not turned they are the format's bit for bit."""
    for shape in of_format(kv_format, dtype):
        check(shape)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_format", FORMATS_OF_DIMS)
def test_every_head_dim(kv_format, head_dim):
    for shape in of_head_dim(kv_format, head_dim):
        check(shape)


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_every_kind_of_rope_at_far_positions(rope):
    for positions in ("int32", "int64"):
        check(of_rope(rope).with_(positions=positions))


@pytest.mark.parametrize(("head_dim", "v_head_dim"), DIMS_OF_K_AND_V)
def test_values_of_another_head_dim_and_format(head_dim, v_head_dim):
    for shape in of_dims(head_dim, v_head_dim):
        check(shape)


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(
    kv_format=st.sampled_from(RANDOM_FORMATS),
    new=st.one_of(
        st.lists(st.integers(0, 40), min_size=1, max_size=40), st.integers(1, 600).map(lambda batch: [1] * batch)
    ),
    heads=st.tuples(st.integers(0, 12), st.integers(1, 9)),
    place=st.sampled_from(["table", "contiguous", "slots"]),
    layout=st.sampled_from(["NHD", "HND"]),
    page_size=st.sampled_from([16, 48, 64, 256]),
    rope=st.sampled_from([None, LLAMA]),
    bias=st.booleans(),
    norm=st.booleans(),
    positions=st.sampled_from(["none", "int32", "int64"]),
    fused=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_random_calls(kv_format, new, heads, **options):
    check(Shape(kv_format, new=tuple(new), num_q_heads=heads[0], num_kv_heads=heads[1], **options))


@pytest.mark.parametrize("batch", [1, 2, 16, 17, 256, 257, 5000])
def test_requests_of_a_prefill_are_found_among_any_number(batch):
    new = (*(i * 7919 % 11 // 8 for i in range(batch - 1)), 3)
    check(Shape("int4_g4", new=new, lengths=new, num_q_heads=2, num_kv_heads=1, rope=LLAMA))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 4096, 70_001])
def test_every_number_of_tokens(tokens):
    """Grids of one and of many CTAs, shares of 1, 2 and 4 heads a team."""
    check(Shape("int8_g8", new=(tokens,), num_q_heads=5, num_kv_heads=3, rope=LLAMA, place="contiguous"))


@pytest.mark.parametrize("kv_format", [name for name in ALL_FORMATS if name not in ("bf16", "fp16")])
def test_nan_and_infinity_stay_within_their_row(kv_format):
    call = make_call(Shape(kv_format, new=(1,) * 6, num_q_heads=2))
    assert call.q is not None
    for x in (call.k, call.v):
        x[0, 0, 3] = torch.nan
        x[1, 1, 7] = torch.inf
        x[2, 0] = -torch.inf
        x[3, 0, ::2] = torch.nan
    check(Shape(), call)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g1", "int8_g4", "e5m2"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_tokens_without_a_place_are_not_written_and_nothing_beside_the_cache_is(kv_format, layout):
    """Caches in the middle of poisoned memory; unmapped and foreign pages, lengths beyond the table."""
    host = make_call(Shape(kv_format, new=(1,) * 64, lengths=(17,) * 64, rope=LLAMA, layout=layout))
    assert host.block_table is not None and host.seq_lens is not None
    host.block_table[::4, 1] = -1
    host.block_table[1::4, 1] = 2**31 - 1
    host.seq_lens[2::4] = 10_000
    host.seq_lens[3::4] = 0
    caches, rooms = {}, []
    for name in ("k_cache", "v_cache"):
        cache = getattr(host, name)
        num_bytes = cache.numel() * cache.element_size()
        room = torch.full((3 * num_bytes,), POISON, dtype=torch.uint8, device=CUDA)
        rooms.append(room)
        caches[name] = room[num_bytes : 2 * num_bytes].view(cache.dtype).view(cache.shape)
    call = on(host, CUDA)._replace(**caches)
    q_out = run(call)
    assert q_out is not None
    assert_appended(on(call, "cpu"), host, q_out.cpu())  # q is turned all the same
    assert all(bool((room == POISON).all()) for room in rooms)


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g1"])
def test_a_cache_of_more_than_2_to_the_31_elements(kv_format):
    small = make_call(Shape(kv_format, new=(1,) * 4, lengths=(1, 2, 3, 20), rope=LLAMA, num_kv_heads=8, page_size=256))
    row = small.k_cache.shape[-1]
    num_pages = 2**31 // (256 * 8 * row) + 5
    huge = torch.zeros((num_pages, 256, 8, row), dtype=small.k_cache.dtype, device=CUDA)
    table = torch.tensor([[num_pages - 1], [num_pages - 3], [0], [num_pages // 2]], dtype=torch.int32)
    call = on(small, CUDA)._replace(k_cache=huge, v_cache=huge.clone(), block_table=table.to(CUDA))
    q_out = run(call)
    pages = torch.unique(table.long())
    where = {int(page): i for i, page in enumerate(pages)}
    few = torch.tensor([[where[int(page)]] for page in table.flatten()], dtype=torch.int32)
    before = small._replace(
        k_cache=torch.zeros((len(pages), *huge.shape[1:]), dtype=huge.dtype),
        v_cache=torch.zeros((len(pages), *huge.shape[1:]), dtype=huge.dtype),
        block_table=few,
    )
    after = before._replace(k_cache=call.k_cache[pages.to(CUDA)].cpu(), v_cache=call.v_cache[pages.to(CUDA)].cpu())
    assert q_out is not None
    assert_appended(after, before, q_out.cpu())
    touched = torch.zeros(num_pages, dtype=torch.bool, device=CUDA)
    touched[pages.to(CUDA)] = True
    for cache in (call.k_cache, call.v_cache):
        assert not cache.view(torch.uint8).view(num_pages, -1)[~touched].any(dim=1).any()


def test_q_may_be_turned_in_place():
    call = on(make_call(Shape(new=(300,), rope=LLAMA)), CUDA)
    assert call.q is not None
    want = run(clone_caches(call))
    q = call.q.contiguous()
    assert run(call, q=q, q_out=q) is q
    assert want is not None and torch.equal(q, want)


def test_caches_with_gaps_between_pages_and_heads():
    """K and V interleaved in one pool, as some engines keep them."""
    host = make_call(Shape("int8_g2", new=(1,) * 9, rope=LLAMA))
    pool = torch.full((host.num_pages, 2, *host.k_cache.shape[1:]), POISON, dtype=torch.uint8)
    before = host._replace(k_cache=pool[:, 0], v_cache=pool[:, 1])
    shared = pool.to(CUDA)
    call = on(host, CUDA)._replace(k_cache=shared[:, 0], v_cache=shared[:, 1])
    q_out = run(call)
    assert q_out is not None
    assert_appended(on(call, "cpu"), before, q_out.cpu())


# -- calls -------------------------------------------------------------------------------------------------------------


def test_equal_inputs_give_bitwise_equal_results():
    call = on(make_call(Shape("int4_g4", new=(100, 3, 29), rope=LLAMA, norm=True, bias=True)), CUDA)
    again = clone_caches(call)
    first, second = run(call), run(again)
    assert first is not None and second is not None and torch.equal(first, second)
    assert torch.equal(call.k_cache, again.k_cache) and torch.equal(call.v_cache, again.v_cache)


def test_one_captured_graph_serves_changing_lengths():
    call = on(make_call(Shape("int4_g4", new=(1,) * 8, lengths=(1,) * 8, page_size=256, rope=LLAMA)), CUDA)
    assert call.seq_lens is not None and call.q is not None
    out = torch.empty_like(call.q)
    run(call, q_out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(call, q_out=out)
    for length in (2, 7, 200):
        call.seq_lens.fill_(length)
        call.k_cache.fill_(POISON)
        call.v_cache.fill_(POISON)
        before = on(clone_caches(call), "cpu")
        graph.replay()
        assert_appended(on(call, "cpu"), before, out.cpu())


def test_a_call_is_one_launch():
    from torch.profiler import ProfilerActivity, profile

    call = on(make_call(Shape("int4_g4", new=(1,) * 8, rope=LLAMA, bias=True, norm=True)), CUDA)
    run(call)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(call)
        torch.cuda.synchronize()
    kernels = [event for event in (profiler.events() or []) if event.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        pytest.skip("profiling is not allowed here")
    assert len(kernels) == 1, [event.name for event in kernels]


def test_work_is_on_the_callers_stream():
    call = on(make_call(Shape("int4_g4", new=(64,), rope=LLAMA)), CUDA)
    want = run(clone_caches(call))
    assert want is not None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        q_out = run(call)
        assert q_out is not None
        doubled = q_out.float() * 2
    stream.synchronize()
    assert torch.equal(doubled, want.float() * 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_second_device_while_the_first_is_current():
    host = make_call(Shape("int4_g4", rope=LLAMA))
    with torch.cuda.device(0):
        call = on(host, "cuda:1")
        q_out = run(call)
        assert torch.cuda.current_device() == 0
    assert q_out is not None
    assert_appended(on(call, "cpu"), host, q_out.cpu())


BAD: dict[str, tuple[Any, str]] = {
    "v on the CPU": (lambda a: {"v": a["v"].cpu()}, "v: got a tensor on cpu, want it on cuda:0"),
    "lengths on the CPU": (lambda a: {"seq_lens": a["seq_lens"].cpu()}, "seq_lens: got a tensor on cpu"),
    "a table on the CPU": (lambda a: {"block_table": a["block_table"].cpu()}, "block_table: got a tensor on cpu"),
    "a cache on the CPU": (lambda a: {"v_cache": a["v_cache"].cpu()}, "v_cache: got a tensor on cpu"),
    "lengths of 64 bits": (lambda a: {"seq_lens": a["seq_lens"].long()}, r"seq_lens: got dtype torch\.int64"),
    "a table with gaps": (lambda a: {"block_table": a["block_table"].repeat(1, 2)[:, ::2]}, "block_table: got strides"),
    "fp16 keys": (lambda a: {"k": a["k"].half()}, "(v|q): got dtype torch.bfloat16, want torch.float16"),
    "columns apart": (lambda a: {"v": torch.stack([a["v"]] * 2, -1)[..., 0]}, "v: got strides"),
    "fp32 q_out": (lambda a: {"q_out": a["q"].float()}, "q_out: got dtype torch.float32"),
    "misaligned k": (lambda a: {"k": offset(a["k"], 4)}, "k: got a tensor that starts 4 bytes past a multiple of 8"),
    "odd token strides": (lambda a: {"k": padded(a["k"])}, "k: got strides .* want rows on multiples of 8 bytes"),
    "misaligned cache": (lambda a: {"k_cache": offset(a["k_cache"], 2)}, "k_cache: got a tensor that starts 2 bytes"),
    "misaligned bias": (
        lambda a: {"qkv_bias": (None, offset(torch.zeros(256, device=CUDA).bfloat16(), 2), None)},
        "k_bias: got a tensor that starts 2 bytes past a multiple of 16",
    ),
}


def offset(x: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The same numbers, starting ``num_bytes`` past a multiple of 16."""
    size = x.numel() * x.element_size()
    room = torch.empty(size + 16, dtype=torch.uint8, device=x.device)
    return room[num_bytes : num_bytes + size].view(x.dtype).view(x.shape).copy_(x)


def padded(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with one more element between tokens."""
    room = torch.zeros(x.shape[0], x[0].numel() + 1, dtype=x.dtype, device=x.device)
    return room[:, :-1].view(x.shape).copy_(x)


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "seen before"])
@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=list(BAD))
def test_bad_input_is_refused_by_name_and_nothing_is_launched(spoil, message, seen):
    call = on(make_call(Shape("int4_g4", rope=LLAMA)), CUDA)
    good = arguments(call)
    ops.launch.plans.clear()
    if seen:
        append_kv(**good)
        call.k_cache.fill_(POISON)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        append_kv(**(good | spoil(good)))
    torch.cuda.synchronize()
    assert (call.k_cache == POISON).all()
    append_kv(**good)  # the device is well
    torch.cuda.synchronize()
    assert not (call.k_cache == POISON).all()


def test_debug_mode_looks_at_the_values():
    call = on(make_call(Shape("int4_g4", lengths=(17, 2, 30, 32))), CUDA)
    assert call.block_table is not None
    with cute_kernels.arguments.checking_values():
        run(call)
        call.block_table[2, 1] = -1
        with pytest.raises(ValueError, match="block_table: request 2, position 29: got page -1, want 0 to 9"):
            run(call)
        call.block_table[2, 1] = call.block_table[0, 1]
        with pytest.raises(ValueError, match=r"block_table: request .* and request .* both go to page"):
            run(call, seq_lens=torch.tensor([30, 2, 30, 32], dtype=torch.int32, device=CUDA))


@pytest.mark.parametrize("place", ["table", "slots"])
def test_under_torch_compile_and_opcheck(place):
    torch.compiler.reset()
    call = on(make_call(Shape("int4_g4", place=place, rope=LLAMA)), CUDA)
    eager, compiled = clone_caches(call), clone_caches(call)

    def step(k, v, q, k_cache, v_cache):
        given = arguments(call) | {"k": k * 2, "v": v, "q": q, "k_cache": k_cache, "v_cache": v_cache}
        q_out = append_kv(**given)
        assert q_out is not None
        return q_out * 2

    function = torch.compile(step, fullgraph=True, backend="aot_eager")
    want = step(call.k, call.v, call.q, eager.k_cache, eager.v_cache)
    assert torch.equal(function(call.k, call.v, call.q, compiled.k_cache, compiled.v_cache), want)
    assert torch.equal(eager.k_cache, compiled.k_cache) and torch.equal(eager.v_cache, compiled.v_cache)
    operator = torch.ops.cute_kernels.append_kv.default
    # The operator has neither q_out nor a transform as an object.
    extras = call.extras[: AppendCall._fields.index("q_shift") - NUM_USUAL]
    torch.library.opcheck(operator, (*call[:7], LLAMA.text, *call[8:10], *call[11:13], *extras))


def test_an_eager_call_costs_the_host_little(record_property):
    call = on(make_call(Shape("int4_g4", rope=LLAMA)), CUDA)
    slots = on(make_call(Shape("int4_g4", rope=LLAMA, place="slots", positions="int64")), CUDA)._replace(seq_lens=None)
    out = torch.empty_like(call.k)
    given, given_slots = arguments(call), arguments(slots)
    given_out: dict[str, Any] = given | {"q_out": torch.empty_like(given["q"])}
    costs = {
        "table": host_us(lambda: append_kv(**given)),
        "table, q_out": host_us(lambda: append_kv(**given_out)),
        "slots": host_us(lambda: append_kv(**given_slots)),
        "torch.add": host_us(lambda: torch.add(call.k, out)),
    }
    record_property("host_us", str(costs))
    print(f"\nhost cost of an eager append, us: {', '.join(f'{name} {us:.2f}' for name, us in costs.items())}")
    assert costs["table"] <= HOST_COST * costs["torch.add"]


def test_shipped_kernels_are_the_ones_that_usual_calls_use():
    shipped = {spec.config for spec in shipped_specs() if isinstance(spec, AppendSpec)}
    for kv_format in ALL_FORMATS:
        dtype = kv_format if kv_format in ("bf16", "fp16") else "bf16"
        for new in ((1, 1), (2, 1)):
            assert ops.config_of(make_call(Shape(kv_format, dtype, new, rope=LLAMA))) in shipped
