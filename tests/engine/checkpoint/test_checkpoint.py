"""Checkpoints continue bit for bit, are written while training goes on, and survive full disks and failed writes."""

import resource
import signal
import threading
import warnings
from concurrent import futures
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlft_fast.engine import CheckpointError, CheckpointManager, FSDPEngine
from tests.engine import reference
from tests.engine.reference import make_engine, make_engines, policy_loss, random_batch, state_of, step
from tests.support.machine.distributed import run_distributed
from tests.support.machine.privileges import permissions_hold

STATE = {"step": 3, "seconds": 1.5, "accuracy_before": None}


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16", "int8"])
def test_continues_bit_for_bit(moment_dtype, tiny_model, tmp_path):
    engines = make_engines(tiny_model("llama-tied"), moment_dtype=moment_dtype)
    step(engines, seed=0)
    bad = random_batch().replace(advantage_T=torch.full((random_batch().num_tokens,), torch.inf))
    engines["actor"].train_step(bad, policy_loss())
    manager = CheckpointManager(tmp_path)
    assert manager.save(3, engines, STATE) == tmp_path / "step_00000003"
    expected = step(engines, seed=1)

    resumed = make_engines(tiny_model("llama-tied"), moment_dtype=moment_dtype)
    assert CheckpointManager(tmp_path).load(resumed) == STATE
    assert resumed["actor"].counters() == {"step": 1, "skipped_steps": 1}
    assert step(resumed, seed=1) == expected
    reference.assert_equal(state_of(resumed), state_of(engines))


def test_saving_before_the_first_step_and_loading_over_a_used_engine(tiny_model, tmp_path):
    fresh, used = make_engines(tiny_model("llama")), make_engines(tiny_model("llama"))
    CheckpointManager(tmp_path).save(0, fresh, {})
    step(used, seed=0)
    CheckpointManager(tmp_path).load(used)
    assert step(used, seed=1) == step(fresh, seed=1)
    reference.assert_equal(state_of(used), state_of(fresh))


def test_state_tensors_alias_the_optimizer(tiny_model):
    engine = make_engine(tiny_model("llama-tied"))
    engine.train_step(random_batch(), policy_loss())
    state = engine.state_tensors()
    for name, parameter in engine.model.named_parameters():
        for key, value in engine.optimizer.state[parameter].items():
            assert state.pop(f"optimizer.{name}.{key}") is value
        assert state.pop(f"model.{name}").data_ptr() == parameter.data_ptr()
    assert not state


def test_checkpoint_holds_no_pickle(tiny_model, tmp_path):
    folder = CheckpointManager(tmp_path).save(1, make_engines(tiny_model("llama")), STATE)
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json"}
    assert all(load_file(path) for path in folder.rglob("*.safetensors"))


def test_state_of_the_caller_comes_back(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    manager = CheckpointManager(tmp_path)
    tensors = {"order": torch.arange(5), "ema": torch.tensor(0.5, dtype=torch.bfloat16), "none": torch.zeros(0, 3)}
    values = {"names": ["a", "\u2028"], "nested": {"x": 1.5, "y": None}, "done": False}
    manager.save(1, engines, values | tensors)
    state = manager.load(engines)
    assert {name: state.pop(name) for name in values} == values
    assert {name: tensor.dtype for name, tensor in state.items()} == {n: t.dtype for n, t in tensors.items()}
    reference.assert_equal(state, tensors)


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, {"x": torch.zeros(2)}, float("nan"), Path("a")])
def test_state_that_would_not_come_back_is_refused(value, tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    with pytest.raises(ValueError, match="'progress' of the state to save is"):
        CheckpointManager(tmp_path / "checkpoints").save(1, engines, {"progress": value})
    assert not (tmp_path / "checkpoints").exists()


def test_random_states_continue(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    manager = CheckpointManager(tmp_path)
    torch.manual_seed(5)
    torch.rand(3)
    manager.save(1, engines, {})
    expected = torch.rand(3)
    torch.manual_seed(6)
    manager.load(engines)
    assert torch.equal(torch.rand(3), expected)


# ---- while training goes on -----------------------------------------------------------------------------------------


def held_back(manager: CheckpointManager) -> threading.Event:
    """Saves begin to write when the event is set."""
    event = threading.Event()
    manager._executor.submit(event.wait)
    return event


def test_what_is_saved_is_the_state_at_the_call(tiny_model, tmp_path):
    engines = make_engines(tiny_model("llama-tied"))
    step(engines, seed=0)
    manager = CheckpointManager(tmp_path)
    written = held_back(manager)
    order = torch.arange(3)
    folder = manager.save(1, engines, {"order": order}, asynchronous=True)
    order.add_(1)
    expected = step(engines, seed=1)
    assert not folder.exists()
    written.set()
    manager.wait()
    assert folder.exists()

    resumed = make_engines(tiny_model("llama-tied"))
    assert manager.load(resumed)["order"].tolist() == [0, 1, 2]
    assert step(resumed, seed=1) == expected
    reference.assert_equal(state_of(resumed), state_of(engines))


def test_memory_of_the_copies_is_used_again(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    manager = CheckpointManager(tmp_path)
    manager.save(1, engines, {}, asynchronous=True)
    first = {name: buffer.data_ptr() for name, buffer in manager._snapshot._buffers.items()}
    manager.save(2, engines, {}, asynchronous=True)
    assert {name: buffer.data_ptr() for name, buffer in manager._snapshot._buffers.items()} == first
    assert len(first) == len(engines["actor"].state_tensors()) + 1  # and the random state
    for order in (torch.arange(3), torch.arange(3) / 2, torch.arange(4) / 2):  # but not where it does not fit
        manager.save(3, engines, {"order": order}, asynchronous=True)
        state = manager.load(engines)
        assert state is not None
        assert torch.equal(state["order"], order)
    manager.save(4, engines, {}, asynchronous=True)
    assert manager._snapshot._buffers.keys() == first.keys()
    manager.wait()


def test_error_while_writing_is_raised_by_the_next_call(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    (tmp_path / "file").write_text("where the folder should be")
    manager = CheckpointManager(tmp_path / "file")
    with pytest.raises(CheckpointError) as synchronous:
        manager.save(1, engines, {})
    for following in (manager.wait, lambda: manager.load(engines)):
        manager.save(1, engines, {}, asynchronous=True)
        with pytest.raises(CheckpointError) as error:
            following()
        assert str(error.value) == str(synchronous.value)
        assert f"could not save checkpoint {tmp_path / 'file' / 'step_00000001'}" in str(error.value)
        manager.wait()  # raised once


def test_the_save_after_a_failed_one_is_written_first(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    manager = CheckpointManager(tmp_path / "full")
    (tmp_path / "full").write_text("where the folder should be")
    manager.save(1, engines, {}, asynchronous=True)
    with pytest.raises(CheckpointError, match="step_00000002"):  # still full
        manager.save(2, engines, {}, asynchronous=True)
    manager.save(3, engines, {}, asynchronous=True)
    futures.wait([manager._writing])
    (tmp_path / "full").unlink()
    with pytest.warns(UserWarning, match=r"could not save checkpoint .*step_00000003.* Since then .*step_00000004 was"):
        manager.save(4, engines, {}, asynchronous=True)
    assert manager.load(engines) == {}


def test_leaving_the_manager_waits(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    (tmp_path / "file").write_text("where the folder should be")
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        folder = manager.save(1, engines, {}, asynchronous=True)
    assert folder.exists()
    with pytest.raises(CheckpointError), CheckpointManager(tmp_path / "file") as manager:
        manager.save(1, engines, {}, asynchronous=True)
    with pytest.warns(UserWarning, match="could not save"), pytest.raises(KeyError):  # the first error is not hidden
        save_and_fail(CheckpointManager(tmp_path / "file"), engines)


def save_and_fail(manager: CheckpointManager, engines: dict[str, FSDPEngine]) -> None:
    with manager:
        manager.save(1, engines, {}, asynchronous=True)
        raise KeyError("something else")


# ---- folders --------------------------------------------------------------------------------------------------------


def test_rotation_keeps_the_newest_and_what_is_not_its_own(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    others = ["notes", "step_1", "step_00000001.backup", "step_best.incomplete"]
    for name in others:
        (tmp_path / name).mkdir()
    manager = CheckpointManager(tmp_path, max_num=2)
    for number in (1, 2, 99_999_999, 99_999_999, 100_000_000):  # the same step again, as after a resume
        manager.save(number, engines, {"step": number})
    assert reference.names(tmp_path) == sorted([*others, "step_99999999", "step_100000000"])
    assert manager.load(engines) == {"step": 100_000_000}
    manager.clear()
    assert reference.names(tmp_path) == sorted(others)


def test_a_tagged_checkpoint_is_kept_and_loaded_by_its_tag(tiny_model, tmp_path):
    """It is never the newest, however late it was saved; saving it again replaces it."""
    engines, manager = make_engines(tiny_model("llama")), CheckpointManager(tmp_path, max_num=1)
    step(engines, 1)
    manager.save(1, engines, {"data": "old"}, tag="before-new_data.1")
    saved = state_of(engines)
    for number in (2, 3):
        step(engines, number)
        manager.save(number, engines, {"data": "new"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "tag_before-new_data.1"]
    assert manager.latest() == tmp_path / "step_00000003"
    assert manager.load(engines) == {"data": "new"}
    assert manager.load(engines, tag="before-new_data.1") == {"data": "old"}
    reference.assert_equal(state_of(engines), saved)
    loaded = manager.load_part(engines, tag="before-new_data.1", optimizer=False)
    assert loaded.folder == tmp_path / "tag_before-new_data.1"
    assert manager.load(engines, tag="no-such") is None
    manager.save(4, engines, {"data": "again"}, tag="before-new_data.1")
    assert manager.load(engines, tag="before-new_data.1") == {"data": "again"}


@pytest.mark.parametrize("tag", ["", "../x", "a/b", ".hidden", "a" * 101, "x\n"])
def test_a_tag_that_is_no_name_is_refused(tag, tiny_model, tmp_path):
    with pytest.raises(ValueError, match="is no name: give letters"):
        CheckpointManager(tmp_path).save(1, make_engines(tiny_model("llama")), {}, tag=tag)
    assert [*tmp_path.iterdir()] == []


def test_rotation_by_size(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    folder = CheckpointManager(tmp_path).save(1, engines, {})
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    manager = CheckpointManager(tmp_path, max_num=10, max_mem=2.5 * num_bytes / 1e9)
    for number in (2, 3, 4):
        manager.save(number, engines, {})
    assert reference.names(tmp_path) == ["step_00000003", "step_00000004"]
    CheckpointManager(tmp_path, max_num=10, max_mem=0.5 * num_bytes / 1e9).save(5, engines, {})
    assert reference.names(tmp_path) == ["step_00000005"]


def test_without_a_checkpoint_nothing_is_loaded(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    assert CheckpointManager(tmp_path / "missing").load(engines) is None
    assert CheckpointManager(tmp_path).latest() is None


def test_what_a_kill_left_behind_is_ignored(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    manager = CheckpointManager(tmp_path)
    manager.save(1, engines, {"step": 1})
    for name in ("step_00000002.incomplete", "step_00000000.old.incomplete"):  # while writing, while removing
        (tmp_path / name / "actor").mkdir(parents=True)
        (tmp_path / name / "actor" / "rank_00000.safetensors").write_bytes(b"half of")
    assert manager.load(engines) == {"step": 1}
    manager.save(2, engines, {"step": 2})
    assert reference.names(tmp_path) == ["step_00000001", "step_00000002"]
    assert manager.load(engines) == {"step": 2}


def read_only(checkpoint: Path) -> None:
    checkpoint.chmod(0o555)


def linked(checkpoint: Path) -> None:
    """Moved to another disk, and linked back."""
    elsewhere = checkpoint.parent.parent / "elsewhere"
    checkpoint.rename(elsewhere)
    checkpoint.symlink_to(elsewhere)


def beside_a_file(checkpoint: Path) -> None:
    checkpoint.with_name("step_00000099.incomplete").touch()


@pytest.mark.parametrize("change", [read_only, linked, beside_a_file])
def test_what_cannot_be_removed_ends_no_save(change, tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    with permissions_hold():
        manager = CheckpointManager(tmp_path / "run", max_num=1)
        change(manager.save(1, engines, {}))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (2, 3, 4):
                manager.save(step, engines, {"step": step})
    assert manager.load(engines) == {"step": 4}
    assert [path.name for path in manager._complete()] == ["step_00000004"]
    left = {"read_only": "step_00000001.incomplete", "beside_a_file": "step_00000099.incomplete"}.get(change.__name__)
    said = [str(warning.message) for warning in caught if "cannot be removed" in str(warning.message)]
    assert [text.partition(" cannot")[0] for text in said] == ([str(manager.directory / left)] if left else [])
    if change is linked:
        assert (tmp_path / "elsewhere" / "manifest.json").is_file()


def test_a_failed_save_is_known_before_the_next_one(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    manager = CheckpointManager(tmp_path / "run")
    assert manager.failure() is None
    with permissions_hold():
        manager.save(1, engines, {})
        manager.directory.chmod(0o555)
        manager.save(2, engines, {}, asynchronous=True)
        futures.wait([manager._writing])
    manager.directory.chmod(0o755)
    assert f"could not save checkpoint {manager.directory / 'step_00000002'}" in str(manager.failure())
    assert manager.latest() == manager.directory / "step_00000001"
    with pytest.warns(UserWarning, match="Since then .*step_00000003 was saved"):
        manager.save(3, engines, {})
    assert manager.failure() is None


def test_killed_while_a_checkpoint_is_replaced(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    manager = CheckpointManager(tmp_path, max_num=1)
    manager.save(1, engines, {"step": 1}).rename(tmp_path / "step_00000001.old")
    assert manager.load(engines) == {"step": 1}
    manager.save(1, engines, {"step": 1, "again": True})
    assert manager.load(engines) == {"step": 1, "again": True}
    assert reference.names(tmp_path) == ["step_00000001"]


def test_frozen_engine_needs_no_optimizer(tiny_model, tmp_path):
    engines = make_engines(tiny_model("llama"))
    step(engines, seed=0)
    CheckpointManager(tmp_path).save(1, engines, {})
    frozen = make_engine(tiny_model("llama"), num_training_steps=None)
    CheckpointManager(tmp_path).load({"actor": frozen})
    reference.assert_equal(reference.weights(frozen), reference.weights(engines["actor"]))


def save_on_a_full_disk(rank: int, model: Path, folder: Path) -> None:
    """In a process of its own: the limit on file sizes cannot be taken back."""
    engines, manager = {"actor": make_engine(model)}, CheckpointManager(folder)
    manager.save(1, engines, {"step": 1})
    before = state_of(engines)
    engines["actor"].train_step(random_batch(), policy_loss())
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(CheckpointError, match=r"^could not save checkpoint (?s:.*)step_00000001"):
        manager.save(2, engines, {"step": 2})
    assert manager.load(engines) == {"step": 1}
    reference.assert_equal(state_of(engines), before)


@pytest.mark.dist
def test_full_disk_leaves_the_older_checkpoint(tiny_model, tmp_path):
    run_distributed(save_on_a_full_disk, 1, tiny_model("llama"), tmp_path)
    assert reference.names(tmp_path) == ["step_00000001"]
