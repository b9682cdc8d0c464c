"""The examples of the documentation run, from top to bottom or each on its own, as the page says."""

import pkgutil
import re
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.distributed import run_distributed

ROOT = Path(__file__).parent.parent
PAGES = [
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "benchmarks", "examples")
    for path in sorted((ROOT / folder).glob("*.md"))
]
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
    lines_before = [text[: block.start("code")].count("\n") for block in blocks]  # an error then names the line
    return [
        compile("\n" * lines + block["code"], str(path), "exec")
        for lines, block in zip(lines_before, blocks, strict=True)
    ]


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


def test_methods():
    names: dict[str, Any] = {}
    run_examples(ROOT / "docs" / "methods.md", names)
    assert names["batch"].advantage_T.tolist() == [1, 1, 0, 0, 0, 0]
    logprob_T, advantage_T = torch.full((2,), -1.0), torch.tensor([1.0, -1.0])
    fields = {
        "logprob_T": logprob_T, "entropy_T": torch.ones(2), "old_logprob_T": logprob_T, "advantage_T": advantage_T,
        "loss_weight_T": torch.ones(2),
    }  # fmt: skip
    assert names["loss"].per_token(fields).tolist() == pytest.approx([-1.01, 0.19])


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


def test_runs():
    names: dict[str, Any] = {}
    run_examples(ROOT / "docs" / "runs.md", names)
    assert names["exact"](["1 + 1", "1 + 2"], [" 2", "4"], [[5], [6]], answer=["2", "3"]) == [1.0, 0.0]


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
    for path in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{path.name})" in pages
    for path in (*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples").glob("*.py")):
        assert f"]({path.name})" in examples


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])  # it also names what is gone
def test_names_of_files_and_modules_exist(page: str):
    text = (ROOT / page).read_text()
    for path in re.findall(
        r"\b(?:rlft_fast|benchmarks|tests|csrc|examples)/[\w/]*[a-z0-9_]\.(?:py|cpp|h|sh|yaml)\b", text
    ):
        assert (ROOT / path).exists(), f"{page} names {path}"
    for name in re.findall(r"\brlft_fast(?:\.[a-z_]\w*)+(?!\w*\()", text):
        pkgutil.resolve_name(name)
