"""Two processes compute the results of one process. Starting a process takes seconds, so all cases share a pair."""

import math
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rlft_fast.engine import CheckpointManager, FSDPEngine, export_hf
from rlft_fast.rl import PolicyLoss
from rlft_fast.rollout import Completion, NonFiniteLogitsError, Request, Rollout, SamplingParams
from rlft_fast.world import World
from tests.engine import reference
from tests.engine.models.test_from_module import check_two
from tests.engine.reference import make_engine, near_policy, policy_loss, random_batch, value_loss
from tests.support.machine.distributed import run_distributed

pytestmark = pytest.mark.dist

# The tied one has a parameter that two modules of the root share; a recurrent model runs padded; gpt-oss has sinks.
PADDED = ["qwen3.5"]
NAMES = ["llama", "qwen2-tied", "gpt-oss", *PADDED]
# One micro-batch per rank, several, and a batch of one sequence, of which the second rank gets none.
ONE, SEVERAL, EMPTY = (1000, 7), (24, 7), (1000, 1)
EVERY = [*product(NAMES, ("logprob", "value"), ("token-mean", "sequence-mean"), (ONE, SEVERAL, EMPTY))]
# Every value of each column meets every value of each other column.
PAIRS = [
    ("llama", "logprob", "token-mean", ONE), ("qwen2-tied", "value", "sequence-mean", ONE),
    ("llama", "value", "token-mean", SEVERAL), ("qwen2-tied", "logprob", "sequence-mean", SEVERAL),
    ("llama", "logprob", "sequence-mean", EMPTY), ("qwen2-tied", "value", "token-mean", EMPTY),
    ("qwen3.5", "logprob", "token-mean", SEVERAL), ("gpt-oss", "value", "sequence-mean", EMPTY),
]  # fmt: skip


def run_case(path: Path, head: str, aggregation: str, max_tokens: int, num_sequences: int) -> dict:
    """Results of inference and of two steps, and the weights after them."""
    engine = make_engine(path, head=head, max_tokens=max_tokens, temperature=reference.TEMPERATURE)
    outputs = ("logprob", "entropy") if head == "logprob" else ("value",)
    batch = random_batch(num_sequences)
    inferred = engine.infer(batch, outputs)
    if head == "logprob":
        batch = near_policy(batch, inferred["logprob"])
    loss = policy_loss(aggregation) if head == "logprob" else value_loss(aggregation)
    metrics = engine.train_step(batch, loss)
    gradients = reference.gradients(engine)
    second = engine.train_step(batch, loss)
    return {
        "inferred": inferred, "gradients": gradients, "weights": reference.weights(engine),
        "metrics": torch.tensor(list(metrics.values()) + list(second.values())),
    }  # fmt: skip


def compare_with_one_process(rank: int, models: Path, expected: Path, cases: list[tuple]) -> None:
    for i, (name, head, aggregation, case) in enumerate(cases):
        actual = run_case(models / name, head, aggregation, *case)
        wanted = torch.load(expected / f"{i}.pt")
        reference.assert_close(actual["inferred"], wanted["inferred"], 1e-6)
        # A recurrent layer's decay has the gradient of large sums that cancel: in one process, batches of another shape
        # move it by 3e-5 of itself.
        reference.assert_close(actual["gradients"], wanted["gradients"], 1e-4 if name in PADDED else 1e-5)
        reference.assert_close(actual["weights"], wanted["weights"], 1e-4)
        torch.testing.assert_close(actual["metrics"], wanted["metrics"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cases", [PAIRS, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["pairs", "every"])
def test_two_processes_compute_what_one_does(cases, tiny_model, tmp_path):
    models = [tiny_model(name) for name in NAMES]
    for i, (name, head, aggregation, case) in enumerate(cases):
        torch.save(run_case(tiny_model(name), head, aggregation, *case), tmp_path / f"{i}.pt")
    run_distributed(compare_with_one_process, 2, models[0].parent, tmp_path, cases)


def check_steps(rank: int, path: Path, output: Path) -> None:
    batch = random_batch()
    check_on_policy(path, batch)
    engine = make_engine(path, max_tokens=24)
    # Between inference and the next step no unit may be left gathered: state and weights are read there.
    engine.infer(batch, ("logprob",))
    assert all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())
    # Only one rank's micro-batches hold the bad advantage, and all must skip.
    bad = batch.advantage_T.clone()
    bad[int(batch.active_index_T[0])] = math.inf
    before = {name: reference.full(tensor) for name, tensor in engine.state_tensors().items()}
    metrics = engine.train_step(batch.replace(advantage_T=bad), policy_loss())
    assert engine.counters() == {"step": 0, "skipped_steps": 1}
    assert not math.isfinite(metrics["grad_norm"])
    reference.assert_equal({name: reference.full(t) for name, t in engine.state_tensors().items()}, before)
    engine.train_step(batch, policy_loss())
    names = [name for name, _ in engine.named_weights()]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names
    export_hf(engine, output)
    torch.save(engine.infer(batch, ("logprob",))["logprob"], output / f"rank{rank}.pt")
    check_damage_is_seen_by_all(rank, engine)


class Sampling:
    """A generator whose samples have one token of this log-probability."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob

    def generate(self, requests: list[Request], *_: object) -> list[Completion]:
        return [Completion([1], [self.logprob], "stop") for _ in requests]


def check_damage_is_seen_by_all(rank: int, engine: FSDPEngine) -> None:
    """Each rank has a row that is not finite. Every rank names both rows, and the samples of both ranks."""
    assert engine.non_finite_weights() == []
    name = f"model.model.layers.{rank}.mlp.up_proj.weight"
    engine.model.get_parameter(name).to_local().data[0, 0] = (math.nan, -math.inf)[rank]
    assert engine.non_finite_weights() == [f"model.model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
    with pytest.raises(NonFiniteLogitsError):
        Rollout(partial(Sampling, math.nan if rank == 1 else -1.0), World.current()).generate([[1]], SamplingParams())


def check_on_policy(path: Path, batch) -> None:
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(path, max_tokens=24, dtype=dtype)
        batch = batch.replace(old_logprob_T=engine.infer(batch, ("logprob",))["logprob"])
        metrics = engine.train_step(batch, PolicyLoss())
        assert metrics["ratio_max"] == 1.0
        assert metrics["approx_kl"] == 0.0


# SGD's steps are its gradients. Muon iterates in bfloat16, so its steps of 1e-3 differ by its rounding. One iteration
# has all of its operations.
OPTIMIZERS = {"SGD": ({"momentum": 0.9}, 1e-5), "NAdam": ({"eps": 1e-4}, 1e-4), "Muon": ({"ns_steps": 1}, 1e-3)}


def two_steps(path: Path, name: str, param_dtype: str = "float32") -> FSDPEngine:
    optimizer = {"name": f"torch.optim.{name}", "options": OPTIMIZERS.get(name, ({},))[0], "eps": 1e-8}
    engine = make_engine(path, dtype=param_dtype, config={"param_dtype": param_dtype}, optimizer=optimizer)
    for _ in range(2):
        engine.train_step(random_batch(), policy_loss())
    return engine


def check_other_optimizers(rank: int, path: Path, folder: Path) -> None:
    """They step shards as they step whole weights, go on from checkpoints of one process, or are refused."""
    for name, (_, tolerance) in OPTIMIZERS.items():
        engine = two_steps(path, name)
        reference.assert_close(reference.weights(engine), torch.load(folder / f"{name}.pt"), tolerance)
        two_steps(path, name, "bfloat16")
        assert CheckpointManager(folder / name).load({"actor": engine}) == {}
        saved = torch.load(folder / f"{name} state.pt")
        reference.assert_equal({key: reference.full(t) for key, t in engine.state_tensors().items()}, saved)
    with pytest.raises(ValueError, match=r"optimizer\.name torch\.optim\.Adafactor cannot train sharded parameters: "):
        two_steps(path, "Adafactor")


def check_steps_optimizers_and_a_module(rank: int, path: Path, other: Path, output: Path, saved: Path) -> None:
    check_steps(rank, path, output)
    check_other_optimizers(rank, other, saved)
    check_two(rank)


def test_steps_and_export_on_two_processes(tiny_model, tmp_path):
    export, saved = tmp_path / "export", tmp_path / "saved"
    saved.mkdir()
    for name in OPTIMIZERS:
        engine = two_steps(tiny_model("llama"), name)
        torch.save(reference.weights(engine), saved / f"{name}.pt")
        torch.save(engine.state_tensors(), saved / f"{name} state.pt")
        CheckpointManager(saved / name).save(2, {"actor": engine}, {})
    run_distributed(
        check_steps_optimizers_and_a_module, 2, tiny_model("qwen2-tied"), tiny_model("llama"), export, saved
    )
    AutoModelForCausalLM.from_pretrained(export)
    logprob_T, _ = reference.plain_logprob_and_entropy(export, random_batch())
    for rank in range(2):
        torch.testing.assert_close(torch.load(export / f"rank{rank}.pt").double(), logprob_T, rtol=0, atol=1e-5)


def check_tower(rank: int, path: Path, expected: float) -> None:
    engine = make_engine(path, max_tokens=24, dtype="bfloat16")
    assert engine.train_step(random_batch(), policy_loss())["grad_norm"] == pytest.approx(expected, rel=0.01)


def test_a_tower_that_never_runs_in_micro_batches_of_a_narrow_dtype(tiny_model):
    """It has no gradients that FSDP could keep in float32 until the last micro-batch."""
    path = tiny_model("llava-next")
    expected = make_engine(path, max_tokens=24, dtype="bfloat16").train_step(random_batch(), policy_loss())
    run_distributed(check_tower, 2, path, expected["grad_norm"])
