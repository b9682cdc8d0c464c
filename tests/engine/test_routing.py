"""Routers of experts: their auxiliary loss is transformers' own, and a replay is the recorded pass."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlft_fast.config import EngineConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.sharding.build import build_model
from tests.engine import reference
from tests.engine.reference import make_engine, policy_loss, random_batch
from tests.support.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model

COEF = 0.5
# Packed; more than 256 experts and a dense layer; scores that are no probabilities; padded.
FAMILIES = ["mixtral", "qwen3-moe", "gpt-oss", "qwen3.5-moe"]


def balanced(path: Path, **options) -> FSDPEngine:
    return make_engine(path, config={"router_aux_loss_coef": COEF}, **options)


def tokens_that_run(batch: Batch) -> Tensor:
    """(B, L) the tokens of each sequence up to the last position of its loss mask."""
    mask, _ = reference.pad_right(batch.replace(input_ids_T=batch.loss_mask_T.long()))
    return mask.flip(1).cummax(1).values.flip(1)


@cache
def expected(path: Path) -> tuple[float, dict[str, Tensor]]:
    """transformers' auxiliary loss of the padded batch in float64, and its gradients times `COEF`."""
    model, batch = reference.plain_model(path), random_batch()
    ids, _ = reference.pad_right(batch)
    loss = model(input_ids=ids, attention_mask=tokens_that_run(batch), output_router_logits=True).aux_loss
    (COEF * loss).backward()
    return loss.item(), {f"model.{name}": x.grad for name, x in model.named_parameters() if x.grad is not None}


def step(engine: FSDPEngine, batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    metrics = engine.train_step(batch, policy_loss())
    return metrics, reference.gradients(engine)


# One micro-batch, and several. With sequences alone, prompts that are shared in one micro-batch run several times.
@pytest.mark.parametrize("max_tokens", [128, 24])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_auxiliary_loss_is_that_of_transformers(name, max_tokens, tiny_model):
    path, batch = tiny_model(name), random_batch()
    _, plain = step(make_engine(path, max_tokens=max_tokens), batch)
    metrics, with_loss = step(balanced(path, max_tokens=max_tokens), batch)
    value, wanted = expected(path)
    assert metrics["router_aux_loss"] == pytest.approx(value, rel=1e-6)
    assert max(x.abs().max() for x in wanted.values()) > 1e-2
    assert wanted.keys() < plain.keys()
    for name, gradient in plain.items():
        found = (with_loss[name] - gradient).double()
        torch.testing.assert_close(found, wanted.get(name, torch.zeros_like(found)), rtol=0, atol=2e-6)


def check_two(rank: int, path: Path, sequence_parallel: int) -> None:
    config = {"router_aux_loss_coef": COEF, "sequence_parallel": sequence_parallel}
    metrics, found = step(make_engine(path, config=config, max_tokens=24), random_batch())
    value, _ = expected(path)
    assert metrics["router_aux_loss"] == pytest.approx(value, rel=1e-6)
    reference.assert_close(found, torch.load(path / "one.pt"), 2e-6)


# Each rank has its own micro-batches; both have a part of each.
@pytest.mark.dist
@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_two_processes(sequence_parallel, tmp_path):
    path = save_tiny_model("mixtral", tmp_path / "mixtral")
    torch.save(step(balanced(path, max_tokens=128), random_batch())[1], path / "one.pt")
    run_distributed(check_two, 2, path, sequence_parallel)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama", "LlamaModel has no routers of experts that are known: leave router_aux_loss_coef"),
        ("deepseek-v3", "transformers has no auxiliary loss for the routers of DeepseekV3Model"),
        ("llama4", r"the routers of Llama4TextModel \(Llama4Router\) do not choose by one topk"),
    ],
)
def test_models_without_an_auxiliary_loss(name, message, tiny_model):
    with pytest.raises(ValueError, match=message):
        build_model(str(tiny_model(name)), EngineConfig(router_aux_loss_coef=COEF), "logprob", trains=True)
