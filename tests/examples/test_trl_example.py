"""examples/trl_grpo.py runs; tests/integrations/test_trl.py compares its numbers with TRL's own."""

import runpy
from pathlib import Path

from trl.trainer import utils

from rlft_fast.integrations.trl import disable

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_grpo.py"))


def test_main_prints_rewards(tiny_model, tmp_path, capsys):
    own = utils._ChunkedLogProbFunction
    rows = '{"prompt": "1 + 2\\u2028= ", "answer": "3"}\n' * 8  # which is no end of a line here
    (tmp_path / "data.jsonl").write_text(rows, encoding="utf-8")
    try:
        EXAMPLE["main"](tiny_model("llama"), tmp_path / "data.jsonl", 2)
        assert utils._ChunkedLogProbFunction is not own
    finally:
        disable()
    assert "step 2  reward 0." in capsys.readouterr().out
