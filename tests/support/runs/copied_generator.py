"""A generator with weights of its own, in this process: transformers with a copy of the policy, which takes time."""

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch

from rlft_fast.engine import FSDPEngine, WeightStream
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import Answers, HFGenerator, Request, Rollout, SamplingParams


class CopiedGenerator(HFGenerator):
    """Answers as the policy of the last `load` did.

    Args:
        policy: to be copied.
        seconds: how long a call of `generate` sleeps, by its number; it may raise.
    """

    name = "the copy"

    def __init__(self, policy: FSDPEngine, seconds: Callable[[int], float]) -> None:
        copy = FSDPEngine(policy.path, policy.config, world=policy.world).initialize()
        super().__init__(copy.model.eval(), load_tokenizer(policy.path), batch_size=64)
        self.seconds = seconds
        self.num_calls = 0

    def load(self, weights: WeightStream | None, version: int) -> None:
        assert weights is not None
        own = dict(self.model.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.tensors():
                own[name].copy_(tensor)
        super().load(None, version)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        time.sleep(self.seconds(number))
        return super().generate(requests, params)


def copied_rollout(engine: FSDPEngine, seconds: Callable[[int], float] = lambda number: 0.0) -> Rollout:
    """A rollout by a `CopiedGenerator`, which a run may overlap with its training."""

    @contextmanager
    def weights():
        with engine.eval_mode():
            yield engine.weight_stream(torch.float32)

    return Rollout(lambda: CopiedGenerator(engine, seconds), engine.world, weights=weights)
