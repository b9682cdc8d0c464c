"""A real vLLM samples from prompts with images. Its log-probabilities are the policy's, which learns in between."""

import importlib.util
from pathlib import Path

import pytest
import torch

from rlft_fast.config import RolloutConfig, VLLMConfig
from rlft_fast.data import Batch, Images
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import load_tokenizer
from rlft_fast.rl import PolicyLoss
from rlft_fast.rollout import Completion, Rollout, SamplingParams, build_rollout
from rlft_fast.rollout.vllm import why_no_images
from tests.engine.reference import qwen_images
from tests.support.machine.distributed import run_distributed
from tests.support.runs.vllm_rollouts import HEADS, SMALL, make_engine, needs_vllm
from tests.support.tiny_models import ALL_MODELS, IMAGE_TOKEN_ID, save_tiny_model

PARAMS = SamplingParams(n=3, max_new_tokens=7, temperature=0.7)


def prompts_with_images() -> tuple[list[list[int]], list[Images | None]]:
    """Two images, one, one of other pixels behind the same tokens, and none."""
    generator, prompts, images = torch.Generator().manual_seed(0), [], []
    for row, number in enumerate((2, 1, 1)):
        inputs, runs = qwen_images(number, generator)
        prompts.append([5, *(t for run in runs for t in [7, *[IMAGE_TOKEN_ID] * run, 8]), 20])
        images.append(Images(str(row), inputs))
    return [*prompts, [5, 6, 7]], [*images, None]


def batch_of(groups: list[list[Completion]]) -> Batch:
    prompts, images = prompts_with_images()
    rows = [(*pair, own) for *pair, group in zip(prompts, images, groups, strict=True) for own in group]
    return Batch.from_samples(
        [prompt for prompt, *_ in rows], [own.token_ids for *_, own in rows], images=[own for _, own, _ in rows],
        rollout_logprobs=[own.logprobs for *_, own in rows],
    )  # fmt: skip


def sample(engine: FSDPEngine, rollout: Rollout) -> Batch:
    """Samples, whose log-probabilities the engine confirms."""
    torch.manual_seed(0)
    prompts, images = prompts_with_images()
    batch = batch_of(rollout.generate(prompts, PARAMS, images=images))
    inferred = engine.infer(batch, ("logprob",))["logprob"]
    torch.testing.assert_close(batch.rollout_logprob_T, inferred, rtol=0, atol=2e-4)
    others = batch.replace(image_B=torch.tensor([0, 2, 1, -1])[batch.image_B])
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
        engine.train_step(sample(engine, rollout), PolicyLoss())
    rollout.close()


@needs_vllm
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM's image processors need torchvision")
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_log_probabilities_are_the_policys(tmp_path, name):
    run_distributed(by_vllm, 1, save_wide(name, tmp_path))


def save_wide(name: str, folder: Path) -> Path:
    """The tiny model with heads that vLLM's attention for CPUs takes."""
    own = ALL_MODELS[name][2]
    # vLLM reads from the configuration what transformers does for Qwen3-VL in any case.
    sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": name == "qwen3-vl"}
    rope = {"rope_parameters": own["text_config"]["rope_parameters"] | sections}
    width = "hidden_size" if name == "qwen2-vl" else "out_hidden_size"
    return save_tiny_model(
        name, folder / name, text_config=own["text_config"] | HEADS | rope,
        vision_config=own["vision_config"] | {width: HEADS["hidden_size"]},
    )  # fmt: skip


def test_models_whose_images_vllm_does_not_get(tiny_model):
    assert why_no_images(str(tiny_model("llama")), served=True) == ""
    assert "are given no images: set rollout.backend to hf" in why_no_images(str(tiny_model("qwen2-vl")), served=True)
    assert "not of gemma3: set rollout.backend to hf" in why_no_images(str(tiny_model("gemma3-vision")), served=False)
