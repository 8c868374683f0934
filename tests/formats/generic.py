"""What holds for every KV format: a class of tests, for the formats that a subclass lists.

    class TestMine(KvFormatTests):
        forms = (MINE,)

`conftest.py` beside this file runs every test for each form and each head_dim that the kernels read it at. Tests of
machine code compile the kernels; those of a GPU run them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from cute_kernels.attention import decode_attention
from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.tiles import cannot_read
from cute_kernels.formats.kv import HEAD_DIMS, KvFormat
from cute_kernels.kv_cache import KVCache, append_kv, dequantize_kv, quantize_kv
from cute_kernels.kv_cache.compile import AppendSpec, BulkSpec
from cute_kernels.kv_cache.config import AppendConfig, BulkConfig, RowPrologue, row_alignment, team_lanes
from cute_kernels.kv_cache.plan import config_of
from cute_kernels.kv_cache.reference import quantize, shaped_scale
from cute_kernels.kv_cache.rope import Rope
from cute_kernels.runtime import KernelSpec, default_cache, native
from simulator import Warp
from tests import golden
from tests.attention.cases import relative_errors
from tests.attention.rig import SOFTMAX_SCALE, Operand, make_rig, random_probabilities
from tests.kv_cache.awkward import awkward, same_bits, scales_for
from tests.kv_cache.cases import Shape, assert_appended, clone_caches, general_of, make_call
from tests.kv_cache.simulate import simulate_append, simulate_bulk
from tests.kv_cache.steps import assert_same, make_step, run, run_separately, with_own_cache
from tests.kv_cache.test_append_cpu import arguments

needs_dsl = pytest.mark.skipif(native.dsl_version() is None, reason="the kernels are written in nvidia-cutlass-dsl")
TOLERANCE = 4e-3  # of bf16 outputs and probabilities in fp16, relative to the largest of a row
Q_DTYPE = torch.bfloat16


def head_dims_of(form: KvFormat) -> list[int]:
    """Those that decode attention reads a format at."""
    return [head_dim for head_dim in HEAD_DIMS if cannot_read(form, head_dim) is None]


def random_cache(
    form: KvFormat, shape: tuple[int, ...], seed: int, device: Any = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(rows, their values in fp64, given scale or None) of normal numbers [..., num_kv_heads, head_dim]."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x = x if form.is_coded else x.to(form.cache_dtype).float()
    scale = scales_for(form.name, shape[-2], shape[-1])[0]
    rows = quantize(form, x, scale).view(form.cache_dtype)
    values = form.dequantize(rows, shape[-1], torch.float64, shaped_scale(form, scale))
    return rows.to(device), values.to(device), None if scale is None else scale.to(device)


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """fp64 [batch, 1, num_q_heads, head_dim], of q [batch, 1, num_q_heads, head_dim] and values in fp64."""
    group = q.shape[2] // keys.shape[2]
    keys, values = (x.repeat_interleave(group, dim=2) for x in (keys, values))
    scores = torch.einsum("bhd,bthd->bht", q[:, 0].double(), keys) * q.shape[3] ** -0.5
    behind = torch.arange(keys.shape[1], device=q.device) >= lengths[:, None]
    p = scores.masked_fill(behind[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bht,bthd->bhd", p, values).unsqueeze(1)


class KvFormatTests:
    """See the module."""

    forms: ClassVar[tuple[KvFormat, ...]]
    head_dims: ClassVar[tuple[int, ...]] = ()
    """Those tested, default all that decode attention reads the format at."""
    compiles: ClassVar[bool] = True
    """Whether the kernels are compiled; shipped formats have tests of their own for that."""
    compiled: ClassVar[list[KernelSpec]]

    def __init_subclass__(cls) -> None:
        cases = [(form, head_dim) for form in cls.forms for head_dim in cls.head_dims or head_dims_of(form)]
        specs = [spec for case in cases for spec in specs_of(*case)] if cls.compiles else []
        cls.compiled = golden.worth_compiling(specs, lambda spec: spec)

    # -- the row ------------------------------------------------------------------------------------------------------

    def test_the_layout_is_proved(self, form: KvFormat, head_dim: int):
        if not form.is_coded:
            pytest.skip("rows are the elements themselves")
        row = form.row(head_dim)
        assert len(row.verify()) >= 3
        assert row.row_bytes == form.row_bytes(head_dim) and row.fields[-1].offset == form.header_bytes

    def test_rows_decode_to_what_they_were_made_of_within_the_stated_error(self, form: KvFormat, head_dim: int):
        x = torch.randn(5, 3, 2, head_dim, generator=torch.Generator().manual_seed(head_dim))
        scale = scales_for(form.name, 2, head_dim)[0]
        rows = quantize(form, x, scale)
        back = form.dequantize(rows.view(form.cache_dtype), head_dim, torch.float64, shaped_scale(form, scale))
        assert rows.view(torch.uint8).shape == (5, 3, 2, form.row_bytes(head_dim))
        if form.is_coded:
            bound = form.row(head_dim).error_bound(x, shaped_scale(form, scale))
            assert ((back - x.double()).abs() <= bound).all()
        else:
            assert torch.equal(back, x.to(form.cache_dtype).double())
        assert (back != 0).any()

    # -- the kernels' code, lane by lane ------------------------------------------------------------------------------

    @needs_dsl
    def test_the_writer_quantises_to_the_rows_of_the_reference(self, form: KvFormat, head_dim: int):
        x = awkward(head_dim).view(-1, 2, head_dim)
        scale = scales_for(form.name, 2, head_dim)[0]
        rows = torch.zeros((*x.shape[:-1], form.row_elements(head_dim)), dtype=form.cache_dtype)
        simulate_bulk(BulkConfig("quantize", form.name, "fp32", head_dim), x, rows, scale)
        assert same_bits(rows, quantize(form, x, scale).view(form.cache_dtype))

    @needs_dsl
    def test_the_writer_decodes_rows_to_the_numbers_of_the_reference(self, form: KvFormat, head_dim: int):
        rows, _, scale = random_cache(form, (4, 2, head_dim), 1)
        numbers = torch.zeros(4, 2, head_dim)
        simulate_bulk(BulkConfig("dequantize", form.name, "fp32", head_dim), numbers, rows, scale)
        assert same_bits(numbers, form.dequantize(rows, head_dim, torch.float32, shaped_scale(form, scale)))

    @needs_dsl
    @pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
    def test_append_writes_the_rows_of_the_reference(self, form: KvFormat, head_dim: int, rope: bool):
        dtype = "fp16" if form.name == "fp16" else "bf16"
        shape = Shape(
            form.name,
            dtype,
            new=(1,) * 8,
            num_q_heads=1,
            num_kv_heads=1,
            head_dim=head_dim,
            rope=Rope(head_dim) if rope else None,
        )
        call = make_call(shape)
        config = config_of(call)
        general = general_of(config)
        for kernel in dict.fromkeys((config, general)):
            own = clone_caches(call)
            changes = {"decode": kernel.decode, "lane_columns": kernel.lane_columns}
            assert_appended(own, call, simulate_append(own, 2, **changes))

    @needs_dsl
    def test_readers_attend_over_the_values_of_the_rows(self, form: KvFormat, head_dim: int, run_on):
        config = _configs(form, head_dim)[0]
        operands = []
        for seed in range(2):
            rows, _, scale = random_cache(form, (32, config.mainloop.num_heads, head_dim), seed)
            operands.append(Operand(form, head_dim, rows[:, -1], None if scale is None else scale.float()))
        rig = make_rig(run_on, config, operands)
        scores = rig.scores() / (SOFTMAX_SCALE * Warp.LOG2_E)
        _assert_close(scores, rig.keys @ rig.queries.T, np.abs(rig.keys) @ np.abs(rig.queries.T))
        p = random_probabilities(config, 3)
        _assert_close(rig.weighted_values(p), p.T @ rig.values, p.T @ np.abs(rig.values))

    @needs_dsl
    def test_the_alignment_asked_for_is_what_the_writer_accesses(self, form: KvFormat, head_dim: int):
        from cute_kernels.kv_cache.rows import make_row

        row = make_row(form.name, head_dim, team_lanes(head_dim))
        assert row_alignment(form.name, head_dim, team_lanes(head_dim)) == max(row.codes.unit, 4 * row.has_header)

    # -- the public calls ---------------------------------------------------------------------------------------------

    def test_attention_over_a_cache_is_attention_over_its_values(self, form: KvFormat, head_dim: int):
        _check_attention(form, head_dim, "cpu")

    def test_a_step_is_append_and_then_attention(self, form: KvFormat, head_dim: int):
        _check_step(form, head_dim, "cpu")

    def test_a_cache_object_gives_back_what_it_was_given(self, form: KvFormat, head_dim: int):
        dtype = Q_DTYPE if form.is_coded else form.cache_dtype
        cache = KVCache(1, 4, 16, 2, head_dim, kv_format=_name(form), dtype=dtype)
        scale = scales_for(form.name, 2, head_dim)[0]
        if scale is not None:
            cache.set_scales(0, k_scale=scale, v_scale=scale)
        k, v = (
            torch.randn(21, 2, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2)
        )
        cache.allocate("a", 21)
        cache.append(0, cache.make_batch(1).update(["a"], 21), k, v)
        for found, x in zip(cache.read(0, "a", torch.float32), (k, v), strict=True):
            rows = quantize(form, x.float(), scale).view(form.cache_dtype)
            assert torch.equal(found, form.dequantize(rows, head_dim, torch.float32, shaped_scale(form, scale)))

    def test_bulk_calls_are_the_reference(self, form: KvFormat, head_dim: int):
        _check_bulk(form, head_dim, "cpu")

    # -- machine code and the GPU -------------------------------------------------------------------------------------

    @needs_dsl
    def test_its_kernels_compile_without_spills(self, form: KvFormat, head_dim: int):
        specs = [spec for spec in specs_of(form, head_dim) if spec in self.compiled]
        if not specs:
            pytest.skip("its kernels are compiled by the tests of the families, or none is in the sample")
        for symbol, entry in golden.measure(specs, default_cache()).items():
            assert all(item["spill_store_bytes"] == item["spill_load_bytes"] == 0 for item in entry), symbol

    @pytest.mark.gpu
    def test_append_on_a_gpu_writes_the_rows_of_the_reference(self, form: KvFormat, head_dim: int):
        dtype = "fp16" if form.name == "fp16" else "bf16"
        for new in ((1,) * 9, (5, 0, 1, 130)):
            for rope in (None, Rope(head_dim)):
                shape = Shape(form.name, dtype, new=new, head_dim=head_dim, rope=rope, num_q_heads=4, num_kv_heads=2)
                call = make_call(shape, "cuda")
                own = clone_caches(call)
                q_out = append_kv(**arguments(own))
                assert_appended(own, call, q_out)

    @pytest.mark.gpu
    def test_attention_on_a_gpu_is_attention_over_the_values(self, form: KvFormat, head_dim: int):
        _check_attention(form, head_dim, "cuda", tokens=3000)

    @pytest.mark.gpu
    def test_a_step_on_a_gpu_is_append_and_then_attention(self, form: KvFormat, head_dim: int):
        _check_step(form, head_dim, "cuda")

    @pytest.mark.gpu
    def test_bulk_calls_on_a_gpu_are_the_reference(self, form: KvFormat, head_dim: int):
        _check_bulk(form, head_dim, "cuda")


def _assert_close(got: np.ndarray, want: np.ndarray, terms: np.ndarray) -> None:
    """Up to roundings to fp16 of what is added up."""
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= 2.0**-10 * terms + 1e-9).all()


def _configs(form: KvFormat, head_dim: int) -> list[Any]:
    q_dtype = form.name if not form.is_coded else "bf16"
    name = form.kernel_name
    return candidate_configs(AttentionProblem(1, 4096, 16, 2, head_dim, head_dim, name, name, q_dtype))


def specs_of(form: KvFormat, head_dim: int) -> list[KernelSpec]:
    """The kernels that append, convert and read a format's caches as most models have them."""
    append = AppendConfig.alike(form.name, "bf16", head_dim, RowPrologue("half", head_dim))
    bulk = [BulkConfig(direction, form.name, "bf16", head_dim) for direction in ("quantize", "dequantize")]
    return [
        *(AppendSpec(config) for config in (append, append.for_decode())),
        *(BulkSpec(config) for config in bulk),
        *(AttentionSpec(config) for config in _configs(form, head_dim)),
    ]


def _check_attention(form: KvFormat, head_dim: int, device: str, tokens: int = 100) -> None:
    lengths = torch.tensor([tokens, 1, tokens // 2 + 3], dtype=torch.int32, device=device)
    shape = (3, tokens, 2, head_dim)
    (k_rows, keys, k_scale), (v_rows, values, v_scale) = (random_cache(form, shape, seed, device) for seed in (1, 2))
    dtype = Q_DTYPE if form.is_coded else form.cache_dtype
    q = torch.randn(3, 1, 16, head_dim, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    for rows in (k_rows, v_rows):  # what lies past a length must not matter
        for request, length in enumerate(lengths.tolist()):
            rows.view(torch.uint8)[request, length:] = 0xFF
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    out = decode_attention(q, k_rows, v_rows, lengths, kv_format=_name(form), **options)
    errors = relative_errors(out, attention(q, keys, values, lengths))
    assert float(errors.square().mean().sqrt()) <= TOLERANCE


def _check_step(form: KvFormat, head_dim: int, device: str) -> None:
    dtype = "fp16" if form.name == "fp16" else "bf16"
    shape = Shape(form.name, dtype, num_q_heads=4, num_kv_heads=2, head_dim=head_dim, rope=Rope(head_dim))
    step = make_step(shape, (40, 3, 77), device=device)
    own, other = with_own_cache(step), with_own_cache(step)
    (out, lse), (want, want_lse) = run(own), run_separately(other)
    assert_same(own, other)
    torch.testing.assert_close(out, want, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-3)


def _name(form: KvFormat) -> Any:
    """What calls take; type checkers know the names of those that ship."""
    return form.name


def _check_bulk(form: KvFormat, head_dim: int, device: str) -> None:
    x = torch.randn(7, 5, 2, head_dim, generator=torch.Generator().manual_seed(4)).to(device)
    scale = scales_for(form.name, 2, head_dim)[0]
    options: dict[str, Any] = {"kv_format": form.name, "scale": None if scale is None else scale.to(device)}
    rows = quantize_kv(x, **options)
    assert same_bits(rows.cpu(), quantize(form, x.cpu(), scale).view(rows.dtype))
    back = dequantize_kv(rows, head_dim=head_dim, dtype=torch.float32, **options)
    assert same_bits(back.cpu(), form.dequantize(rows.cpu(), head_dim, torch.float32, shaped_scale(form, scale)))
