"""The numbers of tokens that a run writes: which token has which number, the limit of bytes, and damaged files."""

import json
import math
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rlft_fast.run.records.log import RunLog
from rlft_fast.run.records.tokens import read_tokens, write_tokens
from rlft_fast.trainer import train
from tests.run.counting import count
from tests.support.runs.samples import SAMPLES, columns_of_samples
from tests.trainer.toy import comparable, read_lines, toy_config

NAN = math.nan
TOKEN_BYTES, SAMPLE_BYTES = 25, 8


def test_every_token_has_its_own_numbers():
    expected = {
        "sample_B": [0, 1, 2, 3, 4],
        "length_B": [3, 1, 2, 1, 2],
        "token_id_T": [5, 6, 9, 7, 7, 8, 4, 4, 4],
        "weight_version_T": [3, 4, 4, 4, 4, 4, 4, 0, 0],
        "mask_T": [True, False, True, False, True, True, True, True, True],  # 6 is of an environment
        "rollout_logprob_T": [-0.5, NAN, -0.125, -2.0, -1.0, -3.0, -0.75, -0.75, -0.25],
        "logprob_T": [0.5, NAN, 0.875, NAN, 0.0, -2.0, 0.25, 0.25, 0.75],
        "advantage_T": [10.0, NAN, 18.0, NAN, 14.0, 16.0, 8.0, 8.0, 8.0],  # twice the token
    }
    found = columns_of_samples()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), values, name)


# Nothing fits; one byte too few for the second sample; two samples.
@pytest.mark.parametrize(
    ("max_bytes", "num_kept"),
    [(0, 0), (4 * TOKEN_BYTES + 2 * SAMPLE_BYTES - 1, 1), (4 * TOKEN_BYTES + 2 * SAMPLE_BYTES, 2)],
)
def test_the_first_samples_that_fit_are_kept(max_bytes, num_kept, tmp_path):
    found, whole = columns_of_samples(max_bytes), columns_of_samples()
    write_tokens(tmp_path, 7, found, len(SAMPLES))
    read = read_tokens(tmp_path, 7)
    assert read is not None
    columns, num_samples = read
    assert num_samples == 5
    assert columns["sample_B"].tolist() == list(range(num_kept))
    for name, column in columns.items():
        np.testing.assert_array_equal(column, whole[name][: len(column)].numpy(), name)


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """A run of two steps whose optimizer step is on-policy; one prompt's samples have no reward."""
    folder, model = tmp_path_factory.mktemp("tokens"), tiny_model("llama")
    options = {"steps": 2, "rollout__prompts_per_step": 10, "reward__function": "tests.trainer.toy:not_for_sun"}
    with_tokens = toy_config(model, folder / "with", log_tokens_mib=1, **options)
    train(with_tokens)
    train(toy_config(model, folder / "without", **options))
    return folder, with_tokens, options


def test_the_numbers_are_those_of_the_metrics_and_samples(run):
    folder, config, _ = run
    metrics = {row["step"]: row for row in read_lines(folder / "with" / "run" / "metrics.jsonl") if "loss" in row}
    samples = read_lines(folder / "with" / "run" / "samples.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    for step, row in metrics.items():
        read = read_tokens(folder / "with" / "run", step)
        assert read is not None
        columns, num_samples = read
        own = [sample for sample in samples if sample["step"] == step]
        assert num_samples == len(own) == len(columns["sample_B"]) == 40
        ends = np.cumsum(columns["length_B"])[:-1]
        texts = tokenizer.batch_decode(np.split(columns["token_id_T"], ends), skip_special_tokens=True)
        assert texts == [sample["completion"] for sample in own]
        learned = columns["mask_T"]
        by_sample = [part.all() for part in np.split(learned, ends)]
        assert by_sample == [sample["reward"] is not None for sample in own]
        assert 0 < learned.sum() < len(learned)
        ran = ~np.isnan(columns["logprob_T"])  # the update computed them where there was something to learn
        assert (ran == (learned & (columns["advantage_T"] != 0))).all()
        distance = np.abs(columns["logprob_T"] - columns["rollout_logprob_T"])[ran]
        assert distance.mean() == pytest.approx(row["mismatch_mean"], rel=1e-5)
        assert columns["entropy_T"][ran].mean() == pytest.approx(row["entropy"], rel=1e-5)
        assert (columns["weight_version_T"] == step).all()
        assert columns["advantage_T"][learned].mean() == pytest.approx(0, abs=0.2)
        assert np.isnan(columns["advantage_T"][~learned]).all()


def test_a_run_learns_the_same_with_and_without_them(run):
    folder, _, _ = run
    assert comparable(folder / "with" / "run") == comparable(folder / "without" / "run")
    assert not (folder / "without" / "run" / "tokens").exists()


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_what_no_pass_computes_is_left_out(mini_batches, tiny_model, tmp_path):
    options = {"rollout_correction": "bypass", "mini_batches": mini_batches, "mask_truncated": True}
    longer = {
        "rollout__max_new_tokens": 24,
        "rollout__samples_per_prompt": 16,
    }  # so that some samples end by themselves
    train(toy_config(tiny_model("llama"), tmp_path, steps=1, log_tokens_mib=1, algorithm=options, **longer))
    read = read_tokens(tmp_path / "run", 1)
    assert read is not None
    columns, _ = read
    known = {"logprob_T", "entropy_T"} & columns.keys()
    assert known == ({"logprob_T", "entropy_T"} if mini_batches == 1 else set())
    stopped = [sample["finish_reason"] == "stop" for sample in read_lines(tmp_path / "run" / "samples.jsonl")]
    ends = np.cumsum(columns["length_B"])[:-1]
    assert [part.all() for part in np.split(columns["mask_T"], ends)] == stopped
    assert 0 < sum(stopped) < len(stopped)


def test_a_run_keeps_no_numbers_of_steps_that_it_has_not_done(tmp_path):
    run = tmp_path / "run"
    count(tmp_path, steps=2, log_tokens_mib=1)
    assert sorted(os.listdir(run / "tokens")) == ["step_00000001.safetensors", "step_00000002.safetensors"]
    (run / "tokens" / "step_00000003.safetensors.incomplete").touch()
    (run / "tokens" / "notes.txt").touch()
    log = RunLog(run, num_steps=2, rank=0)
    log.rewind(1, {})
    assert sorted(os.listdir(run / "tokens")) == ["notes.txt", "step_00000001.safetensors"]
    (run / "tokens" / "step_00000007.safetensors").touch()
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_00000003.safetensors").touch()
    count(tmp_path, steps=3, log_tokens_mib=1, resume=True)
    kept = ["notes.txt", "step_00000001.safetensors", "step_00000003.safetensors"]  # the checkpoint is of step 2
    assert sorted(os.listdir(run / "tokens")) == kept
    assert os.listdir(run / "rollouts") == []
    count(tmp_path, steps=1)  # from the beginning
    assert os.listdir(run / "tokens") == ["notes.txt"]
    assert log.set_aside() == ["metrics.1.jsonl", "samples.1.jsonl", "timeline.1.jsonl", "tokens.1", "rollouts.1"]


def damage(path, how: str) -> None:
    columns = load_file(path)
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut off":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        metadata = {"num_samples": "x" if how == "metadata" else "5"}
        changes = {
            "missing": {"mask_T": None},
            "unknown": {"other": columns["mask_T"].clone()},
            "dtype": {"mask_T": columns["mask_T"].float()},
            "shape": {"advantage_T": columns["advantage_T"][1:]},
            "length": {"length_B": columns["length_B"] + torch.tensor([-4, 4, 0, 0, 0], dtype=torch.int32)},
            "number": {"sample_B": columns["sample_B"] + 1},
        }
        changed = {**columns, **changes.get(how, {})}
        save_file({name: column for name, column in changed.items() if column is not None}, path, metadata)


@pytest.mark.parametrize(
    "how", ["empty", "cut off", "metadata", "missing", "unknown", "dtype", "shape", "length", "number"]
)
def test_a_damaged_file_is_said_to_be_damaged(how, tmp_path):
    write_tokens(tmp_path, 1, columns_of_samples(), len(SAMPLES))
    damage(tmp_path / "tokens" / "step_00000001.safetensors", how)
    with pytest.raises(ValueError, match=r"tokens/step_00000001.safetensors is damaged: "):
        read_tokens(tmp_path, 1)


def test_the_file_says_what_it_leaves_out(tmp_path):
    write_tokens(tmp_path, 3, columns_of_samples(4 * TOKEN_BYTES + 2 * SAMPLE_BYTES), len(SAMPLES))
    content = (tmp_path / "tokens" / "step_00000003.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"] == {"step": "3", "num_samples": "5", "num_left_out": "3"}
