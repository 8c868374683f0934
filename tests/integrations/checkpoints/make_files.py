"""Makes the small files in `made`: layers written by the projects' own code, each with the weight that it stands for.

    PYTHONPATH=...: python -m tests.integrations.checkpoints.make_files hqq torchao compressed-tensors auto-round floats

Each name wants that package (made with hqq 0.2.8, torchao 0.18.0, compressed-tensors 0.20.0, auto-round 0.16.1; floats:
torchao 0.18.0 and compressed-tensors 0.20.1; modelopt: nvidia-modelopt 0.47.0); tests read the files and want none of
them. `want` is the project's own dequantising, in fp32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

MADE = Path(__file__).parent / "made"
N, K, GROUP = 32, 128, 64
NAME = "model.layers.0.mlp.up_proj"


def dense(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    linear = nn.Linear(K, N, bias=False)
    with torch.no_grad():
        linear.weight.copy_(0.05 * torch.randn(N, K) + 0.03 * torch.randn(N, 1))  # off centre
    return linear


def write(name: str, tensors: dict[str, Any], want: torch.Tensor, config: dict[str, Any], metadata: Any = None) -> None:
    directory = MADE / name
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata=metadata)
    save_file({"want": want.detach().float().contiguous()}, directory / "want.st")
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}, indent=1) + "\n")


def hqq() -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer  # pyright: ignore[reportMissingImports]

    for name, bits, options in (
        ("hqq4", 4, {}),
        ("hqq4_round_zero", 4, {"round_zero": True}),
        ("hqq8", 8, {}),
    ):
        config = BaseQuantizeConfig(nbits=bits, group_size=GROUP, axis=1)
        config["weight_quant_params"].update({"optimize": True, "round_zero": bits == 4, **options})
        if name == "hqq4_round_zero":
            config["weight_quant_params"]["optimize"] = False
        layer = HQQLinear(dense(bits), config, compute_dtype=torch.float16, device="cpu")
        meta = {**layer.meta, "compute_dtype": torch.float32}
        meta |= {key: meta[key].float() for key in ("scale", "zero")}
        want = Quantizer.dequantize(layer.W_q.data, meta)
        state = {f"{NAME}.{key}": tensor for key, tensor in layer.state_dict().items()}
        write(name, state, want, {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": bits}}})


def torchao() -> None:
    from torchao.prototype.safetensors.safetensors_support import (  # pyright: ignore[reportMissingImports]
        flatten_tensor_state_dict,
    )
    from torchao.quantization import (  # pyright: ignore[reportMissingImports]
        Int4Tensor,
        Int8Tensor,
        IntxUnpackedToInt8Tensor,
        MappingType,
        PerGroup,
        PerRow,
    )

    asymmetric, symmetric = MappingType.ASYMMETRIC, MappingType.SYMMETRIC
    w, int4 = dense(1).weight.data.bfloat16(), getattr(torch, "int4")  # noqa: B009 - unknown to type checkers
    made = {
        "torchao_int8": Int8Tensor.from_hp(w, PerRow()),
        "torchao_int8_asymmetric": Int8Tensor.from_hp(w, PerGroup(GROUP), mapping_type=asymmetric),
        "torchao_intx4": IntxUnpackedToInt8Tensor.from_hp(w, (1, GROUP), int4, mapping_type=asymmetric),
        "torchao_intx8": IntxUnpackedToInt8Tensor.from_hp(w, (1, K), torch.int8, mapping_type=symmetric),
    }
    for name, tensor in made.items():
        wide = tensor.dequantize(torch.float32) if name.startswith("torchao_int8") else _wide(tensor)
        state, metadata = flatten_tensor_state_dict({f"{NAME}.weight": tensor})
        write(name, state, wide, {"quant_method": "torchao"}, metadata)
    # FBGEMM's quantiser wants a GPU; its convention is W = q * scale + zero_point, even k in the low half of a byte.
    q = torch.randint(-8, 8, (N, K), dtype=torch.int8)
    scale, zero = 0.01 * torch.rand(K // GROUP, N).bfloat16(), 0.05 * torch.randn(K // GROUP, N).bfloat16()
    packed = (q[:, ::2] & 15) | (q[:, 1::2] << 4)
    tensor = Int4Tensor(packed, scale, zero, [1, GROUP], torch.Size((N, K)))
    by_group = q.float().unflatten(1, (-1, GROUP))
    wide = (by_group * scale.T[..., None].float() + zero.T[..., None].float()).flatten(1)
    state, metadata = flatten_tensor_state_dict({f"{NAME}.weight": tensor})
    write("torchao_int4", state, wide, {"quant_method": "torchao"}, metadata)


def _wide(tensor: Any) -> torch.Tensor:
    """IntxUnpackedToInt8Tensor's dequantising in fp32."""
    parts = tensor.qdata, tensor.scale.float(), tensor.zero_point
    return type(tensor)(*parts, tensor.target_dtype, tensor.block_size, torch.float32, None).dequantize()


def compressed_tensors() -> None:
    from compressed_tensors.compressors.naive_quantized.base import (  # pyright: ignore[reportMissingImports]
        IntQuantizationCompressor,
    )
    from compressed_tensors.compressors.pack_quantized.base import (  # pyright: ignore[reportMissingImports]
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
        QuantizationArgs,
        QuantizationScheme,
    )

    packed = PackedQuantizationCompressor, "pack-quantized"
    cases = {
        "ct_w4": (*packed, {"num_bits": 4, "group_size": GROUP, "symmetric": False}),
        "ct_w8": (*packed, {"num_bits": 8, "symmetric": True}),
        "ct_int_w8": (IntQuantizationCompressor, "int-quantized", {"num_bits": 8, "symmetric": False}),
        "ct_int_w8_group": (IntQuantizationCompressor, "naive-quantized", {"num_bits": 8, "group_size": GROUP}),
    }  # fmt: skip
    for name, (compressor, stored, said) in cases.items():
        strategy = "group" if "group_size" in said else "channel"
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(strategy=strategy, **said))
        w, groups = dense(2).weight.data.bfloat16(), K // said.get("group_size", K)
        grouped, top = w.float().unflatten(1, (groups, -1)), 2 ** (said["num_bits"] - 1)
        state = {"weight": w}
        if said.get("symmetric", True):
            state["weight_scale"] = (grouped.abs().amax(-1) / (top - 1)).bfloat16()
        else:
            low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
            state["weight_scale"] = ((high - low) / (2 * top - 1)).bfloat16()
            zero = (-low / state["weight_scale"].float()).round().clamp(0, 2 * top - 1) - top
            state["weight_zero_point"] = zero.to(torch.int8)
        tensors = compressor.compress(state, scheme)
        wide = {key: t.float() if key == "weight_scale" else t for key, t in tensors.items()}
        want = compressor.decompress(wide, scheme)["weight"]
        config = {
            "quant_method": "compressed-tensors",
            "format": stored,
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {**said, "strategy": strategy, "type": "int"}}
            },
            "ignore": ["lm_head"],
        }
        write(name, {f"{NAME}.{key}": tensor for key, tensor in tensors.items()}, want, config)


FLOATS: dict[str, tuple[str, dict[str, Any]]] = {
    "ct_nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}),
    "ct_mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "ct_mxfp8": ("mxfp8-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    "ct_fp8_tensor": ("float-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "ct_fp8_channel": ("float-quantized", {"num_bits": 8, "strategy": "channel"}),
    "ct_fp8_block": ("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}),
}


def floats() -> None:
    """Codes of floats: compressed-tensors', then torchao's."""
    from compressed_tensors.compressors.base import BaseCompressor  # pyright: ignore[reportMissingImports]
    from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
        QuantizationArgs,
        QuantizationScheme,
    )
    from torchao.prototype.mx_formats.mx_tensor import MXTensor  # pyright: ignore[reportMissingImports]
    from torchao.prototype.mx_formats.nvfp4_tensor import (  # pyright: ignore[reportMissingImports]
        NVFP4Tensor,
        per_tensor_amax_to_scale,
    )
    from torchao.prototype.safetensors.safetensors_support import (  # pyright: ignore[reportMissingImports]
        flatten_tensor_state_dict,
    )
    from torchao.quantization import Float8Tensor, PerRow, PerTensor  # pyright: ignore[reportMissingImports]

    for name, (stored, said) in FLOATS.items():
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="float", symmetric=True, **said))
        compressor, w = BaseCompressor.get_value_from_registry(stored), dense(4).weight.data
        most = 6.0 if said["num_bits"] == 4 else 448.0
        blocks = w.unflatten(1, (-1, said.get("group_size", K)))
        scale = blocks.abs().amax(-1) / most
        state = {"weight": w}
        if said["strategy"] in ("tensor", "block"):
            scale = scale.amax().reshape(1, 1) if said["strategy"] == "block" else scale.amax().reshape(1)
        if stored.startswith("mx"):
            scale = scale.log2().ceil().exp2()
        if said["strategy"] == "tensor_group":
            state["weight_global_scale"] = (6 * 448 / w.abs().max()).reshape(1)
            scale = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        tensors = compressor.compress({**state, "weight_scale": scale}, scheme)
        # In fp32, also where the project's own dequantising would come out in bf16.
        wide = {key: t.float() if t.dtype == torch.bfloat16 else t for key, t in tensors.items()}
        want = _dequantized(wide, scheme)
        groups = {"group_0": {"targets": ["Linear"], "weights": {**said, "type": "float", "symmetric": True}}}
        groups["group_0"]["input_activations"] = {**said, "type": "float", "dynamic": True}
        config = {"quant_method": "compressed-tensors", "format": stored, "config_groups": groups}
        write(name, {f"{NAME}.{key}": tensor for key, tensor in tensors.items()}, want, config)
    w = dense(5).weight.data
    second = per_tensor_amax_to_scale(w.abs().max())
    made = {
        "torchao_nvfp4": NVFP4Tensor.to_nvfp4(w, per_tensor_scale=second),
        "torchao_nvfp4_blocked": NVFP4Tensor.to_nvfp4(w, per_tensor_scale=second, is_swizzled_scales=True),
        "torchao_mxfp4": MXTensor.to_mx(w, torch.float4_e2m1fn_x2, 32),
        "torchao_mxfp8": MXTensor.to_mx(w, torch.float8_e4m3fn, 32, is_swizzled_scales=True),
        "torchao_fp8_row": Float8Tensor.from_hp(w, granularity=PerRow()),
        "torchao_fp8_tensor": Float8Tensor.from_hp(w, granularity=PerTensor()),
    }
    for name, tensor in made.items():
        state, metadata = flatten_tensor_state_dict({f"{NAME}.weight": tensor})
        write(name, state, tensor.dequantize(torch.float32), {"quant_method": "torchao"}, metadata)


def _dequantized(tensors: dict[str, torch.Tensor], scheme: Any) -> torch.Tensor:
    """compressed-tensors' dequantising in fp32."""
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale  # pyright: ignore[reportMissingImports]
    from compressed_tensors.compressors.nvfp4.helpers import (  # pyright: ignore[reportMissingImports]
        unpack_fp4_from_uint8,
    )
    from compressed_tensors.quantization.lifecycle.forward import dequantize  # pyright: ignore[reportMissingImports]

    codes = tensors["weight"].float() if "weight" in tensors else None
    if codes is None:
        codes = unpack_fp4_from_uint8(tensors["weight_packed"], N, K).float()
    scale = tensors["weight_scale"]
    scale = decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale
    second = tensors.get("weight_global_scale")
    return dequantize(codes, scale.float(), args=scheme.weights, global_scale=second, dtype=torch.float32)


MODELOPT = {  # by the name of its configuration
    "modelopt_fp8": "FP8_DEFAULT_CFG",
    "modelopt_fp8_row": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "modelopt_fp8_block": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "modelopt_mxfp8": "MXFP8_DEFAULT_CFG",
    "modelopt_mxfp4": "W4A8_MXFP4_FP8_CFG",
    "modelopt_nvfp4": "NVFP4_DEFAULT_CFG",
}


def modelopt() -> None:
    """Writes a layer of the directory that ModelOpt exports of a small model."""
    import modelopt.torch.quantization as mtq  # pyright: ignore[reportMissingImports]
    from modelopt.torch.export import export_hf_checkpoint  # pyright: ignore[reportMissingImports]
    from modelopt.torch.quantization import qtensor  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    for name, config in MODELOPT.items():
        torch.manual_seed(6)
        k = 2 * K if name == "modelopt_fp8_block" else K
        sizes: dict[str, Any] = {"hidden_size": k, "intermediate_size": N, "num_hidden_layers": 1, "vocab_size": 64}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])).bfloat16()
        tokens = torch.randint(0, 64, (4, 32))
        mtq.quantize(model, getattr(mtq, config), lambda model, tokens=tokens: model(tokens))
        with TemporaryDirectory() as path:
            export_hf_checkpoint(model, export_dir=path)
            found = load_file(Path(path) / "model.safetensors")
            said = json.loads((Path(path) / "config.json").read_text())["quantization_config"]
        own = {key.removeprefix(f"{NAME}."): tensor for key, tensor in found.items() if key.startswith(NAME)}
        given: dict[str, Any] = {"scale": own["weight_scale"]}
        kind, shape = qtensor.FP8QTensor, (N, k)
        if "fp4" in name:
            kind = qtensor.NVFP4QTensor if "nvfp4" in name else qtensor.MXFP4QTensor
            given |= {"double_scale": own.get("weight_scale_2"), "block_sizes": {-1: 16 if "nvfp4" in name else 32}}
        elif name == "modelopt_mxfp8":
            kind = qtensor.MXFP8QTensor
        elif name == "modelopt_fp8_block":
            given = {"scale": own["weight_scale"][:, 0, :, 0], "block_sizes": {-1: 128, -2: 128}}
        elif name == "modelopt_fp8_row":
            given = {"scale": own["weight_scale"][:, None]}
        want = kind(torch.Size(shape), torch.float32, own["weight"]).dequantize(torch.float32, **given)
        write(name, {f"{NAME}.{key}": tensor for key, tensor in own.items()}, want, said)


def auto_round() -> None:
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM  # pyright: ignore[reportMissingImports]
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp  # pyright: ignore[reportMissingImports]

    linear = dense(3).half()
    grouped = linear.weight.data.float().unflatten(1, (-1, GROUP))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    for bits in (4, 8):
        top = 2**bits - 1
        scale = ((high - low) / top).half()
        zero = (-low / scale.float()).round().clamp(1, top)
        codes = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
        want = ((codes - zero[..., None]) * scale.float()[..., None]).flatten(1)
        linear.weight.data = want.half()  # so that packing finds these codes again
        for packing, module in (("auto_round", qlinear_torch), ("auto_round:auto_gptq", qlinear_torch_zp)):
            layer = module.QuantLinear(bits, GROUP, K, N, False)
            layer.device = "cpu"
            layer.pack(linear, scale, zero, None, device="cpu")
            state = {f"{NAME}.{key}": tensor for key, tensor in layer.state_dict().items()}
            config = {
                "quant_method": "auto-round",
                "packing_format": packing,
                "bits": 4,
                "group_size": GROUP,
                "sym": False,
            }
            config["extra_config"] = (
                {NAME: {"bits": bits}} if packing == "auto_round" else {".*up_proj.*": {"bits": bits}}
            )
            write(f"{packing.replace(':', '_')}_{bits}", state, want, config)
        if bits == 4:
            layer = WQLinear_GEMM.from_linear(
                linear, 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous(), device="cpu"
            )
            state = {f"{NAME}.{key}": tensor for key, tensor in layer.state_dict().items()}
            config = {
                "quant_method": "auto-round",
                "packing_format": "auto_round:auto_awq",
                "bits": 4,
                "group_size": GROUP,
            }
            write("auto_round_auto_awq_4", state, want, config)


MAKERS = {
    "hqq": hqq,
    "torchao": torchao,
    "compressed-tensors": compressed_tensors,
    "auto-round": auto_round,
    "floats": floats,
    "modelopt": modelopt,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", choices=MAKERS, metavar="PACKAGE")
    for package in parser.parse_args(arguments).packages:
        MAKERS[package]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
