"""The program in a process of its own: its help, the modules it loads, its messages and exit status."""

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

import rlft_fast
from rlft_fast.cli import COMMANDS, _report, _show_traceback, main
from rlft_fast.errors import TRAIN_MODULES
from tests.support.machine.distributed import start_processes

ROOT = Path(rlft_fast.__file__).parents[1]


def run_cli(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    # pytest-benchmark measures nothing in a process of xdist.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "rlft_fast", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture
def installed_without_source(tmp_path):
    """A folder in which ``python -m rlft_fast`` finds the package but no benchmarks beside it."""
    package = Path(rlft_fast.__file__).parent
    for part in ("__init__.py", "__main__.py", "errors.py", "files.py"):
        (tmp_path / "rlft_fast").mkdir(exist_ok=True)
        shutil.copy(package / part, tmp_path / "rlft_fast" / part)
    (tmp_path / "rlft_fast" / "_C.abi3.so").touch()  # a source tree without it would give way to the installed package
    for folder in ("cli", "config"):
        shutil.copytree(package / folder, tmp_path / "rlft_fast" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    assert all(f"  {name:<10}{summary}" in output for name, summary in COMMANDS.items())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: rlft-fast {command}")


# No command; a misspelt command; commands without their arguments.
@pytest.mark.parametrize("arguments", [[], ["trian"], ["train"], ["plot"], ["view"], ["export"], ["plan"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: rlft-fast" in capsys.readouterr().err


def test_help_and_pictures_of_a_run_do_not_load_torch(tmp_path):
    """Torch and transformers take ten seconds of a slow CPU, and these commands only read files."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n')
    code = (
        "import contextlib, sys\n"
        "from rlft_fast.cli import main\n"
        "for arguments in (['--version'], ['train', '--help'], ['view', sys.argv[1]], ['plot', sys.argv[1]]):\n"
        "    with contextlib.suppress(SystemExit): assert main(arguments) == 0\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr
    assert (tmp_path / "view.html").is_file()
    assert (tmp_path / "curve.png").is_file()


def test_error_is_one_message_without_traceback(tmp_path):
    result = run_cli("export", str(tmp_path / "missing"))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: there is no run in {tmp_path / 'missing'}")
    assert "Traceback" not in result.stderr


def test_eval_takes_no_second_model(tmp_path, capsys):
    assert main(["eval", str(tmp_path / "one"), "config.yaml", "--model", str(tmp_path / "two")]) == 2
    assert f"error: MODEL is {tmp_path / 'one'}, and --model is {tmp_path / 'two'}" in capsys.readouterr().err


def test_traceback_option_lets_the_error_through(tmp_path):
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl"):
        main(["--traceback", "plot", str(tmp_path / "missing")])


def shown_harmlessly(text: str) -> bool:
    return r"\x1b[31m" in text and all(x.isprintable() or x == "\n" for x in text)


# The message of an error; arguments that one of the parsers does not know.
@pytest.mark.parametrize(
    "arguments", [["export", "run\x1b[31m"], ["train", "c.yaml", "\x1b[31m"], ["demo", "\x1b[31m"]]
)
def test_arguments_cannot_steer_the_terminal(arguments, capsys):
    with contextlib.suppress(SystemExit):
        main(arguments)
    assert shown_harmlessly(capsys.readouterr().err)


def test_tracebacks_cannot_steer_the_terminal():
    assert shown_harmlessly(run_cli("--traceback", "export", "run\x1b[31m").stderr)


# A warning; a log message, as transformers has for a rope_type of config.json; an error that no command expects; the
# end of a program by its own code, with a text.
@pytest.mark.parametrize(
    "code",
    [
        "import warnings; warnings.warn(TEXT)",
        "from transformers.utils.logging import get_logger; get_logger('transformers.x').warning('%s', TEXT)",
        "raise KeyError(type('Name', (), {'__repr__': lambda self: TEXT})())",
        "from rlft_fast.cli.commands import plot; plot.run = lambda _: sys.exit(TEXT); sys.exit(main(['plot', '/x']))",
    ],
)
@pytest.mark.thin(4)
def test_messages_of_libraries_cannot_steer_the_terminal(code):
    before = "import sys; from rlft_fast.cli import main; TEXT = 'z\\x1b[31m'; main(['plot', '/nowhere'])"
    command = [sys.executable, "-c", f"{before}\n{code}"]
    assert shown_harmlessly(subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stderr)


def test_version():
    assert run_cli("--version").stdout == f"rlft-fast {metadata.version('rlft_fast')}\n"


def test_plot_of_a_missing_run(tmp_path, capsys):
    assert main(["plot", str(tmp_path / "missing")]) == 1
    assert f"error: {tmp_path / 'missing'} has no metrics.jsonl" in capsys.readouterr().err


def test_bench_without_source(installed_without_source):
    result = run_cli("bench", cwd=installed_without_source)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: no benchmarks in {installed_without_source / 'benchmarks'} or ")


def test_bench_runs_benchmarks_passes_options_on_and_reports_failures(installed_without_source):
    folder = installed_without_source / "benchmarks"
    folder.mkdir()
    (folder / "bench_sums.py").write_text(
        "from pathlib import Path\n"
        "def test_sum(benchmark):\n    assert benchmark(sum, [1, 2]) == 3\n"
        "def test_wrong_sum(benchmark):\n    assert benchmark(sum, [1, 2]) == 4\n"
        "def test_other(benchmark):\n    Path('other').touch()\n    benchmark(sum, [])\n"
        "def test_no_benchmark():\n    Path('no_benchmark').touch()\n"
    )
    result = run_cli("bench", "-k", "not other", "--benchmark-max-time=0.01", cwd=installed_without_source)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 failed, 1 passed" in result.stdout
    assert "test_sum" in result.stdout
    assert not (installed_without_source / "other").exists()
    assert not (installed_without_source / "no_benchmark").exists()


def forget(*packages: str) -> None:
    """The next import of their modules is the first."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages:
            del sys.modules[name]


def run_bench(_: int, cwd: Path) -> None:
    """In a forked process, which has torch already: to import it takes seconds."""
    forget("rlft_fast", "benchmarks")
    sys.path.insert(0, str(cwd))
    os.chdir(cwd)
    os.environ["COLUMNS"] = "200"  # of a wide terminal
    sys.stdout = sys.stderr = (cwd / "output").open("w")
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        del os.environ[name]
    sys.exit(importlib.import_module("rlft_fast.cli").main(["bench"]))


@pytest.mark.dist
def test_bench_shows_memory_and_the_reason_of_a_skip_in_120_columns(installed_without_source):
    folder = installed_without_source / "benchmarks"
    (folder / "support").mkdir(parents=True)
    for name in ("conftest.py", "support/harness.py"):
        shutil.copy(ROOT / "benchmarks" / name, folder / name)
    (folder / "bench_sums.py").write_text(
        "import pytest, torch, warnings\n"
        "from benchmarks.support.harness import measured\n"
        "@pytest.mark.parametrize('way', ['a way with a long name, as chunks have', 'another way', 'a peer'])\n"
        "def test_sum(benchmark, way):\n"
        "    benchmark.group = 'sum'\n"
        "    warnings.warn('a long message ' * 20)\n"
        "    if way == 'a peer':\n"
        "        pytest.skip('ModuleNotFoundError: ' + 'a long reason ' * 20)\n"
        "    measured(benchmark, lambda: torch.ones(32 * 2**18).sum(), rounds=2)\n"
    )
    start_processes(run_bench, 1, installed_without_source)
    output = (installed_without_source / "output").read_text()
    assert max(map(len, output.splitlines())) <= 120
    weighed = re.findall(r"^(a way with .* have|another way) +([\d.]+) MiB peak", output, re.MULTILINE)
    assert len(weighed) == 2
    assert [float(mib) for _, mib in weighed] == pytest.approx([32, 32], abs=3)
    assert "ModuleNotFoundError: a long reason" in output
    assert "test_sum[a peer]" in output


@pytest.fixture
def with_torch_alone(tmp_path) -> dict[str, str]:
    """An environment in which a process finds nothing that the extra train brings."""
    for name in TRAIN_MODULES:
        message = f"No module named {name!r}"
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError({message!r}, name={name!r})\n")
    return os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


@pytest.mark.parametrize("arguments", ["train x.yaml", "demo", "plot x", "plan x.yaml --gpus 1 --memory 1", "doctor"])
def test_a_command_names_the_extra_that_it_lacks(arguments, with_torch_alone, tmp_path):
    command = [sys.executable, "-m", "rlft_fast", *arguments.split()]
    result = subprocess.run(command, env=with_torch_alone, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1
    sentence = (
        r"error: \w+ is not installed, and only the ops work .*run pip install --no-build-isolation '\.\[train\]'"
    )
    assert re.fullmatch(sentence, result.stderr.splitlines()[0])
    assert "Traceback" not in result.stderr


def import_the_package(_: int, without: Path) -> None:
    """In a forked process, which has torch already: to import it takes seconds."""
    forget("rlft_fast", *TRAIN_MODULES)
    sys.path.insert(0, str(without))
    sys.dont_write_bytecode = True
    importlib.import_module("rlft_fast.ops")
    assert "rlft_fast.models" not in sys.modules
    package = importlib.import_module("rlft_fast")
    names = ("data", "models", "engine", "rollout", "trainer")
    for use in (lambda: package.patch_lm_head, *(partial(importlib.import_module, f"rlft_fast.{x}") for x in names)):
        with pytest.raises(ModuleNotFoundError, match=r"run pip install --no-build-isolation '\.\[train\]'$"):
            use()


@pytest.mark.dist
def test_the_package_names_the_extra_that_it_lacks(with_torch_alone, tmp_path):
    start_processes(import_the_package, 1, tmp_path)


def test_the_extra_brings_the_modules_that_are_said_to_need_it():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules = {"pyyaml": "yaml"}
    brought = [re.split(r"\W", requirement)[0] for requirement in extras["train"]]
    assert sorted(modules.get(name, name) for name in brought) == list(TRAIN_MODULES)


def test_plot_into_a_folder_that_does_not_exist(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["plot", str(tmp_path), "--output", str(tmp_path / "no" / "curve.png")])
    assert exit_info.value.code == 2
    assert f"cannot be written: there is no folder {tmp_path / 'no'}" in capsys.readouterr().err


# A folder, and a name without a suffix: matplotlib would add one, and write another file.
@pytest.mark.parametrize("name", ["", "curve"])
def test_plot_needs_the_name_of_a_picture(name, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n')
    with pytest.raises(SystemExit) as exit_info:
        main(["plot", str(tmp_path), "--output", str(tmp_path / name)])
    assert exit_info.value.code == 2
    assert "has no suffix that names the picture's format" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


HANGS = """
import atexit, sys, threading, time
from rlft_fast import cli
cli._SECONDS_TO_EXIT = 0.5
sys.argv = ["rlft-fast", *sys.argv[1:]]
wait = lambda: time.sleep(60)
HOW
cli.script()
"""


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("threading.Thread(target=wait, name='of a judge').start()", "the threads of a judge"),
        ("atexit.register(wait)", "a function that was to run at the exit"),
    ],
)
@pytest.mark.parametrize(("argument", "status"), [("--version", 0), ("nonsense", 2)])
def test_a_command_that_has_ended_ends_its_process(how, what, argument, status):
    command = [sys.executable, "-c", HANGS.replace("HOW", how), argument]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.returncode == status
    assert ended.stderr.endswith(f"the command has ended, and its process ends without waiting for {what}\n")
    assert (ended.stdout == f"rlft-fast {rlft_fast.__version__}\n") == (status == 0)


def test_an_error_of_megabytes_is_cut(capsys):
    _report(ValueError("x" * 10**7))
    error = RuntimeError("y" * 10**7)
    _show_traceback(RuntimeError, error, None)
    shown = capsys.readouterr().err
    assert shown.startswith("error: xxx")
    assert "RuntimeError: yyy" in shown
    assert len(shown) < 60_000
