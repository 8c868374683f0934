"""Checks of attention: steps of SGLang's own batches over its own pool, refusals, and how a server asks for it."""

# SGLang is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cute_kernels import dequantize_kv, quantize_kv
from cute_kernels.integrations.sglang import attention, attention_layers, rows, seams
from tests.integrations.sglang.checks import check, lines
from tests.integrations.vllm.steps import causal_attention

PAGE, HEADS, KV_HEADS, DIM, CONTEXT = 16, 4, 2, 64, 512


def server(**given: Any) -> Any:
    """What SGLang has published of a server, by its namespaces."""
    fields = {
        "parallel": {"attn_dcp_size": 1, "attn_cp_size": 1},
        "overlap": {"enable_two_batch_overlap": False},
        "dllm": {"dllm_algorithm": None},
        "disagg": {"enable_pdmux": False, "disaggregation_mode": "null"},
        "features": {"enable_memory_saver": False},
        "deterministic": {"enable_deterministic_inference": False},
        "memory": {"enable_hierarchical_cache": False, "enable_lmcache": False},
    }
    for name, value in given.items():
        next(group for group in fields.values() if name in group)[name] = value
    made = {name: SimpleNamespace(**group) for name, group in fields.items()}
    apart = {name: made.pop(name) for name in ("parallel", "disagg", "memory")}
    return SimpleNamespace(**apart, exec_=SimpleNamespace(**made))


@contextmanager
def published(**given: Any) -> Iterator[None]:
    from sglang.srt import runtime_context

    backends = given.pop("backends", (attention.NAME, attention.NAME))
    found = server(**given)
    with mock.patch.multiple(
        runtime_context,
        get_parallel=lambda: found.parallel,
        get_disagg=lambda: found.disagg,
        get_memory=lambda: found.memory,
        attention_backends=lambda: backends,
        get_exec=lambda: found.exec_,
    ):
        yield


def radix(layer_id: int = 0, **given: Any) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    sizes = {"num_heads": HEADS, "head_dim": DIM, "scaling": DIM**-0.5, "num_kv_heads": KV_HEADS}
    return RadixAttention(**sizes, layer_id=layer_id, **given)


def runner(layers: list[Any] | None = None, **given: Any) -> Any:
    """A model runner as far as a backend sees it, with SGLang's own pools."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from cute_kernels.integrations.sglang.pool import RowsPool

    layers = [radix()] if layers is None else layers
    page, device = given.get("page_size", PAGE), given.get("device", "cpu")
    pool = (MHATokenToKVPool if rows.wanted_formats() is None else RowsPool)(
        size=1024,
        page_size=page,
        dtype=given.get("kv_cache_dtype", torch.float8_e4m3fn),
        head_num=KV_HEADS,
        head_dim=DIM,
        layer_num=len(layers),
        device=device,
        enable_memory_saver=False,
    )
    fields = {
        "model": torch.nn.ModuleList(layers),
        "device": device,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": torch.float8_e4m3fn,
        "page_size": page,
        "use_mla_backend": False,
        "is_draft_worker": False,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "req_to_token_pool": ReqToTokenPool(8, CONTEXT, device, False),
        "token_to_kv_pool": pool,
    }
    return SimpleNamespace(**(fields | given))


def make(made: Any, **given: Any) -> Any:
    with published(**given):
        return attention.make(made)


@dataclass
class Engine:
    """Requests, their places in the pools, and K and V as they were before the pool rounded them."""

    runner: Any
    backend: Any
    layer: Any
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: [15, 3, 12, 5, 9, 1, 14, 2, 11, 6, 8, 0, 13, 10, 4, 7])

    def room(self, request: int, tokens: int) -> torch.Tensor:
        """Slots of a request's next tokens, which begin new pages where the last one is full."""
        page, table = self.runner.page_size, self.runner.req_to_token_pool.req_to_token
        there = len(self.kept[request][0]) if request in self.kept else 0
        slots = []
        for position in range(there, there + tokens):
            if position % page == 0:
                table[request, position] = (1 + self.free.pop()) * page
            slots.append(int(table[request, position // page * page]) + position % page)
            table[request, position] = slots[-1]
        return torch.tensor(slots, device=self.runner.device)

    def share(self, request: int, other: int, tokens: int) -> None:
        """A prefix hit: whole pages of another request begin this one."""
        assert tokens % self.runner.page_size == 0
        table = self.runner.req_to_token_pool.req_to_token
        table[request, :tokens] = table[other, :tokens]
        self.kept[request] = tuple(x[:tokens] for x in self.kept[other])  # type: ignore[assignment]

    def batch(self, new: dict[int, int], mode: str, pad_to: int = 0) -> tuple[Any, torch.Tensor]:
        """SGLang's batch of requests with so many new tokens each, and new q, k and v [tokens, heads, dim]."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        before = [len(self.kept[request][0]) if request in self.kept else 0 for request in new]
        slots = torch.cat([self.room(request, count) for request, count in new.items()])
        lengths = [old + count for old, count in zip(before, new.values(), strict=True)]
        tokens = sum(new.values())
        device = self.runner.device
        fused = torch.randn(max(tokens, pad_to), (HEADS + 2 * KV_HEADS) * DIM).to(device, self.runner.dtype)
        k, v = fused[:tokens, HEADS * DIM :].view(tokens, 2, KV_HEADS, DIM).unbind(1)
        for (request, count), at in zip(new.items(), torch.tensor(list(new.values())).cumsum(0).tolist(), strict=True):
            fresh = k[at - count : at], v[at - count : at]
            old = self.kept.get(request, (k[:0], v[:0]))
            self.kept[request] = torch.cat((old[0], fresh[0])), torch.cat((old[1], fresh[1]))
        pad = max(pad_to - len(new), 0)
        batch = ForwardBatch(
            forward_mode=ForwardMode[mode],
            batch_size=len(new) + pad,
            input_ids=torch.zeros(tokens + pad, dtype=torch.int64, device=device),
            req_pool_indices=torch.tensor([*new, *[0] * pad], device=device),
            seq_lens=torch.tensor([*lengths, *[1] * pad], device=device),
            out_cache_loc=torch.cat((slots, slots.new_zeros(pad))),
            seq_lens_sum=sum(lengths),
            seq_lens_cpu=torch.tensor([*lengths, *[1] * pad]),
            extend_seq_lens=torch.tensor(list(new.values()), dtype=torch.int32, device=device),
        )
        return batch, fused

    def run(self, batch: Any, fused: torch.Tensor, **more: Any) -> torch.Tensor:
        """A layer's attention, as its model calls it: parts of one projection's result."""
        q, k, v = fused.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
        k, v = (x.view(-1, KV_HEADS, DIM) for x in (k, v))
        return self.backend.forward(q, k, v, self.layer, batch, **more)

    def expected(self, new: dict[int, int], fused: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention in fp64 over K and V as FP8 has them."""
        found, at = [], 0
        window = None if self.layer.sliding_window_size < 0 else self.layer.sliding_window_size + 1
        for request, count in new.items():
            q = fused[at : at + count, : HEADS * DIM].reshape(count, HEADS, DIM).cpu()
            k, v = (x.cpu() for x in self.stored(request))
            cap = self.layer.logit_cap or None
            found.append(causal_attention(q, k, v, self.layer.scaling, window, cap, sinks).flatten(1))
            at += count
        return torch.cat(found)

    def stored(self, request: int) -> list[torch.Tensor]:
        """A request's K and V as the pool has them."""
        formats = rows.wanted_formats()
        if formats is None:
            return [rounded(x, scale) for x, scale in zip(self.kept[request], scales_of(self.layer), strict=True)]
        names: tuple[Any, Any] = (formats.k.name, formats.v.name)
        return [
            dequantize_kv(quantize_kv(x, kv_format=name), kv_format=name, head_dim=DIM, dtype=torch.float32)
            for x, name in zip(self.kept[request], names, strict=True)
        ]

    def step(self, new: dict[int, int], mode: str, **more: Any) -> None:
        """Runs a step outside graphs and compares it."""
        batch, fused = self.batch(new, mode)
        self.backend.init_forward_metadata(batch)
        assert_close(self.run(batch, fused, **more), self.expected(new, fused, more.get("sinks")))

    def replay(self, new: dict[int, int], size: int) -> None:
        """Runs a decoding step as a graph of ``size`` requests does when it is replayed."""
        batch, fused = self.batch(new, "DECODE", size)
        self.backend.init_forward_metadata_out_graph(batch)
        self.backend.init_forward_metadata_in_graph(batch)
        assert_close(self.run(batch, fused)[: len(new)], self.expected(new, fused))


def scales_of(layer: Any) -> list[float]:
    return [1.0 if scale is None else float(scale) for scale in (layer.k_scale, layer.v_scale)]


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float() / scale).to(torch.float8_e4m3fn).double() * scale


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.cpu().double() - expected).abs().max() <= expected.abs().max() * 2**-7


def engine(layer: Any | None = None, **given: Any) -> Engine:
    torch.manual_seed(0)
    layer = radix() if layer is None else layer
    made = runner([layer], **given)
    return Engine(made, make(made), layer)


@check
def steps_of_every_kind_give_attention_over_the_pool() -> None:
    for page in (16, 64):
        layer = radix()
        layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(s), requires_grad=False) for s in (0.5, 2.0))
        served = engine(layer, page_size=page)
        served.step({1: 37, 2: 70}, "EXTEND")
        served.step({1: 33, 2: 1}, "EXTEND")  # the next chunk
        served.share(3, 2, 64)
        served.step({3: 9}, "EXTEND")  # a prefix hit
        served.step({1: 1, 2: 1, 4: 21}, "MIXED")
        served.step({1: 1, 3: 1, 4: 1}, "DECODE")


@check
def a_graphs_replay_makes_its_own_metadata_whatever_its_buffers_had() -> None:
    served = engine()
    served.step({1: 31, 2: 47, 5: 15}, "EXTEND")
    served.backend.init_cuda_graph_state(4, 4)
    served.backend.graph_step.block_table.fill_(7)
    served.replay({1: 1, 5: 1}, 4)  # 1 and 5 begin pages
    served.replay({2: 1, 1: 1, 5: 1}, 4)
    served.replay({5: 1}, 1)
    assert not served.runner.token_to_kv_pool.get_kv_buffer(0)[0].view(torch.uint8)[:PAGE].any()  # by those that pad
    steps = [served.backend._captured(count) for count in (2, 2)]
    assert steps[0].block_table.data_ptr() == steps[1].block_table.data_ptr()


@check
def the_pools_bytes_are_those_that_sglang_writes() -> None:
    layer = radix()
    layer.k_scale, layer.v_scale = 0.25, 4.0  # numbers, as of a file of scales
    served = engine(layer)
    served.step({1: 20, 2: 5}, "EXTEND")
    served.step({1: 1, 2: 1}, "DECODE")
    k_cache, v_cache = served.runner.token_to_kv_pool.get_kv_buffer(0)
    for request in (1, 2):
        for cache, x, scale in zip((k_cache, v_cache), served.kept[request], scales_of(layer), strict=True):
            slots = served.runner.req_to_token_pool.req_to_token[request, : len(x)].long()
            assert torch.equal(cache[slots].double() * scale, rounded(x, scale))


@check
def windows_caps_and_sinks_are_applied() -> None:
    options: tuple[dict[str, Any], ...] = ({"sliding_window_size": 20}, {"logit_cap": 5.0}, {})
    for given in options:
        served = engine(radix(**given))
        sinks = {} if given else {"sinks": torch.randn(HEADS, dtype=torch.bfloat16)}
        served.step({1: 40}, "EXTEND", **sinks)
        served.step({1: 1}, "DECODE", **sinks)


@check
def a_layer_that_reads_another_ones_cache_writes_nothing() -> None:
    served = engine()
    served.step({1: 20}, "EXTEND")
    before = [cache.view(torch.uint8).clone() for cache in served.runner.token_to_kv_pool.get_kv_buffer(0)]
    batch, fused = served.batch({1: 1}, "DECODE")
    served.backend.init_forward_metadata(batch)
    served.backend.forward(fused[:, : HEADS * DIM], None, None, served.layer, batch)
    served.run(batch, fused, save_kv_cache=False)
    now = [cache.view(torch.uint8) for cache in served.runner.token_to_kv_pool.get_kv_buffer(0)]
    assert all(map(torch.equal, before, now))


@check
def steps_that_are_not_supported_are_refused() -> None:
    served = engine()
    served.step({1: 4}, "EXTEND")
    batch, fused = served.batch({1: 1}, "DECODE")
    mode: Any = type(batch.forward_mode)
    served.backend.init_forward_metadata(batch)
    assert "layer 0: got q_rope, want sinks or nothing" in refusal(served.run, batch, fused, q_rope=fused)
    served.run(batch, fused, return_lse=False, q_rope=None)
    for unknown in (mode.TARGET_VERIFY, mode.DLLM_EXTEND):
        batch.forward_mode = unknown
        assert "want DECODE, EXTEND, MIXED or IDLE" in refusal(served.backend.init_forward_metadata, batch)
    assert "want DECODE" in refusal(served.backend.init_forward_metadata_out_graph, batch)
    batch.forward_mode = mode.IDLE
    batch.seq_lens = batch.seq_lens[:0]
    served.backend.init_forward_metadata(batch)
    assert served.backend.forward(fused[:0, : HEADS * DIM], None, None, served.layer, batch).shape == (0, HEADS * DIM)


def refusal(called: Any, *arguments: Any, **named: Any) -> str:
    try:
        called(*arguments, **named)
    except (ValueError, NotImplementedError) as error:
        return f"{error}"
    raise AssertionError("nothing was refused")


@check
def servers_that_are_not_supported_are_refused_by_name() -> None:
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def of_server(**given: Any) -> str:
        return refusal(make, runner(), **given)

    assert "context parallelism" in of_server(attn_dcp_size=2) and "context parallelism" in of_server(attn_cp_size=2)
    assert "two-batch overlap" in of_server(enable_two_batch_overlap=True)
    assert "PD multiplexing" in of_server(enable_pdmux=True)
    assert "diffusion" in of_server(dllm_algorithm="LowConfidence")
    assert "--enable-memory-saver is not supported" in of_server(enable_memory_saver=True)
    assert "--enable-deterministic-inference" in of_server(enable_deterministic_inference=True)
    assert "speculative decoding" in refusal(make, runner(spec_algorithm=SpeculativeAlgorithm.EAGLE))
    assert "want --kv-cache-dtype fp8_e4m3" in refusal(make, runner(kv_cache_dtype=torch.bfloat16))
    assert "--page-size 1; supported: 16" in refusal(make, runner(page_size=1))
    assert "a pool of" in refusal(make, runner(use_mla_backend=True))
    for name in ("HybridLinearKVPool", "PageMajorMHATokenToKVPool"):
        pool = object.__new__(getattr(memory_pool, name))
        assert f"a pool of {name}; supported: MHATokenToKVPool" in refusal(make, runner(token_to_kv_pool=pool))
    for layer, reason in (
        (radix(is_cross_attention=True), "layer 0: cross attention"),
        (radix(v_head_dim=128), "head sizes 64 and 128"),
        (radix(use_irope=True), "attention within chunks"),
    ):
        assert reason in refusal(make, runner([layer]))
    with mock.patch("cute_kernels.integrations.sglang.seams.capability_of", lambda device: (8, 0)):
        assert "compute capability (8, 0); supported: (9, 0)" in refusal(make, runner())


@check
def the_command_line_takes_the_name_and_gets_pages_of_64() -> None:
    from sglang.srt.arg_groups import attention_hook, overrides
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    assert ATTENTION_BACKEND_CHOICES.count(attention.NAME) == 1 and ATTENTION_BACKENDS[attention.NAME] is attention.make
    assert attention_hook._mla_backend_page_constraints is overrides._mla_backend_page_constraints
    fields = dict.fromkeys((*attention.CHOICES, "speculative_draft_attention_backend"))
    for name, page, wanted in (
        (attention.NAME, 1, {"page_size": 64}),
        (attention.NAME, None, {"page_size": 64}),
        (attention.NAME, 32, {}),
        ("fa3", 1, {}),
        ("hpc_ops", 1, {"page_size": 64}),
    ):
        for choice in attention.CHOICES:
            view = SimpleNamespace(**fields | {choice: name, "page_size": page})
            assert attention_hook._mla_backend_page_constraints(view) == wanted, (name, page)


@check
def the_backend_has_the_methods_of_sglangs() -> None:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    from cute_kernels.integrations.sglang.attention_backend import CuteKernelsAttentionBackend

    for name, method in vars(CuteKernelsAttentionBackend).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            theirs = tuple(inspect.signature(getattr(AttentionBackend, name)).parameters)[:8]
            assert tuple(inspect.signature(method).parameters)[: len(theirs)][:7] == theirs[:7], name


@check
def kernels_of_a_models_steps_are_known_before_it_runs() -> None:
    from cute_kernels.integrations import attention_kernels

    model = runner([radix(0), radix(1, sliding_window_size=20), radix(1, sliding_window_size=20)])
    layers = attention_layers.kernel_layers(model, attention_layers.layers_of(model.model))
    assert [layer.sliding_window for layer in layers] == [None, 21, 21]
    assert all(layer.kv_sharing_target_layer_name for layer in layers)  # two layers have one cache
    decodes = attention_layers.decodes_of(model)
    assert decodes.batches == tuple(range(1, 9)) and (decodes.max_seq_len, decodes.page_size) == (CONTEXT, PAGE)
    assert len(attention_kernels.specs_of(layers[0], decodes, 132)) > 4


@check
def what_is_served_is_said_once() -> None:
    seams.say_once.cache_clear()
    with mock.patch.object(seams, "logger") as said:
        make(runner())
        make(runner())
    assert lines(said) == ["20 cute-kernels: %s attention over a e4m3_tensor pool in pages of 16 runs here"]


ROWS = ("int8_token_head", "int8_token_head,int4_g4", "int4_g4")


@check
def pools_of_our_rows_give_attention_over_them() -> None:
    for text in ROWS:
        with mock.patch.dict(os.environ, {rows.KV_FORMAT: text}):
            served = engine()
            assert type(served.runner.token_to_kv_pool).__name__ == "RowsPool"
            served.step({1: 37, 2: 40}, "EXTEND")
            served.share(3, 2, 32)
            served.step({3: 9, 1: 1}, "MIXED")
            served.step({1: 1, 3: 1}, "DECODE")
            served.backend.init_cuda_graph_state(4, 4)
            served.replay({2: 1, 1: 1}, 4)


@check
def a_pool_of_our_rows_takes_what_it_says_and_writes_what_the_backend_writes() -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    for text in ROWS:
        with mock.patch.dict(os.environ, {rows.KV_FORMAT: text}):
            served = engine()
            served.step({1: 20}, "EXTEND")
            pool, form = served.runner.token_to_kv_pool, rows.wanted_formats()
            assert form is not None
            slots, row = 1024 + PAGE, (form.k.row_bytes(DIM), form.v.row_bytes(DIM))
            assert pool.get_kv_size_bytes() == tuple(slots * KV_HEADS * each for each in row)
            table = served.runner.req_to_token_pool.req_to_token[1, :20].long()
            written = [cache[table].clone() for cache in (pool.k_buffer[0], pool.v_buffer[0])]
            for cache in (pool.k_buffer[0], pool.v_buffer[0]):
                cache.zero_()
            pool.set_kv_buffer(served.layer, KVWriteLoc(table), *served.kept[1])
            assert all(map(torch.equal, written, (pool.k_buffer[0][table], pool.v_buffer[0][table])))
            config = SimpleNamespace(head_dim=DIM, v_head_dim=DIM)
            original: Any = lambda *_: 2 * KV_HEADS * DIM * 3  # noqa: E731
            made = attention._slot_bytes(original, SimpleNamespace(), SimpleNamespace(model_config=config), 3)
            assert made == 3 * KV_HEADS * sum(row)


@check
def servers_that_know_nothing_of_our_rows_are_refused_by_name() -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, PageMajorMHATokenToKVPool

    config = SimpleNamespace(head_dim=DIM, v_head_dim=DIM, dtype=torch.bfloat16)
    usual = {"model_config": config, "kv_cache_dtype": torch.float8_e4m3fn}
    usual |= {"use_mla_backend": False, "is_hybrid_swa": False}

    def chosen(default: type = MHATokenToKVPool, kind: str = "mha", changes: Any = None, **given: Any) -> type:
        configurator: Any = SimpleNamespace(**usual | (changes or {}))
        with published(**given):
            return KVCacheConfigurator._resolve_kv_pool_class(configurator, kind=kind, default=default)

    assert chosen() is MHATokenToKVPool
    with mock.patch.dict(os.environ, {rows.KV_FORMAT: "int4_g4"}):
        assert chosen().__name__ == "RowsPool" and chosen(kind="mla") is MHATokenToKVPool
        assert "want cute_kernels" in refusal(chosen, backends=("fa3", attention.NAME))
        assert "HiCache" in refusal(chosen, enable_hierarchical_cache=True)
        assert "LMCache" in refusal(chosen, enable_lmcache=True)
        assert "disaggregation" in refusal(chosen, disaggregation_mode="decode")
        assert "sliding windows" in refusal(chosen, changes={"is_hybrid_swa": True})
        assert "want --kv-cache-dtype fp8_e4m3" in refusal(chosen, changes={"kv_cache_dtype": torch.bfloat16})
        assert "a pool of PageMajorMHATokenToKVPool" in refusal(chosen, PageMajorMHATokenToKVPool)
        changes = {"model_config": SimpleNamespace(head_dim=72, v_head_dim=72, dtype=torch.bfloat16)}
        assert "head size 72" in refusal(chosen, changes=changes)
    with mock.patch.dict(os.environ, {rows.KV_FORMAT: "int5"}):
        assert "CUTE_KERNELS_SGLANG_KV_FORMAT: got 'int5'" in refusal(chosen)
