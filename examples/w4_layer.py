"""Linear layers with 4-bit weights: one layer, then every layer of a model.

python examples/w4_layer.py
"""

import torch

from cute_kernels import QuantizedLinear, quantize_model, quantize_weight, quantized_linear

device = "cuda" if torch.cuda.is_available() else "cpu"
dense = torch.nn.Linear(1024, 512, dtype=torch.bfloat16, device=device)
x = torch.randn(4, 1024, dtype=torch.bfloat16, device=device)

weight = quantize_weight(dense.weight, bits=4, group_size=128)  # round to nearest
y = quantized_linear(x, weight, dense.bias)
print(weight)
print(f"relative difference from 16 bits: {((y - dense(x)).norm() / y.norm()).item():.3f}")

layer = QuantizedLinear.from_linear(dense, group_size=64)  # the same as a module
assert layer(x).shape == (4, 512)

model = torch.nn.Sequential(dense, torch.nn.SiLU(), torch.nn.Linear(512, 256, dtype=torch.bfloat16, device=device))
quantize_model(model, bits=4, progress=lambda name, done, total: print(f"[{done}/{total}] layer {name}"))
assert isinstance(model[2], QuantizedLinear)
assert model(x).shape == (4, 256)
