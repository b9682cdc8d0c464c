"""Every language model of the installed transformers is refused by name, or computes its own numbers."""

import pytest

from tests.models.every_architecture import CLASSES, PAGE, YES, answer, page

pytestmark = pytest.mark.slow

# These must not be refused: a check that has become too strict fails here.
KNOWN_TO_WORK = [
    "arcee", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2",
    "granite", "llama", "minicpm3", "minimax_m2", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "opt",
    "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
]  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(CLASSES))
def test_refused_or_right(model_type):
    found = answer(model_type)
    assert model_type not in KNOWN_TO_WORK or found == (YES, YES)


def test_the_page_has_the_answers():
    assert PAGE.read_text() == page(), f"{PAGE} is out of date: run python -m tests.models.every_architecture"
