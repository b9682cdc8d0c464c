"""Runs whose prompts have images."""

import base64
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from rlft_fast.config import Config
from rlft_fast.data import Batch
from rlft_fast.trainer import PPOTrainer, train
from tests.engine.reference import plain_model
from tests.rollout.vllm.test_images import save_wide
from tests.support.machine.distributed import run_distributed
from tests.support.pictures import asking, picture, plain_processor
from tests.support.runs.vllm_rollouts import SMALL, needs_vllm
from tests.support.tiny_models import save_tiny_model
from tests.trainer.toy import comparable, read_lines, toy_config, write_rows


@pytest.fixture
def config(tmp_path, tiny_model):
    """Rows with one image, with two, and with none."""
    for i in range(5):
        picture(i, 12 + i, 16).save(tmp_path / f"{i}.png")
    rows = [{"prompt": asking({"path": f"{i}.png"}, "what?")} for i in range(4)]
    rows += [{"prompt": asking({}, "or", {}, "?"), "images": ["0.png", "4.png"]}, {"prompt": asking("hi")}]
    write_rows(tmp_path / "rows.jsonl", rows)

    def make(run: str = "run", **changes: Any):
        values = {
            "output_dir": str(tmp_path / run), "data__path": str(tmp_path / "rows.jsonl"), "data__chat": True,
            "rollout__max_prompt_tokens": 64, "actor__max_tokens": 200, "checkpoint__every": 1,
        }  # fmt: skip
        return toy_config(changes.pop("model", tiny_model("qwen2-vl")), tmp_path, **values | changes)

    return make


def assert_plain(model, batch: Batch, b: int, found_T: Tensor, **inputs: Tensor) -> None:
    """Sequence b has the generator's log-probabilities, and the engine's, of the model in float64 with these inputs."""
    begin, end = batch.cu_seqlens[b : b + 2].tolist()
    ids, mask = batch.input_ids_T[None, begin:end], batch.loss_mask_T[begin : end - 1]
    if inputs:
        inputs["pixel_values"] = inputs["pixel_values"].double()
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
    with torch.no_grad():
        logprob = torch.log_softmax(model(input_ids=ids, **inputs).logits[0], -1)
    expected = logprob[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
    for values_T in (found_T, batch.rollout_logprob_T):
        own = values_T[begin : end - 1][mask].double()
        torch.testing.assert_close(own, expected[mask], rtol=0, atol=2e-5)


def test_log_probabilities_are_those_of_plain_transformers(config, tmp_path, tiny_model):
    """From the files to the update: the generator's, and the engine's."""
    trainer = PPOTrainer(config(rollout__prompts_per_step=6))
    trainer.start(0)
    experience = trainer.collect(0)
    batch = experience.batch
    found = trainer.actor.infer(batch.unweighted(), ("logprob",))["logprob"]
    trainer.close()
    model, processor = plain_model(tiny_model("qwen2-vl")), plain_processor(tiny_model("qwen2-vl"))
    bounds = batch.cu_seqlens.tolist()
    for b, row in enumerate(experience.taught.row_B.tolist()):
        ids = batch.input_ids_T[None, bounds[b] : bounds[b + 1]]
        inputs = {}
        if row in experience.prompts.images:
            pictures = [Image.open(tmp_path / name) for name in experience.prompts.images[row].names]
            inputs = processor(images=pictures, text=[experience.prompts.texts[row]], return_tensors="pt")
            assert torch.equal(inputs["input_ids"][0], ids[0, : inputs["input_ids"].shape[1]])
            inputs = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
        assert_plain(model, batch, b, found, **inputs)


@pytest.fixture
def episodes(config, tmp_path):
    """The same rows for an environment that shows pictures. A reply ends by any of a third of all tokens."""
    model = save_tiny_model("qwen2-vl", tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, *range(0, 256, 3)]}))
    rows = read_lines(tmp_path / "rows.jsonl")
    write_rows(tmp_path / "rows.jsonl", [row | {"first": i % 3} for i, row in enumerate(rows)])
    environment = {"name": f"{Path(__file__).with_name('environments.py')}:Pictures"}

    def make(run: str = "run", **changes: Any):
        values = {
            "model": str(model),
            "environment": environment,
            "reward": {},
            "rollout__max_new_tokens": 60,
            "actor__max_tokens": 2000,
        }
        return config(run, **values | changes)

    return make


def test_episodes_have_the_log_probabilities_of_plain_transformers(episodes, tmp_path):
    """From what an environment draws to the update. The tower runs once on each of the pictures."""
    trainer = PPOTrainer(episodes(rollout__prompts_per_step=6))
    trainer.start(0)
    experience = trainer.collect(0)
    batch, seen = experience.batch, []
    trainer.actor.model.backbone.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    found = trainer.actor.infer(batch.unweighted(), ("logprob",))["logprob"]
    trainer.close()
    model, processor = plain_model(tmp_path / "model"), plain_processor(tmp_path / "model")
    different = {}
    for b, row in enumerate(experience.taught.row_B.tolist()):
        own = experience.prompts.images.get(row)
        pictures = [Image.open(tmp_path / name) for name in own.names] if own is not None else []
        answers = [
            [Image.open(io.BytesIO(base64.b64decode(x))) for x in answer] for answer in experience.taught.pictures[b]
        ]
        assert all(len(answer) == 1 for answer in answers)
        different |= {tuple(x.tobytes() for x in part): part for part in (pictures, *answers) if part}
        shown = [*pictures, *(x for answer in answers for x in answer)]
        inputs = processor.image_processor(shown, return_tensors="pt") if shown else {}
        assert_plain(model, batch, b, found, **inputs)
    assert max(map(len, experience.taught.pictures)) == 2
    patches = [len(processor.image_processor(part, return_tensors="pt")["pixel_values"]) for part in different.values()]
    assert seen == [sum(patches)]


@needs_vllm
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM's image processors need torchvision")
def test_vllm_is_shown_the_same(episodes, tmp_path):
    model = save_wide("qwen2-vl", tmp_path)
    make = episodes("vllm", model=str(model), steps=1, rollout__backend="vllm", rollout__vllm=SMALL)
    (model / "generation_config.json").write_text((tmp_path / "model" / "generation_config.json").read_text())
    train(make)
    (line,) = (line for line in read_lines(tmp_path / "vllm" / "metrics.jsonl") if "loss" in line)
    assert line["mismatch_max"] < 1e-4
    assert line["turns_mean"] > 1
    assert line["environment_failed_mean"] == 0


@pytest.mark.slow
def test_interrupted_episodes_go_on_bit_for_bit(episodes, tmp_path):
    train(episodes("whole", steps=2))
    train(episodes("cut", steps=1))
    train(episodes("cut", steps=2), resume=True)
    lines = comparable(tmp_path / "whole")
    assert comparable(tmp_path / "cut") == lines
    for line in lines:
        assert line["ratio_max"] == 1.0
        assert line["mismatch_max"] < 1e-4
        assert line["stop_image_mean"] == 0
        assert line["turns_mean"] > 1


def test_an_interrupted_run_goes_on_bit_for_bit(config, tmp_path):
    """And on-policy ratios are 1, the log names the images, and held-out rows may have images."""
    more = {"steps": 2, "evaluation": {"path": str(tmp_path / "rows.jsonl"), "every": 1}}
    train(config("whole", **more))
    train(config("cut", **more | {"steps": 1}))
    train(config("cut", **more), resume=True)
    lines = comparable(tmp_path / "whole")
    assert comparable(tmp_path / "cut") == lines
    assert {line["ratio_max"] for line in lines if "loss" in line} == {1.0}
    assert max(line["mismatch_max"] for line in lines if "loss" in line) < 1e-4
    shown = {(line["prompt"], *line.get("images", ())) for line in read_lines(tmp_path / "whole" / "samples.jsonl")}
    assert ("u:[<|image_pad|>]what?a:", "1.png") in shown
    assert ("u:[<|image_pad|>]or[<|image_pad|>]?a:", "0.png", "4.png") in shown
    assert ("u:hia:",) in shown
    picture(9).save(tmp_path / "1.png")
    with pytest.raises(ValueError, match="data"):
        train(config("cut", **more | {"steps": 3}), resume=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"rollout__backend": "vllm", "rollout__servers": ["http://localhost:1"]},
            "and vLLM's servers are given no images: set rollout.backend to hf",
        ),
        (
            {"rollout__backend": "vllm", "rollout__vllm": {"tensor_parallel": 2}},
            "and processes that share a vLLM do not exchange images: set rollout.vllm.tensor_parallel to 1",
        ),
        (
            {"reward": {"model": "."}},
            "which do not reach a reward model: leave out it",
        ),
    ],
)
def test_parts_that_would_not_see_an_image_are_refused(config, changes, named):
    with pytest.raises(ValueError, match=rf"row 0 .* has images, {named}"):
        PPOTrainer(config(**changes))


def on_two_processes(rank: int, values: dict[str, Any]) -> None:
    train(Config.parse(values))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["config", "episodes"])
def test_two_processes_learn_what_one_learns(kind, request, tmp_path):
    """With a vision tower that is not trained, which has no gradients to reduce."""
    make = request.getfixturevalue(kind)
    train(make("one", actor__freeze=["model.visual.*"]))
    two = make("two", actor__freeze=["model.visual.*"])
    run_distributed(on_two_processes, 2, two.model_dump(mode="json"))
    one, two = (comparable(tmp_path / name) for name in ("one", "two"))
    for name in ("reward_mean", "loss", "grad_norm"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-3)
    answers = [
        [line["completion"] for line in read_lines(tmp_path / name / "samples.jsonl")] for name in ("one", "two")
    ]
    assert answers[0] == answers[1]
