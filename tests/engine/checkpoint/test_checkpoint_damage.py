"""A damaged checkpoint is skipped and named. A checkpoint of another model is refused, and differences are listed."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlft_fast.engine import CheckpointError, CheckpointManager, export_hf
from tests.engine import reference
from tests.engine.reference import make_engine, names, policy_loss, random_batch, state_of
from tests.support.tiny_models import save_tiny_model


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def rewrite(folder: Path, **changes: object) -> None:
    """A manifest by hand, with the checksum that belongs to it."""
    path = folder / "manifest.json"
    manifest = {name: value for name, value in (json.loads(path.read_text()) | changes).items() if name != "crc32"}
    checksum = f"{zlib.crc32(json.dumps(manifest).encode()):08x}"
    path.write_text(json.dumps(manifest | {"crc32": checksum}))


def restate(folder: Path, text: str) -> None:
    """A state by hand, with the size and the checksum that belong to it in the manifest."""
    (folder / "state.json").write_text(text)
    described = {"bytes": len(text.encode()), "crc32": f"{zlib.crc32(text.encode()):08x}"}
    rewrite(folder, files=manifest_files(folder) | {"state.json": described})


def manifest_files(folder: Path) -> dict[str, dict[str, int | str]]:
    return json.loads((folder / "manifest.json").read_text())["files"]


def hide_state(folder: Path) -> None:
    """A manifest that does not name the state, which is edited."""
    rewrite(folder, files={name: file for name, file in manifest_files(folder).items() if name != "state.json"})
    change(folder / "state.json", '"step": 2', '"step": 1')


NESTED = "[" * 100_000
RANK = "actor/rank_00000.safetensors"
ENTRY = {"bytes": 1, "crc32": "0"}
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "half-written": (lambda f: (f / RANK).write_bytes(b"half of"), f"{RANK} has 7 bytes instead of"),
    "bit": (lambda f: flip_a_bit(f / RANK), f"{RANK} has the checksum"),
    "bit-of-state": (lambda f: flip_a_bit(f / "state.json"), "state.json has the checksum"),
    "missing": (lambda f: (f / RANK).unlink(), f"{RANK} is missing"),
    "no-manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json cannot be read"),
    "half-manifest": (lambda f: (f / "manifest.json").write_text('{"version": 1, "fi'), "manifest.json cannot be read"),
    "list-as-manifest": (lambda f: (f / "manifest.json").write_text("[1, 2]"), "manifest.json cannot be read"),
    "empty-manifest": (lambda f: (f / "manifest.json").write_text('{"version": 1}'), "manifest.json has the checksum"),
    "shape": (lambda f: change(f / "manifest.json", "32", "33"), "manifest.json has the checksum"),
    "later-format": (
        lambda f: (f / "manifest.json").write_text('{"version": 9}'),
        "manifest.json has format version 9",
    ),
    "no-models": (lambda f: rewrite(f, models=None), "manifest.json has models = None: Input should be a valid dict"),
    "no-files": (
        lambda f: rewrite(f, files={}),
        "manifest.json has files = {}: Dictionary should have at least 1",
    ),
    "no-bytes": (lambda f: rewrite(f, files={RANK: {"crc32": "0"}}), f"manifest.json has files.{RANK}.bytes = {{"),
    "absolute": (lambda f: rewrite(f, files={"/etc/passwd": ENTRY}), "= '/etc/passwd': Value error, expected a path"),
    "above": (lambda f: rewrite(f, files={"a/../../x": ENTRY}), "= 'a/../../x': Value error, expected a path inside"),
    "words-as-shape": (
        lambda f: rewrite(f, models={"actor": {"architecture": "", "shapes": {"x": ["many"]}}}),
        "manifest.json has models.actor.shapes.x.0 = 'many': Input should be a valid integer",
    ),
    "nested-manifest": (
        lambda f: (f / "manifest.json").write_text(NESTED),
        "manifest.json cannot be read (maximum rec",
    ),
    "state-not-named": (hide_state, "manifest.json does not name state.json"),
    "list-as-state": (lambda f: restate(f, "[]"), "state.json is []: Input should be a valid dictionary"),
    "nested-state": (lambda f: restate(f, NESTED), "state.json cannot be read (maximum recursion depth"),
    "no-counters": (
        lambda f: restate(f, '{"engines": {"actor": 1}, "client": {}}'),
        "state.json has engines.actor = 1",
    ),
    "another-step": (lambda f: rewrite(f, step=7), "manifest.json is of step 7"),
    "extra-weights": (
        lambda f: shutil.copyfile(f / RANK, f / "actor" / "more.safetensors"),
        "actor/more.safetensors is not in manifest.json: remove it",
    ),
}


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with the checkpoints of two steps, and the state in the first."""
    folder, engines = tmp_path_factory.mktemp("saved"), {"actor": make_engine(tiny_model("llama"))}
    manager, states = CheckpointManager(folder), []
    for step in (1, 2):
        engines["actor"].train_step(random_batch(), policy_loss())
        manager.save(step, engines, {"step": step})
        states.append(state_of(engines))
    return folder, states[0]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_one_is_left_out_by_name(kind, saved, tiny_model, tmp_path):
    damage, reason = DAMAGE[kind]
    folder, expected = saved
    shutil.copytree(folder, tmp_path / "run")
    damage(tmp_path / "run" / "step_00000002")
    engines = {"actor": make_engine(tiny_model("llama"))}
    with pytest.warns(UserWarning, match=rf"step_00000002 is damaged: .*{re.escape(reason)}"):
        assert CheckpointManager(tmp_path / "run").load(engines) == {"step": 1}
    reference.assert_equal(state_of(engines), expected)


def test_files_of_macos_are_no_weights(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    folder = CheckpointManager(tmp_path).save(1, engines, {"step": 1})
    expected = state_of(engines)
    engines["actor"].train_step(random_batch(), policy_loss())
    for path in [folder, *folder.rglob("*")]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7Mac OS X")
    assert CheckpointManager(tmp_path).load(engines) == {"step": 1}
    reference.assert_equal(state_of(engines), expected)


@pytest.mark.parametrize("kind", ["no-manifest", "no-models", "another-step"])
def test_a_folder_that_its_manifest_does_not_confirm_is_not_the_newest(kind, tiny_model, tmp_path):
    engines, manager = {"actor": make_engine(tiny_model("llama"))}, CheckpointManager(tmp_path)
    manager.save(1, engines, {})
    DAMAGE[kind][0](manager.save(2, engines, {}))
    newest = manager.latest()
    assert newest is not None
    assert newest.name == "step_00000001"


def test_a_checkpoint_whose_manifest_names_no_step(tiny_model, tmp_path):
    """As older versions wrote it."""
    engines, manager = {"actor": make_engine(tiny_model("llama"))}, CheckpointManager(tmp_path)
    rewrite(manager.save(2, engines, {"step": 2}), step=None)
    assert manager.load(engines) == {"step": 2}


def test_the_state_confirms_the_step_where_the_manifest_names_none(tiny_model, tmp_path):
    """A copy under a later name is not the newest."""
    engines, manager = {"actor": make_engine(tiny_model("llama"))}, CheckpointManager(tmp_path)
    saved = manager.save(2, engines, {"step": 2})
    rewrite(saved, step=None)
    shutil.copytree(saved, tmp_path / "step_00000099")
    assert manager.latest() == saved
    with pytest.warns(UserWarning, match=r"step_00000099 is damaged: state\.json is of step 2"):
        assert manager.load(engines) == {"step": 2}


def test_damaged_one_does_not_drive_out_good_ones(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    manager = CheckpointManager(tmp_path, max_num=2)
    manager.save(3, engines, {"step": 3})
    flip_a_bit(manager.save(6, engines, {"step": 6}) / "state.json")
    resumed = CheckpointManager(tmp_path, max_num=2)
    with pytest.warns(UserWarning, match="step_00000006 is damaged"):
        assert resumed.load(engines) == {"step": 3}
    resumed.save(4, engines, {"step": 4})
    assert reference.names(tmp_path) == ["step_00000003", "step_00000004"]
    for number in (6, 7):  # written anew it is a good one
        resumed.save(number, engines, {"step": number})
    assert reference.names(tmp_path) == ["step_00000006", "step_00000007"]


def test_when_all_are_damaged_nothing_starts_from_scratch_unnoticed(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    flip_a_bit(CheckpointManager(tmp_path).save(1, engines, {}) / "state.json")
    with (
        pytest.warns(UserWarning, match="step_00000001"),
        pytest.raises(CheckpointError, match=r"no checkpoint can be used: .*step_00000001 is damaged: state\.json"),
    ):
        CheckpointManager(tmp_path).load(engines)


def test_checkpoint_of_another_model(tiny_model, tmp_path):
    CheckpointManager(tmp_path).save(1, {"actor": make_engine(tiny_model("llama"))}, {})
    before = (qwen := make_engine(tiny_model("qwen2"))).state_tensors()["model.model.lm_head.weight"].clone()
    with pytest.raises(
        ValueError,
        match=r"step_00000001 is of another model than the actor: it is of LlamaForCausalLM with a logprob head, this "
        r"is Qwen2ForCausalLM with a logprob head; the checkpoint lacks model\S+q_proj\.bias, \S+, \S+ and 33 more\. ",
    ):
        CheckpointManager(tmp_path).load({"actor": qwen})
    assert torch.equal(qwen.state_tensors()["model.model.lm_head.weight"], before)
    with pytest.raises(
        ValueError, match=r"this model lacks model\.model\.lm_head\.weight, optimizer\.\S+, \S+ and 1 more"
    ):
        CheckpointManager(tmp_path).load({"actor": make_engine(tiny_model("llama-tied"))})
    with pytest.raises(ValueError, match="holds actor, not critic"):
        CheckpointManager(tmp_path).load({"critic": make_engine(tiny_model("llama"), head="value")})


def test_checkpoint_of_another_size(tiny_model, tmp_path):
    save_tiny_model("llama", tmp_path / "small", intermediate_size=40)
    CheckpointManager(tmp_path / "run").save(1, {"actor": make_engine(tmp_path / "small")}, {})
    with pytest.raises(
        ValueError, match=r"shapes differ: \S+gate_proj\.weight is \[40, 32\] there and \[48, 32\] here, "
    ):
        CheckpointManager(tmp_path / "run").load({"actor": make_engine(tiny_model("llama"))})


# ---- ended at any moment --------------------------------------------------------------------------------------------


class Killed(BaseException):
    """An error that no handler of the code catches."""


@pytest.mark.parametrize("step", [1, 2], ids=["replacing", "next"])
def test_ended_at_any_moment(step, tiny_model, tmp_path, monkeypatch):
    """A kill before any call that changes the disk leaves an intact checkpoint, and the next save clears up."""
    engines = {"actor": make_engine(tiny_model("llama"))}
    calls_left: float = math.inf

    def counted(function):
        def call(*args, **options):
            nonlocal calls_left
            calls_left -= 1
            if calls_left < 0:
                raise Killed
            return function(*args, **options)

        return call

    first = tmp_path / "first"
    CheckpointManager(first, max_num=1).save(1, engines, {"saved": 1})
    for name in ("rename", "fsync", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for moment in itertools.count():
        calls_left = math.inf
        directory = tmp_path / f"{moment}"
        shutil.copytree(first, directory)
        calls_left = moment
        with contextlib.suppress(Killed):
            CheckpointManager(directory, max_num=1).save(step, engines, {"saved": 2})
        is_done = calls_left >= 0
        calls_left = math.inf
        manager = CheckpointManager(directory, max_num=1)
        assert manager.load(engines) in (({"saved": 2},) if is_done else ({"saved": 1}, {"saved": 2}))
        manager.save(3, engines, {})
        assert names(directory) == ["step_00000003"]
        if is_done:
            break
    assert moment > 20


def test_a_folder_has_its_name_when_all_of_it_is_on_the_disk(tiny_model, tmp_path, monkeypatch):
    """Files and folders are synced before the name: a power cut could otherwise leave a name without its content."""
    engine = make_engine(tiny_model("llama"))
    events: list[int | None] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), events.append(os.fstat(file).st_ino)))
    monkeypatch.setattr(os, "rename", lambda old, new: (rename(old, new), events.append(None)))
    manager = CheckpointManager(tmp_path)
    for name, write in (
        ("step_00000001", lambda: manager.save(1, {"actor": engine}, {})),
        ("hf", lambda: export_hf(engine, tmp_path / "hf")),
    ):
        events.clear()
        write()
        *before, renamed, after = events
        assert (renamed, after) == (None, tmp_path.stat().st_ino)
        assert {path.stat().st_ino for path in (tmp_path / name, *(tmp_path / name).rglob("*"))} <= set(before)
