"""Kills a saving run at random moments, again and again: `make crash-test`.

Each round starts two processes that load the newest complete checkpoint, train, and save without a pause; then one of
them, or both, get SIGKILL at a random moment. A round survives if, before the next kill,

- no complete checkpoint has disappeared, and the newest one loads, unharmed and without being skipped,
- what was loaded has the bits that were saved (a checksum that the run saves along),
- training continues and another checkpoint is completed,
- the process that was not killed has ended by itself.

Prints a line per round and last `survived N/N`; exits with 1 if that is not so.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
import zlib
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from rlft_fast.engine import CheckpointManager, FSDPEngine
from rlft_fast.engine.checkpoint.storage import local_parts
from rlft_fast.files import TEMPORARY, write_text
from tests.engine.reference import make_engine, policy_loss, random_batch
from tests.support.tiny_models import save_tiny_model

RANKS = 2
PATIENCE_SECONDS = 60.0
SIZES = {"hidden_size": 128, "intermediate_size": 4096, "num_hidden_layers": 2}  # slow to write, fast to train


def train_and_save(rank: int, folder: Path, number: int) -> None:
    """One process of a round. It never ends by itself, unless the other one dies."""
    log = os.open(folder / f"log_{number}_{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)  # a process whose peer was killed ends with a traceback
    warnings.simplefilter("error", UserWarning)  # a checkpoint that is left out is a failure here
    store = dist.FileStore(str(folder / f"store_{number}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    engine = make_engine(folder / "model")
    manager = CheckpointManager(folder / "checkpoints", max_num=2)
    newest = manager.latest()
    state = manager.load({"actor": engine})
    if newest is not None:
        assert state is not None
        assert newest.name == f"step_{state['step']:08d}"
        assert state["checksums"] == checksums(engine)
    step = engine.step
    for loop in itertools.count():
        engine.train_step(random_batch(num_sequences=2, seed=step), policy_loss())
        step += 1
        state = {"step": step, "checksums": checksums(engine)}
        began = time.monotonic()
        if loop == 1:
            (folder / f"saving_{number}_{rank}").touch()
        manager.save(step, {"actor": engine}, state, asynchronous=number % 2 == 0)
        if loop == 0:
            manager.wait()
            write_text(folder / f"saved_{number}_{rank}", str(time.monotonic() - began))


def checksums(engine: FSDPEngine) -> list[int]:
    """Of what each rank has."""
    crc = 0
    for part in local_parts(engine.state_tensors(), engine.world).values():
        crc = zlib.crc32(part.data.contiguous().numpy(), crc)
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
    dist.all_gather(gathered, torch.tensor([crc]))
    return [int(value) for value in gathered]


def start(folder: Path, number: int) -> list[BaseProcess]:
    """Starts the processes; returns when they have loaded, trained and saved, which proves the round before,
    and have begun to save once more."""
    context = multiprocessing.get_context("fork")  # torch is imported already, which takes seconds
    processes: list[BaseProcess] = []
    for rank in range(RANKS):
        processes.append(context.Process(target=train_and_save, args=(rank, folder, number)))
        processes[-1].start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all((folder / f"saving_{number}_{rank}").exists() for rank in range(RANKS)):
        if not all(process.is_alive() for process in processes) or time.monotonic() > deadline:
            end(processes)
            logs = "\n".join(path.read_text() for path in folder.glob(f"log_{number}_*"))
            raise AssertionError(f"the processes do not load, train and save:\n{logs}")
        time.sleep(0.01)
    return processes


def strike(folder: Path, number: int, processes: list[BaseProcess], generator: random.Random) -> tuple[str, bool]:
    """Kills at a random moment and looks at what is left: a line about it, and whether a save was under way."""
    manager = CheckpointManager(folder / "checkpoints")
    seconds = float((folder / f"saved_{number}_0").read_text())  # what the first save of this round took
    time.sleep(generator.uniform(0, seconds))
    victims = generator.choice([(0,), (1,), (0, 1)])
    before = manager.latest()
    for rank in victims:
        processes[rank].kill()
    during_save = any((folder / "checkpoints").glob(f"*{TEMPORARY}"))
    for process in processes:
        process.join(PATIENCE_SECONDS)
        assert not process.is_alive(), "the process that was not killed did not end"
    after = manager.latest()
    assert before is not None, "no complete checkpoint before the kill"
    assert after is not None, f"no complete checkpoint after the kill; before it there was {before.name}"
    assert after.name >= before.name, f"{before.name} was there before the kill; after it the newest is {after.name}"
    what = "a save" if during_save else "a step"
    return f"killed rank {' and '.join(map(str, victims))} during {what}, {after.name} is complete", during_save


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def play(folder: Path, rounds: int, generator: random.Random) -> int:
    """Returns how many rounds survived."""
    survived = num_during_save = 0
    for number in range(1, rounds + 2):  # one more start, which proves the last round
        processes: list[BaseProcess] = []
        try:
            processes = start(folder, number)
            survived = number - 1
            if survived == rounds:
                break
            line, during_save = strike(folder, number, processes, generator)
        except AssertionError as error:
            print(f"FAILED after {survived} rounds: {error}")
            break
        finally:
            end(processes)
        num_during_save += during_save
        print(f"round {number}: {line}", flush=True)
    print(f"{num_during_save} during a save")
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of who is killed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        save_tiny_model("llama", Path(name) / "model", **SIZES)
        survived = play(Path(name), options.rounds, random.Random(options.seed))
    print(f"survived {survived}/{options.rounds}")
    return int(survived != options.rounds)


if __name__ == "__main__":
    sys.exit(main())
