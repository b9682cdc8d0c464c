"""``rlft-fast data`` shows rows as the model will see them."""

import subprocess
import sys

import pytest
import yaml

from rlft_fast.cli import main
from tests.trainer.toy import write_rows


def shown(capsys, tmp_path, model, values: dict, rows: list[dict], *arguments: str) -> list[str]:
    """The lines that the command prints."""
    data = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "chat": False} | values.pop("data", {})
    config = {"model": str(model), "output_dir": str(tmp_path / "run"), "steps": 1, "data": data} | values
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["data", str(tmp_path / "config.yaml"), *arguments]) == 0
    assert not (tmp_path / "run").exists()
    return capsys.readouterr().out.splitlines()


def test_prompts(tiny_model, tmp_path, capsys):
    rows = [{"prompt": "abc", "answer": "\x1b[1m"}, {"prompt": "abcdefghi"}, {"prompt": "z"}]
    values = {"reward": {"function": "m:f"}, "rollout": {"max_prompt_tokens": 8}}
    values["evaluation"] = {"path": {"other": str(write_rows(tmp_path / "other.jsonl", rows[2:]))}}
    assert shown(capsys, tmp_path, tiny_model("llama"), values, rows, "--show", "1", "--tokens") == [
        "data: 2 sequences of 1 to 3 tokens, 3 in the middle, 4 in all",
        "  1 overlong left out (the run refuses them: see data.overlong)",
        f"  left out: row 1 of {tmp_path}/rows.jsonl: 9 tokens",
        "--- row 0: 3 tokens", "abc", "  tokens: [64, 65, 66]", r"  answer: '\x1b[1m'",
        "held-out data other: 1 sequences of 1 to 1 tokens, 1 in the middle, 1 in all",
        "--- row 0: 1 tokens", "z", "  tokens: [89]",
    ]  # fmt: skip


@pytest.mark.parametrize("objective", ["sft", "dpo", "reward"])
def test_masks_of_what_is_learned(objective, tiny_model, tmp_path, capsys):
    model = tiny_model("llama-reward" if objective == "reward" else "llama")
    rows = [{"prompt": "Q\n", "completion": "ab", "chosen": "ab", "rejected": "c"}]
    rows.append({"prompt": 99 * "x", "completion": "y", "chosen": "y", "rejected": "z"})
    values = {"objective": objective, "data": {"max_sequence_tokens": 20}, "actor": {"max_tokens": 64}}
    lines = shown(capsys, tmp_path, model, values, rows)
    text = "\n".join(lines)
    assert f"left out: row 1 of {tmp_path}/rows.jsonl: it has 101 tokens, more than data.max_sequence_tokens=20" in text
    expected = {
        "sft": ["--- row 0: 5 tokens", "Q", "⟦ab<eos>⟧"],
        "dpo": ["--- row 0, chosen: 5 tokens", "Q", "⟦ab<eos>⟧", "--- row 0, rejected: 4 tokens", "Q", "⟦c<eos>⟧"],
        # The score is that of the last token before the one that is asked of, which does not run.
        "reward": [
            "--- row 0, chosen: 6 tokens", "Q", "ab<eos>⟦<eos>⟧", "--- row 0, rejected: 5 tokens", "Q",
            "c<eos>⟦<eos>⟧",
        ],
    }  # fmt: skip
    assert lines[-len(expected[objective]) :] == expected[objective]


@pytest.mark.slow
def test_rows_need_no_models():
    code = "import sys; import rlft_fast.trainer as t; t.show_data; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rlft_fast.trainer.supervised.rows" in run.stdout.split()
    assert not {"rlft_fast.engine", "rlft_fast.models.heads", "rlft_fast.rollout", "peft"} & {*run.stdout.split()}


def test_wrong_usage(capsys):
    with pytest.raises(SystemExit):
        main(["data", "a.yaml", "--show", "-1"])
    assert "--show is -1, expected at least 0" in capsys.readouterr().err
