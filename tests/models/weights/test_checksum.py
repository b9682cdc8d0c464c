"""A model folder's checksum: the same for a copy, another for another model."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlft_fast.models import model_checksum


def test_a_copy_has_the_same_and_each_difference_another(tiny_model, tmp_path):
    model = tiny_model("llama")
    tensors = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    matrix, vector = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    bfloat16 = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    first = tensors[matrix].clone()
    first[0, 0] += 1
    changes = [
        (config, tensors),
        (config, tensors | {matrix: first}),
        (config, tensors | {vector: tensors[vector] + 1}),
        (config, tensors | {matrix: tensors[matrix].T.contiguous()}),
        (config, {name: tensor for name, tensor in tensors.items() if name != vector}),
        (config, tensors | {"scale": torch.tensor(1.5)}),
        (config, tensors | {"scale": torch.tensor(2.5)}),
        (config, bfloat16),
        (config | {"rope_theta": 5}, tensors),
    ]
    checksums = []
    for i, (config, tensors) in enumerate(changes):
        folder = shutil.copytree(model, tmp_path / str(i))
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        checksums.append(model_checksum(folder))
    copy = shutil.copytree(tmp_path / "0", tmp_path / "copy")
    (copy / "._model.safetensors").write_bytes(b"Mac OS X")
    assert model_checksum(copy) == checksums[0]
    assert len({*checksums}) == len(checksums)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_unreadable_folder(name, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (folder / name).write_text("x") if name.startswith("model") else (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"the model in {re.escape(str(folder))} cannot be read: "):
        model_checksum(folder)
