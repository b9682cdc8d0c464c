"""Every supported architecture, packed or padded, against its plain self: one sequence after the other in float64."""

import pytest
import torch

from rlft_fast.data import Batch, Images
from rlft_fast.engine.forward import prepare_model_inputs
from tests.engine import reference
from tests.engine.reference import (
    gemma_images,
    make_engine,
    near_policy,
    policy_loss,
    random_batch,
    random_image_batch,
    value_loss,
)
from tests.support.tiny_models import IMAGE_TOKEN_ID, MORE_MODELS, PADDED_MODELS, PICTURE_MODELS, VISION_MODELS

# Transformers' gated delta rule computes in float32 inside, whatever the dtype.
IN_FLOAT32 = {"qwen3.5": 5.0}


def batch_for(name: str) -> Batch:
    return random_image_batch(name=name) if name in VISION_MODELS | PICTURE_MODELS else random_batch()


# tests/engine/test_engine.py has those of MODELS.
@pytest.mark.parametrize("name", [*MORE_MODELS, *PADDED_MODELS, *VISION_MODELS, *PICTURE_MODELS])
def test_logprob_entropy_and_gradient(tiny_model, name):
    path, batch, factor = tiny_model(name), batch_for(name), IN_FLOAT32.get(name, 1.0)
    plain = reference.PlainPolicy(path, batch)
    engine = make_engine(path, temperature=reference.TEMPERATURE, max_tokens=80)
    inferred = engine.infer(batch, ("logprob", "entropy"))
    torch.testing.assert_close(inferred["logprob"].double(), plain.logprob_T, rtol=0, atol=factor * 1e-5)
    torch.testing.assert_close(inferred["entropy"].double(), plain.entropy_T, rtol=0, atol=1e-5)
    batch = near_policy(batch, plain.logprob_T.float())
    metrics = engine.train_step(batch, policy_loss())
    assert 0.05 < metrics["clip_share"] < 0.95  # both branches of the loss are on trial
    expected = plain.gradients(batch, "token-mean")
    trained = {name: x for name, x in expected.items() if x is not None}  # not a layer that LLaVA leaves out
    found = reference.gradients(engine)
    assert not any(found.pop(unused).any() for unused in found.keys() - trained.keys())
    # A softmax does not see the bias of keys: both gradients are rounding. Keys that are rotated see theirs.
    for key_bias in [each for each in trained if each.endswith("k_proj.bias") and "vision_tower" in each]:
        assert found.pop(key_bias).abs().max() < 1e-6 > trained.pop(key_bias).abs().max()
    reference.assert_close(found, trained, factor * 2e-5)


def test_samples_of_a_prompt_share_rows_that_attend_to_later_ones(tiny_model):
    """Gemma 3: two samples of two images, a text with the same tokens and other images, and one of text alone."""
    path, generator = tiny_model("gemma3-vision"), torch.Generator().manual_seed(0)
    (inputs, runs), (others, _) = (gemma_images(2, generator) for _ in range(2))
    prompt = [5, *(t for run in runs for t in [7, *[IMAGE_TOKEN_ID] * run, 8]), 20]
    images = [Images("a", inputs), Images("a", inputs), Images("b", others), None]
    batch = Batch.from_samples([*[prompt] * 3, [5, 6]], [[1, 2, 3], [1, 4], [1, 2, 3], [9]], images=images)
    engine = make_engine(path)
    rows = prepare_model_inputs(batch, torch.device("cpu"), backbone=engine.model.backbone).look_ahead.row_N
    assert len(rows) == 2 * sum(runs)
    expected, _ = reference.plain_logprob_and_entropy(path, batch)
    torch.testing.assert_close(engine.infer(batch, ("logprob",))["logprob"].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", VISION_MODELS)
def test_a_critic_sees_images(tiny_model, name):
    path, batch = tiny_model(name), random_image_batch()
    engine = make_engine(path, head="value", max_tokens=80)
    values = engine.infer(batch, ("value",))["value"]
    backbone = reference.plain_model(path).model
    with torch.no_grad():
        hidden = [
            backbone(input_ids=ids[None], **reference.images(backbone, batch, b)).last_hidden_state[0]
            for b, ids in enumerate(batch.input_ids_T.split(batch.lengths.tolist()))
        ]
    expected = torch.cat(hidden).sum(-1) * reference.HEAD_WEIGHT * batch.loss_mask_T
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-5)
    batch = batch.replace(value_T=values, return_T=batch.advantage_T)
    engine.train_step(batch, value_loss())
    assert all(gradient.any() for gradient in reference.gradients(engine).values())
