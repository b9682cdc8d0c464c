"""Models, batches, and the memory that torch's allocator reports for them to the profiler."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.loss import Loss
from tests.support.machine.memory import peak_allocated_bytes

VOCAB_SIZE = 8000
TOLERANCE = 0.10


def save_config(folder: Path, width: int, vocab_size: int = VOCAB_SIZE, **options: Any) -> Path:
    """Activations are most of the model's memory: it has a small vocabulary, and batches have thousands of tokens.

    A plan needs no weights.
    """
    config = LlamaConfig(**{
        "hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": vocab_size, "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"], **options,
    })  # fmt: skip
    config.save_pretrained(folder)
    return folder


def save_model(folder: Path, width: int, vocab_size: int = VOCAB_SIZE, **options: Any) -> Path:
    """The model of `save_config`, with random weights."""
    save_config(folder, width, vocab_size, **options)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def full_batch(max_tokens: int, num_micro_batches: int) -> Batch:
    """Micro-batches of ``max_tokens`` tokens. Every token but the first of a sequence is sampled."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (4 * num_micro_batches, max_tokens // 4), generator=generator).tolist()
    batch = Batch.from_samples([row[:1] for row in tokens], [row[1:] for row in tokens])
    noise = torch.randn(4, batch.num_tokens, generator=generator)
    return batch.replace(
        advantage_T=noise[0], old_logprob_T=noise[1] - 9, value_T=noise[2], return_T=noise[3]
    )  # fmt: skip


def measured_bytes(engine: FSDPEngine, batch: Batch, loss: Loss, steps: int = 1) -> int:
    """The weights, the moments, and what a step allocates on top of them: the least of so many steps."""
    assert engine.optimizer is not None
    engine.optimizer.initialize_state()
    peak = min(peak_allocated_bytes(lambda: engine.train_step(batch, loss)) for _ in range(steps))
    return peak + sum(state_bytes(engine).values())


def state_bytes(engine: FSDPEngine) -> dict[str, int]:
    """Of this rank's weights, and moments and masters, by part."""
    assert engine.optimizer is not None
    moments = [tensor for state in engine.optimizer.state.values() for tensor in state.values() if tensor.dim()]
    return {"parameters": num_bytes(engine.model.parameters()), "optimizer": num_bytes(moments)}


def num_bytes(tensors: Any) -> int:
    return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors)
