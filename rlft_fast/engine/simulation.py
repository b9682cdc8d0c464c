"""What a forward and backward pass needs in memory, found by running it on tensors without data.

The real model code runs under `FakeTensorMode`, so that any architecture is covered and nothing is computed.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from rlft_fast.config import EngineConfig
from rlft_fast.engine.build import build_model, shard
from rlft_fast.engine.optimizer import build_optimizer
from rlft_fast.engine.wrap import reduce_gradients
from rlft_fast.models.heads import ModelInputs, PolicyModel
from rlft_fast.models.weights import materialize
from rlft_fast.rl import PolicyLoss

WHOLE_SEQUENCE = "rlft_whole_sequence"


class MemoryTracker(TorchDispatchMode):
    """Follows the bytes of all storages that operators create while it is active; works on fake tensors, too.

    Args:
        operator: the name of one, ``namespace::name``, that takes memory of its own unseen.

    Attributes:
        live: bytes that are there now.
        peak: the most there were.
        peak_at_operator: the most there were when a call of the operator ended, its results among them.
    """

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator
        self.live = self.peak = self.peak_at_operator = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self):
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            self._resize(storage, size)
            return original(storage, size)

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010  FSDP frees weights so, without an operator
        return super().__enter__()

    def __exit__(self, exc_type, exc_val, exc_tb):
        delattr(torch.UntypedStorage, "resize_")  # what remains is the base class's
        return super().__exit__(exc_type, exc_val, exc_tb)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its shards comes here again
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                self._follow(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        if func.name() == self.operator:
            self.peak_at_operator = max(self.peak_at_operator, self.live)
        return outputs

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata in self._sizes:
            self.live += size - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = size

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def whole_sequence_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Stands for packed attention, whose boundaries a fake tensor does not have; it needs as much memory."""
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return torch.cat([output], dim=2).transpose(1, 2), None


AttentionInterface.register(WHOLE_SEQUENCE, whole_sequence_attention)


@contextlib.contextmanager
def pretended_world(world_size: int) -> Iterator[None]:
    """This process is rank 0 of so many, whose collectives do nothing.

    Raises:
        ValueError: it is in a process group already.
    """
    if dist.is_initialized():
        raise ValueError("this process has joined a process group, so it cannot pretend another: plan before joining")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulate_step(path: str, config: EngineConfig, num_tokens: int, num_micro_batches: int) -> MemoryTracker:
    """Rank 0's memory during `FSDPEngine.train_step`, by the code that builds, shards and runs its model.

    The operator whose own memory is not in it is `linear_logprob_loss`.

    Args:
        path: folder with the model's ``config.json``.
        config: of the engine.
        num_tokens: size of each micro-batch.
        num_micro_batches: more than two need what two need.
    """
    device = torch.device("cpu")
    model = build_model(path, config.model_copy(update={"compile": False}), "logprob", trains=True)
    assert isinstance(model, PolicyModel)
    shard(model, config, device)
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker("rlft_fast::linear_logprob_loss") as tracker:
        materialize(model, device)
        model.pretrained.set_attn_implementation(WHOLE_SEQUENCE)
        optimizer = build_optimizer(model.parameters(), config.optimizer)
        optimizer.initialize_state()
        for i in reversed(range(min(num_micro_batches, 2))):
            reduce_gradients(model, i == 0, config.reduce_every_micro_batch)
            forward_backward(model, num_tokens)
    return tracker


def forward_backward(model: PolicyModel, num_tokens: int) -> None:
    """One micro-batch of so many tokens, all of them active."""
    ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    boundaries = torch.zeros(2, dtype=torch.int32)
    inputs = ModelInputs(
        input_ids=ids, position_ids=ids, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, max_seqlen_q=num_tokens,
        max_seqlen_k=num_tokens, key_index=None, active_index=ids[0], target=ids[0], output_index=ids[0],
    )  # fmt: skip
    fields = tuple(torch.zeros(num_tokens) for _ in range(3))
    options: dict[str, Any] = {"return_entropy": True, "loss_fn": PolicyLoss().per_token, "per_token": fields}
    total, *_ = model(inputs, **options)
    total.backward()
