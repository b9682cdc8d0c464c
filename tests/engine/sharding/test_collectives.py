"""What a step costs in communication: one collective more is a change, and this test says so.

With U units (blocks, embedding, head, and the root) and k micro-batches:

- all-gathers: 2U - 2 per micro-batch. A unit gathers its weights for the forward pass and again for the backward pass,
  and frees them in between: sharding saves this memory. The head and the root stay gathered, because their backward
  pass begins where their forward pass ends.
- reduce-scatters: U per step, with the last micro-batch, while the gradients of the others wait; or U per micro-batch.
  Both ways add the same numbers in float32. With one micro-batch they add them in the same order. With more, one way
  adds a rank's micro-batches first, and the other way adds the ranks first.
- all-reduces: 3 per step. The gradient norm, and the metrics by sum and by maximum. In a hybrid mesh U more, with the
  last micro-batch in any case: copies add up their gradients.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlft_fast.config import RolloutConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.sharding.wrap import find_units
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import SamplingParams, build_rollout
from tests.engine import reference
from tests.engine.reference import make_engine, near_policy, policy_loss, random_batch
from tests.support.machine.distributed import run_distributed

pytestmark = pytest.mark.dist


class CollectiveCounter(TorchDispatchMode):
    """Counts the operators of torch.distributed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def step(engine: FSDPEngine, batch: Batch) -> tuple[int, Counter[str], dict[str, float]]:
    """Micro-batches of a step, its collectives by kind, and its metrics."""
    with CollectiveCounter() as counter:
        metrics = engine.train_step(batch, policy_loss())
    return len(engine._work(batch).micro_batches), counter.counts, metrics


def check(rank: int, path: Path, shard_size: int, num_copies: int) -> None:
    batch = random_batch(7 * num_copies)
    batch = near_policy(batch, torch.full((batch.num_tokens,), -5.5))
    seen, norms, gradients = [], [], []
    # The first step of a model may do more than the others.
    for max_tokens, every, steps in ((1000, False, 2), (1000, True, 1), (24, False, 1), (24, True, 2)):
        config = {"reduce_every_micro_batch": every, "shard_size": shard_size}
        engine = make_engine(path, max_tokens=max_tokens, config=config)
        num_units = len(find_units(engine.model)) + 1
        for number in range(steps):
            num_micro_batches, counts, metrics = step(engine, batch)
            expected = {
                "allgather_base": num_micro_batches * (2 * num_units - 2),
                "reduce_scatter_base": num_units * (num_micro_batches if every else 1),
                "allreduce": 3 + (num_units if num_copies > 1 else 0),
            }
            assert counts == expected, (num_micro_batches, every, counts, expected)
            if number == 0:
                gradients.append(reference.gradients(engine))
                norms.append(metrics["grad_norm"])
        seen.append(num_micro_batches)
    assert seen[:2] == [1, 1]
    assert seen[2] == seen[3] > 1
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)
    once, each, waiting, reduced = gradients
    reference.assert_equal(each, once)
    reference.assert_close(reduced, waiting, 2 * (num_copies + seen[2]) * torch.finfo(torch.float32).eps)


def check_after_a_rollout(rank: int, path: Path) -> None:
    """A rollout keeps the weights gathered. Afterwards units free their weights as they did before it."""
    batch = near_policy(random_batch(), torch.full((random_batch().num_tokens,), -5.5))
    for reshards in (True, False):
        engine = make_engine(path, max_tokens=1000, config={"reshard_after_forward": reshards})
        gathers = []
        for _ in range(2):
            gathers.append(step(engine, batch)[1]["allgather_base"])
            rollout = build_rollout(engine, load_tokenizer(path), RolloutConfig(batch_size=4), 16)
            rollout.generate([[1, 2, 3]], SamplingParams(n=2, max_new_tokens=2))
        num_units = len(find_units(engine.model)) + 1
        assert gathers == [2 * num_units - 2 if reshards else num_units] * 2


def check_prefetch(rank: int, path: Path) -> None:
    """Before a unit computes, the gather of the next one has begun: in both passes, and at the ends of the model."""
    batch = near_policy(random_batch(), torch.full((random_batch().num_tokens,), -5.5))
    engine = make_engine(path, max_tokens=1000)
    forward, backward = [], []

    def note_backward(_unit: torch.nn.Module, _arguments: object, outputs: object) -> None:
        tree_leaves(outputs)[0].register_hook(lambda _: backward.append(counter.counts["allgather_base"]))

    with CollectiveCounter() as counter:
        for _, unit in find_units(engine.model):
            unit.register_forward_pre_hook(lambda *_: forward.append(counter.counts["allgather_base"]))
            unit.register_forward_hook(note_backward)
        engine.train_step(batch, policy_loss())
    num_units = len(forward) + 1
    assert forward == [*range(3, num_units + 1), num_units]  # the root, the unit itself, and the next one
    assert backward == [*range(num_units + 1, 2 * num_units - 1), 2 * num_units - 2]


def test_units_gather_before_they_run(tiny_model):
    run_distributed(check_prefetch, 2, tiny_model("llama"))


def test_collectives_after_a_rollout(tiny_model):
    run_distributed(check_after_a_rollout, 2, tiny_model("llama"))


@pytest.mark.parametrize("num_copies", [1, 2])
@pytest.mark.thin(2)
def test_collectives_of_a_step(num_copies, tiny_model):
    run_distributed(check, 2 * num_copies, tiny_model("llama"), 2, num_copies)
