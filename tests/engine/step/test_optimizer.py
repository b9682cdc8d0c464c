"""Parameter groups and learning-rate schedules, by numbers worked out by hand and by the schedules of transformers."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    AutoModelForCausalLM,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from rlft_fast.config import ConfigError, OptimizerConfig
from rlft_fast.config.schema.supervised import SFTConfig
from rlft_fast.engine import Schedule
from rlft_fast.engine.optimizer import build_optimizer, named_parameters
from rlft_fast.engine.torch_optim import end_parameters
from tests.engine import reference


def factors(steps: int, **options) -> list[float]:
    schedule = Schedule(OptimizerConfig(**{"learning_rate": 1.0, **options}), steps)
    return [schedule.factor(step) for step in range(steps)]


def factors_of_transformers(steps: int, make: Callable[..., LRScheduler], **options) -> list[float]:
    """At so many steps and one more, of a peak of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=1.0)
    scheduler, found = make(optimizer, num_training_steps=steps, **options), []
    for _ in range(steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


# A warm-up of a count and of a share, none, and longer than the run; the end of the decay at 0 and above.
@pytest.mark.parametrize(
    ("options", "make", "theirs"),
    [
        (
            {"schedule": "cosine", "min_learning_rate": 0.1, "warmup_steps": 3},
            get_cosine_with_min_lr_schedule_with_warmup,
            {"num_warmup_steps": 3, "min_lr_rate": 0.1},
        ),
        (
            {"schedule": "cosine", "min_learning_rate": 0.25, "warmup_ratio": 0.12},  # 0.12 * 20 = 2.4: 3 steps
            get_cosine_with_min_lr_schedule_with_warmup,
            {"num_warmup_steps": 3, "min_lr_rate": 0.25},
        ),
        ({"schedule": "linear", "warmup_ratio": 0.5}, get_linear_schedule_with_warmup, {"num_warmup_steps": 10}),
        ({"schedule": "linear", "warmup_steps": 30}, get_linear_schedule_with_warmup, {"num_warmup_steps": 30}),
        (
            {"schedule": "wsd", "decay_ratio": 0.3, "warmup_steps": 4},
            get_wsd_schedule,
            {"num_warmup_steps": 4, "num_decay_steps": 6, "decay_type": "linear"},
        ),
        (
            {"schedule": "wsd", "decay_ratio": 0.5, "min_learning_rate": 0.2},
            get_wsd_schedule,
            {"num_warmup_steps": 0, "num_decay_steps": 10, "decay_type": "linear", "min_lr_ratio": 0.2},
        ),
    ],
)
def test_schedules_are_those_of_transformers(options, make, theirs):
    """In the warm-up this project is one step ahead: it teaches nothing at a rate of 0."""
    warmup = min(theirs["num_warmup_steps"], 20)
    expected = factors_of_transformers(20, make, **theirs)
    expected = expected[1 : warmup + 1] + expected[warmup:20]
    assert factors(20, **options) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def own_schedule(folder: Path, line: str) -> str:
    (folder / "mine.py").write_text(f"def rate(step, num_steps):\n    {line}\n")
    return f"{folder / 'mine.py'}:rate"


def test_a_schedule_of_ones_own(tmp_path):
    assert factors(4, schedule=own_schedule(tmp_path, "return 2 - step / num_steps")) == [2.0, 1.75, 1.5, 1.25]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return 1 - step", "returns -1 at step 2, expected the share of learning_rate: a number from 0 on"),
        ("return float('nan')", "returns nan at step 0, expected"),
        ("return None", "returns None at step 0, expected"),
        ("return 1 / (3 - step)", "raises ZeroDivisionError at step 3: division by zero"),
    ],
)
def test_a_wrong_schedule_is_told_before_the_first_step(line, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"mine.py:rate {message}")):
        factors(4, schedule=own_schedule(tmp_path, line))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, "schedule: expected one of constant, linear, cosine, wsd, or module:function for your"),
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "give either warmup_steps or warmup_ratio, not both"),
        ({"schedule": "linear", "min_learning_rate": 1}, "min_learning_rate is 1, above learning_rate, 1e-06"),
        ({"min_learning_rate": 1e-7}, "min_learning_rate is the end of a schedule that falls: set schedule: linear"),
        ({"schedule": "a:b", "warmup_steps": 2}, "warmup_steps has no meaning for a schedule of your own, which says"),
        ({"groups": {"*": {"lr": 1}}}, "groups.*"),
        ({"groups": {"*": {"learning_rate": -1}}}, "Input should be greater than or equal to 0, got -1"),
    ],
)
def test_settings_that_do_not_go_together(options, message):
    values = {"objective": "sft", "model": "m", "output_dir": "o", "data": {"path": "p"}, "steps": 1}
    with pytest.raises(ConfigError, match=re.escape(message)):
        SFTConfig.parse(values | {"actor": {"optimizer": options}})


def test_constant():
    assert factors(3) == [1.0, 1.0, 1.0]


def test_warmup_rises_to_the_peak_and_never_is_zero():
    assert factors(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


# Beyond the planned steps, and a warm-up longer than the run: neither negative nor more than the peak.
@pytest.mark.parametrize(("step", "warmup", "expected"), [(4, 0, 0.0), (9, 0, 0.0), (3, 8, 0.5), (8, 8, 1.0)])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedule_at_its_ends(schedule, step, warmup, expected):
    found = Schedule(OptimizerConfig(schedule=schedule, warmup_steps=warmup), 4)
    assert found.factor(step) == pytest.approx(expected)


def test_only_matrices_decay():
    model = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(3), "embedding": nn.Embedding(4, 3)})
    model["scale"] = nn.Module()
    model["scale"].value = nn.Parameter(torch.ones(()))
    model["experts"] = nn.Module()  # of gpt-oss: their biases are one tensor
    for name, shape in {"down_proj": (4, 3, 2), "down_proj_bias": (4, 2)}.items():
        model["experts"].register_parameter(name, nn.Parameter(torch.ones(shape)))
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    by_name = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    assert {name for name, value in by_name.items() if value == 0.1} == {
        "linear.weight", "embedding.weight", "experts.down_proj",
    }  # fmt: skip
    assert {name for name, value in by_name.items() if value == 0.0} == {
        "linear.bias", "norm.weight", "norm.bias", "scale.value", "experts.down_proj_bias",
    }  # fmt: skip
    muon = build_optimizer(model.named_parameters(), OptimizerConfig(name="torch.optim.Muon"), end_parameters(model))
    (taken,) = (optimizer for optimizer in muon._optimizers if isinstance(optimizer, torch.optim.Muon))
    assert [id(p) for group in taken.param_groups for p in group["params"]] == [id(model["linear"].weight)]


def test_options_reach_adamw_and_frozen_parameters_do_not():
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2), requires_grad=False)]
    named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
    optimizer = build_optimizer(named, OptimizerConfig(learning_rate=0.5, betas=(0.1, 0.2), eps=0.3))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.1, 0.2), 0.3)
    assert [id(parameter) for parameter in group["params"]] == [id(parameters[0])]


def test_rates_and_decays_of_groups_follow_the_names_of_the_files(tiny_model):
    """A step of each group is that of plain AdamW with the group's settings; the first pattern that fits sets them."""
    options = {
        "learning_rate": 1e-3, "weight_decay": 0.1, "schedule": "linear", "max_grad_norm": None,
        "groups": {
            "lm_head.*": {"learning_rate": 1e-2}, "model.layers.0.*": {"weight_decay": 0.5},
            "*_proj.weight": {"learning_rate": 0.0},
        },
    }  # fmt: skip
    settings = {  # by the beginning of the name: rate, decay
        "lm_head.weight": (1e-2, 0.1), "model.embed_tokens.weight": (1e-3, 0.1),
        "model.layers.0.self_attn.q_proj.weight": (1e-3, 0.5), "model.layers.0.input_layernorm.weight": (1e-3, 0.0),
        "model.layers.1.self_attn.q_proj.weight": (0.0, 0.1), "model.norm.weight": (1e-3, 0.0),
    }  # fmt: skip
    engine = reference.make_engine(tiny_model("llama"), num_training_steps=2, optimizer=options)
    named = dict(engine.model.pretrained.named_parameters())
    copies = {name: nn.Parameter(named[name].detach().double()) for name in settings}
    groups = [{"params": [copies[name]], "weight_decay": decay} for name, (_, decay) in settings.items()]
    adamw = torch.optim.AdamW(groups, eps=1e-4)
    for factor in (1.0, 0.5):
        engine.forward_backward(reference.random_batch(), reference.policy_loss())
        for name, copy in copies.items():
            copy.grad = named[name].grad.double()
        for group, (rate, _) in zip(adamw.param_groups, settings.values(), strict=True):
            group["lr"] = rate * factor
        adamw.step()
        assert engine.optimizer_step()["learning_rate"] == 1e-3 * factor
    for name, copy in copies.items():
        assert torch.allclose(named[name].double(), copy, rtol=0, atol=3e-7), name


def test_a_pattern_that_fits_nothing(tiny_model):
    message = (
        r"optimizer\.groups has the pattern 'head\.\*', which no trained parameter is left for; their names are "
        r"model\.embed_tokens\.weight, model\.layers\.\*, model\.norm\.weight, lm_head\.weight$"
    )
    with pytest.raises(ValueError, match=message):
        reference.make_engine(
            tiny_model("llama"), num_training_steps=1, optimizer={"groups": {"head.*": {"learning_rate": 1.0}}}
        )


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_names_are_those_of_the_files(lora, tiny_model):
    engine = reference.make_engine(tiny_model("llama-tied"), num_training_steps=1, config={"lora": lora})
    names = [name for name, _ in named_parameters(engine.model)]
    plain = dict(AutoModelForCausalLM.from_pretrained(tiny_model("llama-tied")).named_parameters())
    assert len(names) == len(set(names))
    assert {name for name in names if "lora_" not in name} == set(plain)


def test_engine_follows_the_schedule(tiny_model):
    engine = reference.make_engine(
        tiny_model("llama"),
        num_training_steps=4,
        optimizer={"learning_rate": 1e-4, "schedule": "linear", "warmup_steps": 2},
    )
    rates = [engine.train_step(reference.random_batch(), reference.policy_loss())["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.5e-4, 1e-4, 1e-4, 0.5e-4])
