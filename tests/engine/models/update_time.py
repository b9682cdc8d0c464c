"""The time of an update here, as a share of the time of transformers' own padded step.

Seconds are those that the CPU computes on one thread, and both sides run in turns: other work on the machine changes
the share little.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from rlft_fast.data import Batch, plan_batch
from rlft_fast.engine.forward import prepare_micro_batches, prepare_model_inputs
from rlft_fast.models import PolicyModel, padded_attention

MAX_TOKENS = 16384  # the default of an engine
# Log-normal as in benchmarks/engine/workload.py, with a median of 64 and a sigma of 0.7, at equal distances of rank.
MIXED = [17, 25, 32, 38, 43, 49, 55, 61, 67, 75, 84, 94, 108, 128, 161, 240]
FEW = MIXED[3::4]
EQUAL = [64] * 16
_TURNS = 3


def share_of_time(policy: PolicyModel, lengths: list[int], vocab_size: int = 64) -> float:
    """Forward and backward of sequences without a common prompt; every token but the first has a term of the loss."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]
    batch = Batch.from_samples([x[:1].tolist() for x in sequences], [x[1:].tolist() for x in sequences])
    turns: list[tuple[float, float]] = []
    with _one_thread():
        for _ in range(1 + _TURNS):
            ours = _seconds(lambda: _ours(policy, batch))
            with padded_attention(policy.model):
                turns.append((ours, _seconds(lambda: _theirs(policy, sequences))))
    policy.zero_grad()
    ours, theirs = map(min, zip(*turns[1:], strict=True))  # the first turn warms up
    return ours / theirs


def _ours(policy: PolicyModel, batch: Batch) -> None:
    is_padded = bool(policy.padded_because)
    for micro_batch in prepare_micro_batches(batch, plan_batch(batch, MAX_TOKENS, padded=is_padded), 0):
        inputs = prepare_model_inputs(micro_batch, torch.device("cpu"), backbone=policy.backbone, padded=is_padded)
        (-policy(inputs).logprob.sum()).backward()


def _theirs(policy: PolicyModel, sequences: list[Tensor]) -> None:
    ids_BL = pad_sequence(sequences, batch_first=True)
    mask_BL = pad_sequence([torch.ones_like(x) for x in sequences], batch_first=True)
    logits = policy.model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits
    target_BL = ids_BL.masked_fill(mask_BL == 0, -100)
    cross_entropy(logits[:, :-1].flatten(0, 1), target_BL[:, 1:].flatten(), reduction="sum").backward()


def _seconds(run: Callable[[], None]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
