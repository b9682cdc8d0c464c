import json
import os
import warnings
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from matplotlib.image import imread

from rlft_fast.cli import main
from rlft_fast.run.records.plot import _running_mean, plot_runs, read_metrics
from tests.support.runs.metrics import ODD

SERIES = ("reward_mean", "accuracy", "approx_kl", "entropy", "completion_length_mean", "tokens_per_second")


@pytest.fixture(autouse=True)
def without_curves() -> None:
    """Here they are drawn."""


def write_run(folder, num_steps: int, names=SERIES):
    folder.mkdir()
    rows = [{"step": step} | dict.fromkeys(names, step / num_steps) for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_one_run_is_drawn_into_its_folder(tmp_path, capsys):
    run = write_run(tmp_path / "run", 5)
    assert main(["plot", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "curve.png")
    assert imread(run / "curve.png").std() > 0.01  # a blank picture has none


def test_several_runs_need_an_output(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name, 5)) for name in ("a", "b")]
    with pytest.raises(SystemExit) as exit_info:
        main(["plot", *runs])
    assert exit_info.value.code == 2
    assert "--output" in capsys.readouterr().err
    assert main(["plot", *runs, "--output", str(tmp_path / "both.svg")]) == 0
    assert not (tmp_path / "a" / "curve.png").exists()
    assert "<svg" in (tmp_path / "both.svg").read_text()


def picture_size(run, tmp_path) -> tuple[int, int]:
    plot_runs([run], tmp_path / "out.png")
    return imread(tmp_path / "out.png").shape[:2]


# 1: a single panel; 3: one full row; 4: two by two, without holes; 6: two rows of three.
@pytest.mark.parametrize(("num_series", "rows", "columns"), [(1, 1, 1), (3, 1, 3), (4, 2, 2), (6, 2, 3)])
def test_missing_series_take_no_room(num_series, rows, columns, tmp_path):
    height, width = picture_size(write_run(tmp_path / "run", 5, SERIES[:num_series]), tmp_path)
    assert (height, width) == pytest.approx(((2.9 * rows + 0.3) * 150, 4.2 * columns * 150), abs=1)


def test_a_single_step_is_visible(tmp_path):
    plot_runs([write_run(tmp_path / "one", 1, ["reward_mean"])], tmp_path / "one.png")
    red, _, blue, _ = imread(tmp_path / "one.png").transpose(2, 0, 1)
    assert ((blue > 0.6) & (red < 0.1)).any()  # the colour of the series; text and axes are grey


@pytest.mark.parametrize("rewards", [(2.5, 3.0), (-40.0, -30.0), (0.2, 0.4)])
def test_a_mean_reward_that_is_no_share_is_in_the_picture(rewards, tmp_path):
    (tmp_path / "run").mkdir()
    rows = [{"step": step, "accuracy": reward} for step, reward in enumerate(rewards)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_runs([tmp_path / "run"], tmp_path / "out.png")
    red, _, blue, _ = imread(tmp_path / "out.png").transpose(2, 0, 1)
    assert ((blue > 0.6) & (red < 0.1)).any()


def test_running_mean_is_centred():
    values = [float(i) for i in range(9)]
    assert _running_mean(values, reach=2)[2:-2] == values[2:-2]  # a straight line stays where it is
    assert _running_mean([0.0, 3.0, 6.0, 0.0], reach=1) == [1.5, 3.0, 3.0, 3.0]


def test_a_line_being_written_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", 3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]


# No file; nothing complete; no JSON; no object; no step; nothing that is drawn.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no metrics.jsonl"),
        ("", "holds no complete line"),
        ('{"step": 1}\nnonsense\n', "line 2 is no JSON"),
        (b'{"step": 1}\n{"step\xff', "nothing to draw"),  # the second line is still being written
        (b'{"step": 1}\n\xff\n', "line 2 is no JSON"),
        ("[1]\n", "line 1 must be a JSON object with an integer step"),
        ('{"kl": 0.1}\n', "line 1 must be a JSON object with an integer step"),
        ('{"step": 1, "approx_kl": null}\n', "nothing to draw"),
    ],
)
def test_unusable_metrics(text, message, tmp_path):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        plot_runs([tmp_path], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_what_can_be_drawn_of_odd_numbers_is_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in ODD))
    told = []
    rows = read_metrics(tmp_path, told.append)
    assert [{name: value for name, value in row.items() if value is not None} for row in rows] == [
        {"step": 1, "reward_mean": 0.5, "constructor": 1, "__proto__": 2.0, "entropy": 1e300},
        {"step": 2}, {"step": 3}, {"step": 2**53 - 1, "entropy": -1e300},
    ]  # fmt: skip
    place = tmp_path / "metrics.jsonl"
    assert told == [
        f"4 lines of {place} are left out: their steps are 2^53 or more in size",
        f"6 numbers of {place} are left out: they are not finite, or larger than 1e+300 in size",
    ]
    with warnings.catch_warnings(record=True, action="always") as shown:
        plot_runs([tmp_path], tmp_path / "curve.png")
    assert [str(warning.message) for warning in shown] == told


def test_names_of_runs_are_texts(tmp_path, monkeypatch):
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")  # texts as texts
    runs = [write_run(tmp_path / name, 1, ["entropy"]) for name in ("$\\frac{x$", "a^b_$5$", "_run", "line\x07")]
    plot_runs(runs, tmp_path / "all.svg")
    plot_runs(runs[:1], tmp_path / "one.svg")
    shown = [text for text in svg_texts(tmp_path / "all.svg") if text.startswith(str(tmp_path))]
    assert shown == [str(run).replace("\x07", "\\x07") for run in runs]
    assert "$\\frac{x$" in svg_texts(tmp_path / "one.svg")


def svg_texts(picture) -> list[str]:
    found = ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()) for text in found]


def test_a_picture_is_written_through_no_link(tmp_path):
    run, mine = write_run(tmp_path / "run", 1, ["entropy"]), tmp_path / "mine.txt"
    mine.write_text("mine")
    for name in ("curve.png", "curve.png.incomplete"):
        os.symlink(mine, run / name)
    assert main(["plot", str(run)]) == 0
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in run.iterdir()) == ["curve.png", "metrics.jsonl"]
    assert imread(run / "curve.png").std() > 0.01


def test_a_folder_in_the_place_of_a_picture_is_named(tmp_path, capsys):
    run = write_run(tmp_path / "run", 1, ["entropy"])
    (run / "curve.png").mkdir()
    assert main(["plot", str(run)]) == 1
    assert f"{run / 'curve.png'} is a folder, and a file is to be written there" in capsys.readouterr().err
    assert [*(run / "curve.png").iterdir()] == []
