"""Parameter groups and learning-rate schedules, by numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

from rlft_fast.config import OptimizerConfig
from rlft_fast.engine.optimizer import build_optimizer, learning_rate_factor
from tests.engine import reference


def factors(steps: int, **options) -> list[float]:
    config = OptimizerConfig(**options)
    return [learning_rate_factor(step, config, steps) for step in range(steps)]


def test_constant():
    assert factors(3) == [1.0, 1.0, 1.0]


def test_warmup_rises_to_the_peak_and_never_is_zero():
    assert factors(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear():
    assert factors(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert factors(6, schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine():
    expected = [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]
    assert factors(4, schedule="cosine") == pytest.approx(expected)
    assert factors(6, schedule="cosine", warmup_steps=2) == pytest.approx([0.5, 1.0, *expected])


# Beyond the planned steps, and a warm-up longer than the run: neither negative nor more than the peak.
@pytest.mark.parametrize(("step", "warmup", "expected"), [(4, 0, 0.0), (9, 0, 0.0), (3, 8, 0.5), (8, 8, 1.0)])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedule_at_its_ends(schedule, step, warmup, expected):
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup)
    assert learning_rate_factor(step, config, 4) == pytest.approx(expected)


def test_only_matrices_decay():
    model = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(3), "embedding": nn.Embedding(4, 3)})
    model["scale"] = nn.Module()
    model["scale"].value = nn.Parameter(torch.ones(()))
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    by_name = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    assert {name for name, value in by_name.items() if value == 0.1} == {"linear.weight", "embedding.weight"}
    assert {name for name, value in by_name.items() if value == 0.0} == {
        "linear.bias", "norm.weight", "norm.bias", "scale.value",
    }  # fmt: skip


def test_options_reach_adamw_and_frozen_parameters_do_not():
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2), requires_grad=False)]
    optimizer = build_optimizer(parameters, OptimizerConfig(learning_rate=0.5, betas=(0.1, 0.2), eps=0.3))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.1, 0.2), 0.3)
    assert [id(parameter) for parameter in group["params"]] == [id(parameters[0])]


def test_engine_follows_the_schedule(tiny_model):
    engine = reference.make_engine(
        tiny_model("llama"),
        num_training_steps=4,
        optimizer={"learning_rate": 1e-4, "schedule": "linear", "warmup_steps": 2},
    )
    rates = [engine.train_step(reference.random_batch(), reference.policy_loss())["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.5e-4, 1e-4, 1e-4, 0.5e-4])
