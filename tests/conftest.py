"""Fixtures shared by all tests."""

import atexit
import gc
import os
import signal
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.support.runs.curves import without_matplotlib

# A busy machine makes single examples slow, which is no failure.
hypothesis.settings.register_profile("rlft_fast", deadline=None)
hypothesis.settings.load_profile("rlft_fast")

# Under nohup a process ignores SIGHUP, and so do the runs that it starts. Tests send them this signal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without a GPU, Triton kernels run in Triton's interpreter. Triton reads the variable on import, and transformers
# imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "run one in N of the variants of each test, always the same and at least one, and no test marked long"
    parser.addoption("--thin", type=int, metavar="N", help=help)
    parser.addoption("--threads", type=int, default=1, metavar="N", help="threads of each process of a test")


def pytest_configure(config: pytest.Config) -> None:
    """One thread: the models are so small that handing work to threads costs more than it saves.

    Child processes inherit the number of threads, because equal bits need equal numbers of threads.
    """
    threads = config.getoption("threads")
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # To free millions of objects takes seconds, for which the run waits at the end of each process of xdist. Of others,
    # extension modules report at the exit what they have not seen freed.
    atexit.register(partial(os._exit, 0) if hasattr(config, "workerinput") else gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """What is imported and collected is millions of objects. The collector of cycles does not visit them again."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, obj: object) -> list[pytest.Item] | None:
    """Without a GPU, tests marked ``gpu`` are not collected: to make hundreds of items takes seconds."""
    marks = [*collector.iter_markers(), *getattr(obj, "pytestmark", [])]
    if not torch.cuda.is_available() and any(isinstance(mark, pytest.Mark) and mark.name == "gpu" for mark in marks):
        return []
    return None


def spread(items: Sequence[pytest.Item], n: int) -> list[pytest.Item]:
    """One in ``n`` of the variants of each test, at least one.

    Variants are chosen by a hash of their names. To count every n-th would always choose the same value of a parameter
    that has a divisor of n values.
    """
    variants = defaultdict(list)
    for item in items:
        variants[item.nodeid.partition("[")[0]].append(item)
    return [
        item
        for of_test in variants.values()
        for item in sorted(of_test, key=lambda item: zlib.crc32(item.nodeid.encode()))[: -(-len(of_test) // n)]
    ]


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files with a test marked ``first``, files that start processes, then the others, each by their number of tests.

    The last files of a run should be short: xdist gives a file to one process, and the others then wait for it.
    """
    files = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    marked = lambda of_file, mark: any(item.get_closest_marker(mark) for item in of_file)  # noqa: E731
    weight = lambda of_file: (marked(of_file, "first"), marked(of_file, "dist"), len(of_file))  # noqa: E731
    return [item for of_file in sorted(files.values(), key=weight, reverse=True) for item in of_file]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Makes most variants of a test marked ``thin`` slow and long. Applies ``--thin`` to what is selected.

    Orders the files for the processes of xdist, which keeps the order with ``--no-loadscope-reorder``.
    """
    thin = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("thin")) and not item.get_closest_marker("slow"):
            thin[mark.args[0]].append(item)
    for n, of_n in thin.items():
        kept = set(spread(of_n, n))
        for item in of_n:
            if item not in kept:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.long)
    yield
    if n := config.getoption("thin"):
        kept = set(spread([item for item in items if not item.get_closest_marker("long")], n))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)


def pytest_runtest_setup() -> None:
    """Every test draws the same random numbers, whichever tests ran before it in its process."""
    # Without a GPU, torch.manual_seed keeps the stack of each call for CUDA, which takes a millisecond.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(scope="session", autouse=True)
def processes_to_be_forked(request: pytest.FixtureRequest) -> None:
    """Forked now, with all that the tests import, and before a test begins a thread."""
    distributed = sys.modules.get("tests.support.machine.distributed")
    if distributed is not None and distributed.FORKS:  # some test has imported it
        imports = []
        if any(item.get_closest_marker("vllm") for item in request.session.items):
            from rlft_fast.rollout.vllm.colocated import set_environment

            set_environment()  # which vLLM reads on import
            imports = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu_model_runner"]
        distributed.begin_to_fork(*imports)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random model by name, see `tests.support.tiny_models.ALL_MODELS`. Treat it as read-only."""
    # Imported here, because tests of the ops need torch alone.
    from tests.support.tiny_models import ALL_MODELS, save_tiny_model

    folder = tmp_path_factory.mktemp("tiny_models")

    def path(name: str) -> Path:
        assert name in ALL_MODELS
        return folder / name if (folder / name).exists() else save_tiny_model(name, folder / name)

    return path


@pytest.fixture(scope="module", autouse=True)  # before the runs that the tests of a module share
def without_curves() -> Iterator[None]:
    """Runs draw no curve. A module whose tests draw defines this fixture anew."""
    with without_matplotlib():
        yield


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left() -> Iterator[None]:
    """FSDP in a single process makes a group of one. The group must not reach the tests of another module."""
    yield
    if torch.distributed.is_initialized():
        from rlft_fast.world.process_group import leave_process_group

        leave_process_group()
