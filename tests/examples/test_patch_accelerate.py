"""Trainers on a patched model that accelerate's own FSDP2 function has prepared, in two processes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from rlft_fast import patch_lm_head
from rlft_fast.integrations.trl import enable
from tests.support.accelerated import prepare_as_accelerate
from tests.support.machine.distributed import run_distributed

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LEARNING_RATE = 0.05


def train(trainer: Trainer) -> None:
    """Prepares the model where accelerate would on a GPU; on CPUs accelerate would wrap it by DDP."""
    prepare_as_accelerate(trainer.model, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    trainer.accelerator.prepare_model = lambda model, **_: model
    trainer.train()


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def loss_of(model: nn.Module, input_ids: Tensor) -> Tensor:
    result = model(input_ids=input_ids[:, :-1], logprob_targets=input_ids[:, 1:], return_entropy=True)
    return -(result.logprob + 0.1 * result.entropy).mean()


class PolicyTrainer(Trainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        return loss_of(model, inputs["input_ids"])


ARGUMENTS: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "optim": "sgd", "learning_rate": LEARNING_RATE, "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant", "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "logging_steps": 1, "ddp_backend": "gloo",
}  # fmt: skip


def join(rank: int) -> None:
    """As torchrun would tell accelerate; the process group is there."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def train_by_transformers(rank: int, folder: Path, output: Path) -> None:
    join(rank)
    rows = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = patch_lm_head(load(folder))
    optimizer = torch.optim.SGD(plain.parameters(), LEARNING_RATE)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(plain, rows).backward()
        optimizer.step()

    model = patch_lm_head(load(folder))
    arguments = TrainingArguments(str(output), max_steps=3, per_device_train_batch_size=1, **ARGUMENTS)
    trainer = PolicyTrainer(model, arguments, train_dataset=[{"input_ids": row} for row in rows])
    train(trainer)
    compare(model, plain)


def compare(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_transformers_trainer(name, tiny_model, tmp_path):
    run_distributed(train_by_transformers, 2, tiny_model(name), tmp_path)


def train_by_trl(rank: int, folder: Path, output: Path) -> None:
    """Completions of fixed length, so that both processes call the sharded model equally often."""
    join(rank)
    reward = lambda completion_ids, **_: [len({*ids}) / len(ids) for ids in completion_ids]  # noqa: E731
    rows = Dataset.from_dict({"prompt": ["1 + 2 = ", "a", "hello there", "b c"]})
    histories = []
    for fused in (False, True):
        if fused:
            enable()
        torch.manual_seed(0)
        options = {"max_completion_length": 6, "generation_kwargs": {"min_new_tokens": 6}, "num_generations": 4}
        arguments = GRPOConfig(str(output), max_steps=2, per_device_train_batch_size=4, **options, **ARGUMENTS)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        trainer = GRPOTrainer(load(folder), reward, arguments, rows, processing_class=tokenizer)
        train(trainer)
        histories.append(trainer.state.log_history[:2])
    for theirs, ours in zip(*histories, strict=True):
        assert ours["reward"] == theirs["reward"]
        for key in ("loss", "grad_norm", "entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key


def test_trl(tiny_model, tmp_path):
    run_distributed(train_by_trl, 2, tiny_model("llama-tied"), tmp_path)
