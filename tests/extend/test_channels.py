"""Scales of channels: K's meet queries, V's the output; run by the simulator, and what a launch is given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.attention.problem import AttentionProblem

pytest.importorskip("cutlass")

from cute_kernels.attention.arguments import extend_arguments
from cute_kernels.attention.call import make_extend_call as check_call
from cute_kernels.attention.compile import CAUSAL_PAGES
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import cannot_read
from cute_kernels.attention.extend_schedule import choose, choose_key_rows, choose_unpacked
from cute_kernels.attention.mainloops.tile_queries import QueryLoader
from cute_kernels.attention.mainloops.tile_results import ResultWriter
from cute_kernels.attention.plan import check_alignment, problem_of
from cute_kernels.device.wgmma_tiles import sum_place
from cute_kernels.formats.kv import format_of
from simulator import LANES, Float32, Int32, Int64, Uint32, Warp, running
from simulator.registers import halves
from tests.extend.cases import Call, make_call
from tests.launchers import recording

HEADS, HEAD = 3, 1
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def config_of(head_dim: int = 128, q_dtype: str = "bf16") -> ExtendConfig:
    config = choose(AttentionProblem.ragged(head_dim, "int8_channel", "int8_channel", q_dtype, 64, CAUSAL_PAGES))
    assert config.can_implement() is None
    return config


def run_with_scales(head_dim: int, part: int = 0) -> tuple[Warp, Any, Any, torch.Tensor]:
    """(a warp whose global memory holds scales and nothing else, operands, work, the head's scales)."""
    stride = head_dim + 4  # elements from a head's scales to the next one's
    scales = torch.rand(HEADS, stride) + 0.5
    scales[:, head_dim:] = torch.nan
    end = (HEADS - 1) * stride + head_dim
    memory = scales.flatten()[:end].numpy().view(np.uint8)
    addresses = {"k_scale": Int64(0), "v_scale": Int64(0), "k_scale_stride": Int32(stride)}
    operands = SimpleNamespace(**addresses, v_scale_stride=Int32(stride))
    machine = Warp(np.zeros(16, np.uint8), np.ascontiguousarray(memory))
    work = SimpleNamespace(head=Int32(HEAD), value_part=Int32(part))
    return machine, operands, work, scales[HEAD, :head_dim]


@pytest.mark.parametrize("q_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
def test_queries_are_multiplied_with_their_columns_scales_and_rounded_once(head_dim, q_dtype):
    config = config_of(head_dim, q_dtype)
    assert config.converts_queries
    machine, operands, work, scales = run_with_scales(head_dim)
    rows = max(32 * 8 // config.columns, 1)  # of a step: a lane has 8 columns of a row, or of each part of it
    q = torch.zeros(rows, config.columns, dtype=DTYPES[q_dtype])
    q[:, :head_dim] = torch.randn(rows, head_dim).to(q.dtype)
    by_lane = q.view(rows, -1, 32 // rows, 8).transpose(1, 2).contiguous()
    pieces = by_lane.view(torch.uint8).numpy().reshape(32, -1).view(np.uint32)
    with running(machine):
        loader = QueryLoader(config)
        channels = loader.channel_scales(operands, work, Int32(LANES))
        packed: Any
        words = [Uint32(np.ascontiguousarray(word)) for word in pieces.T]
        packed, unit = loader.convert_piece(words, channels)
        found = np.stack([halves(word).view(np.float16) for word in packed], 1).reshape(32, -1).astype(np.float64)
        powers = np.broadcast_to(np.asarray(unit), (32,)).astype(np.float64)
    found = torch.from_numpy(found * powers[:, None]).view(rows, 32 // rows, -1, 8).transpose(1, 2)
    found = found.reshape(rows, config.columns)
    want = q[:, :head_dim].double() * scales.double()
    assert not found[:, head_dim:].any()
    error = (found[:, :head_dim] - want).abs() / want.abs().amax(1, keepdim=True)
    assert error.max() <= 2**-11
    assert np.array_equal(powers, np.exp2(np.round(np.log2(powers))))


@pytest.mark.parametrize("head_dim, part", [(64, 0), (80, 0), (128, 0), (256, 0), (512, 0), (512, 1)])
def test_each_sum_meets_the_scale_of_its_column(head_dim, part):
    machine, operands, work, scales = run_with_scales(head_dim, part)
    config = config_of(head_dim)
    writer, scales = ResultWriter(config), scales[part * config.value_dim :]
    with running(machine):
        for j in range(0, config.value_dim // 2, 2):
            own = writer.factors(operands, work, j, Float32(2.0), Int32(LANES))
            for k in range(2):
                column = sum_place(j + k)[1] + 2 * (LANES % 4)
                assert np.array_equal(np.asarray(own[k]), 2 * scales.numpy()[column])


def test_rows_of_other_formats_have_no_such_factors():
    writer = ResultWriter(choose(AttentionProblem.ragged(128, "int8_tensor", "int8_tensor", "bf16", 64, CAUSAL_PAGES)))
    assert writer.factors(None, None, 0, 3.0, None) == [3.0, 3.0]


def test_what_serves_it():
    """Tiles of 128 rows, unpacked keys with scales of channels; not key rows."""
    config = config_of()
    assert not choose_key_rows(config)
    unpack, attention = choose_unpacked(config)
    assert (unpack.k_format, attention.k_format) == ("int8_channel", "int8_channel")
    assert unpack.can_implement() is attention.can_implement() is None
    assert replace(config, tile_rows=72, pipeline=replace(config.pipeline, producer_warps=4)).can_implement()


@pytest.mark.parametrize(
    "kv_format", ["int8_channel", ("int8_channel", "int4_g4"), ("e4m3_token_head", "int8_channel")]
)
def test_a_launch_is_given_addresses_and_strides(kv_format):
    call = make_call(kv_format, [3, 2], [9, 12])
    with recording() as recorded:
        call.run()
    names = [argument.name for argument in extend_arguments(CAUSAL_PAGES).arguments]
    given = dict(zip(names, recorded.launches[0].arguments, strict=True))
    for name in ("k_scale", "v_scale"):
        scale = call.options.get(name)
        assert given[name] == (0 if scale is None else scale.data_ptr())
        assert given[f"{name}_stride"] == (0 if scale is None else scale.stride(0))


def scales_of(call: Call, scale: torch.Tensor) -> Call:
    return replace(call, options=call.options | {"k_scale": scale})


def test_scales_that_kernels_cannot_load_are_named():
    call = make_call("int8_channel", [3, 2], [9, 12])
    scale = call.options["k_scale"]
    apart = scale.t().contiguous().t()
    odd = torch.zeros(2, 129)[:, 1:].copy_(scale)
    alike = scale.mean(1, keepdim=True).expand(-1, 128)
    with pytest.raises(ValueError, match="k_scale: got strides"):
        check_alignment(check_call(*call.tensors, **scales_of(call, alike).keywords))
    for given in (apart, odd, torch.zeros(2, 130)[:, :128].copy_(scale)):
        other = scales_of(call, given)
        checked = check_call(*other.tensors, **other.keywords)
        assert problem_of(checked).k_format == "int8_channel"
        with pytest.raises(ValueError, match="k_scale: got strides .* want a KV head's columns side by side"):
            check_alignment(checked)
        assert torch.equal(other.run(), call.run()), "on the CPU"
    check_alignment(check_call(*call.tensors, **call.keywords))


@pytest.mark.parametrize("name", ["int8_channel", "int8_g4", "int8_token_head"])
def test_a_format_of_int8_codes_that_names_no_reader_is_refused(name: str):
    """Not read as one of the same codes and headers, whose scales may mean something else."""
    assert cannot_read(format_of(name)) is None
    other = replace(format_of(name), name="int8_mine", extend=None)
    assert cannot_read(other) == "extend attention does not read int8_mine caches"
