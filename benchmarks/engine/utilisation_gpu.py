"""`python -m benchmarks.engine.utilisation_gpu`: model FLOPs utilisation of `train_step` on a GPU, and its time.

Random weights in the shapes of Qwen2.5, packed sequences of log-normal lengths, bfloat16 over float32 masters, 8,192
tokens per micro-batch. Where a model and its optimizer do not fit, the model gets as many layers as fit.
`rlft_fast.engine.model_flops` counts the FLOPs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine.profile import profile_step
from benchmarks.support.document import table
from benchmarks.support.harness import DEVICE, environment, reason, synchronise
from rlft_fast.config import EngineConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine, model_flops, peak_flops
from rlft_fast.engine.memory.engine import USABLE, plan_engine_memory
from rlft_fast.engine.optimizer import build_optimizer, named_parameters
from rlft_fast.engine.sharding import multiply_in_float8, run_in_graphs
from rlft_fast.engine.sharding.build import build_model, shard
from rlft_fast.engine.sharding.mesh import device_memory
from rlft_fast.models.weights import materialize
from rlft_fast.ops import backends
from rlft_fast.rl import PolicyLoss

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512, True),
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
MIN_MFU, MIN_MFU_FROM = 0.45, ("1.5B", "7B")
MICRO_BATCHES = 4
# Kernels by category: the first pattern that is found in a kernel's name decides.
CATEGORIES = {
    "attention": r"flash|fmha|attention|mha_",
    "head": r"frozen_kernel|fused_(grad|odds|stats)|\b_?(stats|grad|target_logits)_kernel",
    "GEMM": r"gemm|cutlass|nvjet|xmma|cublas|splitk|::mm|addmm|bmm",
    "optimizer": r"adam|norm_kernel|multi_tensor|foreach",
    "compiled layers": r"^triton_|cpp_fused",
    "copy and cast": r"memcpy|memset|copy|cast|cat",
    "sums, norms and the rest": r"",
}


class RandomEngine(FSDPEngine):
    """An engine with random weights."""

    def initialize(self) -> RandomEngine:
        self.model = build_model(self.path, self.config, self.head, trains=True)
        multiply_in_float8(self.model, self.config, self.device)
        shard(self.model, self.config, self.world)
        materialize(self.model, self.device)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.02)
        run_in_graphs(self.model, self.config)
        self.optimizer = build_optimizer(named_parameters(self.model), self.config.optimizer)
        return self


def write_config(folder: str, shape: str, num_layers: int) -> str:
    hidden, intermediate, _, heads, kv_heads, vocab, tied = SHAPES[shape]
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": num_layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": tied,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    }  # fmt: skip
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def layers_that_fit(folder: str, shape: str, config: EngineConfig) -> int:
    """The layers of the shape, or as many layers as the plan has room for."""
    usable, num_layers = USABLE * device_memory(DEVICE), SHAPES[shape][2]

    def needed(layers: int) -> int:
        return plan_engine_memory(write_config(folder, shape, layers), config, 1, MICRO_BATCHES).total_bytes

    whole = needed(num_layers)
    per_layer = (whole - needed(num_layers // 2)) / (num_layers - num_layers // 2)
    return num_layers if whole <= usable else num_layers - int(np.ceil((whole - usable) / per_layer))


def random_batch(vocab: int, max_tokens: int) -> Batch:
    """About MICRO_BATCHES micro-batches; a quarter of each sequence is its prompt, and no two prompts are equal."""
    random, lengths = np.random.default_rng(0), []
    while sum(lengths) < 0.97 * MICRO_BATCHES * max_tokens:
        lengths.append(int(np.clip(random.lognormal(np.log(max_tokens / 12), 0.7), 16, max_tokens // 2)))
    tokens = [random.integers(vocab, size=length).tolist() for length in lengths]
    batch = Batch.from_samples([t[: len(t) // 4] for t in tokens], [t[len(t) // 4 :] for t in tokens])
    noise = torch.randn(2, batch.num_tokens)
    return batch.replace(advantage_T=noise[0], old_logprob_T=noise[1] - 12)


def measure(
    shape: str, max_tokens: int, rounds: int, compiled: bool, backend: str, float8: str | None, cuda_graphs: bool
) -> dict[str, Any]:  # fmt: skip
    """Measures in a process that has done nothing else."""
    if backend != "auto":
        backends._automatic = lambda *_: backend
    config = EngineConfig(
        max_tokens=max_tokens, compute_dtype="bfloat16", compile=compiled, float8=float8, cuda_graphs=cuda_graphs
    )
    if shape == "7B":
        config = config.model_copy(update={"activation_checkpointing": "selective"})
    with tempfile.TemporaryDirectory() as folder:
        num_layers = layers_that_fit(folder, shape, config)
        engine = RandomEngine(write_config(folder, shape, num_layers), config, num_training_steps=1000).initialize()
    batch, loss, seconds = random_batch(SHAPES[shape][5], max_tokens), PolicyLoss(), []
    for _ in range(2 + rounds):  # graphs are recorded in the second
        synchronise()
        start = time.perf_counter()
        engine.train_step(batch, loss)
        synchronise()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[2:])
    flops, peak = model_flops(engine.model).of(batch), None if float8 else peak_flops(DEVICE)  # float8 has two peaks
    return {
        "shape": shape, "compiled": compiled, "layers": f"{num_layers} of {SHAPES[shape][2]}",
        "tokens": batch.num_tokens,
        "seconds": median, "tflops": flops / median / 1e12, "mfu": None if peak is None else flops / median / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else None,
        "parts": _parts(profile_step(engine, batch, loss), compiled), **traced(engine, batch, loss),
    }  # fmt: skip


def _parts(parts: dict[str, float], compiled: bool) -> dict[str, float]:
    """Seconds by part. Hooks tell parts apart, and do not see inside of compiled blocks, which are one part then."""
    if not compiled:
        return parts
    inside = ("attention", "MLP", "other layers")
    return {"head": parts["head"], "layers": sum(parts[name] for name in inside)} | {
        name: seconds for name, seconds in parts.items() if name not in (*inside, "head")
    }


def traced(engine: FSDPEngine, batch: Batch, loss: PolicyLoss, count: int = 12) -> dict[str, Any]:
    """Seconds of a step's kernels on the device: all of them by category, and the `count` largest by name."""
    activity = ProfilerActivity.CUDA if DEVICE.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        engine.train_step(batch, loss)
    times = {e.key: (e.self_device_time_total or e.self_cpu_time_total) / 1e6 for e in profiler.key_averages()}
    categories = dict.fromkeys(CATEGORIES, 0.0)
    for name, seconds in times.items():
        categories[category(name)] += seconds
    largest = sorted(times, key=lambda name: times[name], reverse=True)[:count]
    return {"categories": categories, "kernels": [(name, times[name]) for name in largest]}


def category(kernel: str) -> str:
    """The category of a kernel, by its name."""
    return next(name for name, pattern in CATEGORIES.items() if re.search(pattern, kernel, re.IGNORECASE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.5B", "7B", "0.5B"])
    parser.add_argument(
        "--compile", nargs="+", type=int, choices=(0, 1), default=[0, 1], help="blocks as they are, compiled"
    )
    parser.add_argument("--backend", choices=("auto", "native", "triton"), default="auto", help="of the head's kernels")
    parser.add_argument("--float8", help="recipe of the layers' products (default: bfloat16)")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay the backbone's passes")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="engine-gpu", help="of the two files in the output (default: engine-gpu)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for compiled, shape in product(args.compile, args.shapes):
        # A process of its own leaves no memory, no process group and no compiled graph to the next variant.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                variant = (bool(compiled), args.backend, args.float8, args.cuda_graphs)
                done = pool.submit(measure, shape, args.max_tokens, args.rounds, *variant)
                results.append(done.result())
            except Exception as error:
                results.append({"shape": shape, "compiled": bool(compiled), "failed": reason(error)})
        write(results, args.output / args.name)
    print(args.output.joinpath(f"{args.name}.md").read_text())
    bars = () if args.float8 else MIN_MFU_FROM
    low = [shape for shape in bars if shape in args.shapes and best_mfu(results, shape) < MIN_MFU]
    if low:
        print(f"below {MIN_MFU:.0%} MFU: {', '.join(low)}")
    return 1 if low or any("failed" in r for r in results) else 0


def best_mfu(results: list[dict[str, Any]], shape: str) -> float:
    return max(r.get("mfu") or 0 for r in results if r["shape"] == shape)


def write(results: list[dict[str, Any]], path: Path) -> None:
    """Writes `path` with the suffixes .md and .json from the results so far."""
    rows = [
        (f"{r['shape']}{', compiled' if r['compiled'] else ''}", r["layers"], str(r["tokens"]), f"{r['seconds']:.3f}",
         f"{r['tokens'] / r['seconds']:.0f}", f"{r['tflops']:.1f}", "?" if r["mfu"] is None else f"{r['mfu']:.1%}",
         "?" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}")
        for r in results if "failed" not in r
    ]  # fmt: skip
    header = ("shape", "layers", "tokens", "step, s", "tokens / s", "TFLOPS", "MFU", "peak, GiB")
    sections = ["# Utilisation of train_step", "\n".join(f"- {k}: {v}" for k, v in environment().items())]
    sections.append(table(header, rows))
    for r in results:
        sections.append(f"## {r['shape']}{', compiled' if r['compiled'] else ''}")
        if "failed" in r:
            sections.append(f"failed: {r['failed']}")
            continue
        whole = sum(r["parts"].values())
        parts = [(part, f"{s:.3f}", f"{s / whole:.1%}") for part, s in r["parts"].items()]
        on_device = sum(r["categories"].values())
        kinds = [(name, f"{s:.4f}", f"{s / on_device:.1%}") for name, s in r["categories"].items()]
        top = [(name[:80], f"{s:.4f}") for name, s in r["kernels"]]
        sections += [table(("part", "time, s", "share"), parts), table(("kernels", "time, s", "share"), kinds)]
        sections.append(table(("kernel", "time, s"), top))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.md").write_text("\n\n".join(sections) + "\n")
    path.with_name(f"{path.name}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
