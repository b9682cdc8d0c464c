"""A run's copy in an object store: another machine goes on from it, and no failure of the store loses a checkpoint."""

import itertools
import json
import random
import shutil
import signal
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rlft_fast.engine import CheckpointManager
from rlft_fast.errors import Checks, Interrupted
from rlft_fast.run import Store, claim
from rlft_fast.run import store as store_module
from rlft_fast.run.folder import run_id
from rlft_fast.run.store import StoreError
from rlft_fast.trainer import check_folder
from rlft_fast.world import World
from tests.run.counting import Counter, by_signal, checkpoints, count, counting_config, lose, result_of


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
    """A complete checkpoint has all its bytes, the critic's too, and goes only when a newer one is complete."""
    monkeypatch.setattr(store_module, "_PAUSES", ())
    run, store, draw = tmp_path / "run", Store(ADDRESS), random.Random(0)
    claim(run)
    written: dict[str, dict[str, bytes]] = {}
    newest, num_taken = "", 0
    Flaky.chance = 0.03
    for step in itertools.count(1):
        name = f"step_{step:08d}"
        for part in ("actor", "critic"):
            files = {f"{part}/rank_00000.safetensors": draw.randbytes(64), "manifest.json": name.encode()}
            folder = "critic/" * (part == "critic") + name
            written[folder] = files
            for file, content in files.items():
                path = run / "checkpoints" / folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        for old in sorted((run / "checkpoints").glob("step_*"))[:-2]:
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
        assert all(stored(f"critic/{own}") == written[f"critic/{own}"] for own in complete)
        assert not newest or complete[-1] >= newest
        if Flaky.failures >= 1000:
            break
    assert num_taken > 20


def test_a_checkpoint_stays_until_it_is_copied(tmp_path, monkeypatch):
    """Where the folder keeps one checkpoint, the next save waits for the copy. All checkpoints reach the store."""
    push, found = Store.push, []

    def push_slowly(store: Store, run: Path, checkpoint: Path) -> None:
        time.sleep(0.1)
        found.append((checkpoint.name, checkpoint.is_dir()))
        push(store, run, checkpoint)

    monkeypatch.setattr(Store, "push", push_slowly)
    steps_take_longer_than_writes = {("train_step", step): lambda: time.sleep(0.1) for step in range(4)}
    settings = {"every": 1, "max_num": 1, "store": ADDRESS}
    count(tmp_path, steps_take_longer_than_writes, steps=4, **{f"checkpoint__{key}": x for key, x in settings.items()})
    assert found == [(f"step_{step:08d}", True) for step in (1, 2, 3, 4)]


def test_a_second_ctrl_c_begins_no_copy(tmp_path):
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    settings = {"checkpoint__max_num": 1, "checkpoint__store": ADDRESS}
    with pytest.raises(KeyboardInterrupt) as stopped:
        count(tmp_path, {("train_step", 3): twice}, **settings)
    assert not isinstance(stopped.value, Interrupted)
    assert checkpoints(tmp_path) == ["step_00000003"]
    assert Store(ADDRESS).checkpoints() == []
    count(tmp_path, resume=True, **settings)
    assert Store(ADDRESS).checkpoints() == checkpoints(tmp_path) == ["step_00000006"]


def test_another_machine_goes_on(tmp_path):
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    for folder in (whole, lost):
        folder.mkdir()
    count(whole)
    lose(lost, ADDRESS)
    store = Store(ADDRESS)
    store.require_own(lost / "run", resume=True)
    assert store.fetch(lost / "run") == ["step_00000005"]
    assert store.fetch(lost / "run") == []  # it is there
    count(lost, resume=True, checkpoint__store=ADDRESS)
    assert result_of(lost) == result_of(whole)
    assert store.checkpoints() == checkpoints(lost) == ["step_00000005", "step_00000006"]
    model = json.loads(Flaky.store["/bucket/run/hf/total.json"].getvalue())
    assert model == json.loads((whole / "run" / "hf" / "total.json").read_text())


def test_the_first_machine_goes_on_after_another(tmp_path):
    """Its logs and its best policy are older than the checkpoint that it gets."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    for folder in (whole, moved):
        folder.mkdir()
    changes = {"accuracy": {0: 0.1, 2: 0.2, 4: 0.4, 6: 0.3}, "checkpoint__best": "accuracy"}
    count(whole, **changes)
    run, own = moved / "run", {**changes, "checkpoint__store": ADDRESS}
    for step in (2, 4):
        with pytest.raises(Interrupted):
            count(moved, {("train_step", step): by_signal(signal.SIGTERM)}, resume=True, **own)
        if step == 2:
            shutil.copytree(run, tmp_path / "first")
    shutil.rmtree(run)
    (tmp_path / "first").rename(run)
    assert Store(ADDRESS).fetch(run) == ["step_00000005"]
    count(moved, resume=True, **own)
    assert result_of(moved) == result_of(whole)
    assert (run / "best/total.json").read_text() == (whole / "run/best/total.json").read_text()


def test_a_critic_with_workers_of_its_own_goes_on(tmp_path):
    """Its checkpoints lie in a folder of their own, see `RemoteCheckpoints`. Nothing stays of those that have gone."""
    counters = {"": Counter(), "critic": Counter()}

    def managers(run: Path, world: World) -> dict[str, CheckpointManager]:
        return {part: CheckpointManager(run / "checkpoints" / part, 2, world=world) for part in counters}

    store, run, world = Store(ADDRESS), tmp_path / "run", World.current()
    claim(run)
    for step in (1, 2, 3):
        for part, manager in reversed(managers(run, world).items()):
            counters[part].add(step + len(part))
            manager.save(step, {part or "actor": counters[part]}, {"step": step})
        store.push(run, run / f"checkpoints/step_{step:08d}")
    paths = [path.removeprefix("/bucket/run/checkpoints/") for path in Flaky.store]
    assert {path.rpartition("step_")[2][:8] for path in paths if "step_" in path} == {"00000002", "00000003"}
    assert store.fetch(tmp_path / "new") == ["step_00000003"]
    for part, manager in managers(tmp_path / "new", world).items():
        fetched = Counter()
        assert manager.load({part or "actor": fetched}) == {"step": 3}
        assert fetched.total.equal(counters[part].total)


# ---- going back -----------------------------------------------------------------------------------------------------


def there() -> dict[str, object]:
    """The checkpoints in the store, the id of its run, and files of a run that has ended."""
    marker = json.loads(Flaky.store["/bucket/run/run.json"].getvalue())
    ended = [name for name in ("summary.json", "hf/total.json") if f"/bucket/run/{name}" in Flaky.store]
    return {"checkpoints": Store(ADDRESS).checkpoints(), "id": marker["id"], "ended": ended}


IN_TURN = {"checkpoint__store": ADDRESS, "checkpoint__asynchronous": False}


def test_the_store_goes_back_with_the_run(tmp_path):
    """Before its next step: a run that is killed then, and loses its folder, goes on from the step it went back to."""
    count(tmp_path, **IN_TURN)
    before, seen = there(), []
    assert before["checkpoints"] == ["step_00000003", "step_00000006"]
    assert before["ended"] == ["summary.json", "hf/total.json"]
    count(tmp_path, {("train_step", 3): lambda: seen.append(there())}, resume="step_3", **IN_TURN)
    after = there()
    assert after["id"] == run_id(tmp_path / "run") != before["id"]
    assert seen == [{"checkpoints": ["step_00000003"], "id": after["id"], "ended": []}]
    assert after == {**before, "id": after["id"]}


def test_a_run_goes_on_that_went_back_without_its_store(tmp_path, monkeypatch):
    """The store then still has the later steps, which do not come back."""
    monkeypatch.setattr(store_module, "_PAUSES", ())
    count(tmp_path, **IN_TURN)
    before, result = there(), result_of(tmp_path)
    Flaky.chance = 1.0
    with pytest.raises(StoreError):
        count(tmp_path, resume="step_3", **IN_TURN)
    Flaky.chance = 0.0
    assert there() == before
    store, run = Store(ADDRESS), tmp_path / "run"
    store.require_own(run, resume=True)
    assert store.fetch(run) == []
    assert checkpoints(tmp_path) == ["step_00000003"]
    count(tmp_path, resume=True, **IN_TURN)
    assert result_of(tmp_path) == result
    assert there() == {**before, "id": run_id(run)}


@pytest.mark.parametrize("name", ["step_3", "step_00000003", "run/checkpoints/step_3"])
def test_another_machine_goes_back(name, tmp_path, monkeypatch):
    """What came after the checkpoint is kept there, as on the machine that has lost it."""
    monkeypatch.chdir(tmp_path)
    changes = {**IN_TURN, "checkpoint__best": "accuracy"}
    count(tmp_path, **changes)
    run, before = tmp_path / "run", result_of(tmp_path)
    best = (run / "best/total.json").read_text()
    shutil.rmtree(run)
    checks = Checks()
    assert check_folder(counting_config(tmp_path, **changes), checks, resume=name).endswith("after step_00000003")
    checks.raise_found()
    assert Store(ADDRESS).fetch(run, name) == ["step_00000003", "step_00000006"]
    count(tmp_path, resume=name, **changes)
    assert result_of(tmp_path) == result_of(tmp_path, "run/later.1") == before
    assert (run / "later.1/best/total.json").read_text() == best
    assert there()["checkpoints"] == checkpoints(tmp_path) == ["step_00000003", "step_00000006"]


def test_a_checkpoint_that_neither_store_nor_folder_has(tmp_path):
    count(tmp_path, **IN_TURN)
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000003")
    message = r"there is no checkpoint step_4 in .*/run/checkpoints: it has step_6, and .*store has step_3, step_6"
    with pytest.raises(ValueError, match=message):
        Store(ADDRESS).fetch(tmp_path / "run", "step_4")


# ---- the best policy ------------------------------------------------------------------------------------------------

ACCURACY = {0: 0.5, 2: 0.75, 4: 0.25, 6: 0.5}


def test_the_best_policy_comes_to_another_machine(tmp_path):
    changes = {**IN_TURN, "accuracy": ACCURACY, "checkpoint__best": "accuracy"}
    count(tmp_path, steps=4, **changes)
    run = tmp_path / "run"
    best, copied = (run / "best/total.json").read_text(), Flaky.store["/bucket/run/best/total.json"]
    shutil.rmtree(run)
    Store(ADDRESS).fetch(run)
    assert count(tmp_path, resume=True, **changes)["best_step"] == 2
    assert (run / "best/total.json").read_text() == best
    assert Flaky.store["/bucket/run/best/total.json"] is copied  # once: it did not change
    count(tmp_path, resume=True, **{**changes, "steps": 7, "accuracy": {7: 1.0}, "evaluation__every": 7})
    assert Flaky.store["/bucket/run/best/total.json"].getvalue() == (run / "best/total.json").read_bytes() != best


def test_a_run_whose_best_policy_is_lost_keeps_the_next(tmp_path):
    changes = {"accuracy": ACCURACY, "checkpoint__best": "accuracy"}
    count(tmp_path, steps=4, **changes)
    shutil.rmtree(tmp_path / "run/best")
    assert count(tmp_path, resume=True, **changes)["best_step"] == 6
    assert (tmp_path / "run/best/total.json").read_text() == (tmp_path / "run/hf/total.json").read_text()


# ---- bad input ------------------------------------------------------------------------------------------------------


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
