"""Constants of a cache in a file: what is written is read, and what is wrong with a file is said."""

import json
import re

import pytest
import torch

from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.kv_cache.constants import CacheConstants, ConstantsError, constants_of

safetensors_torch = pytest.importorskip("safetensors.torch")


def make_constants():
    full = CacheTransform(torch.randn(2, 64), torch.rand(2, 64) + 0.5, 32, -torch.rand(2, 128) - 0.5, 128)
    transforms = (None, full, CacheTransform(k_rotation=64))
    scales = ((None, None), (torch.rand(2, 1), torch.rand(())), (None, torch.rand(2, 64)))
    return CacheConstants(transforms, scales, {"model": "a model", "tokens": "12"})


def header(**changes):
    good = {"format": "cute_kernels.cache_constants", "version": "1", "rotations": "[[1, 1], [32, 1]]", "about": "{}"}
    return {key: value for key, value in (good | changes).items() if value is not None}


def test_what_is_written_is_read(tmp_path):
    made, path = make_constants(), tmp_path / "constants.safetensors"
    made.save(path)
    read = constants_of(path)
    assert [one and one.key for one in read.transforms] == [one and one.key for one in made.transforms]
    assert read.about == made.about and read.num_layers == 3
    for pair, wanted in zip(read.scales, made.scales, strict=True):
        for scale, want in zip(pair, wanted, strict=True):
            assert (scale is None) == (want is None)
            assert scale is None or want is None or torch.equal(scale, want)
    assert constants_of(made) is made


def test_layers_may_share_arrays_and_have_nothing(tmp_path):
    center, path = torch.randn(2, 64), tmp_path / "constants.safetensors"
    CacheConstants((CacheTransform(center), CacheTransform(center), CacheTransform())).save(str(path))
    read = CacheConstants.load(str(path), "cpu")
    assert read.scales == () and read.transforms[2] is None
    assert read.transforms[0] is not None and torch.equal(read.transforms[0].arrays["k_center"], center)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"format": None}, {}, "got a file of 'something else', want 'cute_kernels.cache_constants'"),
        ({"version": "2"}, {}, "got version '2', want '1'"),
        ({"rotations": None}, {}, "rotations: got None, want pairs of widths"),
        ({"rotations": "[[1]]"}, {}, "rotations: got '[[1]]', want pairs of widths"),
        ({"rotations": "[]"}, {}, "rotations: got '[]', want pairs of widths"),
        ({"rotations": '[[1, "2"]]'}, {}, "want pairs of widths"),
        ({"rotations": "[[1, 1], [24, 1]]"}, {}, "layer 1: k_rotation: got 24, want 1 or a power of two"),
        ({"about": "[1]"}, {}, "about: got list, want a dict of texts"),
        ({"about": "{"}, {}, "constants.safetensors: Expecting"),
        ({}, {"layers.2.k_center": torch.zeros(2, 64)}, "got a tensor 'layers.2.k_center', want constants of 2 layers"),
        ({}, {"model.weight": torch.zeros(2, 64)}, "got a tensor 'model.weight'"),
        ({}, {"layers.0.k_center": torch.zeros(2, 64).half()}, "layer 0: k_center: got dtype torch.float16"),
        ({}, {"layers.1.k_factor": torch.zeros(2, 64)}, "layer 1: k_factor: got 0 for column 0 of head 0"),
        ({}, {"layers.1.k_center": torch.full((2, 64), torch.nan)}, "layer 1: k_center: got NaN or infinity"),
        ({}, {"layers.1.k_center": torch.zeros(2, 80)}, "layer 1: k_rotation: got 32, want"),
        ({}, {"layers.1.v_scale": torch.tensor(-1.0)}, "scales[1]: v_scale: got -1.0, want positive finite numbers"),
    ],
)
def test_bad_files_are_named(tmp_path, changes, tensors, message):
    path = tmp_path / "constants.safetensors"
    safetensors_torch.save_file(tensors, str(path), header(**changes))
    with pytest.raises(ConstantsError, match=re.escape(message)) as caught:
        CacheConstants.load(path)
    assert str(path) in str(caught.value)


def test_what_is_no_whole_file_is_named(tmp_path):
    path = tmp_path / "constants.safetensors"
    with pytest.raises(FileNotFoundError, match="no such file; `cute-kernels calibrate` writes one"):
        CacheConstants.load(path)
    make_constants().save(path)
    whole = path.read_bytes()
    for part in (b"", b"no such thing", whole[:-10], whole[:20]):
        path.write_bytes(part)
        with pytest.raises(ConstantsError, match="constants.safetensors: no whole safetensors file"):
            CacheConstants.load(path)
    with pytest.raises(TypeError, match="constants: got int, want CacheConstants, or a file's path"):
        constants_of(3)  # type: ignore[arg-type]


def test_constants_are_checked_when_they_are_made():
    with pytest.raises(ValueError, match="transforms: got"):
        CacheConstants(())
    with pytest.raises(TypeError, match=r"transforms\[1\]: got str"):
        CacheConstants((None, "rotate"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scales: got 1 layers', want 2"):
        CacheConstants((None, None), ((None, None),))
    for pair in (None, (torch.ones(2),), torch.ones(2)):
        with pytest.raises(TypeError, match=r"scales\[0\]: got .*, want \(K's scale, V's scale\)"):
            CacheConstants((None,), (pair,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scales\[0\]: k_scale: got dtype torch.float64"):
        CacheConstants((None,), ((torch.ones(2).double(), None),))
    with pytest.raises(TypeError, match="about: got 'tokens': 3, want text"):
        CacheConstants((None,), about={"tokens": 3})  # type: ignore[dict-item]


def test_a_file_says_what_it_is_of(tmp_path):
    path = tmp_path / "constants.safetensors"
    make_constants().save(path)
    with safetensors_torch.safe_open(str(path), "pt") as file:
        assert json.loads(file.metadata()["about"]) == {"model": "a model", "tokens": "12"}
        assert json.loads(file.metadata()["rotations"]) == [[1, 1], [32, 128], [64, 1]]
