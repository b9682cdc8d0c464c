"""Moments in CPU memory: the same steps, wherever the moments wait."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch

from rlft_fast.ops import FusedAdamW
from rlft_fast.ops.optim import host
from tests.ops.optim.adamw_problems import (
    OPTIONS,
    SHAPES,
    as_parameters,
    assert_same_bits,
    bits,
    random_tensors,
    take_steps,
)
from tests.support.machine.devices import DEVICES

MOMENTS = ("exp_avg", "exp_avg_sq")


class Numbered(NamedTuple):
    number: int
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def moments(optimizer: FusedAdamW) -> list[torch.Tensor]:
    return [state[key] for state in optimizer.state.values() for key in MOMENTS]


# Every parameter in a bucket of its own, two in one, and all in one.
@pytest.mark.parametrize("bucket_bytes", [1, 129 * 7 * 8 + 24, 2**28])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_same_bits_as_on_the_device(dtype, device, bucket_bytes, monkeypatch):
    monkeypatch.setattr(host, "BUCKET_BYTES", bucket_bytes)
    initial = random_tensors(SHAPES, dtype, device)
    here, there = (FusedAdamW(as_parameters(initial), **OPTIONS, offload_moments=x) for x in (False, True))
    coefficient = torch.tensor(0.5, device=device)
    for optimizer in (here, there):
        take_steps(optimizer, 2, coefficient=coefficient)
        take_steps(optimizer, 1, first=3, found_inf=torch.ones((), device=device))
    assert_same_bits([x.cpu() for x in bits(there)], [x.cpu() for x in bits(here)])
    assert {x.device.type for x in moments(there)} == {"cpu"}
    assert {x.is_pinned() for x in moments(there)} == {device == "cuda" and torch.version.cuda is not None}

    # A state dict goes from one place to the other, and so does a copy.
    resumed = FusedAdamW(as_parameters([p.detach() for p in there.param_groups[0]["params"]]), offload_moments=True)
    resumed.load_state_dict(copy.deepcopy(here.state_dict()))
    assert {x.device.type for x in moments(resumed)} == {"cpu"}
    assert pickle.loads(pickle.dumps(there)).offload_moments
    for optimizer in (resumed, here):
        take_steps(optimizer, 1, first=4)
    assert_same_bits([x.cpu() for x in bits(resumed)], [x.cpu() for x in bits(here)])


def test_moved_state_leaves_the_moments():
    optimizer = FusedAdamW(as_parameters(random_tensors([(3,)], torch.bfloat16)), offload_moments=True)
    optimizer.initialize_state()
    optimizer.move_state("meta")
    (state,) = optimizer.state.values()
    assert {key: x.device.type for key, x in state.items()} == {
        "step": "meta", "exp_avg": "cpu", "exp_avg_sq": "cpu", "master": "meta",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([4, 4, 4], [[0, 1], [2]]), ([9, 1, 7], [[0], [1, 2]]), ([8], [[0]]), ([0, 8, 0], [[0, 1, 2]])],
)
def test_buckets(sizes, expected, monkeypatch):
    """A float32 element has eight bytes of moments: a bucket has room for eight elements."""
    monkeypatch.setattr(host, "BUCKET_BYTES", 64)
    parts = [Numbered(i, torch.zeros(size), torch.zeros(size)) for i, size in enumerate(sizes)]
    assert [[part.number for part in bucket] for bucket in host.buckets(parts)] == expected
