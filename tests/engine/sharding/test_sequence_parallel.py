"""Ranks that share micro-batches, and ranks with and without images, compute the results of one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlft_fast.data import Batch
from rlft_fast.engine.forward import prepare_model_inputs, prepare_model_outputs
from rlft_fast.models import load_policy, require_divisible_heads
from rlft_fast.rl import PolicyLoss
from tests.engine import reference
from tests.engine.reference import (
    make_engine,
    near_policy,
    policy_loss,
    random_batch,
    random_image_batch,
    value_loss,
    with_supports,
)
from tests.support.machine.distributed import run_distributed
from tests.support.tiny_models import PICTURE_MODELS, VISION_MODELS

pytestmark = pytest.mark.dist

# Two key-value heads; one, which is fewer than ranks, and a window; soft-caps; experts and two head widths; sinks;
# chunks; images, tokens of which attend to later ones in Gemma 3.
NAMES = ["llama", "mistral", "gemma2", "deepseek-v3", "gpt-oss", "llama4", "qwen2.5-vl", "qwen3-vl", "gemma3-vision"]
# Many micro-batches, most with an odd number of rows; one with all; one sequence, so that other ranks have none.
CASES = {"llama": [(24, 7), (1000, 7), (1000, 1)], "qwen3-vl": [(80, 6), (1000, 2)]}


def batch_for(name: str, num_sequences: int) -> Batch:
    has_images = name in VISION_MODELS | PICTURE_MODELS
    return random_image_batch(num_sequences, name=name) if has_images else random_batch(num_sequences)


def run_case(path: Path, head: str, max_tokens: int, num_sequences: int, sequence_parallel: int) -> dict:
    engine = make_engine(
        path,
        head="value" if head == "value" else "logprob",
        max_tokens=max_tokens,
        temperature=reference.TEMPERATURE,
        config={"sequence_parallel": sequence_parallel},
    )
    batch = batch_for(path.name, num_sequences)
    batch = with_supports(batch) if head == "support" else batch
    inferred = engine.infer(batch, ("value",) if head == "value" else ("logprob", "entropy"))
    if head != "value":
        batch, loss = near_policy(batch, inferred["logprob"]), policy_loss()
    else:
        batch, loss = batch.replace(value_T=batch.advantage_T / 3, return_T=batch.advantage_T), value_loss()
    metrics = engine.train_step(batch, loss)
    return {
        "inferred": inferred, "gradients": reference.gradients(engine), "weights": reference.weights(engine),
        "metrics": torch.tensor(list(metrics.values())),
    }  # fmt: skip


def cases(names: list[str]) -> list[tuple]:
    policies = [(name, "logprob", *case) for name in names for case in CASES.get(name, [(80, 6)])]
    return policies + [("llama", head, 24, 7) for head in ("value", "support")] * ("llama" in names)


def compare_with_one_process(rank: int, models: Path, expected: Path, names: list[str], sizes: tuple[int, ...]) -> None:
    for name, head, *case in cases(names):
        for size in sizes:
            actual = run_case(models / name, head, *case, size)
            wanted = torch.load(expected / f"{name}-{head}-{case}.pt")
            reference.assert_close(actual["inferred"], wanted["inferred"], 2e-6)
            reference.assert_close(actual["gradients"], wanted["gradients"], 1e-5)
            reference.assert_close(actual["weights"], wanted["weights"], 1e-4)
            torch.testing.assert_close(actual["metrics"], wanted["metrics"], rtol=1e-3, atol=1e-5)


def check_shares(rank: int, path: Path) -> None:
    """Every output goes to one rank, with the targets of the whole micro-batch."""
    engine, batch = make_engine(path, config={"sequence_parallel": 2}), random_batch()
    inputs = prepare_model_inputs(
        batch, engine.device, backbone=engine.model.backbone, sequence_group=engine.sequence_group
    )
    assert torch.equal(inputs.target_A, batch.target_T[inputs.output_index_A])
    assert make_engine(path, config={"sequence_parallel": 2}).sequence_group is engine.sequence_group  # one for all
    own = prepare_model_outputs(torch.ones(len(inputs.target_A)), batch, inputs.output_index_A)
    assert 0 < own.sum() < len(batch.active_index_T)
    dist.all_reduce(own)
    assert torch.equal(own.bool(), batch.loss_mask_T)
    assert own.max() == 1


def check_nothing_active(rank: int, path: Path) -> None:
    engine, batch = make_engine(path, config={"sequence_parallel": 2}), random_batch()
    silent = batch.replace(loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    assert not engine.infer(silent, ("logprob",))["logprob"].any()


def check_on_policy(rank: int, path: Path, dtype: str) -> None:
    engine = make_engine(path, config={"sequence_parallel": 2}, max_tokens=80, dtype=dtype)
    batch = batch_for(path.name, 6)
    batch = batch.replace(old_logprob_T=engine.infer(batch, ("logprob",))["logprob"])
    outputs = {}
    assert engine.train_step(batch, PolicyLoss(), outputs=outputs)["ratio_max"] == 1.0
    assert torch.equal(outputs["logprob"], batch.old_logprob_T)


def check_refusals(rank: int, path: Path) -> None:
    with pytest.raises(ValueError, match="sequence_parallel=3 must divide the number of processes, which is 2"):
        make_engine(path, config={"sequence_parallel": 3})


def on_two_processes(rank: int, models: Path, expected: Path) -> None:
    compare_with_one_process(rank, models, expected, NAMES, (2,))
    # Two data ranks, of which one has no images: the second case is one sequence with and one without.
    compare_with_one_process(rank, models, expected, ["qwen3-vl"], (1,))
    check_shares(rank, models / "llama")
    check_nothing_active(rank, models / "llama")
    check_on_policy(rank, models / "llama", "float32")
    check_on_policy(rank, models / "qwen2.5-vl", "bfloat16")
    check_refusals(rank, models / "llama")


def save_expected(tiny_model, folder: Path, names: list[str]) -> Path:
    """Runs all cases on this process; returns where the models are."""
    for name, head, *case in cases(names):
        torch.save(run_case(tiny_model(name), head, *case, 1), folder / f"{name}-{head}-{case}.pt")
    return tiny_model(names[0]).parent


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tiny_model, tmp_path):
    run_distributed(on_two_processes, 2, save_expected(tiny_model, tmp_path, NAMES), tmp_path)


@pytest.mark.slow
def test_four_processes_compute_what_one_does(tiny_model, tmp_path):
    """Two groups of two ranks, and one group of four: more ranks than the models have key-value heads."""
    names = ["llama"]
    models = save_expected(tiny_model, tmp_path, names)
    run_distributed(compare_with_one_process, 4, models, tmp_path, names, (2, 4))


def test_refuses_heads_that_cannot_be_shared(tiny_model):
    backbone = load_policy(tiny_model("llama")).backbone
    require_divisible_heads(backbone, 2)
    with pytest.raises(ValueError, match=r"sequence_parallel=3 must divide the 4 attention heads of LlamaModel"):
        require_divisible_heads(backbone, 3)
