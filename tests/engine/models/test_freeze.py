"""Weights that are not trained, by the patterns of their names."""

import pytest
import torch

from rlft_fast.config import EngineConfig
from rlft_fast.engine.sharding.build import build_model
from tests.engine import reference
from tests.engine.reference import make_engine, near_policy, policy_loss, random_image_batch


def test_a_frozen_tower_changes_no_other_gradient(tiny_model):
    path, batch = tiny_model("qwen2.5-vl"), random_image_batch()
    engines = [make_engine(path, config={"freeze": freeze}) for freeze in ((), ("model.visual.*",))]
    batch = near_policy(batch, engines[0].infer(batch, ("logprob",))["logprob"])
    before = reference.weights(engines[1])
    for engine in engines:
        engine.train_step(batch, policy_loss())
    whole, frozen = map(reference.gradients, engines)
    assert frozen.keys() == {name for name in whole if "visual." not in name} < whole.keys()
    for name, gradient in frozen.items():
        assert torch.equal(gradient, whole[name])
    after = reference.weights(engines[1])
    assert all(torch.equal(after[name], before[name]) == ("visual." in name) for name in before)


def test_frozen_layers_have_no_adapter_and_a_pattern_fits(tiny_model):
    config = EngineConfig(freeze=("model.visual.*",), lora={"rank": 2})
    names = [
        name for name, _ in build_model(str(tiny_model("qwen2-vl")), config, "logprob", trains=True).named_modules()
    ]
    adapted = [name for name in names if "lora_A." in name]
    assert adapted
    assert not [name for name in adapted if "visual." in name]
    with pytest.raises(ValueError, match=r"freeze has the pattern 'visual\.\*', which fits none of ") as error:
        build_model(str(tiny_model("qwen2-vl")), EngineConfig(freeze=("visual.*",)), "logprob", trains=True)
    for kind in ("model.visual.patch_embed.proj.weight", "model.visual.blocks.*", "model.language_model.layers.*"):
        assert f" {kind}," in str(error.value)
    assert str(error.value).endswith(", lm_head.weight")
