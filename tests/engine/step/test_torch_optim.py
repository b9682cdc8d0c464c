"""Optimizers of `torch.optim` beside the same optimizers in plain torch."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rlft_fast.config import ConfigError, EngineConfig, OptimizerConfig, SFTConfig
from rlft_fast.engine.sharding import build_model
from rlft_fast.engine.torch_optim import TorchOptimizer, moment_bytes, require_trainable
from tests.engine import reference
from tests.support.machine.distributed import run_distributed

MAX_NORM = 0.5
MATRIX = "model.layers.0.mlp.up_proj.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"


def settings(name: str, **options) -> dict:
    return {"name": f"torch.optim.{name}", "options": options, "eps": 1e-8, "max_grad_norm": MAX_NORM}


# One that has no state, one with a buffer, one with a product of its own, one whose state begins elsewhere than at 0,
# one whose state is not as large as its parameter.
@pytest.mark.parametrize(
    "optimizer",
    [
        settings("SGD"), settings("SGD", momentum=0.9, nesterov=True), settings("AdamW", betas=[0.8, 0.9], eps=1e-4),
        settings("NAdam", eps=1e-4), settings("Adagrad", initial_accumulator_value=0.1), settings("Adafactor"),
    ],
)  # fmt: skip
def test_a_step_is_that_of_plain_torch(optimizer, tiny_model):
    """Three steps with gradients that are clipped, by float64 copies of three parameters."""
    engine = reference.make_engine(tiny_model("llama"), num_training_steps=3, optimizer=optimizer)
    named = dict(engine.model.pretrained.named_parameters())
    copies = {name: nn.Parameter(named[name].detach().double()) for name in (MATRIX, HEAD, NORM)}
    kind = getattr(torch.optim, optimizer["name"].removeprefix("torch.optim."))
    plain = kind(copies.values(), lr=1e-3, weight_decay=0.0, **optimizer["options"])
    for _ in range(3):
        engine.forward_backward(reference.random_batch(), reference.policy_loss())
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in engine.model.parameters()])
        for name, copy in copies.items():
            copy.grad = named[name].grad.double() * min(MAX_NORM / (norm + 1e-6), 1.0)
        plain.step()
        assert engine.optimizer_step()["grad_norm"] == pytest.approx(norm.item())
    for name, copy in copies.items():
        assert (named[name] - copy).abs().max() <= 3e-7 * copy.abs().max(), name


def test_muon_trains_the_matrices_of_blocks_and_adamw_all_else(tiny_model):
    engine = reference.make_engine(tiny_model("llama"), num_training_steps=3, optimizer=settings("Muon", momentum=0.8))
    named = dict(engine.model.pretrained.named_parameters())
    copies = {name: nn.Parameter(named[name].detach().clone()) for name in (MATRIX, HEAD, NORM)}
    plain = [
        torch.optim.Muon([copies[MATRIX]], lr=1e-3, weight_decay=0.0, momentum=0.8),
        torch.optim.AdamW([copies[HEAD], copies[NORM]], lr=1e-3, weight_decay=0.0),
    ]
    for _ in range(2):
        engine.forward_backward(reference.random_batch(), reference.policy_loss())
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in engine.model.parameters()])
        for name, copy in copies.items():
            copy.grad = named[name].grad * min(MAX_NORM / (norm + 1e-6), 1.0)
        for optimizer in plain:
            optimizer.step()
        engine.optimizer_step()
    assert torch.allclose(named[HEAD], copies[HEAD], rtol=0, atol=1e-6)
    assert torch.allclose(named[NORM], copies[NORM], rtol=0, atol=1e-6)
    assert (named[MATRIX] - copies[MATRIX]).abs().max() < 2e-5  # of 1e-3: Muon iterates in bfloat16


def test_a_bfloat16_parameter_follows_its_float32_master():
    """Steps that are too small for bfloat16 add up."""
    parameter, plain = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4, 4))
    config = OptimizerConfig(name="torch.optim.SGD", options={"momentum": 0.5})
    ours = TorchOptimizer([{"params": [parameter], "lr": 1e-4, "weight_decay": 0.0}], config)
    torchs = torch.optim.SGD([plain], lr=1e-4, momentum=0.5)
    one, zero = torch.ones(()), torch.zeros(())
    for _ in range(40):
        parameter.grad, plain.grad = torch.ones_like(parameter), torch.ones_like(plain)
        ours.step(coefficient=one, found_inf=zero)
        torchs.step()
    assert torch.equal(ours.state[parameter]["master"], plain)
    assert torch.equal(parameter, plain.bfloat16())
    assert parameter[0, 0] < 1.0


def move_masters(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4, dtype=torch.bfloat16), mesh, [Shard(0)]))
    config = OptimizerConfig(name="torch.optim.SGD", options={"momentum": 0.5})
    optimizer = TorchOptimizer([{"params": [parameter], "lr": 1e-4, "weight_decay": 0.0}], config)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(coefficient=torch.ones(()), found_inf=torch.zeros(()))
    optimizer.move_state("meta")
    shards = {key: x.to_local().device.type for key, x in optimizer.state[parameter].items()}
    assert shards == {"momentum_buffer": "meta", "master": "meta"}


@pytest.mark.dist
def test_shards_of_masters_move():
    run_distributed(move_masters, 1)


def test_a_norm_that_is_not_finite_skips_the_step(tiny_model):
    engine = reference.make_engine(tiny_model("llama"), optimizer=settings("SGD", momentum=0.9))
    before = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
    with torch.no_grad():
        engine.model.head.weight[0, 0] = torch.nan
    metrics = engine.train_step(reference.random_batch(), reference.policy_loss())
    assert metrics["skipped_steps"] == 1
    for name, tensor in engine.state_tensors().items():
        assert name == f"model.{HEAD}" or name.endswith("head.weight") or torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "sgd"}, "optimizer.name: String should match pattern"),
        ({"name": "my.module.SGD"}, "optimizer.name: String should match pattern"),
        ({"options": {"momentum": 0.9}}, "options are those of a class of torch.optim: adamw has keys of its own"),
        (
            {"name": "torch.optim.SGD", "moment_dtype": "bfloat16"},
            "moment_dtype is a key of adamw: give torch.optim.SGD its own options, or leave moment_dtype out",
        ),
    ],
)
def test_settings_of_another_optimizer(options, message):
    values = {"objective": "sft", "model": "m", "output_dir": "o", "data": {"path": "p"}, "steps": 1}
    with pytest.raises(ConfigError, match=re.escape(message)):
        SFTConfig.parse(values | {"actor": {"optimizer": options}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "torch.optim.Muom"}, "torch.optim has no optimizer Muom (did you mean Muon"),
        ({"name": "torch.optim.lr_scheduler"}, "torch.optim has no optimizer lr_scheduler"),
        ({"name": "torch.optim.LBFGS"}, "optimizer.name torch.optim.LBFGS needs more than a gradient: take one of"),
        ({"name": "torch.optim.SparseAdam"}, "optimizer.name torch.optim.SparseAdam needs more than a gradient"),
        (
            {"name": "torch.optim.SGD", "options": {"momentun": 1}},
            "takes no option momentun (did you mean momentum",
        ),
        ({"name": "torch.optim.SGD", "options": {"lr": 1}}, "optimizer.options has lr: set optimizer.learning_rate"),
        ({"name": "torch.optim.SGD", "options": {"momentum": -1}}, "cannot be used: Invalid momentum value: -1"),
        ({"name": "torch.optim.SGD", "options": {"maximize": True}}, "takes no option maximize"),
        ({"name": "torch.optim.SGD", "options": {"dampening": 0.5}}, "takes no option dampening"),
        ({"name": "torch.optim.Rprop", "weight_decay": 0.1}, "torch.optim.Rprop has no weight_decay: leave it out"),
        ({"name": "torch.optim.Rprop", "schedule": "linear"}, "torch.optim.Rprop keeps the learning rate in its state"),
        ({"name": "torch.optim.ASGD", "warmup_steps": 2}, "follows no schedule: set schedule: constant, without"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        require_trainable(OptimizerConfig(**options))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "optimizer", [settings("SGD"), settings("SGD", momentum=0.9), settings("Muon"), settings("Adam")]
)
def test_the_plan_counts_the_state_that_there_is(optimizer, dtype, tiny_model):
    path = tiny_model("llama")
    config = EngineConfig(param_dtype=dtype, compute_dtype=dtype, optimizer=OptimizerConfig(**optimizer))
    model = build_model(str(path), config, "logprob", trains=True)
    engine = reference.make_engine(path, optimizer=optimizer, dtype=dtype, config={"param_dtype": dtype})
    parameters = [*engine.model.parameters()]
    held: list[Tensor] = [x for p in parameters for key, x in engine.optimizer.state[p].items() if key != "master"]
    gradients = 4 * sum(p.numel() for p in parameters) if dtype == "bfloat16" else 0  # of a step
    expected = sum(x.numel() * x.itemsize for x in held if x.dim()) + gradients
    assert moment_bytes(model, config.optimizer, lambda parameter: parameter.shape) == expected
