"""What the head does on a GPU, counted without a GPU: products, bytes of each pass, launches, and no wait."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.prediction.counts import WAYS, Counts, Gemm, bare
from benchmarks.prediction.report import DEVICES, counted

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
ROOT = Path(__file__).parents[2]
SHAPE = 2048, 128, 65536  # whose logits exceed the workspace
LOGITS = SHAPE[0] * SHAPE[2]
LONGER = 4096, 128, 65536


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, tuple[int, int, int]], Counts]:
    return counted([SHAPE, LONGER])


@pytest.mark.parametrize(("way", "products"), [*zip(WAYS, (1, 4, 2, 3), strict=True)])
def test_products(way, products, found):
    assert found[way, SHAPE].products(SHAPE) == products == bare(SHAPE, WAYS[way]).products(SHAPE)


@pytest.mark.parametrize(
    ("way", "kernel", "bytes_per_logit"),
    [
        ("no grad", "logprob_stats_", 4),
        ("forward + backward", "logprob_stats_", 4),
        ("forward + backward", "logprob_grad_", 4 + 2),
        ("loss", "logprob_stats_", 4),
        ("loss", "logprob_grad_", 4 + 2),
    ],
)
def test_bytes_of_a_pass(way, kernel, bytes_per_logit, found):
    assert found[way, SHAPE].bytes[f"rlft_fast::{kernel}"] == bytes_per_logit * LOGITS


def test_the_frozen_pass_reads_logits_twice_and_moves_its_sums(found):
    counts = found["frozen weight", SHAPE]
    (sums,) = (n for gemm, n in counts.gemms.items() if gemm.accumulates and gemm.rows == SHAPE[0])
    assert counts.bytes["rlft_fast::logprob_frozen_"] == (4 + 4 + 2) * LOGITS + sums * 8 * SHAPE[0] * SHAPE[1]


def test_the_gradients_of_the_loss_are_not_scaled_by_one(found):
    moved = found["loss", SHAPE].bytes
    assert "rlft_fast::scale_" in moved
    assert moved["aten::mul_"] < SHAPE[1] * SHAPE[2]  # less than one byte for each element of dweight


@pytest.mark.parametrize("way", WAYS)
def test_nothing_waits_for_the_device(way, found):
    assert found[way, SHAPE].waits == []


def test_launches_of_a_chunk_of_the_loss(found):
    """Of 512 rows; with a loss of twelve operators, forward and backward."""
    more = found["loss", LONGER].launches - found["loss", SHAPE].launches
    assert more <= 4 * 55


def test_seconds_by_hand():
    gemm = Gemm(rows=10, inner=20, columns=30, in_bytes=2, out_bytes=4, accumulates=True)
    assert gemm.bytes == 2 * (200 + 600) + 2 * 4 * 300
    device = DEVICES["h200"]._replace(flops=1e3, bandwidth=1e3, launch_seconds=2.0)
    counts = Counts()
    counts.gemms[gemm] = 2
    counts.bytes["copy"] = 500
    counts.launches = 3
    assert counts.device_seconds(device) == pytest.approx(2 * (12 + 4) + 0.5)
    assert counts.host_seconds(device) == 6.0
    floor = Counts()
    floor.gemms[gemm] = 1
    assert counts.ratio(device, floor) == pytest.approx(32.5 / 16)


@pytest.mark.slow
def test_the_command_prints_and_keeps_a_prediction(tmp_path):
    command = [sys.executable, "-m", "rlft_fast", "bench", "--predict", "h200", "1024,64,4096", "--output", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "predict-h200.md").read_text()
    assert "PREDICTED, not measured" in done.stdout
    rows = json.loads((tmp_path / "predict-h200.json").read_text())
    assert [row["way"] for row in rows] == [*WAYS]


@pytest.mark.parametrize("words", [["h200", "8192,foo"], ["h200", "0,1,1"], ["no-such-gpu"]])
def test_bad_input_is_one_line(words):
    command = [sys.executable, "-m", "rlft_fast", "bench", "--predict", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("rlft-fast bench --predict: error: argument")
