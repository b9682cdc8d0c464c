"""Every language model of the installed transformers is refused by name, or computes its own numbers."""

import pytest

from tests.engine.models.every_architecture import MODEL_TYPES, PACKED, PADDED, PAGE, YES, answer, page, told, written

pytestmark = [pytest.mark.slow, pytest.mark.first]

# These must not be refused: a check that has become too strict fails here, also with --thin.
PACK = [
    "arcee", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "glm4",
    "gpt2", "gpt_oss", "granite", "granite_swa", "idefics3", "internvl", "llama", "llama4_text", "llava", "minicpm3",
    "minimax_m2", "ministral", "mistral", "mistral3", "mixtral", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl", "seed_oss", "smollm3", "smolvlm", "starcoder2",
]  # fmt: skip
RUN_PADDED = [
    "bamba", "falcon_h1", "gemma4", "glm_moe_dsa", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe",
    "mamba", "mamba2", "mllama", "nemotron_h", "qwen3_5",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
]  # fmt: skip


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_refused_or_right_as_the_page_says(model_type):
    assert tuple(each.removesuffix(" *") for each in answer(model_type)) == told()[model_type]


def test_none_of_these_is_refused():
    expected = dict.fromkeys(PACK, (YES, PACKED)) | dict.fromkeys(RUN_PADDED, (YES, PADDED))
    assert {model_type: answer(model_type) for model_type in expected} == expected


@pytest.mark.long
def test_the_page_has_the_answers():
    assert PAGE.read_text() == page(written()), (
        f"{PAGE} is out of date: run python -m tests.engine.models.every_architecture"
    )
