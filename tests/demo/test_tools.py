"""The demo of tools: its problems and calculator, and (slow) that a real model learns them."""

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rlft_fast.cli import main
from rlft_fast.config import SFTConfig
from rlft_fast.demo import tools
from tests.support.tiny_models import save_tiny_model


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_traces_and_held_out_problems(tmp_path):
    paths = tools.write_tool_problems(tmp_path / "problems", tmp_path / "traces")
    train, held_out, traces = (read(paths[name]) for name in ("train", "held_out", "traces"))
    for row in train + held_out:
        assert str(eval(row["prompt"].removesuffix(" = ?"))) == row["answer"]
    prompts = [{row["prompt"] for row in rows} for rows in (train, held_out)]
    assert [len(own) for own in prompts] == [18 * 18 * 8 - 128, 128]
    assert not prompts[0] & prompts[1]
    assert {row["messages"][0]["content"] for row in traces} <= prompts[0]
    complete = [row for row in traces if len(row["messages"]) == 6]
    assert Fraction(len(complete), len(traces)) == pytest.approx(0.35, abs=0.05)
    for row in complete:
        assert str(eval(row["messages"][0]["content"].removesuffix(" = ?"))) == row["messages"][-1]["content"]


def call(**arguments: Any) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": "calculate", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def test_the_calculator_does_one_operation():
    calculator = tools.Calculator()
    calculator.reset(answer="21", prompt="(3 + 4) * 3 = ?")
    for operation, result in (("3 + 4", "7"), (" 7*3 ", "21")):
        assert calculator.step(call(operation=operation)) == ([{"role": "tool", "content": result}], 0.0, False)
    for wrong in ({"operation": "(3 + 4) * 3"}, {"operation": "9 - 1"}, {"operation": None}, {}, {"other": "3 + 4"}):
        ((result,), reward, done) = calculator.step(call(**wrong))
        assert re.match("error: expected one operation", result["content"])
        assert (reward, done) == (0.0, False)
    for words, reward in ((" 21\n", 1.0), ("It is 21", 0.0), ("", 0.0)):
        assert calculator.step({"role": "assistant", "content": words}) == ([], reward, True)


def test_its_two_runs_with_a_tiny_model(tmp_path, monkeypatch, capsys):
    """One step each. The model has a token for every letter, so conversations are longer."""
    model = save_tiny_model("llama", tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}assistant:"
        "{% endif %}"
    )
    full_warm_up, full_config, write_problems = tools.warm_up_config, tools.tools_config, tools.write_tool_problems

    def few_problems(*folders: Path) -> dict[str, Path]:
        paths = write_problems(*folders)
        for path in paths.values():
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:64]))
        return paths

    def short_warm_up(*args: Any) -> SFTConfig:
        config = full_warm_up(*args)
        data = config.data.model_copy(update={"max_sequence_tokens": 2000})
        return config.model_copy(update={"data": data, "batch_size": 8, "steps": 1})

    def short_config(*args: Any) -> Any:
        config = full_config(*args)
        own = {"max_prompt_tokens": 900, "max_new_tokens": 20, "prompts_per_step": 2, "samples_per_prompt": 2}
        return config.model_copy(update={"rollout": config.rollout.model_copy(update=own), "evaluation": None})

    monkeypatch.setattr(tools, "write_tool_problems", few_problems)
    monkeypatch.setattr(tools, "warm_up_config", short_warm_up)
    monkeypatch.setattr(tools, "tools_config", short_config)
    monkeypatch.setattr(tools, "smollm2_folder", lambda: model)
    assert main(["demo", "tools", "--steps", "1", "--output", str(tmp_path / "demo")]) == 0
    said = capsys.readouterr().out
    assert "an episode of step 1, reward 0: system:You can call these tools" in said
    assert "  policy: '" in said
    assert said.strip().splitlines()[-1].endswith(f"{tmp_path / 'demo' / 'learn' / 'view.html'} shows its episodes")
    assert (tmp_path / "demo" / "warm_up" / "hf" / "model.safetensors").is_file()


def test_options_of_the_other_task_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "tools", "--ray"])
    assert "--ray is an option of the task sums" in capsys.readouterr().err


# A policy that does not learn to go on stays at the share of complete traces.
@pytest.mark.slow  # minutes: it trains 135 million parameters
@pytest.mark.long
def test_a_real_model_learns_to_use_the_calculator(tmp_path):
    summary = tools.learn_tools(output_dir=tmp_path, seed=0)
    assert summary["accuracy_before"] <= 0.45
    assert summary["accuracy_after"] >= 0.8
