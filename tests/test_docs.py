"""The examples of the documentation run, from top to bottom or each on its own, as the page says."""

import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from torch.distributed.run import get_args_parser
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlft_fast.cli import main
from rlft_fast.config import OBJECTIVES, sections
from tests.support.machine.distributed import run_distributed
from tests.trainer.toy import read_lines

ROOT = Path(__file__).parent.parent
PAGES = [
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "docs/tutorials", "benchmarks", "examples")
    for path in sorted((ROOT / folder).glob("*.md"))
]
CURRENT_PAGES = [page for page in PAGES if page != "CHANGELOG.md"]  # it also names what is gone
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)#?(?P<heading>[^)\s]*)\)")
EXAMPLE = re.compile(r"^```python(?P<torchrun> torchrun)?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def run_examples(path: Path, names: dict[str, Any], *, torchrun: bool = False) -> None:
    """Runs the file's Python blocks in one namespace: those marked torchrun, or the others."""
    for code in examples(path, torchrun=torchrun):
        exec(code, names)


def examples(path: Path, *, torchrun: bool = False) -> list[CodeType]:
    text = path.read_text()
    blocks = [match for match in EXAMPLE.finditer(text) if bool(match["torchrun"]) == torchrun]
    assert blocks, f"no examples found in {path}"
    return [compile_at(path, text, block.start("code"), block["code"]) for block in blocks]


def compile_at(path: Path, text: str, start: int, code: str) -> CodeType:
    """Code that begins at this character of the file's text; an error then names the line."""
    return compile("\n" * text[:start].count("\n") + code, str(path), "exec")


def test_readme():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    names = {
        "torch": torch, "model": model, "lm_head": model.lm_head, "hidden": torch.randn(6, 16, requires_grad=True),
        "target": torch.randint(0, 50, (6,)), "advantage": torch.randn(6), "weight": torch.ones(6),
        "old_logprob": torch.full((6,), -4.0), "input_ids": torch.randint(0, 50, (2, 5)),
        "targets": torch.randint(0, 50, (2, 5)),
    }  # fmt: skip
    run_examples(ROOT / "README.md", names)
    torch.testing.assert_close(names["fused"].logprob, names["logprob"], rtol=0, atol=1e-5)


def test_ops():
    torch.manual_seed(0)
    run_examples(ROOT / "docs" / "ops.md", {})


def test_integrations(tmp_path, monkeypatch, tiny_model):
    from rlft_fast.integrations.trl import disable

    monkeypatch.chdir(tmp_path)
    for code in examples(ROOT / "docs" / "integrations.md"):  # each on its own
        try:
            exec(code, {"MODEL": str(tiny_model("llama")), "__name__": "__main__"})
        finally:
            disable()


def test_models():
    run_examples(ROOT / "docs" / "models.md", {})


def torchrun_examples(rank: int) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    run_examples(ROOT / "docs" / "ops.md", names, torchrun=True)
    assert names["result"].logprob.shape == names["result"].entropy.shape == (2, 7)
    assert names["norm"] > 0


@pytest.mark.dist
def test_ops_under_fsdp2():
    run_distributed(torchrun_examples, 2)


def test_engine(tmp_path, tiny_model):
    run_examples(ROOT / "docs" / "engine.md", {"MODEL": str(tiny_model("llama")), "OUTPUT": str(tmp_path)})


def test_rollout(tiny_model):
    run_examples(ROOT / "docs" / "rollout.md", {"MODEL": str(tiny_model("llama"))})


def test_environments():
    run_examples(ROOT / "docs" / "environments.md", {})


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: make test-ray")
def test_cluster(tmp_path, tiny_model):
    import ray

    try:
        run_examples(ROOT / "docs" / "cluster.md", {"MODEL": str(tiny_model("llama")), "OUTPUT": str(tmp_path)})
    finally:
        ray.shutdown()


def test_runs():
    names: dict[str, Any] = {}
    run_examples(ROOT / "docs" / "runs.md", names)
    assert names["exact"](["1 + 1", "1 + 2"], [" 2", "4"], [[5], [6]], answer=["2", "3"]) == [1.0, 0.0]


@pytest.fixture
def reader(tmp_path, monkeypatch, tiny_model) -> Iterator[Path]:
    """The folder of a reader who has a tiny model in place of SmolLM2, and the files of the first run."""
    model = tmp_path / ".cache" / "rlft_fast" / "SmolLM2-135M-Instruct"
    shutil.copytree(tiny_model("llama"), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    tokenizer.save_pretrained(model)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    read(ROOT / "docs" / "tutorials" / "first_run.md", ("python",))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("judge", "my_methods"):
            del sys.modules[name]


def read(page: Path, programs: tuple[str, ...], names: dict[str, Any] | None = None) -> None:
    """Does what a page says, in the current folder: writes its files, runs its Python and its commands.

    Args:
        page: with blocks of Python, YAML and sh. A block whose first line is a comment with a file's name is this file.
        programs: those of the commands that run. Runs of `rlft-fast train` are cut to two steps of two prompts.
        names: for the Python blocks, which run if names are given.
    """
    text = page.read_text()
    for block in re.finditer(r"^```(python|yaml|sh)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        language, code = block.groups()
        if file := re.match(r"# (\S+\.(?:py|yaml))\n", code):
            Path(file[1]).write_text(code)
        elif language == "python" and names is not None:
            exec(compile_at(page, text, block.start(2), code), names)
        elif language == "sh":
            for line in filter(None, code.splitlines()):
                program, *arguments = shlex.split(line)
                if program not in programs:
                    continue
                if "train" in arguments and "--dry-run" not in arguments:
                    steps = "3" if "--resume" in arguments else "2"
                    arguments += ["--steps", steps, "--rollout.prompts_per_step", "2"]
                if {"sft", "dpo", "reward"} & {*arguments}:
                    arguments += ["--steps", "3" if "--resume" in arguments else "2"]
                if program == "rlft-fast":
                    assert main(arguments) == 0, line
                elif program == "torchrun":
                    torchrun(arguments)
                else:
                    path = Path(sys.executable).with_name(program)
                    subprocess.run([str(path), *arguments], check=True, timeout=120)


def torchrun(arguments: list[str]) -> None:
    """In processes that are forked, which need not import."""
    options = get_args_parser().parse_args(arguments)
    assert options.module
    assert options.training_script == "rlft_fast"
    run_distributed(run_command, int(options.nproc_per_node), Path.cwd(), options.training_script_args)


def run_command(rank: int, folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    os.environ["HOME"] = str(folder)
    sys.path.insert(0, str(folder))
    assert main(arguments) == 0


def test_first_run(reader, capsys):
    page = ROOT / "docs" / "tutorials" / "first_run.md"
    read(page, ("rlft-fast",), {})
    explained = re.search(r"Each line of the console is a step\.(.*?)Ctrl-C", page.read_text(), re.DOTALL)
    assert explained
    shown = capsys.readouterr().out.split()
    assert {"reward_mean", "accuracy"} <= {*re.findall(r"`(\w+)`", explained[1])} <= {*shown}
    assert max(row["step"] for row in read_lines(reader / "runs" / "first" / "metrics.jsonl")) == 3
    assert (reader / "runs" / "first" / "view.html").exists()
    assert len((reader / "train.jsonl").read_text().splitlines()) == 30 * 29 // 2 - 100


@pytest.mark.parametrize("page", ["own_reward", "own_loss"])
def test_tutorial(reader, page: str):
    names: dict[str, Any] = {}
    read(ROOT / "docs" / "tutorials" / f"{page}.md", ("rlft-fast",), names)
    if page == "own_loss":
        logprob_T, advantage_T = torch.full((2,), -1.0), torch.tensor([1.0, -1.0])
        fields = {
            "logprob_T": logprob_T, "entropy_T": torch.ones(2), "old_logprob_T": logprob_T,
            "advantage_T": advantage_T, "loss_weight_T": torch.ones(2),
        }  # fmt: skip
        assert names["loss"].per_token(fields).tolist() == pytest.approx([-1.01, 0.19])


def test_fine_tuning(reader):
    read(ROOT / "docs" / "tutorials" / "fine_tuning.md", ("python", "rlft-fast"))
    losses = [
        row["held_out_loss"] for row in read_lines(reader / "runs/warm_up/metrics.jsonl") if "held_out_loss" in row
    ]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_distillation(reader):
    """With an untrained teacher in place of the trained policy."""
    shutil.copytree(reader / ".cache/rlft_fast/SmolLM2-135M-Instruct", reader / "runs/first/hf")
    read(ROOT / "docs" / "tutorials" / "first_run.md", ())
    read(ROOT / "docs" / "tutorials" / "fine_tuning.md", ("python",))
    read(ROOT / "docs" / "tutorials" / "distillation.md", ("rlft-fast",))
    for name in ("distilled", "distilled_rows"):
        rows = read_lines(reader / "runs" / name / "metrics.jsonl")
        assert sum("teacher_divergence" in row for row in rows) == 2


@pytest.mark.slow
def test_preferences(reader):
    read(ROOT / "docs" / "tutorials" / "preferences.md", ("python", "rlft-fast"), {})
    for name in ("dpo", "reward_model"):
        rows = read_lines(reader / "runs" / name / "metrics.jsonl")
        assert sum("held_out_pair_accuracy" in row for row in rows) == 2


@pytest.mark.dist
def test_many_gpus(reader):
    read(ROOT / "docs" / "tutorials" / "many_gpus.md", ("rlft-fast", "torchrun"))
    assert (reader / "runs" / "two" / "summary.json").exists()


def test_in_other_trainers(tmp_path, monkeypatch, tiny_model):
    from rlft_fast.integrations.trl import disable

    monkeypatch.chdir(tmp_path)
    try:
        read(ROOT / "docs" / "tutorials" / "in_other_trainers.md", (), {"MODEL": str(tiny_model("llama"))})
    finally:
        disable()


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "prompts", "gain"), [(1, 2, -0.1), pytest.param(12, 16, 0.1, marks=pytest.mark.long)]
)
def test_notebook(steps, prompts, gain, tmp_path, monkeypatch):
    """The notebook's policy learns, in five minutes with a thread. The stored notebook has no outputs."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    (cell,) = (cell for cell in notebook.cells if '"steps": 12' in cell.source)
    cell.source = cell.source.replace('"steps": 12', f'"steps": {steps}')
    cell.source = cell.source.replace('"prompts_per_step": 16', f'"prompts_per_step": {prompts}')
    NotebookClient(notebook, timeout=1800).execute()
    (run,) = tmp_path.glob("rlft_fast-*/run")
    accuracy = [row["accuracy"] for row in read_lines(run / "metrics.jsonl") if "accuracy" in row]
    assert accuracy[-1] > accuracy[0] + gain


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    for link in LINK.finditer((ROOT / page).read_text()):
        target = (ROOT / page).parent / link["path"] if link["path"] else ROOT / page
        assert target.exists(), f"{page} links to {link['path']}"
        if link["heading"]:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert link["heading"] in anchors, f"{page} links to #{link['heading']} of {target.name}"


def test_every_page_and_example_is_linked():
    pages, examples = ((ROOT / name).read_text() for name in ("README.md", "examples/README.md"))
    for path in (ROOT / "docs").rglob("*.md"):
        assert f"]({path.relative_to(ROOT)})" in pages
    for path in (path for kind in ("yaml", "py", "ipynb") for path in (ROOT / "examples").glob(f"*.{kind}")):
        assert f"]({path.name})" in examples


@pytest.mark.parametrize("page", CURRENT_PAGES)
def test_keys_of_configurations_exist(page: str):
    keys = {key for config in OBJECTIVES.values() for key, _ in sections(config)}
    keys |= {key.removeprefix("actor.") for key in keys if key.startswith("actor.optimizer.")}  # an engine has these
    named_sections = "|".join({key.partition(".")[0] for key in keys if "." in key})
    for key in re.findall(rf"`(?:--)?((?:{named_sections})(?:\.[a-z_]+)+)(?![\w(])", (ROOT / page).read_text()):
        if not key.endswith(".py") and not key.startswith("data.training."):  # run.json has a checksum by this name
            assert key in keys, f"{page} names {key}"


@pytest.mark.parametrize("page", CURRENT_PAGES)
def test_names_of_files_and_modules_exist(page: str):
    text = (ROOT / page).read_text()
    for path in re.findall(
        r"\b(?:rlft_fast|benchmarks|tests|csrc|examples)/[\w/]*[a-z0-9_]\.(?:py|cpp|h|sh|yaml)\b", text
    ):
        assert (ROOT / path).exists(), f"{page} names {path}"
    for name in re.findall(r"\brlft_fast(?:\.[A-Za-z_]\w*)+", text):
        if not isinstance(pkgutil.resolve_name(name), ModuleType):  # then a face has it
            module, _, attribute = name.rpartition(".")
            assert attribute in import_module(module).__all__, f"{page} names {name}"
            assert (ROOT / module.replace(".", "/")).is_dir() or module.startswith("rlft_fast.integrations.")
