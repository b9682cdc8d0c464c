"""Runs of supervised fine-tuning: their numbers, on one process and two, interrupted or not."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlft_fast.cli import main
from rlft_fast.config import load_config
from rlft_fast.engine import export_run
from rlft_fast.trainer import RowsTrainer, train
from tests.support.tiny_models import ROPE_LIMIT
from tests.trainer.supervised.rows import assert_two_learn_what_one_learns, encode, sft_config, sft_values, texts
from tests.trainer.toy import comparable, read_lines, write_rows


def plain_loss(model, prompt: str, completion: str) -> tuple[torch.Tensor, int]:
    """-log-probability of a completion of bytes and the end token, by plain transformers, and its number of tokens."""
    tokens = encode(prompt) + encode(completion) + [256]
    logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    size = len(completion) + 1
    return -logprobs[-size - 1 : -1].gather(1, torch.tensor(tokens[-size:])[:, None]).sum(), size


def test_the_first_step_is_that_of_plain_transformers(tiny_model, tmp_path):
    config = sft_config(tiny_model("llama"), tmp_path, batch_size=20, actor__optimizer__max_grad_norm=None)
    metrics = RowsTrainer(config).train_step(0).metrics
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float64, attn_implementation="eager")
    losses, sizes = zip(*(plain_loss(model, **row) for row in texts(20)), strict=True)
    loss = sum(losses) / sum(sizes)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert metrics["train_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert metrics["taught_tokens"] == sum(sizes)


def test_rows_that_are_longer_than_the_positions_of_a_model_are_refused_at_the_start(tiny_model, tmp_path):
    """However short the rows of the first steps are."""
    longest = {"prompt": "count", "completion": "a" * ROPE_LIMIT}
    config = sft_config(tiny_model("phi3"), tmp_path, data__shuffle=False, steps=1)
    write_rows(tmp_path / "data.jsonl", [*texts(3), *texts(3), longest])
    with pytest.raises(ValueError, match=r"model takes sequences of up to 24 tokens, .* and the rows have up to 30: "):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_learn_what_one_learns(tiny_model, tmp_path):
    """A large eps makes the step nearly proportional to the gradient, which shows how far gradients are apart."""
    configs = [
        sft_config(
            tiny_model("llama"), tmp_path / name, actor__optimizer__eps=1.0, evaluation__path=str(held_out(tmp_path))
        )
        for name in ("one", "two")
    ]
    assert_two_learn_what_one_learns(configs, least_movement=1e-3, tolerance=1e-5)


def held_out(folder):
    return write_rows(folder / "held_out.jsonl", texts(7))


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_is_interrupted_ends_with_the_same_bits(lora, tiny_model, tmp_path):
    options = {"evaluation__path": str(held_out(tmp_path)), "checkpoint__best": "held_out_loss", "evaluation__every": 1}
    if lora:
        options["actor__lora"] = {"rank": 2}
    whole = sft_config(tiny_model("shallow"), tmp_path / "whole", **options)
    summary = train(whole)
    train(sft_config(tiny_model("shallow"), tmp_path / "parts", **options | {"steps": 2}))
    again = train(sft_config(tiny_model("shallow"), tmp_path / "parts", **options), resume=True)
    run, parts = tmp_path / "whole" / "run", tmp_path / "parts" / "run"
    assert comparable(parts) == comparable(run)
    expected, found = (load_file(folder / "hf" / "model.safetensors") for folder in (run, parts))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    losses = [row["held_out_loss"] for row in read_lines(run / "metrics.jsonl") if "held_out_loss" in row]
    assert summary["held_out_loss_before"] == losses[0] > losses[-1] == summary["held_out_loss_after"]
    assert summary["held_out_loss_best"] == again["held_out_loss_best"] == min(losses)
    assert (run / "best" / "model.safetensors").exists()


WSD = {
    "learning_rate": 1e-2, "schedule": "wsd", "warmup_ratio": 0.25, "decay_ratio": 0.5, "min_learning_rate": 1e-3,
    "groups": {"lm_head.*": {"learning_rate": 1e-3}, "*.mlp.*": {"weight_decay": 0.1}},
}  # fmt: skip


@pytest.mark.parametrize("optimizer", [WSD, WSD | {"name": "torch.optim.Muon", "groups": {}}])
def test_schedules_and_optimizers_go_on_with_the_same_bits(optimizer, tiny_model, tmp_path):
    """The first run does all four steps; the second goes back to the second step."""
    config = sft_config(tiny_model("shallow"), tmp_path, actor__optimizer=optimizer, checkpoint__max_num=4)
    train(config)
    run, rates = tmp_path / "run", [0.01, 0.01, 0.01, 0.0055]
    assert [row["learning_rate"] for row in read_lines(run / "metrics.jsonl")] == pytest.approx(rates)
    train(config, resume="step_2")
    assert comparable(run) == comparable(run / "later.1")
    expected, found = (load_file(folder / "hf" / "model.safetensors") for folder in (run / "later.1", run))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("start", ["run", "run/checkpoints/step_00000002", "run/hf"])
def test_a_run_starts_from_the_weights_of_another(start, tiny_model, tmp_path):
    train(sft_config(tiny_model("shallow"), tmp_path, steps=2))
    config = sft_config(tiny_model("shallow"), tmp_path / "next", actor__init_from=str(tmp_path / start))
    metrics = RowsTrainer(config).train_step(0).metrics
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf", dtype=torch.float64)
    rows = [texts(20)[i] for i in RowsTrainer(config)._rows(0, 6)]
    losses, sizes = zip(*(plain_loss(model, **row) for row in rows), strict=True)
    assert metrics["train_loss"] == pytest.approx((sum(losses) / sum(sizes)).item(), rel=1e-5)
    train(config)
    train(sft_config(tiny_model("shallow"), tmp_path, steps=3), resume=True)  # whose newest checkpoint is another now
    if start == "run":
        with pytest.raises(ValueError, match=r"checksum\.actor\.init_from was 'step_00000002"):
            train(
                sft_config(tiny_model("shallow"), tmp_path / "next", steps=5, actor__init_from=str(tmp_path / start)),
                resume=True,
            )
        with pytest.raises(ValueError, match=r"actor\.init_from .* lies in output_dir"):
            train(sft_config(tiny_model("shallow"), tmp_path, actor__init_from=str(tmp_path / start)))


def test_a_run_starts_from_an_adapter(tiny_model, tmp_path, monkeypatch):
    """Of the two files of PEFT. The run that goes on has to have the same adapter, wherever the adapter is."""
    lora = {"actor__lora": {"rank": 2}}
    train(sft_config(tiny_model("shallow"), tmp_path, steps=2, **lora))
    adapter = export_run(tmp_path / "run", adapter=True)
    assert {path.suffix for path in adapter.iterdir() if path.name != ".export.json"} == {".json", ".safetensors"}
    monkeypatch.chdir(tmp_path)
    config = sft_config(tiny_model("shallow"), tmp_path / "next", steps=1, actor__init_from="run/adapter", **lora)
    train(config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf", dtype=torch.float64)
    rows = [texts(20)[i] for i in RowsTrainer(config)._rows(0, 6)]
    losses, sizes = zip(*(plain_loss(model, **row) for row in rows), strict=True)
    first = read_lines(tmp_path / "next/run/metrics.jsonl")[0]
    assert first["train_loss"] == pytest.approx((sum(losses) / sum(sizes)).item(), rel=1e-5)
    written = load_config(tmp_path / "next/run/config.yaml", {"steps": "2"})  # with absolute paths
    train(written, resume=True)
    with pytest.raises(ValueError, match=r"checksum\.actor\.init_from was '\w{8}' and is None"):
        train(sft_config(tiny_model("shallow"), tmp_path / "next", steps=3, **lora), resume=True)
    other = {name: x + 1 for name, x in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(other, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"checksum\.actor\.init_from was '\w{8}' and is '"):
        train(written.model_copy(update={"steps": 3}), resume=True)


def test_commands(tiny_model, tmp_path, capsys):
    values = sft_values(tiny_model("shallow"), tmp_path, steps=1, evaluation__path=str(held_out(tmp_path)))
    path = tmp_path / "sft.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    assert main(["sft", str(path), "--dry-run"]) == 0
    taught = [len(row["completion"]) + 1 for row in texts(20)]
    lengths = [len(row["prompt"]) + size for row, size in zip(texts(20), taught, strict=True)]
    counts = f"20 rows of {min(lengths)} to {max(lengths)} tokens, {sum(taught)} of {sum(lengths)} are taught"
    assert f"#   data: {counts}\n" in capsys.readouterr().out
    assert main(["sft", str(path)]) == 0
    assert "held-out loss " in capsys.readouterr().out
    run = tmp_path / "run"
    assert main(["train", str(run / "config.yaml"), "--resume"]) == 0
    assert main(["train", str(run / "config.yaml"), "--resume", "--batch_size", "7"]) == 1
    assert "batch_size was 6 and is 7" in capsys.readouterr().err
    assert main(["view", str(run)]) == 0
    assert main(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(x, exported[name]) for name, x in load_file(run / "hf" / "model.safetensors").items())
    assert main(["plan", str(run / "config.yaml"), "--gpus", "2", "--memory", "80"]) == 0
    assert "update actor" in capsys.readouterr().out


@pytest.mark.peers
def test_the_first_step_is_that_of_trl(tiny_model, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig as TRLConfig
    from trl import SFTTrainer as TRLTrainer

    config = sft_config(tiny_model("llama"), tmp_path, batch_size=20)
    metrics = RowsTrainer(config).train_step(0).metrics
    args = TRLConfig(
        output_dir=str(tmp_path / "trl"), max_steps=1, per_device_train_batch_size=10, gradient_accumulation_steps=2,
        logging_steps=1, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
    )  # fmt: skip
    trainer = TRLTrainer(
        AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_list(texts(20)),
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert metrics["train_loss"] == pytest.approx(logged["loss"], rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-4)
