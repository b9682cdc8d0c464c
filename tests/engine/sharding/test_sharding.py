"""Meshes of 2, 3 and 4 processes, and options that change how a step is computed but not its result."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from rlft_fast.config import EngineConfig
from rlft_fast.engine import FSDPEngine
from tests.engine import reference
from tests.engine.reference import make_engine, near_policy, policy_loss, random_batch
from tests.support.machine.distributed import run_distributed

pytestmark = pytest.mark.dist

# Settings that give the same result, by number of processes.
WAYS = {
    2: [{}, {"shard_size": 1}, {"shard_size": "auto"}, {"reshard_after_forward": False}, {"wrap": ("LlamaMLP",)}],
    3: [{}, {"shard_size": 1, "reduce_every_micro_batch": True}],
    4: [{"shard_size": 2, "reduce_every_micro_batch": every} for every in (False, True)]
       + [{"shard_size": 2, "activation_checkpointing": "full"}],
}  # fmt: skip


def run_steps(path: Path, max_tokens: int = 24, **config) -> dict[str, dict]:
    engine = make_engine(path, max_tokens=max_tokens, temperature=reference.TEMPERATURE, config=config)
    batch = random_batch()
    inferred = engine.infer(batch, ("logprob", "entropy"))
    batch = near_policy(batch, inferred["logprob"])
    metrics = engine.train_step(batch, policy_loss())
    gradients = reference.gradients(engine)
    engine.train_step(batch, policy_loss())
    norm = {"grad_norm": torch.tensor(metrics["grad_norm"])}
    return {"inferred": inferred, "gradients": gradients, "weights": reference.weights(engine), "norm": norm}


def check_ways(rank: int, world_size: int, path: Path, expected: Path) -> None:
    wanted = torch.load(expected)
    for way in WAYS[world_size]:
        actual = run_steps(path, **way)
        reference.assert_close(actual["inferred"], wanted["inferred"], 1e-6)
        reference.assert_close(actual["gradients"], wanted["gradients"], 1e-5)
        reference.assert_close(actual["weights"], wanted["weights"], 1e-4)
        reference.assert_close(actual["norm"], wanted["norm"], 1e-5)


def check_generate(path: Path) -> None:
    """Between steps, a sharded model generates the tokens of an unsharded model."""
    engine = make_engine(path)
    prompts = torch.arange(20).reshape(2, 10)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    engine.train_step(random_batch(), policy_loss())
    engine.model.model.set_attn_implementation("sdpa")
    mask = torch.ones_like(prompts)
    twice = (x.repeat_interleave(2, 0) for x in (prompts, mask))
    tokens = engine.model.generate(*twice, engine.model.prefill(prompts, mask, num_samples=2), **options)
    assert tokens.shape == (4, 16)
    assert torch.equal(tokens[0], tokens[1])
    whole = engine.model.model.__class__(engine.model.model.config)
    whole.load_state_dict(dict(engine.named_weights()), strict=False)
    assert torch.equal(whole.eval().generate(prompts, attention_mask=mask, **options), tokens[::2])


def check_failed_step(path: Path) -> None:
    """Gradients of a broken step, reduced among shards but not among copies, do not enter the next step."""
    config = {"shard_size": 1, "reduce_every_micro_batch": True}
    failed, fresh = (make_engine(path, max_tokens=24, config=config) for _ in range(2))
    with pytest.raises(RuntimeError, match="out of memory"):
        failed.train_step(random_batch(), reference.FailsLate(call=2))
    metrics = [engine.train_step(random_batch(), policy_loss()) for engine in (failed, fresh)]
    assert metrics[0] == metrics[1]
    reference.assert_equal(reference.weights(failed), reference.weights(fresh))


def check_refused(rank: int, path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="shard_size is 3, which does not divide the 4 ranks"):
        make_engine(path, config={"shard_size": 3})
    with pytest.raises(ValueError, match=r"disagree on the engine configuration: max_tokens is 101 on rank 1 and 100"):
        make_engine(path, max_tokens=100 + rank)
    other = folder / f"rank{rank}"
    other.mkdir()
    config = json.loads((path / "config.json").read_text()) | ({"rope_theta": 9e4} if rank == 2 else {})
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"rope_theta is 90000\.0 on rank 2"):
        FSDPEngine(str(other), EngineConfig()).initialize()


def check_four(rank: int, world_size: int, path: Path, expected: Path) -> None:
    check_ways(rank, world_size, path, expected)
    check_refused(rank, path, expected.parent)
    # Two copies, each over two ranks: a step keeps them the same.
    engine = make_engine(path, config={"shard_size": 2})
    engine.train_step(random_batch(), policy_loss())
    for parameter in engine.model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.shape == (2, 2)
        replicas = [torch.empty_like(parameter.to_local()) for _ in range(2)]
        group = parameter.device_mesh.get_group("replicate")
        torch.distributed.all_gather(replicas, parameter.detach().to_local().contiguous(), group)
        assert torch.equal(*replicas)


def check_two(rank: int, world_size: int, path: Path, expected: Path) -> None:
    check_ways(rank, world_size, path, expected)
    check_generate(path)
    check_failed_step(path)


@pytest.mark.parametrize(("world_size", "check"), [(2, check_two), (3, check_ways), (4, check_four)])
@pytest.mark.thin(3)
def test_every_mesh_computes_what_one_process_does(world_size, check, tiny_model, tmp_path):
    path = tiny_model("llama")
    torch.save(run_steps(path), tmp_path / "expected.pt")
    run_distributed(check, world_size, world_size, path, tmp_path / "expected.pt")


@pytest.mark.parametrize("way", [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}])
@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_recomputed_activations_change_nothing(way, name, tiny_model):
    plain, other = run_steps(tiny_model(name)), run_steps(tiny_model(name), **way)
    for key in plain:
        reference.assert_equal(other[key], plain[key])


def test_optimizer_groups_and_one_norm_over_them(tiny_model):
    """Biases and norms do not decay, and the clip is over both groups together."""
    engine = make_engine(tiny_model("qwen2-tied"), optimizer={"weight_decay": 0.5, "max_grad_norm": 1e-3})
    decays = {id(p): group["weight_decay"] for group in engine.optimizer.param_groups for p in group["params"]}
    named = dict(engine.model.named_parameters())
    assert {name for name, p in named.items() if decays[id(p)] == 0} == {
        name for name in named if name.endswith("bias") or "norm" in name
    }
    metrics = engine.train_step(random_batch(), policy_loss())
    gradients = reference.gradients(engine)  # after clipping
    norm = torch.sqrt(sum(g.double().square().sum() for g in gradients.values()))
    assert metrics["grad_norm"] > 1e-3
    torch.testing.assert_close(norm, torch.tensor(1e-3, dtype=torch.float64), rtol=1e-3, atol=0)
