"""The file that `rlft-fast view` writes: what is in it, what is left out, and that no text of a model is markup."""

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlft_fast.cli import main
from rlft_fast.run.records.tokens import write_tokens
from rlft_fast.view import write_view
from rlft_fast.view.contents import token_texts
from tests.support.runs.metrics import ODD
from tests.support.runs.run_folders import HOSTILE, sample, write_lines, write_run
from tests.support.runs.samples import columns_of_samples
from tests.trainer.toy import toy_config


class Page(HTMLParser):
    """Tags and attributes of a page, and the values of its data blocks by their names."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}  # by the number of the tag
        self.is_open = False  # the text that comes is the text of the last tag
        self.feed(path.read_text(encoding="ascii"))
        self.close()
        blocks = {attributes["id"]: i for i, (tag, attributes) in enumerate(self.tags) if "type" in attributes}
        self.data = {name: json.loads(self.texts[i]) for name, i in blocks.items()}

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.is_open = True

    def handle_data(self, text):
        if self.is_open:
            number = len(self.tags) - 1
            self.texts[number] = self.texts.get(number, "") + text

    def handle_endtag(self, tag):
        self.is_open = False


def page_of(run: Path, **options) -> Page:
    write_view([run], run / "view.html", **options)
    return Page(run / "view.html")


def test_the_page_has_the_numbers_and_samples_of_the_run(tmp_path, capsys):
    metrics = [{"step": 0, "accuracy": 0.1}, {"step": 1, "time": 5.0, "reward_mean": 0.25, "loss": None}]
    run = write_run(tmp_path / "run", [sample(1, "a"), sample(1, "b", reward=None), sample(2, "c")], metrics)
    assert main(["view", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "view.html")
    page = Page(run / "view.html")
    (shown,) = page.data["data"]["runs"]
    assert shown["name"] == str(run)
    assert shown["series"] == {"accuracy": [[0], [0.1]], "reward_mean": [[1], [0.25]]}
    assert shown["steps"] == [1, 2]
    assert shown["notes"] == []
    assert [x["completion"] for x in page.data["samples-0-1"]] == ["a", "b"]
    assert page.data["samples-0-2"] == [{name: value for name, value in sample(2, "c").items() if name != "step"}]


def test_texts_are_data_and_never_markup(tmp_path):
    samples = [sample(1, text, prompt=text, finish_reason=text, parts={text: 1.0}) for text in HOSTILE]
    run = write_run(tmp_path / "run", samples, [{"step": 1, "loss": 1.0, **dict.fromkeys(HOSTILE, 1.0)}])
    plain = write_run(tmp_path / "plain", [sample(1)])
    page = page_of(run)
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in page_of(plain).tags]
    assert [x["completion"] for x in page.data["samples-0-1"]] == list(HOSTILE)
    assert set(page.data["data"]["runs"][0]["series"]) == {"loss", *HOSTILE}
    assert set(re.findall(rb"[^\n\x20-\x7e]", (run / "view.html").read_bytes())) == set()


def test_the_page_has_the_timeline_of_the_run(tmp_path):
    run = write_run(tmp_path / "run")
    assert "timeline" not in page_of(run).data["data"]["runs"][0]
    spans = [["update", HOSTILE[1], 10.0, 11.5], ["update", "rank 0", 10.0, 14.0]]
    write_lines(run / "timeline.jsonl", [{"step": 7, "start": 10.0, "end": 14.0, "spans": spans}])
    found = page_of(run)
    rows = [{"name": f"training, {HOSTILE[1]}", "idle": 0.625, "spans": [["update", 0.0, 1.5]]},
            {"name": "training, rank 0", "idle": 0.0, "spans": [["update", 0.0, 4.0]]}]  # fmt: skip
    assert found.data["data"]["runs"][0]["timeline"] == {"steps": [7, 7], "seconds": 4.0, "rows": rows, "left_out": 0}
    assert set(found.data["data"]["phases"]) >= {"update"}


def test_the_page_may_load_nothing_and_run_its_own_script_alone(tmp_path):
    page = page_of(write_run(tmp_path / "run", [sample(1)]))
    policy = next(x["content"] for _, x in page.tags if x.get("http-equiv") == "Content-Security-Policy")
    own = {tag: page.texts[i] for i, (tag, x) in enumerate(page.tags) if tag in ("script", "style") and not x}
    hashes = {tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for tag, text in own.items()}
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert not [x for _, x in page.tags if {"src", "style"} & set(x) or any(name.startswith("on") for name in x)]
    assert [x["href"] for _, x in page.tags if "href" in x] == ["#curves", "#timeline", "#steps", "#samples"]


def test_older_steps_are_left_out_of_a_page_that_would_grow_too_large(tmp_path):
    run = write_run(tmp_path / "run", [sample(step, "x" * 1000) for step in range(1, 101) for _ in range(10)])
    page = page_of(run, max_bytes=2**17)
    (shown,) = page.data["data"]["runs"]
    assert shown["steps"] == list(range(90, 101))  # 11 steps of 11.6 kB are 128 kB
    assert all(len(page.data[f"samples-0-{step}"]) == 10 for step in shown["steps"])
    assert shown["notes"] == ["Samples of steps before 90 are left out: --max-mib is the limit of a page (0.125 MiB)."]
    assert (run / "view.html").stat().st_size < 2**17 + 40_000


def test_of_a_step_that_is_too_large_the_first_samples_are_shown(tmp_path):
    run = write_run(tmp_path / "run", [sample(step, f"{i} " + "x" * 1000) for step in (1, 2) for i in range(100)])
    page = page_of(run, max_bytes=2**15)
    (shown,) = page.data["data"]["runs"]
    assert shown["steps"] == [2]
    assert [x["completion"].split()[0] for x in page.data["samples-0-2"]] == [str(i) for i in range(28)]
    assert "Step 2 has 100 samples, of which the first 28 are shown." in shown["notes"]


def test_a_long_series_is_thinned_and_keeps_its_newest_point(tmp_path):
    run = write_run(tmp_path / "run", metrics=[{"step": step, "loss": step / 3} for step in range(1, 5001)])
    (shown,) = page_of(run).data["data"]["runs"]
    steps, values = shown["series"]["loss"]
    assert steps == list(range(2, 5001, 3))
    assert values[-1] == 1666.667
    assert shown["notes"] == ["Of 5,000 points of a curve, one in 3 is shown."]


def test_a_page_in_the_home_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = write_run(tmp_path / "run")
    assert main(["view", "~/run", "--output=~/page.html"]) == 0
    assert Page(tmp_path / "page.html").data["data"]["runs"][0]["name"] == str(run)
    with pytest.raises(SystemExit):
        main(["view", str(run), "--output=~nobodyhere/page.html"])
    assert "--output: there is no user nobodyhere with a home folder" in capsys.readouterr().err


# No folder; no metrics; a damaged line of metrics.
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing", None, "there is no run in "),
        ("run", None, "has no metrics.jsonl: give the output_dir"),
        ("run", '{"step": 1}\nnonsense\n', "metrics.jsonl, line 2 is no JSON"),
    ],
)
def test_a_folder_without_a_run_is_refused(name, text, message, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    if text is not None:
        (tmp_path / "run" / "metrics.jsonl").write_text(text)
    assert main(["view", str(tmp_path / name), "--output", str(tmp_path / "page.html")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "name it with --output FILE.html"),
        (["a", "--output", "a/metrics.jsonl"], "must end in .html"),
        (["a", "--output", "missing/page.html"], "there is no folder missing"),
        (["a", "--max-mib", "0"], "--max-mib is 0, expected at least 1"),
    ],
)
def test_wrong_usage_is_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["view", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


# No JSON, no object, no step, values of other types, numbers that JSON does not have, and a line being written.
def test_damaged_samples_are_counted(tmp_path):
    damaged = ["nonsense", "[1]", '{"completion": "x"}', '{"step": true}', '{"step": 1, "comp\udcff"}']
    odd = {"step": 2, "prompt": 3, "completion": ["x"], "reward": "high", "parts": [1], "weight_version": 1.5}
    lines = [sample(1), "nonsense", sample(1, "z", reward=float("nan"), parts={"p": float("inf"), "q": 10**400}), odd]
    run = write_run(tmp_path / "run")
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in (*lines, *damaged)) + '{"step": 3, "pro'
    (run / "samples.jsonl").write_text(text, errors="surrogateescape")
    page = page_of(run)
    (shown,) = page.data["data"]["runs"]
    assert shown["notes"] == ["6 damaged lines of samples.jsonl are left out."]
    assert [x["completion"] for x in page.data["samples-0-1"]] == ["answer", None, "z"]
    assert page.data["samples-0-1"][2]["parts"] == {"p": None, "q": None}
    assert page.data["samples-0-2"][0] == dict.fromkeys(odd.keys() - {"step"}) | {"finish_reason": None, "parts": {}}


def test_what_a_script_can_hold_of_odd_numbers_is_in_the_page(tmp_path):
    parts = {"constructor": 1.0, "__proto__": 10**400, "b": 1e308}
    samples = [sample(2**53 - 1, parts=parts, reward=-1e308, weight_version=10**20), sample(2**53), sample(10**400)]
    run = write_run(tmp_path / "run", samples, ODD)
    page = page_of(run)
    (shown,) = page.data["data"]["runs"]
    assert shown["series"] == {
        "reward_mean": [[1], [0.5]], "constructor": [[1], [1.0]], "__proto__": [[1], [2.0]],
        "entropy": [[1, 2**53 - 1], [1e300, -1e300]],
    }  # fmt: skip
    assert [note.partition(" of ")[0] for note in shown["notes"]] == ["4 lines", "6 numbers", "2 damaged lines"]
    (found,) = page.data[f"samples-0-{2**53 - 1}"][:1]
    assert found["parts"] == {"constructor": 1.0, "__proto__": None, "b": None}
    assert (found["reward"], found["weight_version"]) == (None, None)


def test_a_page_is_written_through_no_link(tmp_path):
    run, mine = write_run(tmp_path / "run"), tmp_path / "mine.html"
    mine.write_text("mine")
    for name in ("view.html", "view.html.incomplete"):
        os.symlink(mine, run / name)
    page_of(run)
    assert mine.read_text() == "mine"
    assert not (run / "view.html").is_symlink()


@pytest.mark.parametrize("name", ["view.html", "view.html.incomplete"])
def test_a_folder_in_the_place_of_a_page_is_named(name, tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / name).mkdir()
    assert main(["view", str(run)]) == 1
    assert (
        f"{run / name} is a folder, and a file is to be written there: move the folder away" in capsys.readouterr().err
    )


def test_a_tokenizer_that_would_end_the_process(tmp_path):
    content = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged: .*: model\.vocab gives the token 'a' the id"):
        token_texts(tmp_path, [0])


def test_without_samples_the_page_says_so(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "samples.jsonl").unlink()
    assert page_of(run).data["data"]["runs"][0]["notes"] == ["There is no samples.jsonl, so no samples are shown."]


def run_with_tokens(folder: Path, num_samples: int = 5, steps=(1, 2)) -> Path:
    run = write_run(folder, [sample(step) for step in steps for _ in range(num_samples)])
    for step in steps:
        write_tokens(run, step, columns_of_samples(), 5)
    return run


def test_numbers_of_tokens_are_in_the_page_with_their_texts(tiny_model, tmp_path):
    run = run_with_tokens(tmp_path / "run")
    (run / "config.yaml").write_text(toy_config(tiny_model("llama"), tmp_path).to_yaml())
    page = page_of(run)
    assert page.data["data"]["runs"][0]["notes"] == []
    for name, column in columns_of_samples().items():
        dtype = column.numpy().dtype.newbyteorder("<")
        found = np.frombuffer(base64.b64decode(page.data["tokens-0-2"][name]), dtype)
        np.testing.assert_array_equal(found, column.numpy())
    assert page.data["texts-0"].keys() == {"4", "5", "6", "7", "8", "9"}
    assert all(isinstance(text, str) for text in page.data["texts-0"].values())


# A byte-level tokenizer as Qwen's and Llama 3's, and one of pieces as Llama 2's. Ids: all, special tokens too, and one
# that the tokenizer does not have.
@pytest.mark.parametrize("pieces", [False, True])
def test_texts_of_tokens_are_those_of_transformers(pieces, tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    if pieces:
        vocabulary = {"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3, "<0xE2>": 4}
        model = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], byte_fallback=True, unk_token="<unk>"))
        model.decoder = decoders.Sequence([
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
        ])  # fmt: skip
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path)
    pieces_of = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    expected = {i: tokenizer.decode([i]) for i in range(len(tokenizer))}
    assert token_texts(tmp_path, [*range(len(tokenizer)), 999]) == {
        i: f" {text}" if pieces_of[i].startswith("\u2581") and not text.startswith(" ") else text
        for i, text in expected.items()
    }


def test_without_the_model_tokens_are_shown_by_their_ids(tmp_path):
    run = run_with_tokens(tmp_path / "run")
    page = page_of(run)
    assert page.data["texts-0"] == {}
    assert page.data["data"]["runs"][0]["notes"] == [
        f"Tokens are shown by their ids: there is no tokenizer in {run / 'hf'}."
    ]


def test_tokens_that_cannot_be_shown_are_noted(tmp_path):
    run = run_with_tokens(tmp_path / "run")
    (run / "tokens" / "step_00000002.safetensors").write_bytes(b"\x00" * 100)
    page = page_of(run)
    assert "tokens/step_00000002.safetensors is damaged: " in page.data["data"]["runs"][0]["notes"][0]
    assert [name for name in page.data if name.startswith("tokens")] == ["tokens-0-1"]
    other = page_of(run_with_tokens(tmp_path / "other", num_samples=4)).data
    assert "The tokens of step 1 are left out: they are of 5 samples, samples.jsonl has 4." in str(other["data"])


def test_tokens_of_older_steps_are_left_out_of_a_page_that_would_grow_too_large(tmp_path):
    run = run_with_tokens(tmp_path / "run", steps=range(1, 6))
    small = columns_of_samples()
    columns = {name: column if name.endswith("_B") else column.repeat(1000) for name, column in small.items()}
    columns["length_B"] = columns["length_B"] * 1000
    for step in range(1, 6):
        write_tokens(run, step, columns, 5)
    size = sum(column.numpy().nbytes for column in columns.values())
    page = page_of(run, max_bytes=3 * size)
    assert [name for name in page.data if name.startswith("tokens")] == ["tokens-0-5", "tokens-0-4", "tokens-0-3"]
    assert page.data["data"]["runs"][0]["steps"] == [1, 2, 3, 4, 5]
    assert "Tokens of step 2 and before are left out: --max-mib" in page.data["data"]["runs"][0]["notes"][0]
