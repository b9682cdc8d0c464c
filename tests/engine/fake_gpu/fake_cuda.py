"""Runs an engine's passes on a CUDA device that is not there, and tells what would have waited for it.

`python -m tests.engine.fake_gpu.fake_cuda LIBRARY FOLDER`, in a process that does nothing else: LIBRARY is the compiled
tests/cuda_emulator/device.cpp, FOLDER gets the models. Tensors on the device have shapes but no elements, so that
nothing is computed; what an operator cannot know without elements, it would have to wait for on a GPU, and raises here.
"""

import ctypes
import json
import sys
from importlib.util import find_spec
from pathlib import Path

# Before torch asks, once and for all, whether there is a GPU.
ctypes.CDLL(str(Path(find_spec("torch").origin).parent / "lib/libtorch_cpu.so"))
ctypes.CDLL(sys.argv[1])

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda"): made on the CPU, then moved
torch.cuda.is_available = lambda: True
torch.cuda._lazy_init = lambda: None
torch.cuda.current_device = lambda: 0
torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda index: 0
torch.cuda.get_device_capability = lambda device=None: (9, 0)

from rlft_fast.config import EngineConfig  # noqa: E402
from rlft_fast.data import Batch  # noqa: E402
from rlft_fast.engine import FSDPEngine  # noqa: E402
from rlft_fast.engine.fsdp import Loss  # noqa: E402
from rlft_fast.engine.optimizer import build_optimizer  # noqa: E402
from rlft_fast.engine.sharding.build import build_model  # noqa: E402
from rlft_fast.models.weights import materialize  # noqa: E402
from rlft_fast.ops import backends, library  # noqa: E402
from rlft_fast.rl import PolicyLoss, ValueLoss  # noqa: E402
from tests.engine.reference import random_batch, with_supports  # noqa: E402
from tests.support.tiny_models import save_tiny_model  # noqa: E402

library.has_cuda_kernels = backends.has_cuda_kernels = True
aten = torch.ops.aten
_COPIES = {aten._to_copy.default, aten.copy_.default}


class FakeCuda(TorchDispatchMode):
    """While it is entered, operators that are asked for a CUDA tensor make one without elements.

    Attributes:
        seen: what happened, in order: names of the project's operators, "from device" and "from unpinned memory".
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.pinned: list[Tensor] = []
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        asked_for = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if func is aten._pin_memory.default:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if asked_for != "cuda" and not any(isinstance(x, FakeTensor) for x in tensors):
            return func(*args, **kwargs)
        self._note(func, tensors, asked_for)
        args, kwargs = tree_map(self._as_fake, (args, kwargs))
        with self.fake:
            return func(*args, **kwargs)

    def _note(self, func, tensors: list[Tensor], asked_for: str | None) -> None:
        from_cpu = [x for x in tensors if not isinstance(x, FakeTensor)]
        if func.namespace == "rlft_fast":
            self.seen.append(func._opname)
        if func not in _COPIES:
            mixed = any(x.is_cuda for x in tensors) and any(x.dim() for x in from_cpu)
            assert not mixed, f"{func} of tensors on the device and on the CPU"
        elif asked_for == "cpu" and tensors[0].is_cuda:
            self.seen.append("from device")
        elif asked_for == "cuda" and any(x is not y for x in from_cpu for y in self.pinned[-1:] or [None]):
            self.seen.append("from unpinned memory")

    def _as_fake(self, x):
        return self.fake.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x


LOSSES: dict[str, Loss] = {
    "ppo": PolicyLoss(entropy_coef=0.1, kl_coef=0.1), "on-policy": PolicyLoss(on_policy=True),
    "gspo": PolicyLoss(loss="gspo"),
}  # fmt: skip
MODELS = ("llama", "gemma3", "deepseek-v3")


def make_engine(path: Path, head: str = "logprob", **config) -> FSDPEngine:
    """In bfloat16 on the device, but not sharded."""
    settings = EngineConfig(max_tokens=24, param_dtype="bfloat16", compute_dtype="bfloat16", **config)
    engine = FSDPEngine(str(path), settings, head=head, num_training_steps=1)
    assert engine.device == torch.device("cuda", 0)
    engine.model = build_model(engine.path, settings, head, trains=True)
    materialize(engine.model, engine.device)
    return engine


def train(mode: FakeCuda, engine: FSDPEngine, batch: Batch, loss: Loss) -> list[str]:
    """What a micro-batch does; its results and gradients stay on the device."""
    mode.seen.clear()
    metrics, done = engine._forward_backward(batch, loss, 1.0)
    gradients = {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
    assert gradients
    assert all(x.is_cuda for x in (*metrics.values(), *done.outputs.values(), *gradients.values()))
    return list(mode.seen)


def infer(mode: FakeCuda, engine: FSDPEngine, batch: Batch, outputs: tuple) -> list[str]:
    mode.seen.clear()
    engine.infer(batch, outputs)
    return list(mode.seen)


def step_of_offloaded_weights(mode: FakeCuda, path: Path) -> list[str]:
    """The norm comes from the device; weights, gradients and optimizer are on the CPU."""
    engine = FSDPEngine(str(path), EngineConfig(cpu_offload=True), num_training_steps=1)
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    engine.optimizer = build_optimizer([weight], engine.config.optimizer)
    mode.seen.clear()
    engine._optimizer_step(torch.ones((), device="cuda"))
    return list(mode.seen)


def main(folder: Path) -> None:
    seen: dict[str, list[str]] = {}
    batch = random_batch()
    zeros = torch.zeros(batch.num_tokens)
    batch = batch.replace(loss_weight_T=zeros + 1)
    with FakeCuda() as mode:
        for name in MODELS:
            engine = make_engine(save_tiny_model(name, folder / name), activation_checkpointing="selective")
            for loss in LOSSES:
                seen[f"train {name} {loss}"] = train(mode, engine, batch, LOSSES[loss])
        seen["train supports"] = train(mode, engine, with_supports(batch), LOSSES["ppo"])
        seen["infer"] = infer(mode, engine, batch, ("logprob", "entropy"))
        critic = make_engine(folder / "llama", "value")
        seen["train critic"] = train(mode, critic, batch, ValueLoss())
        seen["step of offloaded weights"] = step_of_offloaded_weights(mode, folder / "llama")
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[2]))
