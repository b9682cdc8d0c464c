"""Times one `train_step` by part, with hooks on the model, the optimizer and `Tensor.backward`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from benchmarks.support.harness import synchronise
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine

PARTS = ("attention", "MLP", "head", "other layers", "optimizer", "host")


class Stopwatch:
    """Adds up the seconds between `start` and `stop` of each name; names may be open at the same time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._since: dict[str, float] = {}

    def start(self, name: str) -> None:
        synchronise()
        self._since[name] = time.perf_counter()

    def stop(self, name: str) -> None:
        synchronise()
        if name in self._since:
            self.seconds[name] += time.perf_counter() - self._since.pop(name)


def profile_step(engine: FSDPEngine, batch: Batch, loss: Any) -> dict[str, float]:
    """Seconds of one train_step by part; they add up to the whole.

    Parts are `PARTS`. Attention and MLP include their projections, forward and backward. The head includes its loss.
    "other layers" is the rest of the model's forward and backward (embedding, norms, residuals). The optimizer begins
    at the end of backward and includes the gradient norm. The host is everything else: planning, selecting and copying
    inputs, computing and reading the loss's metrics.
    """
    watch = Stopwatch()
    with _watched(engine, watch):
        watch.start("step")
        engine.train_step(batch, loss)
        watch.stop("step")
    seconds = watch.seconds
    model = seconds["forward"] + seconds["backward"]
    parts = {name: seconds[name] for name in ("attention", "MLP", "head")}
    parts["other layers"] = model - sum(parts.values())
    parts["optimizer"] = seconds["optimizer"]
    return parts | {"host": seconds["step"] - model - seconds["optimizer"]}


@contextmanager
def _watched(engine: FSDPEngine, watch: Stopwatch) -> Iterator[None]:
    handles = [
        engine.model.register_forward_pre_hook(lambda *_: watch.start("forward")),
        engine.model.register_forward_hook(lambda *_: watch.stop("forward")),
        engine.optimizer.register_step_post_hook(lambda *_: watch.stop("optimizer")),
    ]
    for module, part in _parts(engine.model):
        handles.append(module.register_forward_pre_hook(lambda *_, part=part: watch.start(part)))
        handles.append(module.register_forward_hook(_stop_and_watch_backward(watch, part), with_kwargs=True))
    backward = Tensor.backward

    def timed_backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        watch.start("backward")
        backward(self, *args, **kwargs)
        watch.stop("backward")
        watch.start("optimizer")  # every micro-batch restarts it; only the last start counts

    Tensor.backward = timed_backward
    try:
        yield
    finally:
        Tensor.backward = backward
        for handle in handles:
            handle.remove()


def _parts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    names = {"self_attn": "attention", "mlp": "MLP"}
    blocks = [(m, names[name.rpartition(".")[2]]) for name, m in model.named_modules() if name.endswith((*names,))]
    return [*blocks, (model.head, "head")]


def _stop_and_watch_backward(watch: Stopwatch, part: str) -> Callable[..., None]:
    """A module's backward begins with the gradient of its output, and ends with the gradient of its input."""

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        watch.stop(part)
        given = args[0] if args else kwargs["hidden_states"]
        returned = output[0] if isinstance(output, tuple) else output
        if returned.requires_grad and given.requires_grad:
            returned.register_hook(lambda _: watch.start(part))
            given.register_hook(lambda _: watch.stop(part))

    return hook
