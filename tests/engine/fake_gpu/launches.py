"""Counts what an optimizer step launches on a GPU that is not there, with and without CUDA graphs, as JSON.

`python -m tests.engine.fake_gpu.launches FOLDER LAYERS ...`; benchmarks/support/fake_gpu.py documents the environment.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.prediction.counting import Counting  # before torch, which asks once whether there is a GPU

import torch  # isort: skip
from torch import Tensor
from transformers import Qwen2Config
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.support import fake_gpu
from rlft_fast.config import EngineConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.optimizer import build_optimizer
from rlft_fast.engine.sharding import Recorder, graphs, hand_over_gradients
from rlft_fast.engine.sharding.build import build_model
from rlft_fast.engine.sharding.narrow import narrow
from rlft_fast.models import RowCache, padded_attention
from rlft_fast.models.weights import materialize
from rlft_fast.ops import grad_norm
from rlft_fast.rl import PolicyLoss
from rlft_fast.rollout.graphs import DecodeGraphs

T = TypeVar("T")
# Of Qwen2.5-0.5B.
SHAPE = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
NUM_SEQUENCES, NUM_MICRO_BATCHES = 64, 2


class Launches(Counting):
    """Counts launches by the name of the operator. Each operator is one, but for those of lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        has_python = fake_gpu.python_implementation(func) is not None
        if func.namespace == "rlft_fast" and not has_python:
            self._note_launches(func, args)
            return super(Counting, self).__torch_dispatch__(func, types, args, kwargs) if func._schema.returns else None
        before = self.counts.launches
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not has_python and self.counts.launches > before:
            self._note_launches(func, args)
        return result

    def note(self, kernel: str) -> None:
        self.by_name[kernel] += 1

    def _note_launches(self, func: Any, args: Any) -> None:
        self.by_name[func._schema.name] += _num_launches(func, args)


def _num_launches(func: Any, args: Any) -> int:
    """At most so many; torch's `multi_tensor_apply` takes 64 tensors and 320 chunks of 65,536 numbers at once."""
    if "_foreach_" not in func._schema.name:
        return 2 if "multi_tensor" in func._schema.name else 1
    tensors = [x for x in args[0] if isinstance(x, Tensor)]
    if len({x.dtype for x in tensors}) > 1:
        return len(tensors)
    return -(-len(tensors) // 64) + -(-sum(-(-x.numel() // 65536) for x in tensors) // 320)


class CountedGraphs:
    """Records CUDA graphs that launch nothing: a replay is one launch."""

    def __init__(self, mode: Launches) -> None:
        self.mode = mode

    def __call__(self, function: Callable[[], T], /) -> tuple[T, Callable[[], None]]:
        before, self.mode.by_name = self.mode.by_name, Counter()
        result = function()
        self.mode.by_name = before

        def replay() -> None:
            self.mode.by_name["replay of a graph"] += 1

        return result, replay


def make_engine(folder: Path, num_layers: int, cuda_graphs: bool) -> FSDPEngine:
    """In bfloat16 on one device."""
    Qwen2Config(**SHAPE, num_hidden_layers=num_layers, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    # Float32 weights would be copied to bfloat16 by one more operator; a fake parameter cannot change its data.
    config = EngineConfig(param_dtype="bfloat16", compute_dtype="bfloat16", compile=False, cuda_graphs=cuda_graphs)
    engine = FSDPEngine(str(folder), config, num_training_steps=1)
    engine.model = build_model(engine.path, engine.config, "logprob", trains=True)
    materialize(engine.model, engine.device)
    narrow(engine.model, torch.bfloat16, (), keeps_memory=cuda_graphs)
    graphs.run_in_graphs(engine.model, engine.config)
    engine.optimizer = build_optimizer([*engine.model.named_parameters()], engine.config.optimizer)
    return engine


def batch_of(seed: int) -> Batch:
    """Groups of eight short answers, of nearly as many tokens for every seed."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 16, (NUM_SEQUENCES,), generator=generator).tolist()
    prompts = [[i // 8, *range(40)] for i in range(NUM_SEQUENCES)]
    completions = [torch.randint(0, 999, (n,), generator=generator).tolist() for n in lengths]
    batch = Batch.from_samples(prompts, completions)
    zeros = torch.zeros(batch.num_tokens)
    return batch.replace(old_logprob_T=zeros, advantage_T=zeros + 1, loss_weight_T=zeros + 1)


def step(engine: FSDPEngine) -> None:
    """But for the metrics, which the host would read."""
    micro_batches = [batch_of(seed) for seed in range(NUM_MICRO_BATCHES)]
    engine._accumulate_gradients(micro_batches, PolicyLoss(), 1.0, True)
    hand_over_gradients(engine.model)
    engine._step_optimizer(grad_norm(engine.model.parameters()), 0)


def decode(engine: FSDPEngine, mode: Launches, record: Recorder | None) -> Counter[str]:
    """Launches of a step of 64 rows, without the choice of tokens."""
    model = engine.model
    steps = DecodeGraphs(model, record)
    padding_U, token_U = (torch.zeros(64, dtype=torch.int64, device="cuda") for _ in range(2))
    ids_UL = torch.zeros(64, 40, dtype=torch.int64, device="cuda")
    with padded_attention(model.model), torch.no_grad():
        cache = RowCache(model.model, 64, 100) if record is None else steps.cache(64, 100)
        position_U = model.prefill_rows(ids_UL, torch.ones_like(ids_UL), cache)
        for _ in range(3):  # a size comes once, is recorded, and comes again
            mode.by_name = Counter()
            (model if record is None else steps).next_logits(token_U, position_U, padding_U, cache)
    return mode.by_name


def main(folder: Path, numbers_of_layers: list[int]) -> None:
    ways = ("launched", "in graphs")
    found: dict[str, dict[int, Counter[str]]] = {f"{what}{way}": {} for what in ("", "decode ") for way in ways}
    with Launches() as mode:
        graphs.CudaRecorder = lambda: CountedGraphs(mode)
        InterpretedFunction.__getitem__ = lambda kernel, _: lambda *_, **__: mode.note(kernel.fn.__name__)
        for way, num_layers in product(ways, numbers_of_layers):
            engine = make_engine(folder, num_layers, way == "in graphs")
            for _ in range(3 if way == "in graphs" else 1):  # sizes come once, are recorded, and come again
                mode.by_name = Counter()
                step(engine)
            found[way][num_layers], mode.by_name = mode.by_name, Counter()
            record = CountedGraphs(mode) if way == "in graphs" else None
            found[f"decode {way}"][num_layers], mode.by_name = decode(engine, mode, record), Counter()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*map(int, sys.argv[2:])])
