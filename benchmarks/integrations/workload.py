"""The work of the benchmark: one forward and backward pass of each trainer, with three heads.

The trainers are real, and compute their own loss with their own metrics. Only generation and collation are left out:
each trainer gets a batch of random tokens, as its generation or its collator would make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl.trainer import utils

from rlft_fast.integrations.transformers import FusedLossTrainer
from rlft_fast.integrations.trl import disable, enable

OURS, THEIRS, FLOOR = "rlft_fast", "their own head", "empty head"
HF = "HF Trainer"
TRL_TRAINERS = {
    "GRPO": (GRPOTrainer, GRPOConfig), "RLOO": (RLOOTrainer, RLOOConfig), "DPO": (DPOTrainer, DPOConfig),
    "SFT": (SFTTrainer, SFTConfig),
}  # fmt: skip
TRAINERS = (*TRL_TRAINERS, HF)
_ROWS = {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["d", "c"], "completion": ["c", "d"]}
_COLUMNS = {"DPO": ("prompt", "chosen", "rejected"), "SFT": ("prompt", "completion")}
_OPTIONS: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False}
_SAMPLED: dict[str, Any] = {"num_generations": 2, "beta": 0.0}


@dataclass(frozen=True)
class Workload:
    """A batch of full rows: no position is padding.

    Attributes:
        num_rows: sequences; DPO's first half is chosen, and its second half is rejected.
        prompt: tokens of a prompt. Their positions have no label.
        completion: tokens of a completion.
    """

    num_rows: int = 8
    prompt: int = 40
    completion: int = 64


@dataclass(frozen=True)
class Task:
    """One trainer.

    Attributes:
        name: of the trainer.
        runs: by head, a forward and a backward pass, which adds to the gradients and returns the loss.
        parameters: by head, what gets the gradients. The heads of a trainer of TRL share one model.
    """

    name: str
    runs: dict[str, Callable[[], Tensor]]
    parameters: dict[str, list[nn.Parameter]]


def make_task(name: str, folder: str, work: Workload, output: str) -> Task:
    """One of `TRAINERS` with the model and tokenizer of `folder`."""
    return _hf_task(folder, work, output) if name == HF else _trl_task(name, folder, work, output)


def _trl_task(name: str, folder: str, work: Workload, output: str) -> Task:
    trainer_class, config_class = TRL_TRAINERS[name]
    sampled = name in ("GRPO", "RLOO")
    trainer: Any = trainer_class(
        model=_load(folder),
        args=config_class(output, **_OPTIONS, **(_SAMPLED if sampled else {})),
        train_dataset=Dataset.from_dict({key: _ROWS[key] for key in _COLUMNS.get(name, ("prompt",))}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **({"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if sampled else {}),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # train() would set it
    inputs = _inputs(name, work, trainer.model.config.vocab_size)

    def run_with(head: Callable[[], AbstractContextManager[None]]) -> Callable[[], Tensor]:
        own = inputs
        if name == "RLOO":  # whose old log-probabilities always come from the trainer's own model
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            with head(), torch.no_grad():
                logprob, *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, torch.ones_like(ids), work.completion
                )
            own = inputs | {"old_logps": logprob.sum(1)}

        def run() -> Tensor:
            with head():
                loss = trainer.compute_loss(trainer.model, dict(own))
                loss.backward()
            return loss.detach()

        return run

    heads = {OURS: _fused_head, THEIRS: nullcontext, FLOOR: _empty_head}
    parameters = list(trainer.model.parameters())
    return Task(name, {way: run_with(head) for way, head in heads.items()}, dict.fromkeys(heads, parameters))


def _hf_task(folder: str, work: Workload, output: str) -> Task:
    trainers = {
        way: trainer_class(_load(folder).train(), TrainingArguments(output, **_OPTIONS))
        for way, trainer_class in ((OURS, FusedLossTrainer), (THEIRS, Trainer))
    }
    inputs = _inputs(HF, work, trainers[THEIRS].model.config.vocab_size)
    num_labels = (inputs["labels"] != -100).sum()

    def run_of(trainer: Trainer) -> Callable[[], Tensor]:
        def run() -> Tensor:
            loss = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=num_labels)
            loss.backward()
            return loss.detach()

        return run

    def run_empty() -> Tensor:
        model: Any = trainers[THEIRS].model
        hidden = model.base_model(inputs["input_ids"], inputs["attention_mask"], use_cache=False).last_hidden_state
        loss = _EmptyHead.apply(hidden.flatten(0, 1), model.get_output_embeddings().weight)[0].mean()
        loss.backward()
        return loss.detach()

    runs = {OURS: run_of(trainers[OURS]), THEIRS: run_of(trainers[THEIRS]), FLOOR: run_empty}
    parameters = {way: list(trainers[OURS if way == OURS else THEIRS].model.parameters()) for way in runs}
    return Task(HF, runs, parameters)


def _load(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _inputs(name: str, work: Workload, vocab_size: int) -> dict[str, Any]:
    ids = torch.randint(
        vocab_size, (work.num_rows, work.prompt + work.completion), generator=torch.Generator().manual_seed(0)
    )
    ones = torch.ones_like(ids)
    in_completion = (torch.arange(ids.shape[1]) >= work.prompt).long().expand_as(ids)
    if name == "DPO":
        return {"input_ids": ids, "attention_mask": ones, "completion_mask": in_completion}
    if name in ("SFT", HF):
        return {"input_ids": ids, "attention_mask": ones, "labels": ids.masked_fill(in_completion == 0, -100)}
    return {
        "prompt_ids": ids[:, : work.prompt], "prompt_mask": ones[:, : work.prompt],
        "completion_ids": ids[:, work.prompt :], "completion_mask": ones[:, work.prompt :],
        "advantages": torch.linspace(-1, 2, work.num_rows),  # a mean of 0 would hide the loss
        "num_items_in_batch": torch.tensor(float(work.num_rows * work.completion)),
    }  # fmt: skip


@contextmanager
def _fused_head() -> Iterator[None]:
    enable()
    try:
        yield
    finally:
        disable()


@contextmanager
def _empty_head() -> Iterator[None]:
    own = utils._ChunkedLogProbFunction
    utils._ChunkedLogProbFunction = _EmptyHead
    try:
        yield
    finally:
        utils._ChunkedLogProbFunction = own


class _EmptyHead(torch.autograd.Function):
    """The floor of every head: it has the results and the gradients of TRL's function, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, *others: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden_ND, weight_VD)
        ctx.num_others = len(others)
        results = [hidden_ND[:, 0].clone() for _ in range(4)]
        ctx.mark_non_differentiable(*results[2:], is_top1 := results[0] > 0)
        return *results, is_top1

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        # torch.zeros would take no memory before somebody writes to it.
        return *(torch.full_like(each, 0.0) for each in ctx.saved_tensors), *[None] * ctx.num_others
