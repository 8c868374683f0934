"""Every cache format, pairs of them, and every head dim on a GPU, kernel by kernel, against fp64.

Kernels are launched as configurations, so that what the schedule would not choose here is tested too. Those that no
bundle holds are compiled in parallel before the first test.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.configured import bind_config
from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.tiles import cannot_read
from cute_kernels.formats.kv import FORMATS, HEAD_DIMS, KvFormat, format_of
from cute_kernels.runtime import arch_of, load_many
from cute_kernels.runtime.composed import changed
from tests.attention.cases import Q_DTYPES, TOLERANCE, relative_errors

pytestmark = pytest.mark.gpu

CUDA = "cuda"
LENGTHS = (0, 1, 31, 32, 33, 100, 255, 256, 257, 640)
TOKENS = 640  # of a cache: with any number of heads a multiple of 16 bytes
FAMILIES = ("bf16", "int4_g1", "int4_g4", "int8_token_head", "int8_g4", "e4m3_token_head")
FAMILIES += ("int8_tensor", "int8_channel", "e4m3_head", "e5m2")


@dataclasses.dataclass(frozen=True)
class Case:
    k_format: str
    v_format: str
    head_dim: int = 128
    v_head_dim: int = 128
    num_kv_heads: int = 1
    group: int = 8
    blocks_per_warp: int = 1
    word_copies: bool = False

    def __str__(self) -> str:
        dims = f"d{self.head_dim}v{self.v_head_dim}-h{self.num_kv_heads}x{self.group}w{self.blocks_per_warp}"
        return f"{self.k_format}-{self.v_format}-{dims}" + ("-word" if self.word_copies else "")

    @property
    def forms(self) -> tuple[KvFormat, KvFormat]:
        return format_of(self.k_format), format_of(self.v_format)

    @property
    def q_dtype(self) -> str:
        return next((name for name in (self.k_format, self.v_format) if name in Q_DTYPES), "bf16")

    def configs(self) -> list[DecodeConfig]:
        """Candidates of the schedule: all where K and V are alike at head_dim 128, else the first.

        With several blocks to a warp, one warp takes what several would.
        """
        heads = (self.num_kv_heads * self.group, self.num_kv_heads)
        dims = (self.head_dim, self.v_head_dim)
        formats = (self.k_format, self.v_format)
        problem = AttentionProblem(
            len(LENGTHS), TOKENS, *heads, *dims, *formats, self.q_dtype, aligned=not self.word_copies
        )
        found = candidate_configs(problem)
        if self.k_format != self.v_format or dims != (128, 128):
            found = found[:1]
        if self.blocks_per_warp > 1:
            fields = {"num_query_blocks": 1, "blocks_per_warp": self.blocks_per_warp, "num_slices": 2}
            found = [changed(config, **fields) for config in found[:1]]
        return list(dict.fromkeys(found))


def alike(kv_format: str, head_dim: int = 128, **fields) -> Case:
    return Case(kv_format, kv_format, head_dim, head_dim, **fields)


CASES = [alike(name, d) for name in FORMATS for d in HEAD_DIMS if not cannot_read(format_of(name), d)]
CASES += [Case(k, v) for k in FAMILIES for v in FAMILIES if k != v]
CASES += [
    *(alike(name, num_kv_heads=h) for name in ("int8_token_head", "e4m3_head", "int8_g8", "e5m2") for h in (3, 8, 32)),
    *(alike(name, group=g) for name in ("int8_channel", "e4m3_token_head", "int4_g2") for g in (1, 5, 16, 40)),
    alike("int8_token_head", word_copies=True),
    alike("int8_g2", 80, num_kv_heads=3, word_copies=True),
    Case("e5m2", "int4_g1", word_copies=True, num_kv_heads=2),
    Case("bf16", "bf16", 192, 128),
    Case("e4m3_tensor", "e4m3_tensor", 192, 128, num_kv_heads=2),
    Case("int8_channel", "fp16", 96, 256, num_kv_heads=2),
    Case("int4_g1", "int8_token_head", 80, 64, num_kv_heads=4),
    Case("int8_head", "int4_g2", 192, 128, num_kv_heads=8, group=2),
    *(
        alike(name, d, group=8 * blocks - 3, blocks_per_warp=blocks, num_kv_heads=2)
        for name in ("bf16", "int4_g1", "int8_token_head", "e4m3_head")
        for d, blocks in ((128, 2), (64, 4))
    ),
]


def specs() -> list[AttentionSpec]:
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""
    return [AttentionSpec(config) for config in dict.fromkeys(config for case in CASES for config in case.configs())]


@pytest.fixture(scope="module")
def kernels() -> None:
    load_many(specs(), arch_of())


@dataclasses.dataclass(frozen=True)
class Operand:
    rows: torch.Tensor
    scale: torch.Tensor | None
    values: torch.Tensor  # fp64 [batch, tokens, num_kv_heads, head_dim]


def make_operand(form: KvFormat, head_dim: int, num_kv_heads: int, generator: torch.Generator) -> Operand:
    """Normal values as the format stores them; scales that are given are calibrated on them."""
    shape = (len(LENGTHS), TOKENS, num_kv_heads, head_dim)
    x = torch.randn(shape, generator=generator, device=CUDA)
    scale = None
    if form.given_scale is not None:
        top = x.abs().flatten(0, 1).amax(0)  # [num_kv_heads, head_dim]
        if form.given_scale != "channel":
            top = top.amax(-1, keepdim=True) if form.given_scale == "head" else top.amax()
        scale = top / (448 if form.name.startswith("e4m3") else 127)
    rows = form.quantize(x, scale)
    values = form.dequantize(rows, head_dim, torch.float64, scale)
    # What lies past a length must not matter.
    for request, length in enumerate(LENGTHS):
        rows.view(torch.uint8)[request, length:] = 0xFF
    return Operand(rows, scale, values)


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """fp64 [batch, 1, num_q_heads, v_head_dim]."""
    group = q.shape[2] // keys.shape[2]
    keys, values = (x.repeat_interleave(group, dim=2) for x in (keys, values))
    scores = torch.einsum("bhd,bthd->bht", q[:, 0].double(), keys) * q.shape[3] ** -0.5
    lengths = torch.tensor(LENGTHS, device=CUDA)
    behind = torch.arange(TOKENS, device=CUDA) >= lengths[:, None]
    p = scores.masked_fill(behind[:, None], -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("bht,bthd->bhd", p, values).unsqueeze(1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_is_attention(case: Case, kernels):
    generator = torch.Generator(CUDA).manual_seed(1)
    keys, values = (
        make_operand(form, d, case.num_kv_heads, generator)
        for form, d in zip(case.forms, (case.head_dim, case.v_head_dim), strict=True)
    )
    shape = (len(LENGTHS), 1, case.num_kv_heads * case.group)
    q = torch.randn(*shape, case.head_dim, generator=generator, device=CUDA).to(Q_DTYPES[case.q_dtype])
    seq_lens = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
    want = attention(q, keys.values, values.values)
    for config in case.configs():
        for num_splits in (1, 3, None):
            out = torch.full((*shape, case.v_head_dim), torch.nan, dtype=q.dtype, device=CUDA)
            run = bind_config(
                config,
                q,
                keys.rows,
                values.rows,
                seq_lens,
                out=out,
                num_splits=num_splits,
                kv_format=(case.k_format, case.v_format),
                k_scale=keys.scale,
                v_scale=values.scale,
            )
            run()
            assert not out[0].any(), "the output of a request without tokens is 0"
            error = float(relative_errors(out, want)[1:].square().mean().sqrt())
            assert error <= TOLERANCE[q.dtype], f"{config.name}, {num_splits} splits: relative error {error:.2e}"
