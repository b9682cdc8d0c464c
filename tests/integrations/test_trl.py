"""rlft_fast.integrations.trl inside TRL's own trainers, whose head is the reference."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer import utils

from benchmarks.ops.problems import make_inputs
from rlft_fast.integrations.trl import disable, enable
from tests.support.numerics import assert_no_further_from_truth
from tests.support.runs.trl_trainers import KERNEL, compare, only_fused
from tests.support.tiny_models import IMAGE_TOKEN_ID, PAD_TOKEN_ID

LEARNING_RATE = 0.02
LORA = LoraConfig(r=2, target_modules="all-linear")
SAMPLED: dict[str, Any] = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.8}
PROMPTS = ["1 + 2 = ", "a", "hello there"]
ROWS: dict[str, dict[str, list]] = {
    "prompts": {"prompt": PROMPTS},
    "texts": {"prompt": PROMPTS, "completion": ["3", " small letter", ", and good bye"]},
    "pairs": {"prompt": PROMPTS, "chosen": ["3", " letter", ", sir"], "rejected": [" 5 or so", "b", ""]},
    "marked": {"prompt": PROMPTS, "completion": ["3", " letter", ", sir"], "label": [True, False, True]},
}
TRAINERS: dict[str, tuple[type, type, str]] = {
    "grpo": (GRPOTrainer, GRPOConfig, "prompts"),
    "rloo": (RLOOTrainer, RLOOConfig, "prompts"),
    "dpo": (DPOTrainer, DPOConfig, "pairs"),
    "kto": (KTOTrainer, KTOConfig, "marked"),
    "sft": (SFTTrainer, SFTConfig, "texts"),
}


def load(folder: Path) -> PreTrainedModel:
    images = "vision_config" in json.loads((folder / "config.json").read_text())
    auto_class = AutoModelForImageTextToText if images else AutoModelForCausalLM
    return auto_class.from_pretrained(folder, dtype=torch.float32)


def make_trainer(kind: str, model, tokenizer: Path, output: Path, peft_config=None, **options) -> Any:
    """Plain SGD: its steps differ no more than the gradients. AdamW enlarges differences of gradients near 0."""
    trainer_class, config_class, rows = TRAINERS[kind]
    defaults = {
        "use_cpu": True, "bf16": False, "optim": "sgd", "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant",
        "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    reward = lambda completions, **_: [float(len(set(text))) for text in completions]  # noqa: E731
    torch.manual_seed(0)  # adapters are drawn
    return trainer_class(
        model=model if isinstance(model, str) else copy.deepcopy(model),
        args=config_class(str(output), **defaults | (SAMPLED if rows == "prompts" else {}) | options),
        train_dataset=Dataset.from_dict(ROWS[rows]),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        peft_config=copy.deepcopy(peft_config),
        **({"reward_funcs": reward} if rows == "prompts" else {}),
    )


def train(*arguments, **options) -> tuple[list[dict[str, float]], list[tuple[str, Tensor]]]:
    """The log, and the trained parameters."""
    trainer = make_trainer(*arguments, **options)
    torch.manual_seed(0)
    trainer.train()
    return trainer.state.log_history, [(name, p.detach()) for name, p in trainer.model.named_parameters()]


CASES = {
    "grpo": ("grpo", "qwen2", {"entropy_coef": 0.1, "loss_type": "grpo"}),
    "grpo, old log-probabilities": (
        "grpo", "llama-tied", {"num_iterations": 2, "steps_per_generation": 1, "gradient_checkpointing": True}),
    "grpo, reference model": ("grpo", "gemma2", {"beta": 0.5}),
    "grpo, adapter": ("grpo", "llama-tied", {"beta": 0.5, "peft_config": LORA, "gradient_checkpointing": True}),
    "grpo, prompt learning": (
        "grpo", "llama", {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}),
    "grpo, router": ("grpo", "mixtral", {"router_aux_loss_coef": 0.1}),
    "rloo": ("rloo", "llama", {}),
    "dpo": ("dpo", "qwen2", {"use_weighting": True}),
    "dpo, adapter": ("dpo", "llama", {"peft_config": LORA}),
    "kto": ("kto", "llama-tied", {}),
    "sft": ("sft", "llama-tied", {"gradient_accumulation_steps": 2}),
    "sft, router": ("sft", "mixtral", {"router_aux_loss_coef": 0.1}),
    "sft, compiled": ("sft", "llama", {"torch_compile": True, "torch_compile_backend": "eager"}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if "compiled" in case else ()) for case in CASES]
)
@pytest.mark.thin(3)
def test_training_is_that_of_trl(case, tiny_model, tmp_path, monkeypatch):
    kind, name, options = CASES[case]
    arguments = kind, load(tiny_model(name)), tiny_model(name), tmp_path
    theirs, expected = train(*arguments, **options)
    with only_fused(monkeypatch):
        ours, actual = train(*arguments, **options)
    compare(theirs, ours)
    for (key, parameter), (_, reference) in zip(actual, expected, strict=True):
        torch.testing.assert_close(parameter, reference, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: k + m)


def test_a_model_by_name(tiny_model, tmp_path, monkeypatch):
    arguments = "dpo", str(tiny_model("llama")), tiny_model("llama"), tmp_path
    theirs, _ = train(*arguments)
    with only_fused(monkeypatch):
        ours, _ = train(*arguments)
    compare(theirs, ours)


def padded_batch(prompt_lengths: list[int], completion_lengths: list[int]) -> tuple[Tensor, Tensor, int]:
    """Prompts that end and completions that begin in the same column, as TRL makes them; and the columns of these."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(max(prompt_lengths) + max(completion_lengths)) - max(prompt_lengths)
    mask = (columns >= -torch.tensor(prompt_lengths)[:, None]) & (columns < torch.tensor(completion_lengths)[:, None])
    ids = torch.randint(0, 256, mask.shape, generator=generator).masked_fill(~mask, PAD_TOKEN_ID)
    return ids, mask.long(), max(completion_lengths)


def image_batch() -> tuple[tuple[Tensor, Tensor, int], dict]:
    """The first sequence has an image of 2 x 4 patches, the second one of 4 x 4, the third none."""
    ids, mask, columns = padded_batch([8, 8, 8], [6, 2, 9])
    is_image = torch.zeros_like(ids)
    is_image[0, 2:4] = is_image[1, 2:6] = 1
    grids = torch.tensor([[1, 2, 4], [1, 4, 4]])
    pixels = torch.randn(24, 24, generator=torch.Generator().manual_seed(2))
    images = {"pixel_values": pixels, "image_grid_thw": grids, "num_images": [1, 1, 0], "mm_token_type_ids": is_image}
    return (ids.masked_fill(is_image == 1, IMAGE_TOKEN_ID), mask, columns), images


def test_images_reach_the_model(tiny_model, tmp_path, monkeypatch):
    """Of a trainer that was there before."""
    trainer = make_trainer("grpo", load(tiny_model("qwen2-vl")), tiny_model("qwen2-vl"), tmp_path)
    batch, images = image_batch()
    other_images = images | {"pixel_values": -images["pixel_values"]}
    statistics = lambda inputs: trainer._get_per_token_logps_and_entropies(  # noqa: E731
        trainer.model, *batch, compute_entropy=True, **inputs
    )
    with torch.no_grad():
        expected = statistics(images)
        with only_fused(monkeypatch):
            actual, others = statistics(images), statistics(other_images)
    torch.testing.assert_close(actual[:2], expected[:2], rtol=0, atol=1e-5)
    assert (actual[0] - others[0]).abs()[:2].max() > 0.01


def test_a_model_that_has_an_adapter_already(tiny_model, tmp_path, monkeypatch):
    model = get_peft_model(load(tiny_model("llama")), LORA)
    trainer = make_trainer("grpo", model, tiny_model("llama"), tmp_path)
    assert isinstance(trainer.model, PeftModel)
    batch = padded_batch([3, 7], [6, 2])
    with torch.no_grad():
        expected = trainer._get_per_token_logps_and_entropies(trainer.model, *batch)[0]
        with only_fused(monkeypatch):
            actual = trainer._get_per_token_logps_and_entropies(trainer.model, *batch)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


EVERYTHING = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize(("autocast", "softcap"), [(False, None), (False, 5.0), (True, None)])
@pytest.mark.parametrize("num_rows", [0, 1, 17])
def test_every_result_of_the_function(num_rows, autocast, softcap):
    generator = torch.Generator().manual_seed(num_rows)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((num_rows, 8), (37, 8), (37,)))
    targets = torch.randint(0, 37, (num_rows,), generator=generator)
    upstream = torch.randn(2, num_rows, generator=generator)
    results = []
    for fused in (False, True):
        if fused:
            enable()
        inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = utils._ChunkedLogProbFunction.apply(*inputs, targets, 0.7, 16, softcap, 0.5, EVERYTHING)
        (upstream[0] * outputs[0] + upstream[1] * outputs[1]).sum().backward()
        results.append([*outputs, *(x.grad for x in inputs)])
    disable()
    tolerance = 0.03 if autocast else 1e-5  # TRL rounds the logits to the dtype of autocast
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        if ours.dtype != torch.bool or not autocast:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_wide_head_are_no_further_from_float64_than_trls(hidden_dtype):
    """In TRL's default, bfloat16 autocast over float32 weights."""
    hidden, weight, targets, _ = make_inputs(40, 32, 500)
    inputs = [hidden.to(hidden_dtype), weight, torch.linspace(-1, 1, 500).bfloat16().float()]
    upstream = torch.linspace(-1, 1, 40)
    results = []
    for fused in (False, True):
        if fused:
            enable()
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.autocast("cpu", torch.bfloat16):
            logprob = utils._ChunkedLogProbFunction.apply(*leaves, targets, 1.0, 16, None, 1.0, ("log_probs",))[0]
        results.append(torch.autograd.grad((logprob * upstream).sum(), leaves))
    disable()
    exact = [x.bfloat16().double().requires_grad_() for x in inputs]
    log_p = torch.nn.functional.linear(*exact).log_softmax(-1)
    loss = (log_p.gather(-1, targets[:, None])[:, 0] * upstream).sum()
    for theirs, ours, truth in zip(*results, torch.autograd.grad(loss, exact), strict=True):
        assert ours.dtype == theirs.dtype
        assert_no_further_from_truth(ours, theirs, truth)


def test_a_head_in_float32_of_a_narrow_model():
    """As TRL calls it with cast_lm_head_to_fp32."""
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(37, 8).bfloat16().requires_grad_()
    targets = torch.arange(5)
    arguments = None, targets, 1.0, 16, None, 1.0, ("log_probs",)
    expected = torch.autograd.grad(KERNEL.apply(hidden, weight, *arguments)[0].sum(), (hidden, weight))
    enable()
    actual = torch.autograd.grad(
        utils._ChunkedLogProbFunction.apply(hidden, weight, *arguments)[0].sum(), (hidden, weight)
    )
    disable()
    torch.testing.assert_close(actual, expected)


def test_disable_restores_what_trl_had():
    own = utils._ChunkedLogProbFunction, utils._use_triton
    enable()
    enable(workspace_mib=1)
    assert utils._ChunkedLogProbFunction is not own[0]
    disable()
    disable()
    assert (utils._ChunkedLogProbFunction, utils._use_triton) == own


def test_another_version_is_refused(monkeypatch):
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pytest.raises(ImportError, match=r"trl 1\S+ has no trl.trainer.utils:_ChunkedLogProbFunction.forward \(modul"):
        enable()
