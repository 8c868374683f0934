"""The demo, on a CPU: what `make demo` shows without a GPU."""

import pytest
import torch

from bench import demo

TINY = demo.Scale(2, 40, 3, 1, 64, 96, 4, 2, head_dim=64)


def run(*arguments, **options) -> int:
    show = lambda pair, head_dim: print(f"kernels for {pair[0]}")  # noqa: E731
    return demo.run(*arguments, scale=TINY, show_kernels=show, **options)


def test_the_demo_decodes_compares_and_says_that_there_is_no_gpu(capsys):
    assert run() == 0
    out = capsys.readouterr().out
    assert out.startswith("No CUDA GPU: decode_attention runs its reference implementation")
    assert [line.split()[0] for line in out.splitlines() if line.strip()[:1].isdigit()] == ["1", "2", "3"]
    assert "tokens/s" in out and "KV cache MB" in out and "No GB/s" in out
    assert "2.67 times fewer bytes" in out  # head_dim 64: 128 bytes against 48
    assert out.rstrip().endswith("kernels for int4_g4")


def test_the_demo_fails_if_the_kernel_is_wrong(capsys, monkeypatch):
    right = demo.cute_kernels.decode_attention
    monkeypatch.setattr(demo.cute_kernels, "decode_attention", lambda *a, **k: right(*a, **k) * 1.01)
    assert run() == 1
    assert "FAILED: decode_attention is further than" in capsys.readouterr().out


def test_the_bf16_cache_reproduces_the_model_without_a_cache():
    from cute_kernels.integrations import transformers as integration

    integration.register()
    tokens = demo.tokenize("to be or not to be", 2, 43)
    model = demo.make_model(TINY, torch.device("cpu"))
    with torch.inference_mode():
        exact = demo.uncached_logits(model, tokens, 3)
        model.set_attn_implementation(integration.ATTENTION_NAME)
        found = demo.decode(model, tokens, integration.DecodeCache("bf16", 64), 3)
    assert found.logits.shape == exact.shape == (3, 2, 256) and found.attention.shape == (3, 1, 2, 64)
    assert found.cache.get_seq_length() == 43
    assert demo._error(found.logits, exact) < 2e-2


def test_a_prompt_of_ones_own(capsys, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Call me Ishmael. Some years ago, never mind how long precisely.")
    assert run("int4_g1", steps=2, prompt=path) == 0
    out = capsys.readouterr().out
    assert str(path) in out and "Call me Ishmael." in out and "int4_g1 cache" in out


def test_tokens_are_the_texts_bytes_from_spread_starts():
    assert demo.tokenize("abcdef", 2, 4).tolist() == [[97, 98, 99, 100], [100, 101, 102, 97]]
    with pytest.raises(ValueError, match="prompt: got an empty text"):
        demo.tokenize("", 1, 4)
