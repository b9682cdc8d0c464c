"""The demo of images: its pictures and its two runs, and (slow) that the model learns to see."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from rlft_fast.cli import main
from rlft_fast.demo import images


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def things(row: dict[str, Any], folder: Path) -> tuple[str, list[Any]]:
    """The question about a picture, and its pixels without the ground."""
    image, question = row["prompt"][0]["content"]
    pixels = np.asarray(Image.open(folder / image["path"])).reshape(-1, 3).tolist()
    return question["text"], [(*x,) if len({*x}) > 1 or x[0] > 200 else None for x in pixels]


@pytest.fixture
def few(monkeypatch):
    for name, value in {"_NUM_PICTURES": 48, "_NUM_HELD_OUT": 16, "_NUM_TEXTS": 16, "_WARM_UP_STEPS": 1}.items():
        monkeypatch.setattr(images, name, value)


def test_pictures_show_their_answers(tmp_path, few):
    paths = images.write_pictures(tmp_path, tmp_path / "texts")
    train, held_out = ([(row, *things(row, tmp_path)) for row in read(paths[x])] for x in ("train", "held_out"))
    assert [len(train), len(held_out)] == [48, 16]
    shown = [str(pixels) for _, _, pixels in train + held_out]
    assert len({*shown}) == len(shown)  # no held-out picture is trained on with another ground
    for row, question, pixels in train + held_out:
        colours = {x for x in pixels if x is not None}
        assert len(colours) == 1
        if "colour" in question:
            assert images._COLOURS[row["answer"]] in colours
        else:  # pixels of each thing
            each = {"square": 36, "cross": 12, "ring": 20}[row["answer"]]
            assert len([x for x in pixels if x is not None]) in [each * count for count in (1, 2, 3, 4)]


def test_its_two_runs(tmp_path, few, capsys):
    """One step each. The second one trains the tower, and each sees its own data."""
    assert main(["demo", "images", "--steps", "1", "--output", str(tmp_path)]) == 0
    assert (
        capsys.readouterr().out.strip().endswith(f"{tmp_path / 'learn' / 'view.html'} shows its pictures and answers")
    )
    made, warm, learned = (load_file(tmp_path / x / "model.safetensors") for x in ("model", "warm_up/hf", "learn/hf"))
    tower = [name for name in made if "visual" in name]
    assert tower
    assert all(made[name].equal(warm[name]) for name in tower)
    assert not any(learned[name].equal(warm[name]) for name in tower if name.endswith("weight"))


def test_a_model_of_the_user_is_not_written_over(tmp_path, capsys):
    own = tmp_path / "model" / "config.json"
    own.parent.mkdir()
    own.write_text("{}")
    assert main(["demo", "images", "--steps", "1", "--output", str(tmp_path)]) == 1
    assert f"{own.parent} " in capsys.readouterr().err
    assert own.read_text() == "{}"


def test_options_of_the_sums_alone_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "images", "--rollout", "hf"])
    assert "--rollout is an option of the task sums: leave it out" in capsys.readouterr().err


@pytest.mark.slow  # a minute
@pytest.mark.long
def test_it_learns_to_see(tmp_path):
    summary = images.learn_images(output_dir=tmp_path)
    assert summary["accuracy_before"] <= 0.4
    assert summary["accuracy_after"] >= 0.8
