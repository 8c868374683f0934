"""What every registered score option has to pass; `ScoreOptionTests` brings it to a file with an option."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from cute_kernels import blocks
from cute_kernels.attention import ops
from cute_kernels.attention.arguments import decode_arguments, extend_arguments
from cute_kernels.attention.call import Given
from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.compile import CAUSAL_PAGES, AttentionSpec
from cute_kernels.attention.cta import RECIPROCAL_BITS, FeatureValues, Place, Roles
from cute_kernels.attention.extend import extend_attention
from cute_kernels.attention.extend_schedule import choose
from cute_kernels.attention.mainloops.logits import Logits
from cute_kernels.attention.mainloops.tile_softmax import Rows, Softmax
from cute_kernels.attention.mainloops.warp import WarpMainloop, WarpState
from cute_kernels.attention.options import NO_EXTEND_OPTIONS, NO_OPTIONS
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.reference import extend_attention_reference
from cute_kernels.device.softmax import LOWEST, OnlineSoftmax, row_of
from cute_kernels.device.wgmma_tiles import sum_place
from cute_kernels.formats.scores import SIZES, KeyBlock, ScoreOption
from cute_kernels.formats.scores.features import PLAIN, Features
from cute_kernels.formats.scores.terms import QueryColumn, ScoreState
from cute_kernels.runtime import KernelSpec, native
from cute_kernels.runtime.sources import reached
from cute_kernels.runtime.wanted import record_of, spec_of
from layouts.kv.tile import BLOCK_TOKENS
from simulator import LANES, Float32, Int32, Int64, Registers, Warp, stand_in
from tests import golden
from tests.attention.cases import Call, make_call
from tests.attention.rig import SOFTMAX_SCALE, make_rig, random_operand
from tests.attention.rig import heads as heads_of
from tests.launchers import recording

needs_compiler = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GROUP, HEAD_DIM = 4, 128
LOG2_E = 1.4426950408889634
OPTION_BYTES = 1024  # of global memory for each of an option's tensors, where the rig keeps no scales


def sizes_of(call: Call) -> dict[str, int]:
    batch, q_len, num_q_heads, head_dim = call.q.shape
    table, tokens = call.options.get("block_table"), call.k_cache.shape[1]
    numbers = (batch, q_len, num_q_heads, call.k_cache.shape[2], head_dim)
    return dict(zip(SIZES, (*numbers, tokens if table is None else table.shape[1] * tokens), strict=True))


def with_option(option: ScoreOption, call: Call, seed: int = 5) -> Call:
    generator = torch.Generator(call.q.device).manual_seed(seed)
    return call.with_options(score_options=option.sample(sizes_of(call), generator))


class ScoreOptionTests:
    """Tests of `option`, which is registered."""

    option: ClassVar[ScoreOption]
    compiled: ClassVar[list[KernelSpec]]

    def __init_subclass__(cls) -> None:
        cls.compiled = golden.worth_compiling(cls.specs(), lambda spec: spec)

    @classmethod
    def features(cls, **others: Any) -> Features:
        return Features(terms=(cls.option.name,), **others)

    @classmethod
    def specs(cls) -> list[KernelSpec]:
        """Kernels of decode and of extend attention with the option."""
        decode = AttentionProblem.uniform(8, 4096, 8, 1, 128, "int4_g4", "bf16", features=cls.features())
        features = cls.features(causal=True, paged=True)
        extend = [AttentionProblem.ragged(128, name, name, "bf16", 64, features) for name in ("bf16", "int4_g4")]
        return [AttentionSpec(candidate_configs(decode)[0]), *(AttentionSpec(choose(problem)) for problem in extend)]

    @pytest.mark.parametrize("page_size", [None, 16])
    @pytest.mark.parametrize("others", [{}, {"softcap": 3.0, "sinks": True, "alibi": True}, {"window_size": 9}])
    def test_blocks_of_few_keys_give_what_all_keys_at_once_do(self, page_size, others):
        made = make_call(
            "bf16", (37, 5, 64), num_kv_heads=2, group=2, head_dim=64, q_len=3, page_size=page_size, **others
        )
        call = with_option(self.option, made)
        whole = call.run(return_lse=True)
        with blocks.at_most(64):
            parts = call.run(return_lse=True)
        for got, want in zip(parts, whole, strict=True):
            torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)
        assert not torch.allclose(whole[1], made.run(return_lse=True)[1])  # it does something

    @pytest.mark.parametrize("q_len", [1, 3])
    @pytest.mark.parametrize("kv_format", ["bf16", "int4_g4", "int8_token_head"])
    def test_device_code_makes_the_references_scores(self, kv_format, q_len, run_on):
        """A warp's block of 32 tokens in the simulator, all of them seen: scores, option, softmax, P V."""
        features = self.features(queries=q_len > 1, causal=q_len > 1)
        shape = (1, 4096, GROUP, 1, HEAD_DIM, kv_format, "bf16")
        config = candidate_configs(AttentionProblem.uniform(*shape, q_len=q_len, features=features))[0]
        # Not the seed of the queries, and scores that leave more than one key a weight.
        operands = [random_operand(config, index, 1 + index, (-9, -7)) for index in range(2)]
        rig = make_rig(run_on, config, operands, GROUP * q_len)
        first, length = 97, 97 + BLOCK_TOKENS + q_len
        numbers = (1, q_len, GROUP, 1, HEAD_DIM, 4096)
        tensors = self.option.sample(dict(zip(SIZES, numbers, strict=True)), torch.Generator().manual_seed(1))
        out = _attend(rig, tensors, first, length, q_len)

        call: Any = SimpleNamespace(num_kv_heads=1, group=GROUP, score_tensors=tensors)
        keys_at = torch.arange(first, first + BLOCK_TOKENS)
        places = length - q_len + torch.arange(q_len)[None]
        queries = torch.from_numpy(rig.queries[: GROUP * q_len]).unflatten(0, (q_len, GROUP))
        scores = SOFTMAX_SCALE * torch.einsum("ihd,td->iht", queries, torch.from_numpy(rig.keys))
        changed = self.option.reference(scores[None, :, None], KeyBlock(call, keys_at, places))[0, :, 0]
        want, plain = (torch.softmax(x, dim=-1) @ torch.from_numpy(rig.values) for x in (changed, scores))
        atol = 3e-3 * float(want.abs().max())
        assert float((want - plain).abs().max()) > 10 * atol  # without the option it would be something else
        np.testing.assert_allclose(out, want.flatten(0, 1).numpy(), atol=atol)

    def test_the_operator_gives_what_the_call_gives(self):
        call = with_option(self.option, make_call("int4_g1", (37, 5), num_kv_heads=1, group=2))
        options = {**NO_OPTIONS, **call.options}
        out, _ = ops.dispatch(Given(*call.tensors, call.kv_format, options=options))
        assert torch.equal(out, call.run())

    def test_it_has_a_name_a_key_and_arguments_of_its_own(self):
        config = candidate_configs(AttentionProblem.uniform(1, 4096, 8, 1, 128, "int4_g1", "bf16"))[0]
        other = candidate_configs(
            AttentionProblem.uniform(1, 4096, 8, 1, 128, "int4_g1", "bf16", features=self.features())
        )[0]
        assert config.name != other.name and self.option.name in other.name
        spec = AttentionSpec(other)
        assert spec_of(json.loads(json.dumps(record_of(spec)))) == spec
        assert self.option.term.partition(":")[0] in spec.modules()
        assert reached(spec).digest != reached(AttentionSpec(config)).digest
        own = [
            name
            for name in decode_arguments(other.features, False).names
            if name not in decode_arguments(PLAIN, True).names
        ]
        assert own == [tensor.name for tensor in self.option.tensors]

    @needs_compiler
    def test_a_launch_gets_the_addresses_of_its_tensors(self):
        from tests.host_functions import attention_function

        call = with_option(self.option, make_call("int4_g1", (64, 5), num_kv_heads=1, group=2, softcap=2.0))
        with recording(lambda spec: attention_function(spec.config)) as recorded:
            call.run()
            call.run(score_options=None)
        given = call.options["score_options"]
        with_it, without = recorded.launches
        assert len(with_it.arguments) == len(without.arguments) + len(given)
        addresses = [given[tensor.name].data_ptr() for tensor in self.option.tensors]
        assert list(with_it.arguments[-len(given) :]) == addresses

    @pytest.mark.parametrize("wrong", ["shape", "dtype", "missing", "unknown", "strides"])
    def test_what_is_not_its_tensors_is_refused_by_name(self, wrong):
        call = with_option(self.option, make_call("int4_g1", (37,), num_kv_heads=1, group=2))
        given = dict(call.options["score_options"])
        name = self.option.tensors[0].name
        tensor = given[name]
        others: dict[str, Any] = {
            "shape": given | {name: tensor[None]},
            "dtype": given | {name: tensor.to(torch.int16)},
            "strides": given | {name: tensor.repeat_interleave(2, dim=-1)[..., ::2]},
            "unknown": given | {"nobodys": tensor},
            "missing": [],
        }
        said = {"unknown": "nobodys", "dtype": f"^{name}: got dtype torch.int16, want torch.float32"}
        with pytest.raises((TypeError, ValueError), match=said.get(wrong, "score_options|" + name)):
            call.run(score_options=others[wrong] or [tensor])

    @needs_compiler
    def test_decode_and_extend_attention_compile_without_spills_with_it(self):
        from cute_kernels.runtime.cache import default_cache

        measured = golden.measure(self.compiled, default_cache())
        assert measured
        for (kernel,) in measured.values():
            assert kernel["stack_bytes"] + kernel["spill_store_bytes"] + kernel["spill_load_bytes"] == 0

    # -- extend attention --

    @pytest.mark.parametrize("others", [{}, {"softcap": 3.0, "sinks": True, "alibi": True}, {"window_size": 9}])
    @pytest.mark.parametrize("page_size", [None, 16])
    def test_extend_attention_gives_what_decode_attention_does(self, page_size, others):
        made = make_call(
            "bf16", (37, 5, 64), num_kv_heads=2, group=2, head_dim=64, q_len=3, page_size=page_size, **others
        )
        call = with_option(self.option, made)
        for got, want in zip(extended(call), call.run(return_lse=True), strict=True):
            torch.testing.assert_close(got.view_as(want), want, atol=1e-2, rtol=1e-2)
        assert not torch.allclose(extended(call)[1], extended(made)[1])  # it does something

    def test_device_code_of_extend_attention_makes_the_references_scores(self, run_on):
        """A warp's rows of a block of 128 tokens in the simulator, all of them seen, in powers of 2."""
        features = self.features(causal=True)
        config = choose(AttentionProblem.ragged(HEAD_DIM, "bf16", "bf16", "bf16", 0, features))
        softmax, warp = Softmax(config), Warp(np.zeros(16, np.uint8), np.zeros(8 * OPTION_BYTES, np.uint8))
        run_on(warp)
        numbers = (1, 1, GROUP, 1, HEAD_DIM, 4096)
        tensors = self.option.sample(dict(zip(SIZES, numbers, strict=True)), torch.Generator().manual_seed(1))
        place, block = 300, 1  # of the first row's query, whose group are the next rows
        state, rows = ScoreState(), np.stack([LANES // 4 + 8 * i for i in range(2)])
        state.values = SimpleNamespace(tensors=addresses_of(warp, tensors))
        state.positions, state.length = [Int32(place + rows[i] // GROUP) for i in range(2)], Int32(place + 4)
        queries = [QueryColumn(Int32(rows[i] // GROUP), Int32(rows[i] % GROUP)) for i in range(2)]
        softmax.terms.open(state, SimpleNamespace(request=Int32(0)), queries, Float32(SOFTMAX_SCALE))
        scale = [Float32(SOFTMAX_SCALE * LOG2_E)] * 2
        held = Rows(state.positions, scale, state, [], stand_in(None))
        given = np.random.default_rng(3).standard_normal((softmax.count, len(LANES))).astype(np.float32)
        scores = Registers(softmax.count, Float32)
        for i in range(softmax.count):
            scores[i] = Float32(given[i])
        softmax.take(scores, held, state.values, None, Int32(block), False, [], Int32(LANES))
        found = np.stack(
            [np.asarray(scores[i] * softmax.factor(held, stand_in(None), row_of(i))) for i in range(softmax.count)]
        )

        call: Any = SimpleNamespace(num_kv_heads=1, group=GROUP, score_tensors=tensors)
        keys_at = torch.arange(block * config.tile_tokens, (block + 1) * config.tile_tokens)
        plain = torch.zeros(4, GROUP, config.tile_tokens, dtype=torch.float64)
        lanes = [(rows[row_of(i)], sum_place(i)[1] + LANES % 4 * 2) for i in range(softmax.count)]
        for i, (row, column) in enumerate(lanes):
            plain[row // GROUP, row % GROUP, column] = torch.from_numpy(SOFTMAX_SCALE * given[i].astype(np.float64))
        at = KeyBlock(call, keys_at, place + torch.arange(4)[None])
        changed = self.option.reference(plain[None, :, None], at)[0, :, 0] * LOG2_E
        want = np.stack([changed[row // GROUP, row % GROUP, column].numpy() for row, column in lanes])
        np.testing.assert_allclose(found, want, atol=1e-4)
        assert not np.allclose(found, given * SOFTMAX_SCALE * LOG2_E, atol=1e-3)

    def test_extend_attention_has_a_name_a_key_and_arguments_with_it(self):
        config = choose(
            AttentionProblem.ragged(128, "int4_g1", "int4_g1", "bf16", 64, self.features(causal=True, paged=True))
        )
        assert self.option.name in config.name
        spec = AttentionSpec(config)
        assert spec_of(json.loads(json.dumps(record_of(spec)))) == spec
        assert self.option.term.partition(":")[0] in spec.modules()
        plain = AttentionSpec(replace(config, features=CAUSAL_PAGES))
        assert reached(spec).digest != reached(plain).digest

    def test_a_launch_of_extend_attention_gets_the_addresses_of_its_tensors(self):
        call = with_option(self.option, make_call("bf16", (64, 5), num_kv_heads=1, group=2, head_dim=64, q_len=3))
        with recording() as recorded:
            extended(call)
        (launch, *_) = recorded.launches
        found = dict(zip(extend_arguments(self.features(causal=True)).names, launch.arguments, strict=True))
        given = call.options["score_options"]
        assert {name: found[name] for name in given} == {name: given[name].data_ptr() for name in given}

    def test_the_operator_of_extend_attention_gives_what_the_call_gives(self):
        call = with_option(self.option, make_call("bf16", (37, 5), num_kv_heads=1, group=2, head_dim=64, q_len=3))
        q, ends = queries_of(call)
        options = NO_EXTEND_OPTIONS | {"score_options": call.options["score_options"]}
        given = Given(q, *call.tensors[1:], call.kv_format, options=options, cu_seqlens_q=ends)
        out, _ = ops.dispatch(given)
        assert torch.equal(out, extended(call)[0])

    def test_what_extend_attention_cannot_have_beside_it_is_refused(self):
        call = with_option(self.option, make_call("bf16", (37,), num_kv_heads=1, group=2, head_dim=64, q_len=3))
        new = torch.zeros(3, 1, 64).bfloat16()
        for others in ({"new_k": new, "new_v": new}, {"tree_mask": torch.zeros(3, 1, dtype=torch.int32)}):
            with pytest.raises(ValueError, match=f"{next(iter(others))}: got a value beside score_options"):
                extended(call, **others)
        with pytest.raises(ValueError, match="nobodys"):
            extended(call, score_options={"nobodys": new})
        with pytest.raises(TypeError, match="score_options: got list"):
            extended(call, score_options=[new])

    # -- on a GPU --

    @needs_gpu
    @pytest.mark.gpu
    @pytest.mark.parametrize("unpack", [False, True])
    @pytest.mark.parametrize("kv_format", ["int4_g4", "int8_token_head", "bf16"])
    def test_extend_attention_on_a_gpu_is_the_reference(self, kv_format, unpack):
        capped: dict[str, Any] = {"softcap": 5.0, "sinks": True, "page_size": 64}
        windowed: dict[str, Any] = {"window_size": 300, "page_size": 64}
        for others in ({}, capped, windowed):
            call = with_option(
                self.option,
                make_call(kv_format, (3000, 100, 777), num_kv_heads=2, group=4, q_len=75, device="cuda", **others),
            )
            out = extended(call, unpack=unpack)[0].double()
            want = extended_reference(call)
            errors = (out - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
            assert float(errors.max()) <= 8e-3

    @needs_gpu
    @pytest.mark.gpu
    @pytest.mark.parametrize("kv_format", ["bf16", "int4_g4", "int8_token_head"])
    def test_on_a_gpu_it_is_the_reference(self, kv_format):
        capped: dict[str, Any] = {"q_len": 3, "softcap": 5.0, "sinks": True, "page_size": 64}
        for others in ({}, capped):
            call = with_option(
                self.option, make_call(kv_format, (3000, 1, 777), num_kv_heads=2, group=4, device="cuda", **others)
            )
            out = call.run().double()
            want = call.reference()[0]
            errors = (out - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
            assert float(errors.max()) <= 4e-3


def queries_of(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """q and cu_seqlens_q of extend attention, for a call of decode attention."""
    batch, q_len = call.q.shape[:2]
    return call.q.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32, device=call.q.device) * q_len


def extended(call: Call, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of extend attention, for a call of decode attention."""
    (q, ends), given = queries_of(call), call.options | options
    return extend_attention(q, *call.tensors[1:], cu_seqlens_q=ends, kv_format=call.kv_format, return_lse=True, **given)


def extended_reference(call: Call) -> torch.Tensor:
    """out of extend attention in fp64, for a call of decode attention with any number of queries."""
    (q, ends), fp64 = queries_of(call), torch.float64
    options = {"cu_seqlens_q": ends, "kv_format": call.kv_format, "compute_dtype": fp64} | call.options
    return extend_attention_reference(q, *call.tensors[1:], **options)[0]


def addresses_of(warp: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of an option's tensors, which it puts into the warp's global memory."""
    addresses = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        data = tensor.view(torch.uint8).numpy().reshape(-1)
        assert data.size <= OPTION_BYTES
        addresses[name] = Int64(OPTION_BYTES * (1 + index))
        warp.global_memory[OPTION_BYTES * (1 + index) :][: data.size] = data
    return addresses


def _attend(rig: Any, tensors: dict[str, torch.Tensor], first: int, length: int, q_len: int) -> np.ndarray:
    """out [GROUP * q_len, HEAD_DIM] of the rig's block, whose first key stands at ``first``."""
    config, addresses = rig.config, addresses_of(rig.warp, tensors)
    reciprocal = -(-(1 << RECIPROCAL_BITS) // GROUP)
    shape = SimpleNamespace(q_len=Int32(q_len), group=Int32(GROUP), group_reciprocal=reciprocal, num_q_heads=GROUP)
    work = SimpleNamespace(request=Int32(0), length=Int32(length), place=Place(stand_in(shape), Int32(0), Int32(0)))
    values = FeatureValues(Int32(0), Float32(0.0), Int64(0), Int64(0), Int64(0), (Int64(0),) * 4, None, None, addresses)
    readers = rig.key_reader, rig.value_reader
    mainloop = WarpMainloop(config, stand_in(None), *readers, Logits(config), stand_in(None))
    roles = Roles(Int32(0), Int32(0), Int32(config.mainloop.num_slices - 1))
    logits = mainloop.logits.open(values, work, roles, rig.key_state.t, Float32(SOFTMAX_SCALE))
    softmax: Any = OnlineSoftmax(*(stand_in(Registers(config.columns, Float32)) for _ in range(2)))
    softmax.references.fill(LOWEST)
    softmax.totals.fill(0.0)
    state = WarpState(rig.key_state, rig.value_state, softmax, logits)
    mainloop.attend(state, (Int32(0), rig.value_address), rig.block, False, Int32(first), Int32(first + BLOCK_TOKENS))
    totals = np.zeros(config.warp_queries)
    for column in range(config.columns):
        np.add.at(
            totals, np.broadcast_to(heads_of(column), LANES.shape), np.asarray(softmax.totals[column], np.float64)
        )
    return (rig.outputs() / totals[:, None])[: GROUP * q_len]


def expected(call: Call, scores_of: Any) -> torch.Tensor:
    """decode_attention of a contiguous bf16 call, in loops.

    scores_of: of (request, query, head, scores, positions of keys, position), the scores.
    """
    q, k, v = (x.double() for x in call.tensors[:3])
    batch, q_len, num_q_heads, head_dim = q.shape
    out = torch.zeros_like(q)
    for b in range(batch):
        length = int(call.seq_lens[b])
        for i in range(q_len):
            position = length - q_len + i
            if position < 0:
                continue
            keys_at = torch.arange(position + 1)
            for h in range(num_q_heads):
                kv_head = h // (num_q_heads // k.shape[2])
                scores = head_dim**-0.5 * (k[b, : position + 1, kv_head] @ q[b, i, h])
                weights = torch.softmax(scores_of(b, i, h, scores, keys_at, position), dim=0)
                out[b, i, h] = weights @ v[b, : position + 1, kv_head]
    return out
