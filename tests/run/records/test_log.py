"""What a run shows while it goes on, and what it leaves on disk."""

import json
import re

import pytest

from rlft_fast.run.records.log import RunLog


@pytest.fixture
def shown(tmp_path, capsys):
    """Everything that a rank prints during a step."""

    def call(rank: int) -> str:
        with RunLog(tmp_path, num_steps=2, rank=rank) as log:
            log.metrics(1, {"reward_mean": 0.5})
        return capsys.readouterr().out

    return call


def test_without_a_terminal_a_step_is_a_line_and_there_is_no_bar(shown):
    assert shown(rank=0) == "step 1  reward_mean 0.5\n"


def test_a_line_shows_the_numbers_of_its_step_alone(tmp_path, capsys):
    with RunLog(tmp_path, num_steps=1, rank=0) as log:
        log.metrics(0, {"accuracy": 0.25})
        log.metrics(1, {"reward_mean": 0.5})
        log.metrics(1, {"accuracy": 0.75})
    assert capsys.readouterr().out.splitlines() == [
        "step 0  accuracy 0.25",
        "step 1  reward_mean 0.5",
        "step 1  accuracy 0.75",
    ]


def test_a_skipped_step_is_shown_from_then_on(tmp_path, capsys):
    with RunLog(tmp_path, num_steps=3, rank=0) as log:
        for step, skipped in enumerate((0, 1, 1), start=1):
            log.metrics(step, {"reward_mean": 0.5, "skipped_steps": skipped, "critic_skipped_steps": 0})
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["step 1  reward_mean 0.5"] + [f"step {i}  reward_mean 0.5  skipped_steps 1" for i in (2, 3)]


def test_an_integer_beyond_float64_is_an_infinity(tmp_path, capsys):
    with RunLog(tmp_path, num_steps=1, rank=0) as log:
        log.metrics(1, {"reward_mean": 10**400, "accuracy": -(10**400), "tokens_per_second": 2**53 + 1})
    assert capsys.readouterr().out == "step 1  reward_mean inf  accuracy -inf  tokens_per_second 9.007e+15\n"
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["reward_mean"], line["accuracy"], line["tokens_per_second"]) == (None, None, 2**53 + 1)


HOSTILE = "\x1b[2J\x1b]0;title\x07 \u202eevil\u202c \r[red]a\x00\ud800"
HARMLESS = r"\x1b[2J\x1b]0;title\x07 \u202eevil\u202c \r[red]a\x00\ud800"


def test_text_of_models_and_data_cannot_steer_the_terminal(tmp_path, capsys):
    with RunLog(tmp_path, num_steps=1, rank=0) as log:
        log.message(f"the judge says: {HOSTILE}\nsecond line")
        log.table("answers", ["prompt", "answer"], [[HOSTILE, "a"]])
    shown = capsys.readouterr().out
    assert f"the judge says: {HARMLESS}\nsecond line\n" in shown
    assert HARMLESS in shown.split("second line")[1]
    assert all(x.isprintable() or x == "\n" for x in shown)


def test_a_terminal_has_a_line_for_each_step_and_the_bar(tmp_path, capsys, monkeypatch):
    """As lines stand on the terminal at the end: codes that move its cursor are followed."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with RunLog(tmp_path, num_steps=2, rank=0) as log:
        log.metrics(0, {"accuracy": 0.25})
        log.metrics(1, {"reward_mean": 0.5})
        log.metrics(2, {"reward_mean": 0.75})
    lines = on_terminal(capsys.readouterr().out)
    assert lines[:3] == ["step 0  accuracy 0.25", "step 1  reward_mean 0.5", "step 2  reward_mean 0.75"]
    (bar,) = lines[3:]
    assert bar.startswith("step 2/2 ")
    assert "left" in bar


def on_terminal(output: str) -> list[str]:
    """The lines that rich's output leaves: it moves up (A), erases lines (2K) and returns to their start."""
    lines, row = [""], 0
    for code, text in re.findall(r"(\x1b\[[?\d;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", output):
        if code == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif code.endswith("A"):
            row -= int(code[2:-1])
        elif code.endswith("2K"):
            lines[row] = ""
        lines[row] += text
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_other_ranks_show_nothing(is_terminal, shown, monkeypatch):
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert shown(rank=1) == ""


# Sizes as a checkpoint has them: between lines, in a line, behind a line that a kill has torn, and before any line.
@pytest.mark.parametrize(("num_bytes", "kept"), [(6, 6), (9, 6), (99, 12), (5, 0), (0, 0)])
@pytest.mark.parametrize("torn", [b'{"a": "', b"x" * 200_000])  # the second is longer than what is looked at at once
def test_a_torn_line_is_cut_off(num_bytes, kept, torn, tmp_path):
    whole = b"line1\nline2\n"
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_bytes(whole + torn)
    size = len(whole + torn) if num_bytes == 99 else num_bytes
    RunLog(tmp_path, num_steps=2, rank=0).rewind(1, {"metrics.jsonl": size, "samples.jsonl": size})
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / name).read_bytes() == whole[:kept]


def test_unusual_line_separators_in_samples_survive(tmp_path):
    log = RunLog(tmp_path, num_steps=2, rank=0)
    log.sample(1, completion="one\u2028two\x85three")
    sizes = log.num_bytes()
    log.sample(2, completion="after the checkpoint")
    log.rewind(1, sizes | {"metrics.jsonl": 99})  # which somebody has deleted
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    lines = (tmp_path / "samples.jsonl").read_text().split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [{"step": 1, "completion": "one\u2028two\x85three"}]
