"""A run writes over nothing but its own files, and resumes nothing but itself."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from rlft_fast.cli import main
from rlft_fast.models import load_tokenizer, model_checksum
from rlft_fast.rewards import load_reward
from rlft_fast.run.folder import MARKER, claim, naming_start, require_same, require_usable
from rlft_fast.trainer import train
from rlft_fast.trainer.inputs import identity_of
from rlft_fast.trainer.prompts import load_data
from tests.support.machine.privileges import permissions_hold
from tests.support.runs.curves import without_matplotlib
from tests.trainer.toy import read_lines, toy_config, toy_values, write_rows


@pytest.fixture(autouse=True)
def without_curves(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.nullcontext() if "curves" in request.fixturenames else without_matplotlib():
        yield


@pytest.fixture
def curves() -> None:
    """They are drawn: a run writes over no link in the place of its picture."""


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


def written(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_file(model: Path, folder: Path, **changes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(toy_values(model, folder, **{"steps": 1, **changes})))
    return str(folder / "config.yaml")


def refusal(capsys, *arguments: str) -> str:
    assert main(["train", *arguments]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("key", ["model", "critic.model", "reward.model"])
@pytest.mark.parametrize("place", ["hf", "base", ""])
def test_a_model_in_the_output_dir_is_refused(key, place, model, tmp_path, capsys):
    inside = tmp_path / "run" / place
    inside.parent.mkdir(exist_ok=True)
    os.symlink(model, tmp_path / "linked")
    (inside.parent if place else tmp_path).joinpath("x").touch()
    options = {"critic__max_tokens": 64, "algorithm__advantage": "gae"} if key == "critic.model" else {}
    config = config_file(model, tmp_path, **options)
    before = written(tmp_path)
    error = refusal(capsys, config, f"--{key}", str(inside))
    assert f"{key} {inside} lies in output_dir {tmp_path / 'run'}, where the run writes its own model" in error
    if not place and key == "model":  # by another name of the same folder
        assert "lies in output_dir" in refusal(capsys, config, "--output_dir", str(tmp_path / "linked"))
    assert written(tmp_path) == before


def mark(run: Path) -> None:
    run.mkdir()
    (run / MARKER).write_text('{"identity": {}}')


def occupy(path: Path, how: str) -> None:
    mark(path.parent)
    if how == "link":
        path.symlink_to(path.parent.parent / "nowhere")
    elif how == "file":
        path.touch()
    else:
        path.mkdir(mode=0o555)


@pytest.mark.parametrize("name", ["checkpoints", "hf", "best", "tokens"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("link", "is a link to .*nowhere, which does not exist"),
        ("file", "is no folder"),
        ("read-only", "cannot be written: change its permissions"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(how, words, name, model, tmp_path):
    config = toy_config(model, tmp_path)
    occupy(tmp_path / "run" / name, how)
    with permissions_hold(), pytest.raises(ValueError, match=f"{tmp_path / 'run' / name} {words}"):
        require_usable(config)


def test_files_where_the_run_writes_are_refused(model, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    config = config_file(model, run, output_dir=str(run))
    before = written(tmp_path)
    for resume in ([], ["--resume"]):
        error = refusal(capsys, config, *resume)
        assert f"the configuration {config} is where the run writes a file of its own: name another" in error
    elsewhere = config_file(model, tmp_path)
    before |= {"config.yaml": Path(elsewhere).read_bytes(), "data.jsonl": (tmp_path / "data.jsonl").read_bytes()}
    for key, name in (("data.path", "samples.jsonl"), ("evaluation.path", "hf/held_out.jsonl")):
        assert f"{key} {run / name} is where the run writes" in refusal(capsys, elsewhere, f"--{key}", str(run / name))
    assert written(tmp_path) == before


def test_a_folder_that_is_no_run_is_refused(model, tmp_path, capsys):
    (tmp_path / "run" / "hf").mkdir(parents=True)
    for name in ("hf/notes.txt", "thesis.tex", "config.yaml", "._thesis.tex"):  # the last one is of macOS
        (tmp_path / "run" / name).write_text("mine")
    config = config_file(model, tmp_path)
    before = written(tmp_path)
    for resume in ([], ["--resume"]):
        error = refusal(capsys, config, *resume)
        message = f"output_dir {tmp_path / 'run'} is not the folder of a run, and holds config.yaml, hf, thesis.tex"
        assert message in error
    assert main(["demo", "--output", str(tmp_path / "run")]) == 1
    assert "is not the folder of a run" in capsys.readouterr().err
    assert written(tmp_path) == before


# An experiment tracker's; somebody's own; half a file; YAML and JSON that no parser can hold.
@pytest.mark.parametrize(
    "files",
    [
        {"run.json": '{"wandb": 1}'},
        {"run.json": '["identity"]'},
        {"run.json": ""},
        {"run.json": "[" * 100_000},
        {"config.yaml": "lr: 0.1\n", "metrics.jsonl": "{}\n", "hf/model.safetensors": "weights"},
        {"config.yaml": "[" * 600, "metrics.jsonl": "{}\n"},
    ],
)
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_folder_of_another_tool_is_refused(files, resume, model, tmp_path, capsys):
    for name, text in files.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
    config = config_file(model, tmp_path)
    before = written(tmp_path)
    assert f"output_dir {tmp_path / 'run'} is not the folder of a run" in refusal(capsys, config, *resume)
    assert written(tmp_path) == before


def test_an_export_keeps_what_it_did_not_write(model, tmp_path):
    config = config_file(model, tmp_path)
    assert main(["train", config]) == 0
    folder = tmp_path / "run" / "hf"
    (folder / "notes.txt").write_text("mine")
    (folder / "figures").mkdir()
    (folder / "figures" / "one.svg").write_text("<svg/>")
    exported = written(folder)
    assert main(["export", str(tmp_path / "run")]) == 0
    assert written(folder) == exported
    (folder / "model-00001-of-00002.safetensors").touch()  # of an older version's export, which left no list
    (folder / ".export.json").unlink()
    assert main(["export", str(tmp_path / "run")]) == 0
    assert written(folder) == exported


def identity(model: Path, folder: Path, **changes) -> dict:
    config = toy_config(model, folder, **changes)
    return identity_of(config, *load_data(config, load_tokenizer(config.model)))


def test_another_run_is_not_continued(model, tmp_path):
    run, first = tmp_path / "run", identity(model, tmp_path)
    claim(run, first)
    data = first["data"]["training"]["columns"]["answer"]
    rows = [row | {"answer": 7} for row in read_lines(tmp_path / "data.jsonl")]
    other_data = str(write_rows(tmp_path / "other.jsonl", rows))
    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, other / "model.safetensors")
    for where, changes, difference in (
        (model, {"seed": 2}, "seed was 1 and is 2"),
        (model, {"data__path": other_data}, f"data.training.columns.answer was {data} and is "),
        (model, {"algorithm__clip_high": 0.3}, "algorithm.clip_high was None and is 0.3"),
        (model, {"rollout__prompts_per_step": 2}, "rollout.prompts_per_step was 4 and is 2"),
        (model, {"actor__optimizer__moment_dtype": "int8"}, "actor.optimizer.moment_dtype was 'float32' and is 'int8'"),
        (model, {"actor__lora": {"rank": 4}}, "actor.lora was None and is {'rank': 4, 'alpha': 32, "),
        (other, {}, f"checksum.model was {model_checksum(model)!r} and is "),
    ):
        message = f"this run cannot continue the run in {run}, whose settings differ: {difference}"
        with pytest.raises(ValueError, match=re.escape(message)):
            require_same(run, identity(where, tmp_path, **changes))
    elsewhere = shutil.copytree(model, tmp_path / "copy")  # the same model in another folder
    require_same(run, identity(elsewhere, tmp_path, actor__max_tokens=32, steps=7))


def test_a_finished_run_says_so(model, tmp_path, capsys):
    config = config_file(model, tmp_path)
    assert main(["train", config]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == f"the model is in {tmp_path / 'run' / 'hf'}, numbers and samples of each step beside it"
    before = written(tmp_path / "run")
    assert main(["train", config, "--resume"]) == 0
    message = f"the run in {tmp_path / 'run'} is finished, with 1 steps: to go on, raise steps\n"
    assert capsys.readouterr().out == message
    other = f"this run cannot continue the run in {tmp_path / 'run'}, whose settings differ: seed was 1 and is 2"
    assert other in refusal(capsys, config, "--resume", "--seed", "2")
    assert main(["train", config, "--resume", "--seed", "2", "--force"]) == 0
    assert capsys.readouterr().out == message
    assert written(tmp_path / "run") == before
    own = str(tmp_path / "run" / "config.yaml")
    assert main(["train", own, "--resume", "--steps", "2"]) == 0  # by the configuration that the run has written
    capsys.readouterr()
    assert main(["train", own, "--resume", "step_1", "--steps", "2", "--dry-run"]) == 0
    assert f"#   output_dir: {tmp_path / 'run'} can be written; the run continues after step_00000001\n" in (
        capsys.readouterr().out
    )
    assert "there is no checkpoint step_3 in" in refusal(capsys, own, "--resume", "step_3", "--dry-run")


def test_a_run_goes_on_and_is_evaluated_from_another_folder(curves, model, tmp_path, monkeypatch, capsys):
    """Its paths were relative. Links in the place of its files are replaced, and not written through."""
    values = toy_values(model, tmp_path, steps=1, evaluation={"path": "data.jsonl"}, checkpoint__best="accuracy")
    values |= {"model": os.path.relpath(model, tmp_path), "output_dir": "run", "data": {"path": "data.jsonl"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "mine.yaml", "--data.chat", "false"]) == 0
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    capsys.readouterr()
    assert main(["eval", str(model), "../run/config.yaml"]) == 0
    before = json.loads((run / "summary.json").read_text())
    assert json.loads(capsys.readouterr().out) == {"accuracy": before["accuracy_before"]}
    mine = written(tmp_path)
    for name in ("config.yaml", "summary.json", "run.json", "curve.png"):
        (run / name).replace(tmp_path / f"my {name}")
        (run / name).symlink_to(tmp_path / f"my {name}")
    links = {f"my {name}": mine[f"run/{name}"] for name in ("config.yaml", "summary.json", "run.json", "curve.png")}
    assert main(["train", "../run/config.yaml", "--resume", "--steps", "2"]) == 0
    assert {name: (tmp_path / name).read_bytes() for name in links} == links
    assert not [path for path in run.iterdir() if path.is_symlink()]
    assert [*elsewhere.iterdir()] == []
    after = json.loads((run / "summary.json").read_text())
    assert after["accuracy_best"] == max(before["accuracy_best"], after["accuracy_after"])  # of both parts
    assert [row["step"] for row in read_lines(run / "metrics.jsonl") if "seconds" in row] == [1, 2]


def test_a_function_that_is_missing_elsewhere(tmp_path, monkeypatch):
    start = os.fsdecode(b"caf\xe9")  # not UTF-8
    for name in (start, "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / start)
    claim(tmp_path / "run")
    for spec, message in (("mine.py:score", "no file 'mine.py'"), ("my_module_of_rewards:score", "no module 'my_mod")):
        for folder, more in ((start, "$"), ("elsewhere", f"The run in .*run was started in {tmp_path / start}, ")):
            monkeypatch.chdir(tmp_path / folder)
            with pytest.raises(ValueError, match=f"{message}.*{more}"), naming_start(tmp_path / "run"):
                load_reward(spec)


def test_an_output_dir_that_is_not_utf8_is_refused(model, tmp_path, monkeypatch, capsys):
    """A run may start there, and write elsewhere."""
    (tmp_path / (start := os.fsdecode(b"caf\xe9"))).mkdir()
    monkeypatch.chdir(tmp_path / start)
    config = config_file(model, tmp_path)
    error = refusal(capsys, config, "--output_dir", "run")
    assert r"caf\udce9/run has a name that is not UTF-8" in error
    assert [*Path().iterdir()] == []
    assert main(["train", config]) == 0
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.yaml", "summary.json", "run.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_at_the_start(name, model, tmp_path):
    mark(tmp_path / "run")
    if name == MARKER:  # as an early version's run, which had no marker
        (tmp_path / "run" / MARKER).unlink()
        (tmp_path / "run" / "metrics.jsonl").touch()
        (tmp_path / "run" / "config.yaml").write_text(toy_config(model, tmp_path).to_yaml())
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(
        ValueError, match=f"{tmp_path / 'run' / name} is a folder, and the run writes a file of this name"
    ):
        require_usable(toy_config(model, tmp_path))


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", ".lock"])
def test_logs_and_locks_are_written_through_no_link(name, model, tmp_path):
    mark(tmp_path / "run")
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (tmp_path / "run" / name).symlink_to(mine)
    with pytest.raises(ValueError, match=f"{tmp_path / 'run' / name} is a link, and .* its target: remove the link"):
        train(toy_config(model, tmp_path, steps=1))
    assert mine.read_text() == "mine"


# Before training: the model is exported at its end.
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("link", "hf.incomplete"), ("file", "hf.incomplete"), ("folder", "hf.incomplete"),
        ("folder", "best.incomplete"), ("link", "hf.lock"),
    ],
)  # fmt: skip
def test_what_is_where_an_export_writes_first_is_refused_at_the_start(how, name, model, tmp_path):
    mark(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    place = tmp_path / "run" / name
    if how == "link":
        place.symlink_to(tmp_path / "mine")
    elif how == "file":
        place.write_text("mine")
    else:
        shutil.copytree(tmp_path / "mine", place)
    before = written(tmp_path)
    with pytest.raises(ValueError, match=f"{place}.* (is not an export's|is a link, and)"):
        require_usable(toy_config(model, tmp_path))
    assert before.items() <= written(tmp_path).items()


def test_a_run_that_torchrun_restarts_has_to_resume(model, tmp_path, capsys, monkeypatch):
    """The restart would be refused for the checkpoint of the run itself, or `train` would begin again."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    config = config_file(model, tmp_path)
    message = "torchrun was given --max-restarts 3, and a run that is restarted would not continue what it has saved: "
    assert f"error: {message}start it with --resume" in refusal(capsys, config, "--dry-run")
    with pytest.raises(ValueError, match=message):
        train(toy_config(model, tmp_path))
    with pytest.raises(ValueError, match="a run that is restarted would go back to step_1 again"):
        train(toy_config(model, tmp_path), resume="step_1")
    assert not (tmp_path / "run").exists()
    assert main(["train", config, "--dry-run", "--resume"]) == 0
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert main(["train", config, "--dry-run"]) == 0
