"""Rollouts of prompts with images against plain transformers."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from rlft_fast.data import Images
from rlft_fast.models import load_policy, load_tokenizer
from rlft_fast.rollout import HFGenerator, Request, SamplingParams
from tests.engine.reference import IMAGES as IMAGES_OF
from tests.engine.reference import plain_inputs
from tests.support.tiny_models import EOS_TOKEN_ID, IMAGE_TOKEN_ID, PICTURE_MODELS, VISION_MODELS


def images_of(number: int, *shapes: tuple[int, int]) -> Images:
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randn(sum(h * w for h, w in shapes), 24, generator=generator)
    return Images(str(number), {"pixel_values": pixels, "image_grid_thw": torch.tensor([(1, *x) for x in shapes])})


def prompt_of(*shapes: tuple[int, int]) -> list[int]:
    shown = [token for h, w in shapes for token in [7, *[IMAGE_TOKEN_ID] * (h * w // 4), 8]]
    return [5, *shown, 20, 30]


# The first two have equal tokens and other images; then two images, and none.
PROMPTS = [prompt_of((2, 4)), prompt_of((2, 4)), prompt_of((6, 4), (4, 2)), [5, 6, 7]]
IMAGES = [images_of(0, (2, 4)), images_of(1, (2, 4)), images_of(2, (6, 4), (4, 2)), None]


@lru_cache(maxsize=1)
def plain_model(path: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(path)


def plain_greedy(path: Path, prompt: list[int], images: Images | None) -> list[int]:
    model, ids = plain_model(path), torch.tensor([prompt])
    inputs = {} if images is None else plain_inputs(model, images.inputs, ids)
    config = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=EOS_TOKEN_ID, pad_token_id=EOS_TOKEN_ID)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **inputs)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", [*VISION_MODELS])
def test_samples_see_their_own_image_and_the_tower_runs_once(tiny_model, name):
    path, patches = tiny_model(name), []
    generator = HFGenerator(load_policy(path), load_tokenizer(path), 64)
    generator.model.backbone.visual.register_forward_pre_hook(lambda _, args: patches.append(len(args[0])))
    requests = [
        Request(row=row, token_ids=prompt, seed=seed, max_new_tokens=8, images=images)
        for row, (prompt, images) in enumerate(zip(PROMPTS, IMAGES, strict=True))
        for seed in range(3)
    ]
    found = [x.token_ids for x in generator.generate(requests, SamplingParams(temperature=0.0))]
    expected = [plain_greedy(path, prompt, images) for prompt, images in zip(PROMPTS, IMAGES, strict=True)]
    assert found == [own for own in expected for _ in range(3)]
    assert expected[0] != expected[1]
    assert patches == [8 + 8 + 24 + 8]


@pytest.mark.parametrize("name", [*PICTURE_MODELS])
def test_pictures_of_equal_size(tiny_model, name):
    """One prompt whose image is cut in two pictures, one with another picture, one with none; three samples each."""
    path, seen, generator = tiny_model(name), [], torch.Generator().manual_seed(0)
    pairs = [IMAGES_OF[name](number, generator) for number in (2, 1)]
    images = [*(Images(str(i), inputs) for i, (inputs, _) in enumerate(pairs)), None]
    prompts = [[5, *(t for count in counts for t in [7, *[IMAGE_TOKEN_ID] * count, 8]), 20] for _, counts in pairs]
    prompts.append([5, 6, 7])
    sampler = HFGenerator(load_policy(path), load_tokenizer(path), 64)
    assert sampler.model.decodes_in_place
    tower = next(x for name, x in sampler.model.backbone.named_children() if name.startswith("vision"))
    tower.register_forward_pre_hook(
        lambda _, args, keywords: seen.append(len(keywords.get("pixel_values", args[0] if args else ()))),
        with_kwargs=True,
    )
    requests = [
        Request(row=row, token_ids=prompt, seed=seed, max_new_tokens=8, images=own)
        for row, (prompt, own) in enumerate(zip(prompts, images, strict=True))
        for seed in range(3)
    ]
    found = [x.token_ids for x in sampler.generate(requests, SamplingParams(temperature=0.0))]
    expected = [plain_greedy(path, prompt, own) for prompt, own in zip(prompts, images, strict=True)]
    assert found == [own for own in expected for _ in range(3)]
    assert seen == [sum(len(inputs["pixel_values"]) for inputs, _ in pairs)]


def test_an_image_behind_turns_without_one(tiny_model):
    """What is kept of an episode has no image yet, and an episode beside it shows none."""
    path = tiny_model("qwen2-vl")
    generator = HFGenerator(load_policy(path), load_tokenizer(path), 64)
    generator.eos_token_ids = [*range(0, 256, 4)]

    def asked(episode: int, tokens: list[int], images: Images | None = None) -> Request:
        return Request(row=episode, token_ids=tokens, seed=episode, max_new_tokens=8, images=images, episode=episode)

    prompts = [[9, 10, 11, 12, 13, 14], [9, 10, 11, 15]]
    replies = generator.generate([asked(i, x) for i, x in enumerate(prompts)], SamplingParams())
    assert {x.finish_reason for x in replies} == {"stop"}
    shown = [*prompts[0], *replies[0].token_ids, *prompt_of((2, 4))], [*prompts[1], *replies[1].token_ids, 20]
    requests = [asked(0, shown[0], IMAGES[0]), asked(1, shown[1])]
    assert all(map(generator._kept.num_known, requests))
    found = generator.generate(requests, SamplingParams())
    alone = [HFGenerator(load_policy(path), load_tokenizer(path), 64) for _ in requests]
    for request, reply, other in zip(requests, found, alone, strict=True):
        other.eos_token_ids = generator.eos_token_ids
        (expected,) = other.generate([request], SamplingParams())
        assert reply.token_ids == expected.token_ids
        assert reply.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize("name", [*VISION_MODELS])
def test_a_later_turn_runs_its_own_image_alone(tiny_model, name):
    """Behind an image, behind two, and behind none; all continue as if nothing were kept."""
    path, patches = tiny_model(name), []
    kept, fresh = (HFGenerator(load_policy(path), load_tokenizer(path), 64) for _ in range(2))
    kept.eos_token_ids = fresh.eos_token_ids = [EOS_TOKEN_ID, *range(0, 256, 3)]
    kept.model.backbone.visual.register_forward_pre_hook(lambda _, args: patches.append(len(args[0])))
    params = SamplingParams()
    turns = [
        Request(row=row, token_ids=prompt, seed=row, max_new_tokens=60, images=images, episode=row)
        for row, (prompt, images) in enumerate(zip(PROMPTS[1:], IMAGES[1:], strict=True))
    ]
    for number in range(2):
        replies = [reply.token_ids for reply in kept.generate(turns, params)]
        turns = [
            replace(
                turn, token_ids=[*turn.token_ids, *reply, 30, 7, IMAGE_TOKEN_ID, IMAGE_TOKEN_ID, 8, 20],
                images=replace(images_of(10 + 10 * number + turn.row, (2, 4)), before=turn.images),
            )
            for turn, reply in zip(turns, replies, strict=True)
        ]  # fmt: skip
    found = kept.generate(turns, params)
    expected = fresh.generate([replace(turn, episode=None) for turn in turns], params)
    for own, other in zip(found, expected, strict=True):
        assert own.token_ids == other.token_ids
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert patches == [8 + 32, 3 * 8, 3 * 8]


def test_images_that_see_ahead_run_whole_beside_longer_texts(tiny_model):
    """Gemma 3. The second turn of a text is kept alone, and not beside an image."""
    path, generator = tiny_model("gemma3-vision"), torch.Generator().manual_seed(0)
    kept, fresh = (HFGenerator(load_policy(path), load_tokenizer(path), 64) for _ in range(2))
    kept.eos_token_ids = fresh.eos_token_ids = [EOS_TOKEN_ID, *range(0, 256, 3)]
    params = SamplingParams(temperature=0.0)
    text = Request(row=0, token_ids=[*range(5, 60)], seed=0, max_new_tokens=60, episode=0)
    (reply,) = kept.generate([text], params)
    inputs, (run,) = IMAGES_OF["gemma3-vision"](1, generator)
    shown = Images("a", inputs)
    turns = [
        replace(text, token_ids=[*text.token_ids, *reply.token_ids, 7, 8]),
        Request(row=1, token_ids=[5, 7, *[IMAGE_TOKEN_ID] * run, 8], seed=1, max_new_tokens=9, images=shown, episode=1),
    ]
    found, expected = kept.generate(turns, params), [fresh.generate([turn], params)[0] for turn in turns]
    assert [own.token_ids for own in found] == [own.token_ids for own in expected]
