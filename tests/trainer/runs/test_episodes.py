"""Runs whose policy talks with an environment."""

import contextlib
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rlft_fast.trainer.models
from rlft_fast.cli import main
from rlft_fast.config import Config
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import Completion, to_samples
from rlft_fast.trainer import PPOTrainer, evaluate, train
from rlft_fast.trainer.collect.judge import Judge
from rlft_fast.trainer.prompts import load_prompts
from rlft_fast.world import World
from tests.support.machine.distributed import run_distributed
from tests.support.runs.copied_generator import copied_rollout
from tests.support.runs.vllm_rollouts import HEADS, SMALL, needs_vllm
from tests.support.tiny_models import save_tiny_model
from tests.trainer.toy import comparable, read_lines, toy_config, write_rows

ENVIRONMENTS = Path(__file__).with_name("environments.py")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(name="config")
def episodes_config(tmp_path):
    """A configuration whose model ends a reply by any of a third of all tokens."""
    model = save_tiny_model("llama", tmp_path / "model", **HEADS, num_hidden_layers=1)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, *range(0, 256, 3)]}))
    rows = [{"prompt": word, "seed": i} for i, word in enumerate(["sun", "moon", "star", "rain"])]
    write_rows(tmp_path / "rows.jsonl", rows)

    def make(run: str = "run", **changes: Any):
        changes = {"algorithm__kl_coef": 0.01} | changes
        values = {
            "output_dir": str(tmp_path / run), "data__path": str(tmp_path / "rows.jsonl"), "data__chat": True,
            "reward": {}, "environment": {"name": f"{ENVIRONMENTS}:Letters"}, "rollout__max_prompt_tokens": 24,
            "rollout__max_new_tokens": 48, "actor__max_tokens": 400, "checkpoint__every": 1,
        }  # fmt: skip
        return toy_config(model, tmp_path, **values | changes)

    return make


def test_a_dry_run_says_that_the_environment_rewards(config, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(config().to_yaml())
    assert main(["train", str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    assert "#   reward: environments alone\n" in capsys.readouterr().out


def test_greedy_episodes_draw_by_their_step_and_row(config):
    """As samples do: not by torch's random state, which other threads change."""
    options = {"environment": {"name": f"{ENVIRONMENTS}:Lottery"}, "algorithm__advantage": "remax"}
    with contextlib.closing(PPOTrainer(config(**options))) as trainer:
        first, again, other = (trainer.collector.greedy(trainer.prompts, 3, row).token_ids() for row in (0, 0, 4))
    assert first == again
    assert len({*map(tuple, first), *map(tuple, other)}) == 8  # each begins with its number


def test_answers_of_an_evaluation_have_the_turns_of_their_episodes(config, tmp_path):
    rows = str(tmp_path / "rows.jsonl")
    found = evaluate(config(evaluation={"path": rows, "temperature": 1.0}))
    assert [len(answer["turns"]) > 2 for answer in found.answers].count(True) > 1
    for answer in found.answers:
        assert answer["stop_reason"] in ("done", "max_new_tokens")
        assert sum(turn.get("reward", 0) for turn in answer["turns"]) == pytest.approx(answer["reward"], abs=1e-12)
    assert found.metrics["accuracy"] == pytest.approx(sum(answer["reward"] for answer in found.answers) / 4)


def test_a_policy_learns_in_episodes(config, tmp_path):
    train(config(evaluation={"path": str(tmp_path / "rows.jsonl"), "temperature": 1.0}))
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward_mean" in line]
    assert len(lines) == 3
    for line in lines:
        assert 1 < line["turns_mean"] <= 3
        assert line["environment_failed_mean"] == 0
        stops = {name: share for name, share in line.items() if name.startswith("stop_")}
        assert sum(stops.values()) == pytest.approx(1)
        assert stops["stop_done_mean"] > 0
        assert line["tokens_per_turn_mean"] == pytest.approx(line["completion_length_mean"] / line["turns_mean"])
        waited = line["environment_time_share"] * line["seconds"]
        assert 0 < line["seconds_per_environment_call"] < line["seconds_environment"] == pytest.approx(waited)
        assert line["seconds_environment"] < line["seconds_generate"]
        assert line["ratio_max"] == 1.0  # the tokens of the environment are not sampled, and have no ratio
        assert line["mismatch_max"] < 1e-4
        assert 0 < line["reward_mean"] < 1
    assert lines[-1]["reward_mean"] > lines[0]["reward_mean"]
    assert lines[0]["completion_length_mean"] < 40
    for line in read_lines(tmp_path / "run" / "samples.jsonl"):
        assert line["stop_reason"] in ("done", "max_new_tokens")
        assert sum(turn.get("reward", 0) for turn in line["turns"]) == pytest.approx(line["reward"], abs=1e-12)


@pytest.fixture(name="thinking_config")
def thinking_episodes_config(config, tmp_path):
    """As `config`, with a policy that thinks first. Its template leaves out earlier thoughts."""
    model = tmp_path / "model"
    dropping = TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]")
    (model / "chat_template.jinja").write_text(dropping.replace("a:{% endif", "a:<think>{% endif"))
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_tokens(["</think>"])
    tokenizer.save_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        policy.get_output_embeddings().weight[tokenizer.convert_tokens_to_ids("</think>")] *= 12  # thoughts end often
    policy.save_pretrained(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, *range(0, 256, 5)]}))

    def make(run: str = "run", history: str = "template", **changes: Any):
        environment = {"name": f"{ENVIRONMENTS}:Letters", "history": history}
        changes = {"algorithm__advantage": "reinforce++", "checkpoint__max_num": 3} | changes
        return config(run, environment=environment, **changes)

    return make


def test_a_history_without_thoughts_is_learned_exactly(thinking_config, tmp_path):
    """In one run every branch begins where the template leaves out a thought; in the other the policy sees all.

    A run that goes on from a checkpoint in its middle has the same branches, bit for bit.
    """
    lines = {}
    for history in ("keep", "template"):
        train(thinking_config(history, history, steps=2))
        lines[history] = read_lines(tmp_path / history / "metrics.jsonl")
    assert [1 < line["branches_mean"] <= line["turns_mean"] <= 3 for line in lines["template"]] == [True] * 2
    for line in lines["keep"] + lines["template"]:
        assert line["mismatch_max"] < 1e-4
        assert line["ratio_max"] == 1.0
        assert line["environment_failed_mean"] == 0
    samples = read_lines(tmp_path / "template" / "samples.jsonl")
    begun = [turn for line in samples for turn in line["turns"] if "kept" in turn]
    assert begun
    assert not any("</think>" in turn["text"] for turn in begun)
    assert any("</think>" in turn["text"] for line in samples for turn in line["turns"] if turn["sampled"])
    shutil.copytree(tmp_path / "template", tmp_path / "cut")
    train(thinking_config("cut", steps=2), resume="step_1")
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "template")
    assert read_lines(tmp_path / "cut/samples.jsonl") == samples


def test_a_function_for_held_out_answers_replaces_the_environment(config, tmp_path):
    function = "rlft_fast.rewards:response_length"
    given = config(evaluation={"path": str(tmp_path / "rows.jsonl"), "function": function})
    tokenizer = load_tokenizer(given.model)
    judge = Judge.for_evaluation(given, tokenizer, World.current())
    own = to_samples([(0, Completion([65, 66], [-1.0] * 2, "stop")), (1, Completion([65], [-1.0], "stop"))])
    environment = torch.tensor([0.25, math.nan], dtype=torch.float64)
    scored = judge.score(load_prompts(given.data, tokenizer, 24), own.replace(parts={"environment": environment}))
    assert scored.reward_B.tolist() == pytest.approx([2.0, math.nan], nan_ok=True)  # an episode that failed has none
    assert scored.parts["environment"][0] == 0.25


def test_an_interrupted_run_goes_on_bit_for_bit(config, tmp_path):
    """With two environments, which the rows name. The columns of one are empty in the rows of the other."""
    rows = [{"prompt": word, "seed": i, "environment": "letters"} for i, word in enumerate(["sun", "moon"])]
    rows += [{"prompt": word, "first": word[0], "environment": "echo"} for word in ("star", "rain")]
    kinds = {"letters": {"name": f"{ENVIRONMENTS}:Letters"}, "echo": {"name": f"{ENVIRONMENTS}:Echo", "max_turns": 2}}
    path = write_rows(tmp_path / "mixed.jsonl", rows)
    changes = {"environment": None, "environments": kinds, "data__path": str(path), "steps": 2}
    train(config("whole", **changes))
    train(config("cut", **changes | {"steps": 1}))
    train(config("cut", **changes), resume=True)
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")
    for line in read_lines(tmp_path / "whole" / "metrics.jsonl"):
        assert line["environment_failed_mean"] == 0
        of_each = [line[f"reward_mean_environment_{name}"] for name in kinds]
        assert 0 < of_each[0] < 1
        assert of_each[1] == 0.25
    played = {line["environment"]: set() for line in read_lines(tmp_path / "whole/samples.jsonl")}
    for line in read_lines(tmp_path / "whole/samples.jsonl"):
        played[line["environment"]].add(line["prompt"][2])
    assert played == {"letters": {"s", "m"}, "echo": {"s", "r"}}
    with pytest.raises(ValueError, match=r"rows 2, 3 .* have the environment 'echo', expected a name of environments"):
        train(config("wrong", **changes | {"environments": {"letters": kinds["letters"]}}))


@pytest.mark.slow
def test_episodes_are_played_while_the_policy_trains(config, tmp_path, monkeypatch):
    """Slow calls of the generator change no number, nor does going on from a checkpoint with the episodes in it."""

    def run(name: str, seconds: Callable[[int], float], **options: Any) -> None:
        build = lambda engine, *_: copied_rollout(engine, seconds)  # noqa: E731
        monkeypatch.setattr(rlft_fast.trainer.models, "build_rollout", build)
        separate = {"rollout__backend": "vllm", "rollout__vllm": {"process": "separate"}, "rollout__max_staleness": 2}
        train(config(name, steps=4, algorithm__kl_coef=0.0, **separate), **options)

    def stopping(number: int) -> float:
        if number == 4:  # while the episodes of the second step are played
            os.kill(os.getpid(), signal.SIGTERM)
        return 0.01

    run("whole", lambda number: 0.0)
    with pytest.raises(KeyboardInterrupt):
        run("cut", stopping)
    assert len(read_lines(tmp_path / "cut/metrics.jsonl")) < 4
    run("cut", lambda number: (0.02, 0.0)[number % 2], resume=True)
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")
    assert [line["staleness_max"] for line in read_lines(tmp_path / "whole/metrics.jsonl")] == [0, 1, 2, 1]


def on_two_processes(rank: int, values: dict[str, Any]) -> None:
    train(Config.parse(values))


IN_FLIGHT = {"rollout__max_staleness": 2, "rollout__update": "in-flight"}


@needs_vllm
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rollout__vllm": SMALL}, marks=pytest.mark.long),
        {"rollout__vllm": SMALL | {"process": "separate"}, **IN_FLIGHT},
    ],
)
def test_episodes_by_vllm(changes, config, tmp_path):
    """Its log-probabilities are as near to the policy's as those of single messages, where the policy has sampled."""
    train(config(rollout__backend="vllm", **changes))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [1 < line["turns_mean"] <= 3 for line in lines] == [True] * 3
    assert max(line["mismatch_max"] for line in lines if not line.get("staleness_max")) < 1e-3
    assert max(line.get("staleness_max", 0) for line in lines) <= 2


def check_branches(run: Path) -> None:
    """Of three steps of `thinking_config` by vLLM."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if "reward_mean" in line]
    assert [1 < line["branches_mean"] <= line["turns_mean"] <= 3 for line in lines] == [True] * 3
    for line in lines:
        assert line["mismatch_max"] < 1e-3  # as of single messages
        assert line["ratio_max"] == pytest.approx(1, abs=1e-5)
        assert line["environment_failed_mean"] == 0


@needs_vllm
def test_a_history_without_thoughts_by_vllm(thinking_config, tmp_path):
    """A branch begins with tokens that the prefix cache has of another branch."""
    train(thinking_config(rollout__backend="vllm", rollout__vllm=SMALL))
    check_branches(tmp_path / "run")


@pytest.mark.slow
def test_episodes_go_on_with_new_weights(config, tmp_path, monkeypatch):
    """From turn to turn, none older than the bound; each prompt is trained once."""
    build = lambda engine, *_: copied_rollout(engine, lambda number: 0.05)  # noqa: E731
    monkeypatch.setattr(rlft_fast.trainer.models, "build_rollout", build)
    train(config(steps=6, rollout__backend="vllm", rollout__vllm={"process": "separate"}, **IN_FLIGHT))
    lines, rows = (read_lines(tmp_path / f"run/{name}.jsonl") for name in ("metrics", "samples"))
    assert [line["staleness_max"] <= 2 and 1 < line["turns_mean"] <= 3 for line in lines] == [True] * 6
    mixed = [line for line in lines if line["staleness_mean"] != int(line["staleness_mean"])]
    assert mixed  # a step has tokens of several versions
    for line in lines:
        share_S = [line[f"staleness_share_{age}"] for age in range(3)]
        assert (sum(share_S), share_S[1] + 2 * share_S[2]) == pytest.approx((1.0, line["staleness_mean"]))
    train(config("in_turn", steps=6))
    asked = lambda rows: [(row["step"], row["prompt"]) for row in rows]  # noqa: E731
    assert asked(rows) == asked(read_lines(tmp_path / "in_turn/samples.jsonl"))


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_learn_what_one_learns(config, tmp_path):
    train(config("one"))
    run_distributed(on_two_processes, 2, config("two").model_dump(mode="json"))
    one, two = (comparable(tmp_path / name) for name in ("one", "two"))
    assert [line["turns_mean"] for line in two] == [line["turns_mean"] for line in one]
    for name in ("reward_mean", "loss", "grad_norm"):
        expected = [line[name] for line in one]
        assert [line[name] for line in two] == pytest.approx(expected, rel=1e-3)
    samples = [[line["turns"] for line in read_lines(tmp_path / name / "samples.jsonl")] for name in ("one", "two")]
    assert samples[0] == samples[1]
