"""RoPE: frequencies are those of transformers, angles are exact at any position."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.kv_cache import LinearScaling, Llama3Scaling, NtkScaling, Rope, YarnScaling
from cute_kernels.kv_cache.rope import rope_of

LLAMA = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
DEEPSEEK = {"mscale": 1.0, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}
THETA = 500000.0

# transformers' name, its parameters, the sequence length it is told, and ours.
SCALINGS: dict[str, tuple[str, dict[str, Any], int | None, Any]] = {
    "linear": ("linear", {"factor": 4.0}, None, LinearScaling(4.0)),
    "NTK at the trained length": ("dynamic", {"factor": 4.0}, 100, NtkScaling(4.0, 4096, 100)),
    "NTK at three times the trained length": ("dynamic", {"factor": 4.0}, 3 * 4096, NtkScaling(4.0, 4096, 3 * 4096)),
    "Llama 3": ("llama3", {"factor": 8.0, **LLAMA}, None, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    "YaRN": ("yarn", {"factor": 16.0, "original_max_position_embeddings": 4096}, None, YarnScaling(16.0, 4096)),
    "YaRN, other betas": (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 64.0, "beta_slow": 2.0},
        None,
        YarnScaling(4.0, 32768, beta_fast=64.0, beta_slow=2.0),
    ),
    "YaRN, not truncated (gpt-oss)": (
        "yarn",
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        None,
        YarnScaling(32.0, 4096, truncate=False),
    ),
    "YaRN, mscale (DeepSeek)": (
        "yarn",
        {"factor": 40.0, **DEEPSEEK},
        None,
        YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=0.707),
    ),
    "YaRN, attention factor": (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.7},
        None,
        YarnScaling(4.0, 4096, attention_factor=1.7),
    ),
}


@pytest.mark.parametrize(("name", "parameters", "seq_len", "scaling"), SCALINGS.values(), ids=list(SCALINGS))
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_frequencies_and_attention_factor_are_those_of_transformers(name, parameters, seq_len, scaling, partial):
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config = SimpleNamespace(
        head_dim=128,
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": THETA, "partial_rotary_factor": partial, **parameters},
        standardize_rope_params=lambda: None,
    )
    want, want_factor = functions[name](config, torch.device("cpu"), seq_len)
    rope = Rope(int(128 * partial), THETA, scaling=scaling)
    # It computes in fp32.
    torch.testing.assert_close(torch.tensor(rope.frequencies(), dtype=torch.float64), want.double(), rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(want_factor, rel=1e-12)


def test_ntk_without_a_length_stretches_by_its_factor():
    """The lowest frequency is divided by the factor, the highest kept: what NTK-aware scaling is made for."""
    plain, scaled = Rope(128).frequencies(), Rope(128, scaling=NtkScaling(4.0)).frequencies()
    assert scaled[0] == plain[0] == 1.0
    assert scaled[-1] == pytest.approx(plain[-1] / 4.0)


@pytest.mark.parametrize("scaling", [None, *(case[3] for case in SCALINGS.values())], ids=["none", *SCALINGS])
def test_angles_are_exact_at_any_position(scaling):
    rope = Rope(64, THETA, scaling=scaling)
    positions = torch.tensor([0, 1, 4095, 131072, 1_000_003, 2**24 + 1, -1, -77])
    cos, sin = rope.rotation(positions)
    for row, position in enumerate(positions.tolist()):
        for pair, frequency in enumerate(rope.frequencies()):
            angle = math.remainder(position * frequency, 2 * math.pi)
            slack = 2e-9 + abs(position) * frequency * 2.0**-52  # of this product, in fp64
            assert abs(cos[row, pair] - rope.attention_factor * math.cos(angle)) < 2 * slack
            assert abs(sin[row, pair] - rope.attention_factor * math.sin(angle)) < 2 * slack


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 16])
def test_pairs_are_rotated_and_the_rest_passes_through(rotary_dim, interleaved):
    rope = Rope(rotary_dim, interleaved=interleaved)
    x = torch.randn(5, 3, 64, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 500, 100_000])
    turned = rope.apply(x, positions)
    assert torch.equal(turned[..., rotary_dim:], x[..., rotary_dim:])
    torch.testing.assert_close(turned[0], x[0])
    half = rotary_dim // 2
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        angle = positions.double()[:, None] * rope.frequencies()[pair]
        want = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(torch.complex(turned[..., a], turned[..., b]), want, rtol=0, atol=1e-8)


def test_transformers_rotates_alike():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(1, 4, 7, 128), torch.randn(1, 2, 7, 128)
    positions = torch.arange(3, 10)
    rope = Rope(128)
    cos, sin = (torch.cat((part, part), dim=-1)[None] for part in rope.rotation(positions, torch.float32))
    for got, want in zip(
        (rope.apply(x[0].transpose(0, 1), positions) for x in (q, k)),
        modeling.apply_rotary_pos_emb(q, k, cos, sin),
        strict=True,
    ):
        torch.testing.assert_close(got.transpose(0, 1), want[0])


@pytest.mark.parametrize("scaling", [None, *(case[3] for case in SCALINGS.values())], ids=["none", *SCALINGS])
def test_a_rope_comes_back_from_its_text(scaling):
    rope = Rope(96, 1e6, True, scaling)
    assert rope_of(rope.text) == rope and hash(rope_of(rope.text)) == hash(rope)
    assert rope != Rope(96, 1e6, False, scaling)


def test_numbers_of_numpy_come_back_from_a_ropes_text():
    rope = Rope(96, np.float64(1e6), scaling=LinearScaling(np.float64(2.5)))
    assert rope_of(rope.text) == rope


def test_phase_steps_are_made_once():
    assert Rope(128).phase_steps() is Rope(128).phase_steps("cpu")
    assert Rope(128).phase_steps().dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rotary_dim": 0}, ValueError, "rotary_dim: got 0, want a positive even int"),
        ({"rotary_dim": 63}, ValueError, "rotary_dim: got 63, want a positive even int"),
        ({"rotary_dim": 64.0}, ValueError, "rotary_dim: got 64.0, want a positive even int"),
        ({"rotary_dim": 64, "theta": 1.0}, ValueError, "theta: got 1.0, want a number above 1"),
        ({"rotary_dim": 64, "scaling": 2.0}, TypeError, "scaling: got float, want one of LinearScaling"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Rope(**arguments)


@pytest.mark.parametrize("name", ["mscale", "mscale_all_dim"])
@pytest.mark.parametrize(("value", "error"), [(math.nan, ValueError), (-1.0, ValueError), ("1", TypeError)])
def test_yarns_factors_of_cosines_are_numbers(name, value, error):
    with pytest.raises(error, match=f"{name}: got"):
        YarnScaling(4.0, 4096, **{"mscale": 1.0, "mscale_all_dim": 1.0, name: value})


def test_ntk_wants_its_lengths_together():
    with pytest.raises(ValueError, match="got original_max_position 4096 and seq_len None, want both or none"):
        NtkScaling(2.0, 4096)
