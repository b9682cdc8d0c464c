"""A real vLLM samples from prompts with images. Its log-probabilities are the policy's, which learns in between."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlft_fast.config import RolloutConfig, VLLMConfig
from rlft_fast.data import Batch, Images
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import load_tokenizer
from rlft_fast.rl import PolicyLoss
from rlft_fast.rollout import Completion, Rollout, SamplingParams, build_rollout
from rlft_fast.rollout.vllm import why_no_images
from tests.engine.reference import IMAGES, qwen_images
from tests.support.machine.distributed import run_distributed
from tests.support.runs.vllm_rollouts import HEADS, SMALL, make_engine, needs_vllm
from tests.support.tiny_models import ALL_MODELS, IMAGE_TOKEN_ID, PICTURE_MODELS, VOCAB_SIZE, save_tiny_model

PARAMS = SamplingParams(n=3, max_new_tokens=7, temperature=0.7)


def prompts_with_images(name: str) -> tuple[list[list[int]], list[Images | None]]:
    """Two images, one, one of other pixels behind the same tokens, the last again before another one, and none."""
    generator, prompts, images = torch.Generator().manual_seed(0), [], []
    for row, number in enumerate((2, 1, 1, 1)):
        inputs, runs = IMAGES.get(name, qwen_images)(number, generator)
        before = prompts[2] if row == 3 else [5]  # as in a second turn
        prompts.append([*before, *(t for run in runs for t in [7, *[IMAGE_TOKEN_ID] * run, 8]), 20])
        images.append(Images(str(row), inputs, before=images[2] if row == 3 else None))
    return [*prompts, [5, 6, 7]], [*images, None]


def batch_of(name: str, groups: list[list[Completion]]) -> Batch:
    prompts, images = prompts_with_images(name)
    rows = [(*pair, own) for *pair, group in zip(prompts, images, groups, strict=True) for own in group]
    return Batch.from_samples(
        [prompt for prompt, *_ in rows], [own.token_ids for *_, own in rows], images=[own for _, own, _ in rows],
        rollout_logprobs=[own.logprobs for *_, own in rows],
    )  # fmt: skip


def sample(name: str, engine: FSDPEngine, rollout: Rollout) -> Batch:
    """Samples, whose log-probabilities the engine confirms."""
    torch.manual_seed(0)
    prompts, images = prompts_with_images(name)
    batch = batch_of(name, rollout.generate(prompts, PARAMS, images=images))
    inferred = engine.infer(batch, ("logprob",))["logprob"]
    torch.testing.assert_close(batch.rollout_logprob_T, inferred, rtol=0, atol=2e-4)
    others = batch.replace(image_B=torch.tensor([0, 2, 1, 3, -1])[batch.image_B])
    swapped = engine.infer(others, ("logprob",))["logprob"]
    assert (swapped - inferred).abs().max() > 0.01  # vLLM has not mixed up images
    return batch.replace(old_logprob_T=inferred, advantage_T=torch.randn(batch.num_tokens))


def by_vllm(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    engine = make_engine(path)
    config = RolloutConfig(backend="vllm", vllm=VLLMConfig(**SMALL), batch_size=32)
    rollout = build_rollout(engine, load_tokenizer(path), config, max_sequence_tokens=128)
    for _ in range(2):  # the second time, the tower has other weights
        rollout.sync()
        engine.train_step(sample(path.name, engine, rollout), PolicyLoss())
    rollout.close()


@needs_vllm
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM's image processors need torchvision")
@pytest.mark.dist
@pytest.mark.parametrize(
    "name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "internvl", "idefics3", "smolvlm", "mistral3", "llava"]
)
def test_log_probabilities_are_the_policys(tmp_path, name):
    run_distributed(by_vllm, 1, save_wide(name, tmp_path))


def save_wide(name: str, folder: Path) -> Path:
    """The tiny model with heads that vLLM's attention for CPUs takes."""
    own = ALL_MODELS[name][2]
    if name in PICTURE_MODELS:
        text = own["text_config"] | HEADS | {"vocab_size": VOCAB_SIZE + 4}
        untied = {"tie_word_embeddings": False} if name == "smolvlm" else {}  # as published; vLLM reads another key
        path = save_tiny_model(name, folder / name, text_config=text, **untied)
        add_processor(name, path)
        if name == "llava":  # as published
            weights = load_file(path / "model.safetensors")
            old, new = "vision_tower.", "vision_tower.vision_model."
            save_file({key.replace(old, new): x for key, x in weights.items()}, path / "model.safetensors")
        return path
    # vLLM reads from the configuration what transformers does for Qwen3-VL in any case.
    sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": name == "qwen3-vl"}
    rope = {"rope_parameters": own["text_config"]["rope_parameters"] | sections}
    width = "hidden_size" if name == "qwen2-vl" else "out_hidden_size"
    return save_tiny_model(
        name, folder / name, text_config=own["text_config"] | HEADS | rope,
        vision_config=own["vision_config"] | {width: HEADS["hidden_size"]},
    )  # fmt: skip


def add_processor(name: str, path: Path) -> None:
    """What vLLM's own processor reads when it starts; prompts are processed without it."""
    tokenizer = load_tokenizer(path)
    tokenizer.add_special_tokens({"extra_special_tokens": OWN_TOKENS.get(name, [])})
    tokenizer.save_pretrained(path)
    if named := NAMED_TOKENS.get(name):
        own = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps(own | {"extra_special_tokens": named}))
    settings = {"image_token": "<|image_pad|>"} | OWN_SETTINGS.get(name, {})
    (path / "processor_config.json").write_text(json.dumps(settings))


OWN_TOKENS = {"internvl": ["<img>", "</img>", "<video>"], "mistral3": ["[IMG_BREAK]", "[IMG_END]"]}
NAMED_TOKENS = {
    "internvl": {
        "start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>",
        "context_image_token": "<|image_pad|>",
    },
    "smolvlm": {"image_token": "<|image_pad|>"},
}  # fmt: skip
OWN_SETTINGS = {
    "llava": {"processor_class": "LlavaProcessor", "patch_size": 2, "vision_feature_select_strategy": "default"},
    "mistral3": {"processor_class": "PixtralProcessor", "patch_size": 2, "spatial_merge_size": 2},
    "internvl": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    "idefics3": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
}  # fmt: skip


def test_models_whose_images_vllm_does_not_get(tiny_model):
    assert why_no_images(str(tiny_model("llama")), served=True) == ""
    assert "are given no images: set rollout.backend to hf" in why_no_images(str(tiny_model("qwen2-vl")), served=True)
    assert "not of gemma3: set rollout.backend to hf" in why_no_images(str(tiny_model("gemma3-vision")), served=False)
