"""Decode steps of layers with multi-head latent attention and experts, such as DeepSeek-V3's, for `bench.e2e_steps`.

A layer is one product for the low-rank query and the token to be cached, a norm of each, the queries' up-projection,
the absorbed products around `mla_decode`, o, and experts of which one is shared. Routers choose the topk greatest of
all experts, without groups of them. The absorbed weights stay in bf16 and the queries' RoPE is torch's, in every case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from bench import steps
from bench.steps import EPS, PAGE_SIZE, ROPE_THETA, Cached, Rows, Shape, Step, StepCase, StepModel
from cute_kernels import NormedRows, append_mla, mla_decode, quantize_mla_kv, rms_norm
from cute_kernels.kv_cache import Rope
from cute_kernels.mla.formats import format_of
from cute_kernels.names import MlaFormatName

LATENT, ROPE_COLUMNS, NOPE_COLUMNS, VALUE_COLUMNS = 512, 64, 128, 128
TOKEN = LATENT + ROPE_COLUMNS
QUERY = NOPE_COLUMNS + ROPE_COLUMNS
CASES = (
    StepCase("bf16", "mla_bf16", sdpa=True),
    StepCase("bf16", "mla_fp8"),
    StepCase("w4", "mla_fp8"),
    StepCase("w4", "mla_bf16"),
)


@dataclass(frozen=True)
class LatentModel(StepModel):
    """Layers with latent attention. query_rank: of the queries' low-rank projection; one more expert, of the others'
    size, serves every token."""

    query_rank: int = 1536

    @property
    def cases(self) -> tuple[StepCase, ...]:
        return CASES

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        heads = self.num_q_heads
        return {
            "down": (self.query_rank + TOKEN, self.hidden),
            "q": (heads * QUERY, self.query_rank),
            "o": (self.hidden, heads * VALUE_COLUMNS),
            "shared_gate_up": (2 * self.intermediate, self.hidden),
            "shared_down": (self.hidden, self.intermediate),
        }

    def weight_bytes(self, weights: str, batch: int) -> float:
        absorbed = 2 * self.num_q_heads * LATENT * (NOPE_COLUMNS + VALUE_COLUMNS)
        return super().weight_bytes(weights, batch) + absorbed

    def cache_bytes(self, kv: Cached, tokens: int, v: Cached | None = None) -> int:
        return tokens * format_of(kv).row_bytes(TOKEN)

    def step(self, case: StepCase, shape: Shape, device: str = "cuda", layers: int | None = None) -> Step:
        return LatentStep(self, case, shape, device, layers)


class LatentStep(Step):
    """`Step` of a `LatentModel`."""

    def make_layer(self) -> dict[str, Any]:
        heads, rank = self.model.num_q_heads, self.query_rank
        parts = super().make_layer()
        # The norms before "down" and before the experts are those of every step.
        parts["query_norm"] = torch.ones(rank, dtype=torch.bfloat16, device=self.device)
        parts["latent_norm"] = torch.ones(LATENT, dtype=torch.bfloat16, device=self.device)
        parts["key_up"] = self.random(heads, NOPE_COLUMNS, LATENT)
        parts["value_up"] = self.random(heads, LATENT, VALUE_COLUMNS)
        return parts

    @property
    def query_rank(self) -> int:
        assert isinstance(self.model, LatentModel)
        return self.model.query_rank

    def make_cache(self) -> dict[str, Any]:
        """Pages of `PAGE_SIZE` tokens in random order; for torch's attention one behind the other."""
        form, batch = format_of(self.case.kv), self.shape.batch
        pages = -(-self.shape.context // PAGE_SIZE)
        row = form.row_elements(TOKEN)
        cache = torch.empty(batch * pages, PAGE_SIZE, row, dtype=form.cache_dtypes[0], device=self.device)
        self.fill(cache)
        order = torch.arange if self.case.sdpa else torch.randperm
        table = order(batch * pages, device=self.device).to(torch.int32).view(batch, pages)
        last = self.shape.context - 1
        position = torch.full((batch,), last, dtype=torch.int64, device=self.device)
        return {
            "cache": cache,
            "table": table,
            "slots": table[:, last // PAGE_SIZE].long() * PAGE_SIZE + last % PAGE_SIZE,
            "position": position,
            "rotation": rotations(position),
        }

    def fill(self, cache: torch.Tensor) -> None:
        rows = cache.view(-1, cache.shape[-1])
        numbers = torch.randn(min(steps.FILLED_ROWS, len(rows)), TOKEN, device=self.device).bfloat16()
        some = quantize_mla_kv(numbers, kv_format=self.kv).view(rows.dtype)
        steps.fill_rows(rows, some)

    @property
    def kv(self) -> MlaFormatName:
        kv = self.case.kv
        assert kv == "mla_bf16" or kv == "mla_fp8"
        return kv

    def layer(self, parts: dict[str, Any], rows: Rows, following: dict[str, Any]) -> Rows:
        attended = self.latent_attention(self.normed(parts["down"], rows), parts)
        rows = self.added(parts["o"], attended, rows.rows, parts["mlp_norm"], None)
        x = rows.normed()
        weights, ids = torch.topk(functional.linear(x, parts["router"]).float().sigmoid(), self.model.topk, dim=-1)
        chosen = parts["experts"](x, weights / weights.sum(-1, keepdim=True), ids)
        shared = parts["shared_down"](parts["shared_gate_up"](x, activation="swiglu"), residual=rows.rows)
        return NormedRows(shared + chosen, following["norm"], EPS)

    def latent_attention(self, projected: torch.Tensor, parts: dict[str, Any]) -> torch.Tensor:
        """What attention gives o, of the low-rank query and the token to be cached."""
        query, token = projected.split((self.query_rank, TOKEN), dim=-1)
        cache = parts["cache"]
        latent, key = token.split((LATENT, ROPE_COLUMNS), dim=-1)
        append_mla(
            as_tensor(rms_norm(latent, parts["latent_norm"], eps=EPS)),
            key,
            cache["cache"],
            kv_format=self.kv,
            slot_mapping=cache["slots"],
            rope=Rope(ROPE_COLUMNS, theta=ROPE_THETA, interleaved=True),
            position_ids=cache["position"],
        )
        q = parts["q"](as_tensor(rms_norm(query, parts["query_norm"], eps=EPS)))
        seen = self.attend_latent(self.absorbed(q, parts), cache)
        return torch.bmm(seen.transpose(0, 1), parts["value_up"]).transpose(0, 1).flatten(1)

    def absorbed(self, q: torch.Tensor, parts: dict[str, Any]) -> torch.Tensor:
        """Queries of the cache's columns, [batch, heads, `TOKEN`]."""
        batch, heads = self.shape.batch, self.model.num_q_heads
        nope, rope = q.view(batch, heads, QUERY).split((NOPE_COLUMNS, ROPE_COLUMNS), dim=-1)
        found = torch.empty(batch, heads, TOKEN, dtype=q.dtype, device=q.device)
        found[..., :LATENT] = torch.bmm(nope.transpose(0, 1), parts["key_up"]).transpose(0, 1)
        pairs = torch.view_as_complex(rope.float().unflatten(-1, (-1, 2)))
        found[..., LATENT:] = torch.view_as_real(pairs * parts["cache"]["rotation"][:, None]).flatten(-2)
        return found

    def attend_latent(self, q: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        """[batch, heads, `LATENT`]; by torch all heads are the queries of one head."""
        if not self.case.sdpa:
            given = {"kv_format": self.kv, "block_table": cache["table"], "softmax_scale": QUERY**-0.5}
            return mla_decode(q.unsqueeze(1), cache["cache"], self.seq_lens, **given).squeeze(1)
        tokens = cache["cache"].view(self.shape.batch, 1, -1, TOKEN)[:, :, : self.shape.context]
        attend: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
        return attend(q.unsqueeze(1), tokens, tokens[..., :LATENT], scale=QUERY**-0.5).squeeze(1)


MODELS = {
    "deepseek-v3-layers": LatentModel(
        "DeepSeek-V3, 2 of its layers", 2, 7168, 2048, 128, 1, experts=256, topk=8, about="experts on one GPU"
    ),
}


def rotations(position: torch.Tensor) -> torch.Tensor:
    """RoPE's rotations of positions as complex numbers, [batch, `ROPE_COLUMNS` / 2]."""
    exponents = torch.arange(0, ROPE_COLUMNS, 2, device=position.device) / ROPE_COLUMNS
    angles = position[:, None].double() * ROPE_THETA ** -exponents.double()
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def as_tensor(normed: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A norm without a residual."""
    assert isinstance(normed, torch.Tensor)
    return normed
