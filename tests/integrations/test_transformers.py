"""FusedLossTrainer beside transformers' Trainer, whose loss is the reference."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    AdaptionPromptConfig,
    CPTConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    ShadowConfig,
    get_peft_model,
)
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    BartConfig,
    BartForCausalLM,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from rlft_fast import patch_lm_head
from rlft_fast.integrations.transformers import FusedLossTrainer
from rlft_fast.models import LogprobHead, heads


class Rows(Dataset):
    """Sequences of different lengths. The first third of every second one is a prompt without labels."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        length = 4 + 3 * index % 11
        prompt = length // 3 * (index % 2)
        ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(index)).tolist()
        return {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}


def make_trainer(
    trainer_class: type[Trainer], folder: Path, output: Path, peft=None, patched=False, flat=False, **options
) -> Trainer:
    defaults: dict[str, Any] = {
        "use_cpu": True, "optim": "sgd", "learning_rate": 0.02, "lr_scheduler_type": "constant", "max_steps": 3,
        "per_device_train_batch_size": 3, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if peft is not None:
        if trainer_class is FusedLossTrainer and patched:
            patch_lm_head(model)
        torch.manual_seed(0)
        model = get_peft_model(model, copy.deepcopy(peft))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return trainer_class(
        model,
        TrainingArguments(str(output), **defaults | options),
        DataCollatorWithFlattening() if flat else DataCollatorForSeq2Seq(tokenizer),
        train_dataset=Rows(),
        eval_dataset=Rows(),
    )


ADALORA = AdaLoraConfig("CAUSAL_LM", init_r=3, total_step=9, orth_reg_weight=3.0, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama-tied", {"gradient_accumulation_steps": 3, "gradient_checkpointing": True}),
        ("gemma2", {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False}),
        ("qwen2", {"peft": LoraConfig(r=2, target_modules="all-linear")}),
        ("llama", {"flat": True}),  # one row of several sequences
        # Adds a term to the model's loss, which is about as large.
        ("llama", {"peft": ADALORA, "gradient_accumulation_steps": 2}),
        # Patched before PEFT: a copy of the head is trained; virtual tokens inside of layers.
        ("llama", {"patched": True, "peft": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])}),
        ("llama", {"patched": True, "peft": AdaptionPromptConfig("CAUSAL_LM", adapter_len=3, adapter_layers=2)}),
        # Virtual tokens before the sequences, and in the cache.
        ("llama-tied", {"peft": PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=3)}),
        ("llama", {"peft": PromptEncoderConfig("CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=8)}),
        ("llama", {"peft": PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=3)}),
    ],
)
@pytest.mark.thin(2)
def test_training_and_evaluation_are_those_of_transformers(name, options, tiny_model, tmp_path, monkeypatch):
    histories, models = [], []
    for trainer_class in (Trainer, FusedLossTrainer):
        trainer = make_trainer(trainer_class, tiny_model(name), tmp_path, **options)
        if trainer_class is FusedLossTrainer:
            monkeypatch.setattr(heads, "linear", None)  # makes the logits
        trainer.train()
        trainer.evaluate()
        histories.append(trainer.state.log_history)
        models.append(trainer.model)
    for step, other in zip(*histories, strict=True):
        assert set(step) == set(other)
        for key in {"loss", "grad_norm", "eval_loss"} & step.keys():
            assert other[key] == pytest.approx(step[key], rel=1e-5, abs=1e-6), key
    assert histories[0][0]["grad_norm"] > 0.1
    assert "eval_loss" in histories[0][-1]
    for theirs, (key, ours) in zip(models[0].parameters(), models[1].named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: k + m)


def test_metrics_get_the_logits(tiny_model, tmp_path):
    theirs, ours = (
        make_trainer(trainer_class, tiny_model("llama"), tmp_path, per_device_eval_batch_size=1)
        for trainer_class in (Trainer, FusedLossTrainer)
    )
    for trainer in (theirs, ours):
        trainer.eval_dataset = [Rows()[0]]
        trainer.compute_metrics = lambda prediction: {"mean": float(prediction.predictions.mean())}
    expected, actual = theirs.evaluate(), ours.evaluate()
    assert actual["eval_mean"] == pytest.approx(expected["eval_mean"], rel=1e-5)
    assert actual["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


def test_a_model_made_by_a_function(tiny_model, tmp_path):
    make = lambda: AutoModelForCausalLM.from_pretrained(tiny_model("llama"))  # noqa: E731
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = FusedLossTrainer(args=arguments, model_init=make)
    assert isinstance(trainer.model.get_output_embeddings(), LogprobHead)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "does not know label_smoothing_factor: leave it out, or use transformers.Tr"),
        (
            {"peft": LoraConfig(r=2, target_modules=["lm_head"])},
            "has an adapter .*leave the head out of target_modules",
        ),
        (
            {"peft": LoraConfig("CAUSAL_LM", trainable_token_indices={"lm_head": [1]})},
            "has an adapter .*leave the head out",
        ),
        (
            {"peft": LoraConfig(modules_to_save=["lm_head"])},
            "is a peft.*ModulesToSaveWrapper, whose copies .* call patch_lm_head before get_peft_model",
        ),
        (
            {"peft": AdaptionPromptConfig("CAUSAL_LM", adapter_len=3, adapter_layers=2)},
            r"AdaptionPromptModel keeps the forward .* call patch_lm_head\(model\) before get_peft_model",
        ),
        ({"peft": CPTConfig("CAUSAL_LM", num_virtual_tokens=2, cpt_token_ids=[1, 2])}, "does not know CPT, which"),
        ({"peft": ShadowConfig("CAUSAL_LM")}, "does not know the loss that ShadowPEFT adds: set auxiliary_loss_weight"),
    ],
)
def test_what_it_refuses(options, message, tiny_model, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(FusedLossTrainer, tiny_model("llama"), tmp_path, **options)


class RowsWithColumns(Rows):
    """With columns that have names of the patch's keywords."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"temperature": 0.5, "return_entropy": 1.0, "per_token": 2.0}


def test_columns_of_the_patchs_keywords_are_removed(tiny_model, tmp_path):
    losses = []
    for trainer_class in (Trainer, FusedLossTrainer):
        trainer = make_trainer(trainer_class, tiny_model("llama"), tmp_path)
        trainer.eval_dataset = RowsWithColumns()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class WithTemperature(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, temperature: float = 1.0):
        return super().forward(input_ids, labels=labels)


@pytest.mark.parametrize("peft", [None, LoraConfig(target_modules=["q_proj"])])
def test_a_column_that_the_model_itself_takes_is_kept(peft, tmp_path):
    model = WithTemperature(LlamaConfig(**SIZES))
    if peft is not None:
        model = get_peft_model(patch_lm_head(model), peft)
    trainer = FusedLossTrainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    trainer._set_signature_columns_if_needed()
    assert {*trainer._signature_columns} == {"input_ids", "labels", "temperature", "label", "label_ids"}


SIZES = {
    "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
BART = {"vocab_size": 67, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "attn_layer_indices": [1]}


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: BartForCausalLM(BartConfig(**BART, is_decoder=True)), ""),  # does not shift the labels
        (lambda: BambaForCausalLM(BambaConfig(**SIZES, **BAMBA, z_loss_coefficient=1e-4)), ""),
        (
            lambda: MixtralForCausalLM(MixtralConfig(**SIZES, output_router_logits=True, router_aux_loss_coef=0.1)),
            "set output_router_logits of its configuration to False, or ",
        ),
    ],
)
def test_a_model_with_another_loss_is_refused(make, advice, tmp_path):
    model, ids = make(), torch.randint(0, 67, (2, 9))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    logits = model(ids).logits
    shifted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(model(ids, labels=ids).loss - shifted) > 1e-4
    name = type(model).__name__
    with pytest.raises(ValueError, match=f"{name} computes a loss of .* each next token: {advice}use transformers.Tra"):
        FusedLossTrainer(model, arguments)
    assert not isinstance(model.get_output_embeddings(), LogprobHead)


class WithoutLogits(LlamaForCausalLM):
    """As Liger's patch of the class."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **inputs):
        outputs = super().forward(input_ids, labels=labels, **inputs)
        return CausalLMOutputWithPast(outputs.loss) if self.training and labels is not None else outputs


@pytest.mark.parametrize(
    "make",
    [
        lambda: WithoutLogits(LlamaConfig(**SIZES)).train(),
        lambda: BambaForCausalLM(BambaConfig(**SIZES, **BAMBA)),
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16),
    ],
)
def test_a_model_with_the_cross_entropy_is_not_refused(make, tmp_path):
    model = make()
    was_training = model.training
    trainer = FusedLossTrainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    assert isinstance(trainer.model.get_output_embeddings(), LogprobHead)
    assert model.training == was_training


def test_an_auxiliary_loss_is_refused(tiny_model, tmp_path):
    trainer = make_trainer(FusedLossTrainer, tiny_model("mixtral"), tmp_path)
    trainer.model.config.output_router_logits = True
    with pytest.raises(ValueError, match="the auxiliary loss of MixtralForCausalLM's router would be lost"):
        trainer.train()
