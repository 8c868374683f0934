"""What `tests.gpu.sanitize` runs: attention, linear layers, norms and experts, one case for each kind of kernel.

Where vLLM is installed: steps of an engine, too.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bench import moe as moe_bench
from bench.linear import Format, make_weights, pack
from bench.moe import MODELS, Inputs, make_experts
from bench.peers import relative_error
from bench.workloads import MoeModel, MoeShape
from cute_kernels import append_and_decode, quantized_layer, quantized_linear, quantized_linear_norm, rms_norm
from cute_kernels.attention.call import make_call as check_call
from cute_kernels.attention.call import make_extend_call as check_extend_call
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_schedule import DecodeSchedule, make_schedule
from cute_kernels.attention.extend_schedule import choose_fp8, choose_unpacked
from cute_kernels.attention.plan import combine_spec, configs_of, key_rows_for, problem_of
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats.weights import FP8_BLOCK, MXFP4, NVFP4, WeightFormat
from cute_kernels.gemm import PackedWeight, quantize_weight
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.deferred_choice import config_beside_a_norm
from cute_kernels.gemm.experts import fused_moe, fused_moe_reference
from cute_kernels.gemm.layer.config import config_for
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.product import make_product
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.deferred_config import GIVES, TAKES, DeferredKind
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.schedule import range_configs, schedule_of
from cute_kernels.integrations import attention_kernels
from cute_kernels.kv_cache import Rope
from cute_kernels.norm.compile import NormSpec
from cute_kernels.norm.config import BOTH, NormConfig, launch_shape
from cute_kernels.runtime import KernelSpec
from tests.attention.cases import Call, assert_close, make_call
from tests.extend.cases import Call as ExtendCall
from tests.extend.cases import assert_close as assert_extend_close
from tests.extend.cases import make_call as make_extend_call
from tests.gpu.specs import step_specs
from tests.integrations.vllm.steps import BATCHES, Layer, serve_steps
from tests.kv_cache.cases import Shape
from tests.kv_cache.steps import Arguments, assert_same, make_step, run_separately, with_own_cache
from tests.linear.cases import activated, launch_product

CALLS = 2  # of each case: what a launch leaves in a workspace, the next one finds
PRODUCT_TOLERANCE = 5e-3  # of the norm of a product's results in bf16 or fp16,
LAYER_TOLERANCE = 1e-2  # and of a layer's, whose hidden activations are rounded too
SERVED_TOLERANCE = 0.2  # of the norm of attention's results, next to exact K and V: what 4 bits in one group lose
CHECKED_TOKENS = 3
EPS = 1e-5  # of norms
W4 = Format(4, 128, False, "bf16")


class Case(Protocol):
    """Small calls on initialised inputs."""

    def specs(self) -> Sequence[KernelSpec]:
        """The kernels that it runs on an H100 or H200."""
        ...

    def run(self, device: str = "cuda") -> str:
        """Runs on a device and says what; a CPU has the references only. AssertionError if a result is wrong."""
        ...


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of `make_call` and the splits."""

    kv_format: str
    lengths: tuple[int, ...]
    num_splits: int | None = None
    num_kv_heads: int = 1
    group: int = 8
    head_dim: int = 128
    q_dtype: str = "bf16"
    q_len: int = 1
    page_size: int | None = None

    def call(self) -> Call:
        """On the CPU. Rows past the lengths hold numbers: what lies there may be loaded, and must be initialised."""
        return make_call(
            self.kv_format,
            self.lengths,
            num_kv_heads=self.num_kv_heads,
            group=self.group,
            head_dim=self.head_dim,
            q_dtype=self.q_dtype,
            q_len=self.q_len,
            page_size=self.page_size,
            poison=False,
        )

    def schedule(self) -> DecodeSchedule:
        """What the call uses on an H100 or H200."""
        call = self.call()
        checked = check_call(*call.tensors, kv_format=call.kv_format, **call.options)
        return make_schedule(problem_of(checked), self.num_splits)

    def specs(self) -> list[KernelSpec]:
        return [AttentionSpec(self.schedule().config)]

    def run(self, device: str = "cuda") -> str:
        call = self.call()
        tensors = [tensor.to(device) for tensor in call.tensors]
        options = {key: value.to(device) if torch.is_tensor(value) else value for key, value in call.options.items()}
        named = dict(zip(("q", "k_cache", "v_cache", "seq_lens"), tensors, strict=True))
        there = dataclasses.replace(call, **named, options=options)
        for _ in range(CALLS):
            out, lse = there.run(return_lse=True, num_splits=self.num_splits)
            assert_close(call, out.cpu(), lse.cpu())
        schedule = self.schedule()
        return f"{schedule.num_splits} splits, {schedule.config.name}"


@dataclass(frozen=True)
class StepCase:
    """A step of append and attention in one launch over head-major caches, beside the two calls that it stands for."""

    kv_format: str
    lengths: tuple[int, ...]
    num_splits: int | None = None
    num_kv_heads: int = 2
    place: str = "table"

    def step(self, device: str) -> Arguments:
        shape = Shape(self.kv_format, num_q_heads=8, num_kv_heads=self.num_kv_heads, place=self.place, page_size=64)
        shape = shape.with_(layout="HND", rope=Rope(128))
        return make_step(shape, self.lengths, device=device, num_splits=self.num_splits)

    def specs(self) -> list[KernelSpec]:
        step = self.step("cpu")
        (alone,) = step_specs(step, fused=True)
        return list(dict.fromkeys([alone, *step_specs(step, fused=False)]))

    def run(self, device: str = "cuda") -> str:
        step = self.step(device)
        other = with_own_cache(step)
        for _ in range(CALLS):
            out = append_and_decode(**step)
            want, _ = run_separately(other)
            assert torch.equal(out, want)
            assert_same(step, other)
        return f"{len(self.lengths)} requests, {self.specs()[0].symbol}"


@dataclass(frozen=True)
class ExtendCase:
    """Arguments of extend attention's `make_call`. unpack: whether 16 bits are made of the cache.
    num_splits: None lets the launch choose, which it has to for products whose rows are keys."""

    kv_format: str
    q_lens: tuple[int, ...]
    lengths: tuple[int, ...]
    unpack: bool = False
    num_splits: int | None = 1
    head_dim: int = 128
    page_size: int | None = 64
    fp8_products: bool = False
    num_kv_heads: int = 2

    def call(self, device: str = "cpu") -> ExtendCall:
        return make_extend_call(
            self.kv_format,
            self.q_lens,
            self.lengths,
            head_dim=self.head_dim,
            num_kv_heads=self.num_kv_heads,
            page_size=self.page_size,
            num_splits=self.num_splits,
            unpack=True if self.unpack else None if self.fp8_products or self.num_splits is None else False,
            fp8_products=self.fp8_products,
            device=device,
        )

    def specs(self) -> list[KernelSpec]:
        call = self.call()
        checked = check_extend_call(*call.tensors, **call.keywords)
        (config,) = configs_of(checked)
        combine = [combine_spec(config)] if self.num_splits != 1 else []
        if self.num_splits is None:
            return [*map(AttentionSpec, key_rows_for(checked, config)), *combine]
        if not (self.unpack or self.fp8_products):
            return [AttentionSpec(config), *combine]
        unpack, attention = (choose_fp8 if self.fp8_products else choose_unpacked)(config)
        return [AttentionSpec(unpack), AttentionSpec(attention), *combine]

    def run(self, device: str = "cuda") -> str:
        call = self.call(device)
        for _ in range(CALLS):
            out = torch.full_like(call.q, torch.nan)
            _, lse = call.run(out=out, return_lse=True)
            error = assert_extend_close(call, out, lse)
        return f"{error:.1e}, {', '.join(spec.symbol for spec in self.specs())}"


@dataclass(frozen=True)
class LinearCase:
    """A linear layer [n, k] with m rows. Those with large n or k use stages of their pipeline again."""

    n: int
    k: int
    m: int
    form: Format | WeightFormat = W4
    batch_invariant: bool = False

    def specs(self) -> list[KernelSpec]:
        if isinstance(self.form, Format):
            problem = self.form.problem(self.m, self.n, self.k)
        else:
            problem = LinearProblem(self.m, self.n, self.k, self.k, self.form, "bf16")
        return [GemmSpec(chosen(dataclasses.replace(problem, batch_invariant=self.batch_invariant)).config)]

    def weight(self, device: str) -> PackedWeight:
        if isinstance(self.form, Format):
            return pack(make_weights(self.n, self.k, self.form, device))
        w = torch.randn((self.n, self.k), device=device)
        return quantize_weight(w, format=self.form, dtype=torch.bfloat16)

    def run(self, device: str = "cuda") -> str:
        packed = self.weight(device)
        x = torch.randn((self.m, self.k), device=device).to(packed.dtype)
        wanted = x.float() @ packed.dequantize(torch.float32).T
        for _ in range(CALLS):
            out = torch.full_like(wanted, torch.nan, dtype=packed.dtype)
            quantized_linear(x, packed, out=out, batch_invariant=self.batch_invariant)
            error = relative_error(out, wanted)
            assert error <= PRODUCT_TOLERANCE, error
        return f"{error:.1e}, {', '.join(spec.symbol for spec in self.specs())}"


@dataclass(frozen=True)
class RangesCase:
    """As `LinearCase`, by every schedule whose tiles are work ranges."""

    n: int
    k: int
    m: int

    def schedules(self) -> list[TileSchedule]:
        problem = W4.problem(self.m, self.n, self.k)
        found = (schedule_of(problem, config) for config in range_configs(problem))
        return [one for one in found if one is not None]

    def specs(self) -> list[KernelSpec]:
        return [GemmSpec(schedule.config) for schedule in self.schedules()]

    def run(self, device: str = "cuda") -> str:
        weights = make_weights(self.n, self.k, W4, device)
        packed = pack(weights)
        x = torch.randn((self.m, self.k), device=device).to(packed.dtype)
        wanted = x.float() @ weights.dense.float().T
        for schedule in self.schedules():
            for _ in range(CALLS):
                out = torch.full_like(wanted, torch.nan)
                if device == "cpu":
                    quantized_linear(x, packed, out=out)
                else:
                    launch_product(make_product(schedule, self.m, torch.cuda.current_device()), x, packed, out)
                error = relative_error(out, wanted)
                assert error <= PRODUCT_TOLERANCE, error
        return f"{error:.1e}, {', '.join(spec.symbol for spec in self.specs())}"


@dataclass(frozen=True)
class DeferredNormCase:
    """Two products around a norm that neither launches; [hidden, k] and [n, hidden], with m rows."""

    k: int
    hidden: int
    n: int
    m: int

    def specs(self) -> list[KernelSpec]:
        found: list[KernelSpec] = []
        sides: dict[DeferredKind, tuple[int, int]] = {GIVES: (self.hidden, self.k), TAKES: (self.n, self.hidden)}
        for kind, size in sides.items():
            problem = W4.problem(self.m, *size)
            config = config_beside_a_norm(problem, chosen(problem), kind)
            assert config is not None, "the product's kernel is on no side of a norm"
            found.append(GemmSpec(config))
        return found

    def run(self, device: str = "cuda") -> str:
        weights = [make_weights(*size, W4, device) for size in ((self.hidden, self.k), (self.n, self.hidden))]
        down, up = (pack(one) for one in weights)
        sizes = (self.m, self.k), (self.m, self.hidden), (self.hidden,)
        x, residual, norm = (torch.randn(size, device=device).to(down.dtype) for size in sizes)
        for _ in range(CALLS):
            rows = quantized_linear_norm(x, down, residual=residual, norm=norm, norm_eps=EPS)
            wanted = x.float() @ weights[0].dense.float().T + residual.float()
            assert relative_error(rows.rows, wanted) <= PRODUCT_TOLERANCE
            out = quantized_linear(rows, up)
            error = relative_error(out, rows.normed().float() @ weights[1].dense.float().T)
            assert error <= LAYER_TOLERANCE, error
        return f"{error:.1e}, {', '.join(spec.symbol for spec in self.specs())}"


@dataclass(frozen=True)
class LayerProductsCase:
    """The products of a layer in one launch, of one row; weights [hidden, heads], [2 * inner, hidden], [hidden, inner]
    and [qkv, hidden]."""

    hidden: int
    heads: int
    inner: int
    qkv: int

    def specs(self) -> list[KernelSpec]:
        config = config_for(max(self.hidden, self.heads, self.inner))
        assert config is not None, "no launch serves so many inputs"
        return [GemmSpec(config)]

    def run(self, device: str = "cuda") -> str:
        hidden, inner = self.hidden, self.inner
        sizes = (hidden, self.heads), (2 * inner, hidden), (hidden, inner), (self.qkv, hidden)
        weights = [make_weights(*size, W4, device) for size in sizes]
        packed = [pack(one) for one in weights]
        shapes = (1, self.heads), (1, hidden), (hidden,), (hidden,)
        x, residual, norm, following = (torch.randn(size, device=device).bfloat16() for size in shapes)
        norms = {"norm": norm, "following_norm": following}
        for _ in range(CALLS):
            found = quantized_layer(x, *packed, residual=residual, norm_eps=EPS, **norms)  # pyright: ignore
            middle = (x.float() @ weights[0].dense.float().T + residual.float()).bfloat16()
            gated = activated(rms_norm(middle, norm, eps=EPS).float() @ weights[1].dense.float().T, "swiglu")
            rows = gated @ weights[2].dense.float().T + middle.float()
            assert relative_error(found.rows.rows, rows) <= LAYER_TOLERANCE
            assert found.qkv is not None
            error = relative_error(found.qkv, found.rows.normed().float() @ weights[3].dense.float().T)
            assert error <= LAYER_TOLERANCE, error
        return f"{error:.1e}, {', '.join(spec.symbol for spec in self.specs())}"


@dataclass(frozen=True)
class NormCase:
    """RMSNorm of [rows, n] behind a residual, whose sum comes too; inputs: as of `NormConfig`."""

    rows: int
    n: int
    inputs: str = ""

    def specs(self) -> list[KernelSpec]:
        return [NormSpec(NormConfig("rms", "bf16", *launch_shape(self.n), has_residual=True, inputs=self.inputs))]

    def run(self, device: str = "cuda") -> str:
        size = (self.rows, self.n)
        x, residual, weight = (torch.randn(s, device=device).bfloat16() for s in (size, size, size[1:]))
        summed = (x.float() + residual.float()).bfloat16()
        row = summed.double()
        wanted = row * (row.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        order = scale = None
        if self.inputs:
            order, scale = torch.randperm(self.n, device=device).to(torch.int32), torch.randn_like(weight)
            wanted = (wanted * scale.double())[:, order.long()]
        for _ in range(CALLS):
            out, total = rms_norm(x, weight, residual=residual, eps=EPS, order=order, input_scale=scale)
            assert torch.equal(total, summed)
            error = relative_error(out, wanted)
            assert error <= PRODUCT_TOLERANCE, error
        return f"{error:.1e}, {', '.join(spec.symbol for spec in self.specs())}"


@dataclass(frozen=True)
class LayerCase:
    """A layer of experts with so many tokens."""

    shape: MoeShape
    batch_invariant: bool = False

    def specs(self) -> list[KernelSpec]:
        return moe_bench.specs([self.shape.model], [self.shape.tokens])

    def run(self, device: str = "cuda") -> str:
        model = self.shape.model
        gate_up, down = (make_experts(model.experts, n, k, i, device) for i, (n, k) in enumerate(model.products))
        inputs = Inputs.of(self.shape, device)
        count = min(self.shape.tokens, CHECKED_TOKENS)
        checked = torch.linspace(0, self.shape.tokens - 1, count, device=device).long()
        some = (one[checked] for one in (inputs.weights, inputs.ids))
        wanted = fused_moe_reference(inputs.x[checked], gate_up, down, *some, out_dtype=torch.float32)
        for _ in range(CALLS):
            out = torch.full_like(inputs.x, torch.nan)
            weights = gate_up, down, inputs.weights, inputs.ids
            fused_moe(inputs.x, *weights, batch_invariant=self.batch_invariant, out=out)
            assert bool(torch.isfinite(out).all())
            error = relative_error(out[checked], wanted)
            assert error <= LAYER_TOLERANCE, error
        return f"{error:.1e}, {', '.join(spec.symbol for spec in self.specs())}"


@dataclass(frozen=True)
class ServedCase:
    """Steps of vLLM through the plugin's attention: requests that begin, go on and decode side by side."""

    layer: Layer
    batches: tuple[tuple[tuple[int, int], ...], ...] = BATCHES[:4]

    def specs(self) -> list[KernelSpec]:
        impl = self.layer.make("cpu")
        decodes = attention_kernels.Decodes(
            (1, 2, 3, 4), self.layer.speculative + 1, 128, self.layer.page, torch.float16, False
        )
        return attention_kernels.specs_of(impl, decodes, AttentionProblem.num_sms)

    def run(self, device: str = "cuda") -> str:
        given, exact = serve_steps(self.layer, device, self.batches)
        assert not given.isnan().any()
        error = relative_error(given, exact)
        assert error <= SERVED_TOLERANCE, error
        return f"{error:.1e}, {len(given)} tokens of {len(self.batches)} steps"


ATTENTION = {
    "int4_g1": AttentionCase("int4_g1", (600, 33, 0)),
    "int4_g1-one-combiner": AttentionCase("int4_g1", (1024,)),
    "int4_g1-combiners": AttentionCase("int4_g1", (8192,)),
    "int4_g1-splits": AttentionCase("int4_g1", (600, 300, 1, 0), num_splits=3),
    "int4_g1-words": AttentionCase("int4_g1", (517, 5, 0), num_splits=2),
    "int4_g1-mha": AttentionCase("int4_g1", (96, 33, 0), num_kv_heads=32, group=1),
    "int4_g1-two-warps": AttentionCase("int4_g1", (300, 1), group=16),
    "int4_g1-short-rows": AttentionCase("int4_g1", (130, 33, 0, 100) * 140),
    "int4_g2-d64": AttentionCase("int4_g2", (300, 64), num_kv_heads=3, head_dim=64, q_dtype="fp16"),
    "int4_g4-heads": AttentionCase("int4_g4", (96, 33, 0), num_splits=2, num_kv_heads=8),
    "int4_g8-d256": AttentionCase("int4_g8", (200, 31), head_dim=256),
    "bf16": AttentionCase("bf16", (600, 33, 0)),
    "bf16-combiners": AttentionCase("bf16", (1600,)),
    "bf16-splits": AttentionCase("bf16", (299, 1, 0), num_splits=3, num_kv_heads=2),
    "bf16-d256": AttentionCase("bf16", (150, 31), head_dim=256, group=5),
    "int8_token_head": AttentionCase("int8_token_head", (600, 33, 0)),
    "int8_tensor": AttentionCase("int8_tensor", (600, 33, 0), num_splits=2),
    "e4m3_tensor": AttentionCase("e4m3_tensor", (600, 33, 0), num_splits=2),
    "int4_g1-pages": AttentionCase("int4_g1", (1500, 33, 0, 64), page_size=16),
    "e4m3_tensor-pages": AttentionCase("e4m3_tensor", (1500, 33, 0, 64), page_size=64),
    "bf16-pages": AttentionCase("bf16", (900, 33, 0, 64), page_size=16),
    "int4_g1-queries": AttentionCase("int4_g1", (600, 33, 4), q_len=4),
    "int8_token_head-queries": AttentionCase("int8_token_head", (600, 33, 4), q_len=4, page_size=64),
    "fp16-d64": AttentionCase("fp16", (300, 64), num_kv_heads=3, head_dim=64, group=24),
}
STEPS = {
    "step-int4_g4": StepCase("int4_g4", (600, 33, 0, 65, 1)),
    "step-int4_g4-splits": StepCase("int4_g4", (1600,), num_splits=3),
    "step-int8_token_head": StepCase("int8_token_head", (600, 33, 0), num_kv_heads=1),
    "step-bf16": StepCase("bf16", (600, 33, 0)),
    "step-e4m3_tensor": StepCase("e4m3_tensor", (300, 64), place="contiguous"),
}
LAYERS = {
    "linear-one-row": LinearCase(8192, 8192, 1),
    "linear-8-rows": LinearCase(8192, 8192, 8),
    "linear-8-rows-seven-tiles": LinearCase(28672, 4096, 8),
    "linear-16-rows-early": LinearCase(28672, 4096, 16),
    "linear-16-rows-turns": LinearCase(8192, 8192, 16),
    "linear-24-rows-parts": LinearCase(8192, 8192, 24),
    "linear-64-rows-cluster": LinearCase(8192, 8192, 64),
    "linear-40-rows-cluster": LinearCase(8192, 1024, 40),
    "linear-64-rows-wide-tiles": LinearCase(28672, 256, 64),
    "linear-96-rows-cluster-of-four": LinearCase(1280, 8192, 96, batch_invariant=True),
    "linear-limbs-zeros": LinearCase(4096, 4096, 1, Format(4, 128, True, "bf16")),
    "linear-limbs-zeros-8-rows": LinearCase(28672, 4096, 8, Format(4, 128, True, "bf16")),
    "linear-limbs-groups": LinearCase(4096, 4096, 8, Format(4, 32, False, "bf16")),
    "linear-mma-sync": LinearCase(64, 8192, 2, Format(4, 32, True, "fp16")),
    "linear-zeros-turns": LinearCase(2048, 2048, 16, Format(4, 32, True, "fp16")),
    "linear-w8": LinearCase(2048, 2048, 16, Format(8, 128, False, "bf16")),
    "linear-w8-zeros": LinearCase(2048, 2048, 40, Format(8, 64, True, "fp16")),
    "linear-many-rows": LinearCase(8192, 4096, 512),
    "linear-many-rows-split": LinearCase(16384, 2048, 300),
    "linear-mxfp4": LinearCase(4096, 4096, 8, MXFP4),
    "linear-nvfp4": LinearCase(4096, 4096, 4, NVFP4),
    "linear-fp8-limbs": LinearCase(4096, 4096, 8, FP8_BLOCK),
    "linear-fp8-sums-turns": LinearCase(4096, 4096, 16, FP8_BLOCK),
    "linear-fp8-sums": LinearCase(2048, 2048, 96, FP8_BLOCK),
    "linear-ranges": RangesCase(8504, 1152, 200),
    "linear-ranges-few-rows": RangesCase(17000, 1152, 100),
}
# Requests without queries and without keys, work tiles that end within a block, rings that go round.
EXTEND_SHAPES = (40, 0, 3, 1), (700, 9, 129, 0)
# As many requests as products whose rows are keys want: tiles of 40 rows of queries, of 72.
FEW_QUERIES = (17, 0, 3, 1) * 5, (700, 9, 129, 0) * 5
MORE_QUERIES = (17, 0, 18, 16) * 5, (700, 9, 129, 16) * 5
EXTEND = {
    "extend-bf16": ExtendCase("bf16", *EXTEND_SHAPES),
    "extend-int8_token_head": ExtendCase("int8_token_head", *EXTEND_SHAPES),
    "extend-e4m3_tensor-pages-of-16": ExtendCase("e4m3_tensor", *EXTEND_SHAPES, page_size=16),
    "extend-int4_g4-splits": ExtendCase("int4_g4", *EXTEND_SHAPES, num_splits=3),
    "extend-int8_token_head-d256": ExtendCase("int8_token_head", *EXTEND_SHAPES, head_dim=256),
    "extend-int8_token_head-unpacked": ExtendCase("int8_token_head", *EXTEND_SHAPES, unpack=True),
    "extend-int4_g4-unpacked-splits": ExtendCase("int4_g4", *EXTEND_SHAPES, unpack=True, num_splits=2),
    "extend-fp8": ExtendCase("e4m3_tensor", *EXTEND_SHAPES, fp8_products=True),
    "extend-fp8-splits": ExtendCase("e4m3_tensor", *EXTEND_SHAPES, fp8_products=True, num_splits=2),
    "extend-e4m3_tensor-key-rows": ExtendCase("e4m3_tensor", *MORE_QUERIES, num_splits=None),
    "extend-int4_g4-key-rows": ExtendCase("int4_g4", *FEW_QUERIES, num_splits=None),
    "extend-int8_token_head-key-rows": ExtendCase("int8_token_head", *MORE_QUERIES, num_splits=None),
    "extend-int8_token_head-key-rows-maps": ExtendCase(
        "int8_token_head", *FEW_QUERIES, num_splits=None, num_kv_heads=4
    ),
    "extend-int4_g1-key-rows-maps": ExtendCase("int4_g1", *FEW_QUERIES, num_splits=None, num_kv_heads=4),
}
DEFERRED = {
    "deferred-norm-limbs": DeferredNormCase(1024, 1024, 520, 3),
    "deferred-norm-clusters": DeferredNormCase(1024, 1024, 520, 30),
    "deferred-norm-exchanged-rows": DeferredNormCase(1024, 8192, 7168, 128),
    "deferred-norm-pairs": DeferredNormCase(1024, 8192, 7168, 60),
    "deferred-norm-parts": DeferredNormCase(768, 256, 200, 65),
    "products-of-a-layer": LayerProductsCase(768, 512, 1792, 320),
}
NORMS = {
    "norm": NormCase(3, 4096),
    "norm-short-rows": NormCase(5, 1096),
    "norm-of-inputs": NormCase(3, 4096, BOTH),
    "norm-of-short-inputs": NormCase(5, 136, BOTH),
}
SMALL = MoeModel("small", 32, 4, 1024, 256)
MIXTRAL, QWEN3, _ = MODELS
EXPERTS = {
    "experts-assigned": LayerCase(MoeShape(SMALL, 3)),
    "experts-entries": LayerCase(MoeShape(SMALL, 3), batch_invariant=True),
    "experts-entries-long": LayerCase(MoeShape(MIXTRAL, 1), batch_invariant=True),
    "experts-parts": LayerCase(MoeShape(MIXTRAL, 3)),
    "experts-runs": LayerCase(MoeShape(SMALL, 20)),
    "experts-tiles": LayerCase(MoeShape(SMALL, 300)),
    "experts-16-rows": LayerCase(MoeShape(QWEN3, 128)),
    "experts-limbs": LayerCase(MoeShape(MIXTRAL, 64)),
    "experts-48-rows": LayerCase(MoeShape(MIXTRAL, 128)),
}
SERVED = {
    "served-int4_g4": ServedCase(Layer("auto", "int4_g4")),
    "served-int4_per_token_head": ServedCase(Layer("int4_per_token_head")),
    "served-fp8-drafts": ServedCase(Layer("fp8", window=24, sinks=True, speculative=3, caches={"num_sms": 1})),
}
CASES: dict[str, Case] = {**ATTENTION, **STEPS, **EXTEND, **LAYERS, **DEFERRED, **NORMS, **EXPERTS}
if importlib.util.find_spec("vllm") is not None:
    CASES |= SERVED
