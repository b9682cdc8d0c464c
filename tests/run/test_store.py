"""A run's copy in an object store: another machine goes on from it, and no failure of the store loses a checkpoint."""

import itertools
import json
import random
import shutil
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rlft_fast.run import Store, claim
from rlft_fast.run import store as store_module
from rlft_fast.run.store import StoreError
from tests.run.counting import checkpoints, count, lose, result_of


class Flaky(MemoryFileSystem):
    """A store that fails now and then, also in the middle of a file, with or without an error."""

    protocol = "flaky"
    store: dict = {}  # noqa: RUF012 - as in its base class
    pseudo_dirs: list = [""]  # noqa: RUF012
    draw, chance, failures = random.Random(0), 0.0, 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("flaky:/"))

    def _fails(self) -> bool:
        failed = Flaky.draw.random() < Flaky.chance
        Flaky.failures += failed
        return failed

    def put_file(self, lpath, rpath, **options):
        if self._fails():
            content = Path(lpath).read_bytes()
            self.pipe_file(rpath, content[: len(content) // 2])
            if Flaky.draw.random() < 0.5:
                raise OSError("connection lost")
            return
        super().put_file(lpath, rpath, **options)

    def rm(self, path, **options):
        if self._fails():
            raise OSError("access denied")
        super().rm(path, **options)

    def info(self, path, **options):
        if self._fails():
            raise OSError("try again")
        return super().info(path, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)
ADDRESS = "flaky://bucket/run"


@pytest.fixture(autouse=True)
def empty_store():
    Flaky.store, Flaky.pseudo_dirs, Flaky.chance, Flaky.failures = {}, [""], 0.0, 0


def stored(name: str) -> dict[str, bytes]:
    """Files of a checkpoint in the store."""
    start = f"/bucket/run/checkpoints/{name}/"
    return {path.removeprefix(start): file.getvalue() for path, file in Flaky.store.items() if path.startswith(start)}


def test_no_failure_loses_a_checkpoint(tmp_path, monkeypatch):
    """A complete checkpoint has all its bytes, and goes only when a newer one is complete."""
    monkeypatch.setattr(store_module, "_PAUSES", ())
    run, store, draw = tmp_path / "run", Store(ADDRESS), random.Random(0)
    claim(run)
    written: dict[str, dict[str, bytes]] = {}
    newest, num_taken = "", 0
    Flaky.chance = 0.05
    for step in itertools.count(1):
        name = f"step_{step:08d}"
        files = {"actor/rank_00000.safetensors": draw.randbytes(64), "manifest.json": name.encode()}
        written[name] = files
        for file, content in files.items():
            path = run / "checkpoints" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for old in sorted((run / "checkpoints").iterdir())[:-2]:
            shutil.rmtree(old)
        try:
            store.push(run, run / "checkpoints" / name)
        except StoreError:
            pass
        else:
            newest, num_taken = name, num_taken + 1
        there = {path.split("/")[4] for path in Flaky.store if path.startswith("/bucket/run/checkpoints/")}
        complete = [own for own in sorted(there) if stored(own).get("manifest.json") == own.encode()]
        assert all(stored(own) == written[own] for own in complete)
        assert not newest or complete[-1] >= newest
        if Flaky.failures >= 1000:
            break
    assert num_taken > 20


def test_another_machine_goes_on(tmp_path):
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    for folder in (whole, lost):
        folder.mkdir()
    count(whole)
    lose(lost, ADDRESS)
    store = Store(ADDRESS)
    store.require_own(lost / "run", resume=True)
    assert store.fetch(lost / "run") == "step_00000005"
    assert store.fetch(lost / "run") is None  # it is there
    count(lost, resume=True, checkpoint__store=ADDRESS)
    assert result_of(lost) == result_of(whole)
    assert store.checkpoints() == checkpoints(lost) == ["step_00000005", "step_00000006"]
    model = json.loads(Flaky.store["/bucket/run/hf/total.json"].getvalue())
    assert model == json.loads((whole / "run" / "hf" / "total.json").read_text())


def test_a_run_whose_store_is_gone_has_all_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_PAUSES", ())

    def fail() -> None:
        Flaky.chance = 1.0

    with pytest.raises(StoreError, match=r"the store flaky://bucket/run does not .*"):
        count(tmp_path, {("train_step", 2): fail}, checkpoint__store=ADDRESS)
    assert (tmp_path / "run" / "summary.json").is_file()
    assert checkpoints(tmp_path) == ["step_00000003", "step_00000006"]


def test_a_store_belongs_to_one_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    count(first, checkpoint__store=ADDRESS)
    count(second)
    store = Store(ADDRESS)
    with pytest.raises(ValueError, match=r"holds the run [0-9a-f]{8}: continue it with --resume, or name another"):
        store.require_own(first / "run", resume=False)
    with pytest.raises(ValueError, match=r"holds the run [0-9a-f]{8}, and .*second/run is the run [0-9a-f]{8}, or"):
        store.require_own(second / "run", resume=True)
    store.require_own(first / "run", resume=True)


def test_bad_addresses_and_names(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint.store nothing://a cannot be used: Protocol not known: nothing"):
        Store("nothing://a")
    files = fsspec.filesystem("flaky")
    for name in ("manifest.json", "../../../evil"):
        files.pipe_file(f"/bucket/run/checkpoints/step_00000001/{name}", b"{}")
    with pytest.raises(StoreError, match=r"has a file with the name .*evil: remove it"):
        Store(ADDRESS).fetch(tmp_path / "run")
    assert not list(tmp_path.rglob("evil"))


def test_a_store_with_folders(tmp_path):
    """Folders below the address are made, in a folder that is there."""
    (tmp_path / "run").mkdir()
    count(tmp_path / "run", checkpoint__store=f"file://{tmp_path}/copies/of/it")
    assert Store(f"file://{tmp_path}/copies/of/it").checkpoints()[-1] == "step_00000006"
