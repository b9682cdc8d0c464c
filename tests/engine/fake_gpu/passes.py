"""Runs an engine's passes on a CUDA device without a GPU, and prints the operators and copies that it saw.

`python -m tests.engine.fake_gpu.passes FOLDER` writes the models into FOLDER; benchmarks/support/fake_gpu.py documents
the environment. Tensors on the device have shapes but no elements.
"""

import json
import sys
from pathlib import Path

from benchmarks.support import fake_gpu  # before torch, which asks once whether there is a GPU

import torch  # isort: skip

fake_gpu.install()

from rlft_fast.config import EngineConfig  # noqa: E402
from rlft_fast.data import Batch  # noqa: E402
from rlft_fast.engine import FSDPEngine  # noqa: E402
from rlft_fast.engine.loss import Loss  # noqa: E402
from rlft_fast.engine.optimizer import build_optimizer  # noqa: E402
from rlft_fast.engine.sharding.build import build_model  # noqa: E402
from rlft_fast.engine.sharding.wrap import decoder_blocks  # noqa: E402
from rlft_fast.models.weights import materialize  # noqa: E402
from rlft_fast.rl import PolicyLoss, ValueLoss  # noqa: E402
from tests.engine.reference import random_batch, with_supports  # noqa: E402
from tests.support.tiny_models import save_tiny_model  # noqa: E402

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


def train(mode: fake_gpu.DeviceOfShapes, engine: FSDPEngine, batch: Batch, loss: Loss) -> list[str]:
    """Events of one micro-batch, whose results and gradients stay on the device."""
    mode.seen.clear()
    metrics, done = engine._forward_backward(batch, loss, 1.0, None)
    gradients = {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
    assert gradients
    assert all(x.is_cuda for x in (*metrics.values(), *done.outputs.values(), *gradients.values()))
    return list(mode.seen)


def infer(mode: fake_gpu.DeviceOfShapes, engine: FSDPEngine, batch: Batch, outputs: tuple) -> list[str]:
    mode.seen.clear()
    engine.infer(batch, outputs)
    return list(mode.seen)


def step_of_offloaded_weights(mode: fake_gpu.DeviceOfShapes, path: Path) -> list[str]:
    """The norm comes from the device; weights, gradients and optimizer are on the CPU."""
    engine = FSDPEngine(str(path), EngineConfig(cpu_offload=True), num_training_steps=1)
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    engine.optimizer = build_optimizer([("weight", weight)], engine.config.optimizer)
    mode.seen.clear()
    engine._step_optimizer(torch.ones((), device="cuda"), 0)
    return list(mode.seen)


def main(folder: Path) -> None:
    seen: dict[str, list[str]] = {}
    batch = random_batch()
    zeros = torch.zeros(batch.num_tokens)
    batch = batch.replace(loss_weight_T=zeros + 1)
    with fake_gpu.DeviceOfShapes() as mode:
        for name in MODELS:
            engine = make_engine(save_tiny_model(name, folder / name), activation_checkpointing="selective")
            for loss in LOSSES:
                seen[f"train {name} {loss}"] = train(mode, engine, batch, LOSSES[loss])
        seen["train supports"] = train(mode, engine, with_supports(batch), LOSSES["ppo"])
        seen["infer"] = infer(mode, engine, batch, ("logprob", "entropy"))
        offloaded = make_engine(folder / "llama", activation_checkpointing="offload")
        seen["train offloaded"] = train(mode, offloaded, batch, LOSSES["ppo"])
        seen["blocks"] = ["block"] * len(decoder_blocks(offloaded.model))
        critic = make_engine(folder / "llama", "value")
        seen["train critic"] = train(mode, critic, batch, ValueLoss())
        seen["step of offloaded weights"] = step_of_offloaded_weights(mode, folder / "llama")
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
