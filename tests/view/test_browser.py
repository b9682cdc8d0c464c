"""The page in a real browser without a window: what a reader sees, and how soon."""

import base64
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rlft_fast.run.records.tokens import write_tokens
from rlft_fast.view import write_view
from tests.support.pictures import picture
from tests.support.runs.run_folders import HOSTILE, sample, write_lines, write_run
from tests.support.runs.samples import columns_of_samples

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a Chromium on the PATH (Debian: apt install chromium)")
_EMPTY = ("meta", "line", "path", "circle", "input", "br", "img")


class Element(HTMLParser):
    """A part of a page: its tag, attributes, parts and texts."""

    def __init__(self, tag: str = "", attributes=()) -> None:
        super().__init__()
        self.tag, self.attributes = tag, dict(attributes)
        self.parts: list[Element | str] = []
        self.path = [self]

    def handle_starttag(self, tag, attributes):
        part = Element(tag, attributes)
        self.path[-1].parts.append(part)
        if tag not in _EMPTY:
            self.path.append(part)

    def handle_endtag(self, tag):
        if tag not in _EMPTY:
            assert self.path.pop().tag == tag

    def handle_data(self, text):
        self.path[-1].parts.append(text)

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)

    def all(self, wanted: str) -> list["Element"]:
        """Parts with this tag, ``#id`` or ``.class``."""
        own = [self.tag, f"#{self.attributes.get('id')}", *(f".{x}" for x in self.attributes.get("class", "").split())]
        inner = [found for part in self.parts if isinstance(part, Element) for found in part.all(wanted)]
        return [self, *inner] if wanted in own else inner

    def one(self, wanted: str) -> "Element":
        return self.all(wanted)[0]


class Browser:
    """A browser without a window that shows one page after another: its start takes far longer than a page."""

    def __init__(self, folder: Path) -> None:
        read, self._commands = os.pipe()
        self._answers, write = os.pipe()
        command = [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
            "--window-size=1200,1800", "--remote-debugging-pipe",
        ]  # fmt: skip
        # It reads commands from descriptor 3, and writes answers to 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *command], pass_fds=(read, write),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._messages = self._read()
        self._num_calls = 0
        self._complaints: list[dict[str, Any]] = []

    def _read(self) -> Iterator[dict[str, Any]]:
        """Messages end with a zero."""
        parts: list[bytes] = []
        while part := os.read(self._answers, 2**16):
            *ends, rest = part.split(b"\0")
            for end in ends:
                yield json.loads(b"".join([*parts, end]))
                parts.clear()
            parts.append(rest)

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._num_calls += 1
        to = {} if session is None else {"sessionId": session}
        message = {"id": self._num_calls, "method": method, "params": params, **to}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        for answer in self._messages:
            if answer.get("id") == self._num_calls:
                assert "error" not in answer, (message, answer)
                return answer["result"]
            if answer["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self._complaints.append(answer["params"])
        raise RuntimeError(f"the browser has ended, and did not answer to {message}")

    def dumped(self, page: Path, view: str) -> str:
        """The page as the browser has it after its script has run, without a word of complaint."""
        watch = threading.Timer(120, self._process.kill)
        watch.daemon = True
        watch.start()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Runtime.enable", session)
        self._call("Log.enable", session)
        assert "errorText" not in self._call("Page.navigate", session, url=f"file://{page}#{view}")
        loaded = 'new Promise(done => document.readyState == "complete" ? done() : addEventListener("load", done))'
        expression = f"{loaded}.then(() => document.documentElement.outerHTML)"
        found = self._call("Runtime.evaluate", session, expression=expression, awaitPromise=True, returnByValue=True)
        self._call("Target.closeTarget", targetId=target)
        watch.cancel()
        assert self._complaints == []
        text = found["result"]["value"]
        assert "data-ready-ms" in text[:500], text[:500]
        return text

    def opened(self, page: Path, view: str) -> Element:
        root = Element()
        root.feed(self.dumped(page, view))
        return root

    def close(self) -> None:
        os.close(self._commands)  # at which it ends
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            os.close(self._answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with contextlib.closing(Browser(tmp_path_factory.mktemp("browser"))) as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Forty steps; the samples of the last two, with numbers of the tokens of the last."""
    metrics = [{"step": step, "reward_mean": step / 40, "own": -step} for step in range(1, 41)]
    samples = [sample(39, text, prompt=text, finish_reason=text, parts={text: 1.0, "b": 2}) for text in HOSTILE]
    samples += [sample(40, f"answer {i}", prompt=f"question {i // 3}", reward=i / 4) for i in range(5)]
    folder = write_run(tmp_path_factory.mktemp("view") / "<b>run", samples, metrics)
    write_tokens(folder, 40, columns_of_samples(), 5)
    spans = [["update", text, 10.0 + i, 11.0 + i] for i, text in enumerate(HOSTILE)]
    write_lines(folder / "timeline.jsonl", [{"step": 40, "start": 10.0, "end": 20.0, "spans": spans}])
    return folder


def test_curves_steps_and_samples_are_shown(run, browser, tmp_path):
    write_view([run], tmp_path / "page.html")
    page = browser.opened(tmp_path / "page.html", "")
    assert page.one("title").text == page.one("#title").text == str(run)
    (figure,) = page.one("#panels").all("figure")  # the other series is drawn when it is asked for
    assert [part.text for part in figure.one("figcaption").all("span")] == ["Reward, mean", "1"]
    assert len(figure.all("path")) == 2  # the points and their running mean
    assert page.one("summary").text == "1 more series"
    assert [cell.text for cell in page.one("tbody").one("tr").all("td")] == ["40", "1"]
    first, second = page.one("#groups").all(".group")
    assert [first.one(".prompt").text, second.one(".prompt").text] == ["question 0", "question 1"]
    assert [text.text for text in first.all(".text")] == ["answer 0", "answer 1", "answer 2"]
    assert [part.text for part in second.all(".reward")] == ["reward0.75", "reward1"]


def test_hostile_texts_are_shown_as_texts(run, browser, tmp_path):
    write_view([run], tmp_path / "page.html")
    page = browser.opened(tmp_path / "page.html", "step=39")
    assert page.one("#step").attributes.get("value", "39") == "39"
    groups = page.one("#groups")
    shown = [group.one(".prompt").text for group in groups.all(".group")]
    expected = [
        "<script>alert(1)</script>", "</script><!--", "<img src=x onerror=alert(1)>", "{{script}} {{data}}",
        "\\u2028\\u2029", "\\u0000\\u001b[31mred\\u0007", "\\u202eabc", "\\ud800", "&lt;b&gt; &amp;",
    ]  # fmt: skip
    assert shown == expected
    assert [text.text for text in groups.all(".text")] == shown
    assert {part.tag for tag in ("script", "img", "b") for part in groups.all(tag)} == set()
    timeline = page.one("#timeline")
    names = [text.text for text in timeline.all("text") if "idle" in text.text]
    assert sorted(names) == sorted(f"training, {text}, idle 90 %" for text in expected)
    widths = [float(bar.attributes["width"]) for bar in timeline.all("rect")]
    assert widths == [widths[0]] * len(HOSTILE)
    assert {part.tag for tag in ("script", "img", "b") for part in timeline.all(tag)} == set()
    assert len(page.all("script")) == len(re.findall("<script", (tmp_path / "page.html").read_text()))


def test_turns_of_an_episode_are_told_apart(browser, tmp_path):
    texts = ["Is it?", "<b>yes</b>", "No."]
    turns = [{"sampled": i == 1, "text": text} for i, text in enumerate(texts)]
    turns[1]["reward"] = 0.25
    turns[2]["kept"] = 3
    odd = ["odd", {"sampled": 1, "text": 3, "reward": "much"}]
    folder = write_run(tmp_path / "run", [sample(1) | {"turns": [*turns, *odd], "environment": "<i>shop</i>"}])
    write_view([folder], tmp_path / "page.html")
    groups = browser.opened(tmp_path / "page.html", "").one("#groups")
    (text,), (facts,) = groups.all(".text"), groups.all(".facts")
    assert "environment<i>shop</i>" in facts.text
    assert [part.text for part in text.all(".branch")] == ["branch"]
    assert [part.text for part in text.all(".said")] == ["<b>yes</b>"]
    assert [part.text for part in text.all(".given")] == ["Is it?", "No.", "", ""]
    assert [part.text for part in text.all(".earned")] == ["0.25"]


def test_samples_of_other_images_are_apart_and_show_them(browser, tmp_path):
    """By a copy in the page, or by a name: of an image outside the data's folder, and of no image."""
    data = tmp_path / "data"
    data.mkdir()
    picture(0, 300, 200).save(data / "a.png")
    picture(1).save(tmp_path / "outside.png")
    names = ["a.png", "../outside.png", "<img src=x>.png"]
    samples = [sample(1, images=[name]) for name in ["a.png", *names]] + [sample(1), sample(1, images=[3, "b.png"])]
    folder = write_run(tmp_path / "run", samples)
    values = {"model": "m", "steps": 1, "output_dir": str(folder), "data": {"path": str(data / "rows.jsonl")}}
    (folder / "config.yaml").write_text(json.dumps(values | {"reward": {"function": "a:b"}}))
    write_view([folder], tmp_path / "page.html")
    groups = browser.opened(tmp_path / "page.html", "").one("#groups").all(".group")
    assert [len(group.all(".text")) for group in groups] == [2, 1, 1, 1, 1]
    assert [part.text for group in groups for part in group.all("figcaption")] == [*names, "b.png"]
    (shown,) = [image.attributes["src"] for group in groups for image in group.all("img")]
    content = base64.b64decode(shown.removeprefix("data:image/jpeg;base64,"))
    assert Image.open(io.BytesIO(content)).size == (96, 64)
    assert "3 of 4 images are shown by their names" in (tmp_path / "page.html").read_text()


# What is coloured: all that is known; the tokens that are learned from; the larger numbers alone, 0 being white.
@pytest.mark.parametrize(
    ("overlay", "is_colored"),
    [
        ("logprob", [1, 0, 1, 0, 0, 1, 1, 1, 1]),
        ("mask", [1, 0, 1, 0, 1, 1, 1, 1, 1]),
        ("ratio", [1, 0, 1, 0, *[1] * 5]),
    ],
)
def test_tokens_are_colored(overlay, is_colored, run, browser, tmp_path):
    write_view([run], tmp_path / "page.html")
    page = browser.opened(tmp_path / "page.html", f"by={overlay}")
    tokens = [token for text in page.one("#groups").all(".text") for token in text.all("span")]
    assert [token.text for token in tokens] == [f"[{token}]" for token in (5, 6, 9, 7, 7, 8, 4, 4, 4)]  # no tokenizer
    strong = [
        not re.search(r"rgba\(.*, 0\)", style := token.attributes.get("style", "")) and bool(style) for token in tokens
    ]
    assert strong == [bool(x) for x in is_colored]
    assert len(page.one("#legend").parts) == 3


def test_two_runs_are_beside_each_other(run, browser, tmp_path):
    samples = [sample(40, f"other {i}", prompt="question 1") for i in range(2)]
    other = write_run(tmp_path / "other", samples, [{"step": step, "reward_mean": 0.5} for step in range(1, 11)])
    write_view([run, other], tmp_path / "page.html")
    page = browser.opened(tmp_path / "page.html", "")
    assert [name.text for name in page.one("#title").all("span")] == [str(run), str(other)]
    (figure,) = page.one("#panels").all("figure")
    assert {path.attributes["class"] for path in figure.all("path")} == {"run0", "run1"}
    first, second = page.one("#groups").all(".group")
    assert [name.text for name in second.one(".columns").all(".name")] == [str(run), str(other)]
    assert [text.text for text in second.all(".text")] == ["answer 3", "other 0", "answer 4", "other 1"]
    assert [len(cell.all(".text")) for cell in first.all(".sample")] == [1, 0] * 3  # the other run has none


# Names that every object of JavaScript has; the last steps and the largest numbers that are drawn.
def test_odd_names_and_numbers_are_drawn(run, browser, tmp_path):
    steps, names = (2**53 - 2, 2**53 - 1), ("constructor", "__proto__", "toString")
    odd = write_run(tmp_path / "odd", [], [{"step": step, **dict.fromkeys(names, 1.0)} for step in steps])
    large = write_run(tmp_path / "large", [], [{"step": step, "x": (-1) ** step * 1e300} for step in steps])
    write_view([odd, large], tmp_path / "page.html")
    page = browser.opened(tmp_path / "page.html", "")
    assert [x.text for x in page.all("figcaption")] == ["__proto__1", "constructor1", "toString1", "x\u22121.00e+300"]
    lines = [path.attributes["d"] for figure in page.all("figure") for path in figure.all("path")]
    assert len(lines) == 4
    assert "NaN" not in "".join(lines)
    write_view([run], tmp_path / "page.html")
    page = browser.opened(tmp_path / "page.html", "by=constructor")
    assert [text.text for text in page.one("#groups").all(".text")] == [f"answer {i}" for i in range(5)]


@pytest.mark.slow  # alone: a busy machine is slower
def test_a_thousand_samples_open_within_a_second(tmp_path):
    lengths, total = torch.full((1000,), 256, dtype=torch.int32), 256_000
    generator = torch.Generator().manual_seed(0)
    numbers = {
        name: torch.randn(total, generator=generator) for name in ("rollout_logprob_T", "logprob_T", "entropy_T")
    }
    columns = {
        "sample_B": torch.arange(1000, dtype=torch.int32), "length_B": lengths,
        "token_id_T": torch.randint(50_000, (total,), dtype=torch.int32, generator=generator),
        "weight_version_T": torch.ones(total, dtype=torch.int32), "mask_T": torch.ones(total, dtype=torch.bool),
        "advantage_T": torch.zeros(total), **numbers,
    }  # fmt: skip
    run = write_run(tmp_path / "run", [sample(1, "word " * 256, prompt=f"question {i // 8}") for i in range(1000)])
    write_tokens(run, 1, columns, 1000)
    write_view([run], run / "view.html")
    pages = []
    for number in range(4):
        with contextlib.closing(Browser(tmp_path / f"browser_{number}")) as browser:
            pages.append(browser.dumped(run / "view.html", "by=entropy"))
    first_sample = pages[0].partition('<div class="text">')[2].partition("</div>")[0]
    assert first_sample.count("<span") == 256
    milliseconds = [int(re.findall(r'data-ready-ms="(\d+)"', page)[0]) for page in pages]
    assert min(milliseconds) <= 1000, milliseconds
