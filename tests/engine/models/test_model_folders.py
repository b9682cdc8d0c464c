"""Folders as they are published: shards of any naming, old names of settings, and quantized weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlft_fast.engine import export_hf
from rlft_fast.models import folder_dtype, load_policy
from tests.engine.reference import make_engine
from tests.support.tiny_models import save_tiny_model

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_two_files(folder: Path, target: Path, first: str, second: str) -> dict[str, torch.Tensor]:
    """A copy of the folder with its weights in two files, without an index; the weights."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names = [*weights]
    for file, half in ((first, names[::2]), (second, names[1::2])):
        save_file({name: weights[name] for name in half}, target / file, {"format": "pt"})
    return weights


# Of the usual form without its index, of another library, and without any pattern.
@pytest.mark.parametrize(
    "files",
    [
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("pytorch_model-1-of-2.safetensors", "pytorch_model-2-of-2.safetensors"),
        ("language.safetensors", "model.fp32.safetensors"),
    ],
)
def test_shards_of_any_naming(files, tiny_model, tmp_path):
    weights = in_two_files(tiny_model("llama"), tmp_path / "model", *files)
    shutil.copy(tmp_path / "model" / files[0], tmp_path / "model" / "consolidated.safetensors")  # Mistral's own format
    loaded = dict(load_policy(tmp_path / "model").model.named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


def test_an_index_of_another_name(tiny_model, tmp_path):
    weights = in_two_files(tiny_model("llama"), tmp_path / "model", "a.safetensors", "b.safetensors")
    names = [*weights]
    weight_map = dict.fromkeys(names[::2], "a.safetensors") | dict.fromkeys(names[1::2], "b.safetensors")
    (tmp_path / "model" / "other.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({names[0]: weights[names[0]] + 1}, tmp_path / "model" / "c.safetensors")  # which the index does not name
    assert torch.equal(load_policy(tmp_path / "model").model.get_parameter(names[0]), weights[names[0]])


def test_a_missing_shard_without_an_index(tiny_model, tmp_path):
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    in_two_files(tiny_model("llama"), tmp_path / "model", *files)
    (tmp_path / "model" / files[1]).unlink()
    with pytest.raises(ValueError, match=r"1 of the 2 files model-\?{5}-of-00002\.safetensors: download the others"):
        load_policy(tmp_path / "model")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_by_both_of_its_names(key, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    change_config(folder, {"dtype": None, "torch_dtype": None} | {key: "bfloat16"})
    assert folder_dtype(folder) == torch.bfloat16


def change_config(folder: Path, changes: dict) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def quantize_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Quantizes linear layers as DeepSeek does, in 2 x 2 blocks. Returns the weights that the folder then has."""
    stored, expected = {}, {}
    for name, x in load_file(folder / "model.safetensors").items():
        stored[name] = expected[name] = x
        if x.dim() == 2 and "proj" in name:
            height, width = x.shape[0] // 2, x.shape[1] // 2
            scale = x.abs().reshape(2, height, 2, width).amax((1, 3)) / 448
            scales = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
            stored[name], stored[f"{name}_scale_inv"] = (x / scales).to(torch.float8_e4m3fn), scale
            expected[name] = stored[name].float() * scales
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    return expected


def quantize_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Puts random 4-bit experts into a gpt-oss. Returns the weights that the folder then has."""
    stored, expected, generator = {}, {}, torch.Generator().manual_seed(0)
    for name, x in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj"):
            stored[name] = expected[name] = x
            continue
        shape = (x.shape[0], x.shape[2], x.shape[1] // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)
        pairs = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1).flatten(-2)
        expected[name] = (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, {"quantization_config": {"quant_method": "mxfp4"}})
    return expected


# Experts are joined after they are dequantized. In bfloat16 the float32 masters are read, too.
@pytest.mark.parametrize(
    ("name", "quantize", "dtype"),
    [("mixtral", quantize_fp8, "float32"), ("llama", quantize_fp8, "bfloat16"), ("gpt-oss", quantize_mxfp4, "float32")],
)
def test_quantized_weights_are_dequantized(name, quantize, dtype, tmp_path):
    folder = save_tiny_model(name, tmp_path / "model", **({"intermediate_size": 64} if name == "gpt-oss" else {}))
    expected = quantize(folder)
    engine = make_engine(folder, config={"param_dtype": dtype}, dtype=dtype)
    loaded = dict(engine.named_weights(torch.float32))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], x) for key, x in expected.items())
    export_hf(engine, tmp_path / "exported", dtype="float32")
    exported = load_policy(tmp_path / "exported").state_dict()
    assert all(torch.equal(exported[f"model.{key}"], x) for key, x in expected.items() if f"model.{key}" in exported)


def test_other_quantized_weights_are_refused(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    change_config(folder, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(ValueError, match=r"quantized by gptq, and .* loading are fp8 and mxfp4: dequantize it"):
        load_policy(folder)
