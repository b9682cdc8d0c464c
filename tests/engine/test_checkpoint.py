"""Checkpoints: continue bit for bit, on any number of processes, and survive whatever happens while saving."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlft_fast.config import Config
from rlft_fast.engine import CheckpointError, CheckpointManager, FSDPEngine, export_run
from tests.distributed import run_distributed
from tests.engine import reference
from tests.engine.reference import make_engine, policy_loss, random_batch, value_loss

STATE = {"step": 3, "seconds": 1.5, "accuracy_before": None}


def make_engines(path: Path) -> dict[str, FSDPEngine]:
    """Adam's moments, a schedule in its middle, and a critic whose head is in no model folder."""
    options = {"optimizer": {"schedule": "linear", "warmup_steps": 1}, "max_tokens": 24}
    return {"actor": make_engine(path, **options), "critic": make_engine(path, head="value", **options)}


def step(engines: dict[str, FSDPEngine], seed: int) -> list[dict[str, float]]:
    batch = random_batch(seed=seed)
    return [
        engines["actor"].train_step(batch, policy_loss()),
        engines["critic"].train_step(batch, value_loss()),
    ]


def state_of(engines: dict[str, FSDPEngine]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": reference.full(tensor)
        for name, engine in engines.items()
        for key, tensor in engine.state_tensors().items()
    }


def test_continues_bit_for_bit(tiny_model, tmp_path):
    engines = make_engines(tiny_model("llama-tied"))
    step(engines, seed=0)
    bad = random_batch().replace(advantage_T=torch.full((random_batch().num_tokens,), torch.inf))
    engines["actor"].train_step(bad, policy_loss())
    manager = CheckpointManager(tmp_path)
    assert manager.save(3, engines, STATE) == tmp_path / "step_00000003"
    expected = step(engines, seed=1)

    resumed = make_engines(tiny_model("llama-tied"))
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


# ---- several processes ----------------------------------------------------------------------------------------------


def continue_on_two(rank: int, model: Path, directory: Path) -> None:
    torch.set_num_threads(1)
    engines = make_engines(model)
    assert CheckpointManager(directory / "one").load(engines) == STATE
    step(engines, seed=1)
    if rank == 0:
        expected = torch.load(directory / "one.pt")
    state = state_of(engines)
    if rank == 0:
        reference.assert_close(state, expected, 1e-3)

    manager = CheckpointManager(directory / "two", max_num=1)
    manager.save(1, engines, {"step": 1})
    manager.save(2, engines, {"step": 2})
    step(engines, seed=2)
    resumed = make_engines(model)
    assert manager.load(resumed) == {"step": 2}
    step(resumed, seed=2)
    state = state_of(engines)
    reference.assert_equal(state_of(resumed), state)
    if rank == 0:
        torch.save(state, directory / "two.pt")


@pytest.mark.dist
def test_other_numbers_of_processes_continue_alike(tiny_model, tmp_path):
    model = tiny_model("qwen2-tied")
    engines = make_engines(model)
    step(engines, seed=0)
    CheckpointManager(tmp_path / "one").save(3, engines, STATE)
    step(engines, seed=1)
    torch.save(state_of(engines), tmp_path / "one.pt")
    run_distributed(continue_on_two, 2, model, tmp_path)

    assert [path.name for path in (tmp_path / "two").iterdir()] == ["step_00000002"]
    resumed = make_engines(model)
    assert CheckpointManager(tmp_path / "two").load(resumed) == {"step": 2}
    step(resumed, seed=2)
    reference.assert_close(state_of(resumed), torch.load(tmp_path / "two.pt"), 1e-3)


# ---- folders --------------------------------------------------------------------------------------------------------


def test_rotation_keeps_the_newest(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    manager = CheckpointManager(tmp_path, max_num=2)
    for number in (1, 2, 10, 10, 11):  # the same step again, as after a resume
        manager.save(number, engines, {"step": number})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000011"]
    assert manager.load(engines) == {"step": 11}


def test_without_a_checkpoint_nothing_is_loaded(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    assert CheckpointManager(tmp_path / "missing").load(engines) is None
    assert CheckpointManager(tmp_path).latest() is None


def test_what_a_kill_left_behind_is_ignored(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    manager = CheckpointManager(tmp_path)
    manager.save(1, engines, {"step": 1})
    leftover = tmp_path / "step_00000002.incomplete" / "actor"
    leftover.mkdir(parents=True)
    (leftover / "shard.safetensors").write_bytes(b"half of")
    assert manager.load(engines) == {"step": 1}
    manager.save(2, engines, {"step": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
    assert manager.load(engines) == {"step": 2}


def test_a_checkpoint_that_cannot_be_read_is_named(tiny_model, tmp_path):
    engines = {"actor": make_engine(tiny_model("llama"))}
    folder = CheckpointManager(tmp_path).save(1, engines, {})
    with pytest.raises(CheckpointError, match="step_00000001"):
        CheckpointManager(tmp_path).load({"critic": make_engine(tiny_model("llama"), head="value")})
    with pytest.raises(CheckpointError, match="step_00000001"):  # biases that the checkpoint does not have
        CheckpointManager(tmp_path).load({"actor": make_engine(tiny_model("qwen2"))})
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step_00000001"):
        CheckpointManager(tmp_path).load(engines)


# A process of its own: the limit on file sizes cannot be taken back.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from rlft_fast.engine import CheckpointError, CheckpointManager
from tests.engine.reference import make_engine, policy_loss, random_batch

engine = make_engine(Path(sys.argv[1]))
manager = CheckpointManager(sys.argv[2])
manager.save(1, {"actor": engine}, {"step": 1})
before = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
engine.train_step(random_batch(), policy_loss())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    manager.save(2, {"actor": engine}, {"step": 2})
except CheckpointError as error:
    print("CheckpointError:", error)
print(manager.load({"actor": engine}))
print(all(torch.equal(before[name], tensor) for name, tensor in engine.state_tensors().items()))
"""


@pytest.mark.dist
def test_full_disk_leaves_the_older_checkpoint(tiny_model, tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tiny_model("llama")), str(tmp_path)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line]
    assert lines[0].startswith("CheckpointError: could not save checkpoint")
    assert "step_00000001" in result.stdout
    assert lines[-2:] == ["{'step': 1}", "True"]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


# ---- export ---------------------------------------------------------------------------------------------------------


def make_run(model: Path, run: Path) -> FSDPEngine:
    config = Config.parse(
        {
            "model": str(model), "output_dir": str(run), "steps": 1, "data": {"task": "sums"},
            "actor": {"max_tokens": 2000},
        }
    )  # fmt: skip
    run.mkdir()
    (run / "config.yaml").write_text(config.to_yaml())
    engines = make_engines(model)
    step(engines, seed=0)
    CheckpointManager(run / "checkpoints").save(1, engines, {})
    return engines["actor"]


def test_export_run(tiny_model, tmp_path):
    engine = make_run(tiny_model("llama-tied"), tmp_path / "run")
    assert export_run(tmp_path / "run") == tmp_path / "run" / "hf"
    assert export_run(tmp_path / "run", tmp_path / "elsewhere") == tmp_path / "elsewhere"
    for folder in (tmp_path / "run" / "hf", tmp_path / "elsewhere"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        reference.assert_equal(dict(model.named_parameters()), reference.weights(engine))
        assert (folder / "tokenizer.json").is_file()


def test_export_of_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.yaml"):
        export_run(tmp_path)
