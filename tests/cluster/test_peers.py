"""What a call costs beside verl's way: a batch of a million tokens to two workers and back. make test-peers."""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rlft_fast.cluster import connect
from rlft_fast.cluster.buffers import send_tensors_as_buffers
from rlft_fast.cluster.dispatch import split_batch
from rlft_fast.data import Batch, Share

VERL = importlib.util.find_spec("verl")
pytestmark = [pytest.mark.peers, pytest.mark.skipif(VERL is None, reason="no verl: make test-peers")]

NUM_TOKENS, PROMPT, SIZE = 1_000_000, 64, 2
FIELDS = {"old_logprob_T": "old_log_probs", "ref_logprob_T": "ref_log_prob", "advantage_T": "advantages"}


class Echo:
    """A worker that answers each token by a function of one of its fields."""

    def __init__(self) -> None:
        send_tensors_as_buffers()

    def ours(self, share: Share) -> dict[str, Tensor]:
        assert share.batch.old_logprob_T is not None
        return {"logprob_T": share.batch.old_logprob_T + 1}

    def verls(self, data):
        from verl import DataProto

        return DataProto.from_dict(tensors={"log_probs": data.batch["old_log_probs"] + 1})


def make_batch() -> Batch:
    """Completions of log-normal lengths, around 1,000 tokens."""
    draw = np.random.default_rng(0)
    lengths = draw.lognormal(np.log(1000), 0.7, 2000).astype(int).clip(8, 8192)
    lengths = lengths[: int(np.searchsorted((lengths + PROMPT).cumsum(), NUM_TOKENS))]
    prompts = [draw.integers(1, 1000, PROMPT).tolist() for _ in lengths]
    batch = Batch.from_samples(prompts, [draw.integers(1, 1000, n).tolist() for n in lengths])
    return batch.replace(**{name: torch.rand(batch.num_tokens) * batch.loss_mask_T for name in FIELDS})


def make_data(batch: Batch):
    """The same as verl has it: prompts and responses padded to the longest."""
    from verl import DataProto

    responses = batch.lengths - PROMPT
    longest = int(responses.max())
    mask = torch.arange(longest) < torch.from_numpy(responses)[:, None]

    def padded(values_T: Tensor, chosen: Tensor, shape: Tensor) -> Tensor:
        filled = torch.zeros(shape.shape, dtype=values_T.dtype)
        filled[shape] = values_T[chosen]
        return filled

    whole = torch.cat([torch.ones(len(responses), PROMPT, dtype=torch.bool), mask], 1)
    everything = torch.ones(batch.num_tokens, dtype=torch.bool)
    tensors = {
        "input_ids": padded(batch.input_ids_T, everything, whole),
        "position_ids": padded(batch.position_ids_T, everything, whole),
        "attention_mask": whole.long(), "response_mask": mask.long(),
    } | {theirs: padded(getattr(batch, name), batch.loss_mask_T, mask) for name, theirs in FIELDS.items()}  # fmt: skip
    tensors["responses"] = tensors["input_ids"][:, PROMPT:].contiguous()
    if len(responses) % SIZE:  # verl asks for equal chunks
        tensors = {name: torch.cat([x, x[-1:]]) for name, x in tensors.items()}
    return DataProto.from_dict(tensors=tensors)


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def test_dispatch_takes_half_of_verls_time():
    import ray
    from verl import DataProto

    connect(num_cpus=SIZE)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers find another package named tests
    try:
        workers = [ray.remote(num_cpus=1)(Echo).remote() for _ in range(SIZE)]
        batch = make_batch()
        data = make_data(batch)

        def ours() -> Tensor:
            split = split_batch(batch, (), 16384, SIZE, 1, trains=False)
            calls = [worker.ours.remote(*own) for worker, own in zip(workers, split.arguments, strict=True)]
            return split.join(ray.get(calls))["logprob_T"]

        def verls() -> Tensor:
            calls = [worker.verls.remote(own) for worker, own in zip(workers, data.chunk(SIZE), strict=True)]
            return DataProto.concat(ray.get(calls)).batch["log_probs"]

        assert torch.equal(ours(), batch.old_logprob_T + 1)
        assert verls().shape == data.batch["old_log_probs"].shape
        seconds = [(timed(ours), timed(verls)) for _ in range(7)]
        mine, theirs = (statistics.median(each) for each in zip(*seconds, strict=True))
        print(f"{batch.num_tokens} tokens: {mine:.3f} s, verl {theirs:.3f} s, ratio {mine / theirs:.2f}")
        assert mine <= 0.5 * theirs
    finally:
        ray.shutdown()
