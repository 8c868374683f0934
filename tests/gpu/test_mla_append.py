"""append_mla and quantize_mla_kv on a GPU are the reference on the CPU: to the bit, but for rotated columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.kv_cache.rope import Rope, YarnScaling
from cute_kernels.mla.cache import append_mla, plan, quantize_mla_kv
from cute_kernels.mla.cache.call import AppendMlaCall
from cute_kernels.mla.cache.compile import WriteSpec
from cute_kernels.mla.cache.config import WriteConfig
from cute_kernels.mla.formats import format_of
from cute_kernels.runtime import arch_of, load_many
from tests.mla_cache.cases import DTYPES, ROPES, TOKENS, assert_appended, awkward, bytes_of, make_call

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("write_kernels")]

CUDA = "cuda"
YARN = Rope(64, interleaved=True, scaling=YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=0.5))
every_token = pytest.mark.parametrize(("kv_format", "head_dim"), TOKENS)


def specs() -> list[WriteSpec]:
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""
    configs = [
        WriteConfig(name, head_dim, dtype, rope)
        for name, head_dim in TOKENS
        for dtype in ("bf16", "fp16")
        for rope in ("none", "half", "interleaved")
    ]
    configs += [
        plan.bulk_config(torch.empty(0, head_dim, dtype=dtype), name)
        for name, head_dim in TOKENS
        for dtype in DTYPES.values()
    ]
    return [WriteSpec(config) for config in configs]


@pytest.fixture(scope="module")
def write_kernels() -> None:
    load_many(specs(), arch_of())


def on_gpu(call: AppendMlaCall) -> AppendMlaCall:
    """The call with its tensors on the GPU; its cache keeps its gaps, and latent and RoPE columns are views of one."""
    x = torch.cat((call.latent, call.k_rope), dim=1).to(CUDA)
    pages, _, row = call.cache.shape
    memory = torch.as_strided(call.cache, (pages, call.cache.stride(0)), (call.cache.stride(0), 1)).to(CUDA)
    cache = memory[:, : call.cache.shape[1] * row].unflatten(1, (-1, row))
    positions = None if call.position_ids is None else call.position_ids.to(CUDA)
    width = call.latent.shape[1]
    return call._replace(
        latent=x[:, :width],
        k_rope=x[:, width:],
        cache=cache,
        slot_mapping=call.slot_mapping.to(CUDA),
        position_ids=positions,
    )


def run(call: AppendMlaCall) -> None:
    arguments: dict[str, Any] = call._asdict()
    append_mla(**arguments)


def check(call: AppendMlaCall) -> None:
    """Appends on the GPU, and compares with what the CPU says must have come of it."""
    before, given = call.cache.clone(), on_gpu(call)
    run(given)
    assert_appended(call._replace(cache=given.cache.cpu()), before)


@every_token
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rope", ROPES)
def test_awkward_numbers(kv_format, head_dim, dtype, rope):
    x = awkward(head_dim, DTYPES[dtype])
    if rope is not None:
        x[:, -64:] = torch.randn(x.shape[0], 64, generator=torch.Generator().manual_seed(5)).to(x.dtype)
    check(make_call(kv_format, head_dim, x, rope=ROPES[rope], page_size=2))


@every_token
@pytest.mark.parametrize("page_size", [1, 2, 64, 69, 576])
@pytest.mark.parametrize("tokens", [1, 3, 128, 1001])
def test_every_size(kv_format, head_dim, page_size, tokens):
    if format_of(kv_format).split_pages and page_size % 2:
        padding = 8  # such pages lie on multiples of 16 bytes if they are padded
    else:
        padding = 48
    x = torch.randn(tokens, head_dim, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    rope = Rope(64, interleaved=True)
    check(make_call(kv_format, head_dim, x, rope=rope, page_size=page_size, padding=padding, lost=min(tokens // 2, 5)))


@pytest.mark.parametrize("positions", [torch.int32, torch.int64])
@pytest.mark.parametrize("rope", [Rope(64), YARN])
def test_positions_and_attention_factors(positions, rope):
    x = torch.randn(77, 576, generator=torch.Generator().manual_seed(2)).bfloat16()
    check(make_call("mla_fp8", 576, x, rope=rope, positions=positions))


def test_slots_outside_the_cache_are_not_written():
    call = make_call("mla_fp8", 576, torch.randn(5, 576).bfloat16(), lost=0)
    room = call.cache.shape[0] * call.cache.shape[1]
    call.slot_mapping[:] = torch.tensor([room, -2, 2**62, -(2**62), room - 1])
    before, given = call.cache.clone(), on_gpu(call)
    run(given)
    call.slot_mapping[:4] = -1
    assert_appended(call._replace(cache=given.cache.cpu()), before)


def test_a_cache_of_more_than_2_to_the_31_bytes():
    cache = torch.zeros(56_000, 64, 656, dtype=torch.uint8, device=CUDA)
    x = torch.randn(3, 576, generator=torch.Generator().manual_seed(3)).bfloat16()
    slots = torch.tensor([56_000 * 64 - 1, 3_300_000, 0])
    tokens = x.to(CUDA)
    append_mla(tokens[:, :512], tokens[:, 512:], cache, kv_format="mla_fp8", slot_mapping=slots.to(CUDA))
    rows = cache.view(-1, 656)[slots.to(CUDA)].cpu()
    assert torch.equal(rows, format_of("mla_fp8").quantize(x))
    assert int(cache.view(-1, 656).any(dim=1).sum()) == 3


@every_token
@pytest.mark.parametrize("dtype", DTYPES)
def test_bulk_tokens_are_the_formats(kv_format, head_dim, dtype):
    form = format_of(kv_format)
    for x in (awkward(head_dim, DTYPES[dtype]), 3 * torch.randn(5, 201, head_dim).to(DTYPES[dtype])):
        rows = quantize_mla_kv(x.to(CUDA), kv_format=kv_format)
        assert torch.equal(bytes_of(rows.cpu()), bytes_of(form.quantize(x)))


def test_misaligned_tensors_are_refused():
    x = torch.zeros(577, device=CUDA)[1:].view(1, 576)
    with pytest.raises(ValueError, match="x: got a tensor that starts 4 bytes past a multiple of 16"):
        quantize_mla_kv(x, kv_format="mla_fp8")
    call = on_gpu(make_call("mla_model1", 512, torch.zeros(9, 512).bfloat16(), page_size=3))
    with pytest.raises(ValueError, match="cache: got pages 1752 bytes apart, want a multiple of 16 bytes"):
        run(call)


@every_token
def test_the_operators_pass_opcheck(kv_format, head_dim):
    call = on_gpu(make_call(kv_format, head_dim, torch.randn(6, head_dim).bfloat16(), rope=Rope(64), page_size=2))
    arguments = (*call[:5], None if call.rope is None else call.rope.text, call.position_ids)
    torch.library.opcheck(torch.ops.cute_kernels.append_mla.default, arguments)
    x = torch.randn(3, head_dim, device=CUDA)
    torch.library.opcheck(torch.ops.cute_kernels.quantize_mla_kv.default, (x, kv_format))


def test_a_captured_graph_follows_slots_and_positions():
    call = on_gpu(make_call("mla_fp8", 576, torch.randn(40, 576).bfloat16(), rope=Rope(64, interleaved=True), lost=0))
    run(call)  # compiled and planned outside of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(call)
    before = torch.full_like(call.cache, 0xA5)
    call.cache.fill_(0xA5)
    call.slot_mapping.copy_(call.slot_mapping.flip(0))
    assert call.position_ids is not None
    call.position_ids.add_(17)
    graph.replay()
    positions = call.position_ids.cpu()
    here = call._replace(
        latent=call.latent.cpu(),
        k_rope=call.k_rope.cpu(),
        cache=call.cache.cpu(),
        slot_mapping=call.slot_mapping.cpu(),
        position_ids=positions,
    )
    assert_appended(here, before.cpu())
