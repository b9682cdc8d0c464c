"""examples/trl_grpo.py beside TRL's own GRPOTrainer, whose head is the reference."""

import copy
import json
import runpy
from pathlib import Path

import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from trl import GRPOConfig, GRPOTrainer

from tests.support.tiny_models import IMAGE_TOKEN_ID, PAD_TOKEN_ID

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_grpo.py"))
FusedGRPOTrainer = EXAMPLE["FusedGRPOTrainer"]
LEARNING_RATE = 0.1


def load(folder: Path) -> PreTrainedModel:
    images = "vision_config" in json.loads((folder / "config.json").read_text())
    auto_class = AutoModelForImageTextToText if images else AutoModelForCausalLM
    return auto_class.from_pretrained(folder, dtype=torch.float32)


def make_trainer(trainer_class, model, tokenizer: Path, output: Path, peft_config=None, **options) -> GRPOTrainer:
    """Plain SGD: its steps differ no more than the gradients. AdamW enlarges differences of gradients near 0."""
    defaults = {
        "use_cpu": True, "bf16": False, "optim": "sgd", "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant",
        "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8,
        "temperature": 0.8, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return trainer_class(
        model,
        lambda completions, **_: [float(len(set(text))) for text in completions],
        GRPOConfig(str(output), **defaults | options),
        Dataset.from_dict({"prompt": ["1 + 2 = ", "a", "hello there"]}),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        peft_config=peft_config,
    )


def padded_batch(prompt_lengths: list[int], completion_lengths: list[int]) -> tuple[Tensor, Tensor, int]:
    """Prompts that end and completions that begin in the same column, as TRL makes them; and the columns of these."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(max(prompt_lengths) + max(completion_lengths)) - max(prompt_lengths)
    mask = (columns >= -torch.tensor(prompt_lengths)[:, None]) & (columns < torch.tensor(completion_lengths)[:, None])
    ids = torch.randint(0, 256, mask.shape, generator=generator).masked_fill(~mask, PAD_TOKEN_ID)
    return ids, mask.long(), max(completion_lengths)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gemma2"])  # gemma2 caps its logits
def test_logprobs_and_entropies_are_those_of_trl(name, tiny_model, tmp_path, monkeypatch):
    theirs, ours = (
        make_trainer(trainer_class, load(tiny_model(name)), tiny_model(name), tmp_path)
        for trainer_class in (GRPOTrainer, FusedGRPOTrainer)
    )
    batch = padded_batch([3, 7, 5], [6, 2, 9])
    with torch.no_grad():
        expected = theirs._get_per_token_logps_and_entropies(theirs.model, *batch, batch_size=2, compute_entropy=True)
    logps, entropies, _ = theirs._get_per_token_logps_and_entropies(theirs.model, *batch, compute_entropy=True)
    weights = torch.randn(2, *logps.shape, generator=torch.Generator().manual_seed(1))
    (weights[0] * logps + weights[1] * entropies).sum().backward()

    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", None)  # TRL's kernel: nobody calls it
    with torch.no_grad():
        actual = ours._get_per_token_logps_and_entropies(ours.model, *batch, batch_size=2, compute_entropy=True)
        without = ours._get_per_token_logps_and_entropies(ours.model, *batch)
    assert actual[0].shape == actual[1].shape == (3, 9)
    torch.testing.assert_close(actual[:2], expected[:2], rtol=0, atol=1e-5)
    torch.testing.assert_close(without[0], actual[0], rtol=0, atol=1e-5)
    assert actual[2] is without[1] is without[2] is None
    logps, entropies, _ = ours._get_per_token_logps_and_entropies(ours.model, *batch, compute_entropy=True)
    (weights[0] * logps + weights[1] * entropies).sum().backward()
    for (key, parameter), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        scale = other.grad.abs().max()  # a sum over 17 tokens, each of float32 precision
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-5 * scale, msg=lambda m, k=key: k + m)


def image_batch() -> tuple[tuple[Tensor, Tensor, int], dict]:
    """The first sequence has an image of 2 x 4 patches, the second one of 4 x 4, the third none."""
    ids, mask, columns = padded_batch([8, 8, 8], [6, 2, 9])
    is_image = torch.zeros_like(ids)
    is_image[0, 2:4] = is_image[1, 2:6] = 1
    grids = torch.tensor([[1, 2, 4], [1, 4, 4]])
    pixels = torch.randn(24, 24, generator=torch.Generator().manual_seed(2))
    images = {"pixel_values": pixels, "image_grid_thw": grids, "num_images": [1, 1, 0], "mm_token_type_ids": is_image}
    return (ids.masked_fill(is_image == 1, IMAGE_TOKEN_ID), mask, columns), images


def test_images_reach_the_model(tiny_model, tmp_path):
    theirs, ours = (
        make_trainer(trainer_class, load(tiny_model("qwen2-vl")), tiny_model("qwen2-vl"), tmp_path)
        for trainer_class in (GRPOTrainer, FusedGRPOTrainer)
    )
    batch, images = image_batch()
    other_images = images | {"pixel_values": -images["pixel_values"]}
    with torch.no_grad():
        expected, actual, others = (
            trainer._get_per_token_logps_and_entropies(trainer.model, *batch, compute_entropy=True, **inputs)
            for trainer, inputs in ((theirs, images), (ours, images), (ours, other_images))
        )
    torch.testing.assert_close(actual[:2], expected[:2], rtol=0, atol=1e-5)
    assert (actual[0] - others[0]).abs()[:2].max() > 0.01


LORA = LoraConfig(r=2, target_modules="all-linear")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2", {"entropy_coef": 0.1, "loss_type": "grpo"}),
        ("llama-tied", {"num_iterations": 2, "steps_per_generation": 1, "gradient_checkpointing": True}),
        ("gemma2", {"beta": 0.5}),
        ("llama-tied", {"beta": 0.5, "peft_config": LORA, "gradient_checkpointing": True}),
    ],
    ids=["entropy bonus", "old log-probabilities", "reference model", "adapter"],
)
def test_training_is_that_of_trl(name, options, tiny_model, tmp_path):
    trainers = [
        make_trainer(trainer_class, load(tiny_model(name)), tiny_model(name), tmp_path, **copy.deepcopy(options))
        for trainer_class in (GRPOTrainer, FusedGRPOTrainer)
    ]
    before = {key: parameter.detach().clone() for key, parameter in trainers[1].model.named_parameters()}
    for trainer in trainers:
        torch.manual_seed(0)
        trainer.train()
    theirs, ours = (trainer.state.log_history for trainer in trainers)
    assert [set(step) for step in theirs] == [set(step) for step in ours]
    for step, other in zip(theirs[:2], ours[:2], strict=True):
        assert other.get("reward") == step.get("reward")  # the same samples
        assert other["grad_norm"] > 0.1
        for key in {"loss", "grad_norm", "entropy", "kl"} & step.keys():
            assert other[key] == pytest.approx(step[key], rel=1e-5, abs=1e-6), key
    # Gradients agree to about 1e-6 of their norm, which is clipped to 1; each step rounds the weights once.
    moved = 0.0
    for (key, theirs), ours in zip(trainers[0].model.named_parameters(), trainers[1].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-5 * LEARNING_RATE, msg=lambda m, k=key: k + m)
        moved = max(moved, (ours - before[key]).abs().max().item())
    assert moved > 0.01 * LEARNING_RATE


def test_a_model_that_has_an_adapter_already(tiny_model, tmp_path):
    theirs, ours = (
        make_trainer(trainer_class, get_peft_model(load(tiny_model("llama")), LORA), tiny_model("llama"), tmp_path)
        for trainer_class in (GRPOTrainer, FusedGRPOTrainer)
    )
    assert isinstance(ours.model, PeftModel)
    batch = padded_batch([3, 7], [6, 2])
    with torch.no_grad():
        expected, actual = (t._get_per_token_logps_and_entropies(t.model, *batch)[0] for t in (theirs, ours))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def mixtral() -> PreTrainedModel:
    sizes = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2))


def with_adapted_head(model: PreTrainedModel) -> PeftModel:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (str, {}, TypeError, "expected a transformers PreTrainedModel, got str"),
        (lambda _: mixtral(), {}, ValueError, "does not know a router's auxiliary loss: set router_aux_loss_coef=0.0"),
        (load, {"cast_lm_head_to_fp32": True}, ValueError, "does not know cast_lm_head_to_fp32: leave it out"),
        (load, {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}, ValueError,
         "does not know prompt learning"),
        (lambda folder: with_adapted_head(load(folder)), {}, ValueError, "has an adapter .*leave it out"),
    ],
)  # fmt: skip
def test_what_it_refuses(make, options, error, message, tiny_model, tmp_path):
    with pytest.raises(error, match=message):
        make_trainer(FusedGRPOTrainer, make(tiny_model("llama")), tiny_model("llama"), tmp_path, **options)


def test_experts_without_an_auxiliary_loss(tiny_model, tmp_path):
    trainer = make_trainer(FusedGRPOTrainer, mixtral(), tiny_model("llama"), tmp_path, router_aux_loss_coef=0.0)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_main_prints_rewards(tiny_model, tmp_path, capsys):
    rows = '{"prompt": "1 + 2\u2028= ", "answer": "3"}\n' * 8  # which is no end of a line here
    (tmp_path / "data.jsonl").write_text(rows, encoding="utf-8")
    EXAMPLE["main"](tiny_model("llama"), tmp_path / "data.jsonl", 2)
    assert "step 2  reward 0." in capsys.readouterr().out
