"""What a run shows while it goes on."""

import pytest

from rlft_fast.trainer.log import RunLog


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


def test_a_skipped_step_is_shown_from_then_on(tmp_path, capsys):
    with RunLog(tmp_path, num_steps=3, rank=0) as log:
        for step, skipped in enumerate((0, 1, 1), start=1):
            log.metrics(step, {"reward_mean": 0.5, "skipped_steps": skipped, "critic_skipped_steps": 0})
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["step 1  reward_mean 0.5"] + [f"step {i}  reward_mean 0.5  skipped_steps 1" for i in (2, 3)]


def test_a_terminal_has_the_bar(shown, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = shown(rank=0)
    assert "1/2" in bar
    assert "left" in bar


@pytest.mark.parametrize("is_terminal", [False, True])
def test_other_ranks_show_nothing(is_terminal, shown, monkeypatch):
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert shown(rank=1) == ""
