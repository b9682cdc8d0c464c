"""Modules of one's own: sharded, stepped, offloaded and saved as every engine, with losses of one's own."""

import re
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from rlft_fast.config import EngineConfig, LoraConfig, OptimizerConfig
from rlft_fast.engine import CheckpointManager, FSDPEngine
from rlft_fast.world import World
from tests.engine.reference import policy_loss, random_batch

STEPS = 4


class Denoiser(nn.Module):
    """No language model: blocks of convolutions over images, as a diffusion model has."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(3)
        )
        self.end = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        hidden = self.begin(image_BCHW)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.end(hidden)


def made() -> tuple[Denoiser, Tensor, Tensor]:
    """The module, noisy images and their noise."""
    torch.manual_seed(0)
    noise = torch.randn(8, 3, 6, 5)
    return Denoiser(), torch.rand(8, 3, 6, 5) + noise, noise


def config(**options) -> EngineConfig:
    optimizer = {"learning_rate": 1e-2, "max_grad_norm": 0.1, "schedule": "linear"} | options.pop("optimizer", {})
    return EngineConfig(optimizer=OptimizerConfig(**optimizer), **options)


def train(engine: FSDPEngine, noisy: Tensor, noise: Tensor, steps: int = STEPS) -> list[float]:
    """Two micro-batches per step, each over this rank's share of its images. Returns the norms."""
    rank, size = engine.world.rank, engine.world.size
    norms = []
    for _ in range(steps):
        with engine.train_mode():
            for i in range(2):
                own = slice(4 * i + 4 * rank // size, 4 * i + 4 * (rank + 1) // size)
                loss = (engine.model(noisy[own]) - noise[own]).square().mean()
                engine.backward(loss / 2, is_last=i == 1)
            norms.append(engine.optimizer_step()["grad_norm"])
    return norms


def weights(engine: FSDPEngine) -> dict[str, Tensor]:
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in engine.state_tensors().items()}


def plain(steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """The same in plain torch and float64, whole batches at once."""
    module, noisy, noise = made()
    module.double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    norms = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / STEPS)
        optimizer.zero_grad()
        (module(noisy.double()) - noise.double()).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.1).item())
        optimizer.step()
    return dict(module.named_parameters()), norms


def assert_plain(engine: FSDPEngine, norms: list[float]) -> None:
    expected, expected_norms = plain()
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    found = weights(engine)
    for name, parameter in expected.items():
        assert (found[f"model.{name}"] - parameter).abs().max() < 1e-4, name  # of movements of 1e-2


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "full", "offload_between_phases": True}])
def test_a_module_of_ones_own_learns_as_in_plain_torch(options):
    module, noisy, noise = made()
    engine = FSDPEngine.from_module(module, config(**options), num_training_steps=STEPS)
    assert_plain(engine, train(engine, noisy, noise))


def test_it_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path):
    module, noisy, noise = made()
    module.begin = nn.Sequential(module.begin, nn.BatchNorm2d(8))
    whole = FSDPEngine.from_module(deepcopy(module), config(), num_training_steps=STEPS)
    train(whole, noisy, noise, 2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(2, {"denoiser": whole}, {})
        train(whole, noisy, noise, 2)
        again = FSDPEngine.from_module(module, config(), num_training_steps=STEPS)
        manager.load({"denoiser": again})
    train(again, noisy, noise, 2)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(again).items())
    assert all(torch.equal(x, y) for x, y in zip(whole.model.buffers(), again.model.buffers(), strict=True))


def test_buffers_stay_on_the_device_where_weights_are_offloaded(monkeypatch):
    """FSDP moves them there, and copies weights alone when a unit runs. ``meta`` stands for the device."""

    def shard_as_fsdp(module: nn.Module, *_: object) -> list:
        for part in module.modules():
            part._buffers |= {name: buffer.to("meta") for name, buffer in part._buffers.items()}
        return []

    monkeypatch.setattr("rlft_fast.engine.state.shard", shard_as_fsdp)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    engine = FSDPEngine.from_module(module, config(cpu_offload=True), num_training_steps=1)
    assert {x.device.type for x in engine.model.buffers()} == {"meta"}
    assert {x.device.type for x in engine.model.parameters()} == {"cpu"}


def check_two(rank: int) -> None:
    """On two processes, see `tests.engine.sharding.test_distributed_engine`."""
    module, noisy, noise = made()
    engine = FSDPEngine.from_module(module, config(), num_training_steps=STEPS)
    assert "Sequential" in engine.units
    assert_plain(engine, train(engine, noisy, noise))
    other = Denoiser() if rank else made()[0]
    with pytest.raises(ValueError, match="checksum of the module's weights"):
        FSDPEngine.from_module(other, config(), num_training_steps=STEPS)


class Codebooks(nn.Module):
    """A model of sound: each codebook has an embedding, whose weight is that of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(5, 4) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(2))
        for head, embedding in zip(self.heads, self.embeddings, strict=True):
            head.weight = embedding.weight

    def forward(self, codes_BQ: Tensor) -> Tensor:
        hidden = sum(embedding(codes_BQ[:, i]) for i, embedding in enumerate(self.embeddings))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return torch.stack([head(hidden) for head in self.heads], 1)


def test_tied_members_of_lists_stay_tied():
    torch.manual_seed(0)
    module, codes = Codebooks(), torch.randint(5, (6, 2))
    engines = [
        FSDPEngine.from_module(deepcopy(module), config(cpu_offload=sharded), num_training_steps=2)
        for sharded in (True, False)
    ]
    for _ in range(2):
        for engine in engines:
            engine.backward(nn.functional.cross_entropy(engine.model(codes).flatten(0, 1), codes.flatten()))
            engine.optimizer_step()
    sharded, whole = (weights(engine) for engine in engines)
    assert sharded.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_bfloat16_weights_have_masters():
    module, noisy, noise = made()
    narrow = config(param_dtype="bfloat16", compute_dtype="bfloat16", optimizer={"learning_rate": 1e-5})
    engine = FSDPEngine.from_module(module.bfloat16(), narrow, num_training_steps=STEPS)
    before = engine.model.end.weight.clone()
    train(engine, noisy.bfloat16(), noise)
    master = engine.optimizer.state[engine.model.end.weight]["master"]
    assert torch.equal(engine.model.end.weight, master.bfloat16())
    assert (engine.model.end.weight == before).float().mean() > 0.5  # steps round to nothing there,
    moved = (master - before).abs()
    assert 1e-6 < moved.min() < moved.max() < 3e-5  # but not lost: the rates add up to 2.5e-5


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_is_the_same_when_a_block_runs_again(mode):
    def gradients(mode: str) -> dict[str, Tensor]:
        module, noisy, noise = made()
        for block in module.blocks:
            block.append(nn.Dropout(0.5))
        engine = FSDPEngine.from_module(module, config(activation_checkpointing=mode), num_training_steps=1)
        torch.manual_seed(1)
        with engine.train_mode():
            engine.backward((engine.model(noisy) - noise).square().mean())
            return {name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()}

    expected = gradients("none")
    for name, gradient in gradients(mode).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "torch.optim.SGD"])
def test_frozen_weights_stay_and_are_saved_without_state(optimizer, tmp_path):
    module, noisy, noise = made()
    options = config(freeze=("begin.*",), optimizer={"name": optimizer})
    engine = FSDPEngine.from_module(deepcopy(module), options, num_training_steps=STEPS)
    train(engine, noisy, noise, 1)
    assert torch.equal(engine.model.begin.weight, module.begin.weight)
    assert not torch.equal(engine.model.end.weight, module.end.weight)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"denoiser": engine}, {})
        again = FSDPEngine.from_module(module, options, num_training_steps=STEPS)
        manager.load({"denoiser": again})
    expected = weights(engine)
    assert {*expected} == {*weights(again)}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(again).items())
    with pytest.raises(ValueError, match="freeze has the pattern 'start"):
        FSDPEngine.from_module(module, config(freeze=("start.*",)), num_training_steps=1)


def test_offloaded_weights_are_those_of_the_forward_in_the_backward():
    """In bfloat16, a phase that is opened inside another one leaves the copies that the forward has used."""
    norms = {}
    for offloads in (False, True):
        module, noisy, noise = made()
        options = config(compute_dtype="bfloat16", activation_checkpointing="full", offload_between_phases=offloads)
        engine = FSDPEngine.from_module(module, options, num_training_steps=STEPS)
        norms[offloads] = train(engine, noisy.bfloat16(), noise)
    assert norms[True] == norms[False]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"lora": LoraConfig()}, ValueError, "lora is for models of transformers in folders: leave it out"),
        ({"sequence_parallel": 2}, ValueError, "sequence_parallel is for models of transformers"),
        (
            {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"},
            TypeError,
            "begin.weight is torch.float32, and param_dtype is bfloat16: set it, or cast the module",
        ),
        (
            {"wrap": ["Attention"]},
            ValueError,
            "wrap names Attention, but this model has no such module; it",
        ),
    ],
)
def test_settings_that_a_module_cannot_have(options, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        FSDPEngine.from_module(Denoiser(), config(**options), num_training_steps=1)


def test_another_default_device_is_refused():
    """It would be that of the plans, which the engine makes on the CPU."""
    module, _, _ = made()
    with torch.device("meta"), pytest.raises(ValueError, match="default device is meta, expected cpu"):
        FSDPEngine.from_module(module, config(), num_training_steps=1)


def test_memory_is_reported_by_part(capsys):
    """Three copies of the weights: AdamW's moments, and the gradients until the step."""
    module, noisy, noise = made()
    engine = FSDPEngine.from_module(module, config(), num_training_steps=STEPS)
    size = 4 * sum(parameter.numel() for parameter in module.parameters())
    steps = 4 * len([*module.parameters()])  # a step count for each parameter
    assert engine.report_memory("at first") == {"weights": size, "gradients": 0, "optimizer": 0}
    train(engine, noisy, noise, 1)
    engine.backward((engine.model(noisy) - noise).square().mean())
    assert engine.report_memory("then") == {"weights": size, "gradients": size, "optimizer": 2 * size + steps}
    assert capsys.readouterr().out.splitlines()[0] == f"at first: weights {size / 1e9:.3f} GB, gradients 0.000 GB, " + (
        "optimizer 0.000 GB"
    )


def test_what_needs_a_head_or_a_loss_says_so():
    engine = FSDPEngine.from_module(Denoiser(), config(), num_training_steps=1, world=World())
    batch = random_batch()
    for call in (
        lambda: engine.infer(batch, ("logprob",)), lambda: engine.train_step(batch, policy_loss()),
        engine.weight_stream, lambda: engine.is_padded,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="a module of your own, which has no head"):
            call()
    with pytest.raises(ValueError, match=r"the loss has shape \(2,\), expected a 0-d tensor"):
        engine.backward(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="the loss needs no gradient, expected"):
        engine.backward(torch.ones(()))
    with pytest.raises(ValueError, match="optimizer_step needs reduced gradients, but there was no forward_backward"):
        engine.optimizer_step()
