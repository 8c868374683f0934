"""Transforms and KV formats on CUDA tensors: the bytes of the CPU, at memory speed, without host synchronisation."""

import pytest
import torch

from layouts.kv import Fp8E4M3, Fp8E5M2, Int4Row, Int8, MlaDense, MlaFp8, MlaModel1
from layouts.weights import fastertransformer, hopper

FORMATS = [Int4Row(128, 1), Int4Row(128, 4), Int8(128), Int8(128, "group", 4), Fp8E4M3(128), Fp8E5M2(128)]
FORMATS += [Fp8E5M2(128, truncate=True), MlaFp8(), MlaModel1(), MlaDense(), MlaDense("fp16")]


def weight(k, n, bits, experts=None):
    lead = () if experts is None else (experts,)
    return torch.randint(-128, 128, (*lead, k, n * bits // 8), dtype=torch.int8)


@pytest.fixture
def no_synchronisation():
    """Any host synchronisation inside the test is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("arch", [70, 80, 90, 100])
@pytest.mark.parametrize("experts", [None, 3])
def test_preprocessing_gives_the_bytes_of_the_cpu(bits, arch, experts):
    q = weight(512, 384, bits, experts)
    on_gpu = fastertransformer.preprocess(q.cuda(), bits, arch)
    assert torch.equal(on_gpu.cpu(), fastertransformer.preprocess(q, bits, arch))
    assert torch.equal(fastertransformer.restore(on_gpu, bits, arch).cpu(), q)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_hopper_blob_has_the_bytes_of_the_cpu(bits):
    q = weight(640, 1024, bits)
    assert torch.equal(hopper.pack(q.cuda(), bits).cpu(), hopper.pack(q, bits))
    assert torch.equal(hopper.restore(hopper.pack(q.cuda(), bits), bits).cpu(), q)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f.head_dim}-{f.name}")
def test_rows_have_the_bytes_of_the_cpu(fmt):
    x = torch.randn(33, 2, fmt.head_dim, dtype=torch.bfloat16) * 3
    rows = fmt.quantize(x)
    assert torch.equal(fmt.quantize(x.cuda()).cpu(), rows)
    assert torch.equal(fmt.dequantize(rows.cuda()).cpu(), fmt.dequantize(rows))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f.head_dim}-{f.name}")
def test_rows_are_made_and_read_without_synchronising(fmt, no_synchronisation):
    x = torch.randn(8, 2, fmt.head_dim, dtype=torch.bfloat16, device="cuda")
    rows = fmt.quantize(x)
    fmt.pack(*fmt.unpack(rows))
    fmt.dequantize(rows, torch.bfloat16)


@pytest.mark.parametrize("pack", [lambda q: fastertransformer.preprocess(q, 4, 80), lambda q: hopper.pack(q, 4)])
def test_one_gigabyte_of_int4_weights_is_packed_in_under_50_ms(pack):
    q = torch.randint(-128, 128, (32768, 32768), dtype=torch.int8, device="cuda")
    pack(q)
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        pack(q)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    print(f"{q.numel() / 1e9:.2f} GB in {min(times):.1f} ms")
    assert min(times) < 50
