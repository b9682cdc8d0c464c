"""An engine of vLLM in another process, which answers the requests of any number of threads as they come."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from rlft_fast.world import DaemonThreads


class Stepping:
    """Gives an engine the requests of several threads, and takes its outputs in a thread of its own.

    Args:
        llm: vLLM's ``LLM``, whose engine runs in another process.
    """

    def __init__(self, llm: Any) -> None:
        self._engine, self._numbers = llm.llm_engine, llm.request_counter
        self._asked: dict[str, Future[Any]] = {}
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        _send_one_at_a_time(self._engine.engine_core)
        self._thread = DaemonThreads(1, "vllm")
        self._thread.submit(self._work)

    def outputs_of(self, prompts: Sequence[Any], params: Sequence[Any], adapter: Any = None) -> list[Any]:
        """See `rlft_fast.rollout.vllm.requests.outputs_of`. Raises what the engine has failed with."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        asked: dict[str, Future[Any]] = {}
        try:
            with self._changed:
                for prompt, own in zip(prompts, params, strict=True):
                    if self._failure is not None:
                        raise self._failure
                    name, own.output_kind = str(next(self._numbers)), RequestOutputKind.FINAL_ONLY
                    asked[name] = self._asked[name] = Future()
                    tokens = prompt if "type" in prompt else tokens_input(**prompt)
                    self._engine.add_request(name, tokens, own, lora_request=adapter)
                self._changed.notify_all()
            return [future.result() for future in asked.values()]
        except BaseException:
            for name in asked:
                self._asked.pop(name, None)
            with suppress(Exception):  # an engine that has ended
                self._engine.abort_request([*asked])
            raise

    def close(self) -> None:
        """Ends all calls with an error; after the end of the engine."""
        self._fail(RuntimeError("vLLM is closed"))
        self._thread.close()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            while self._asked:
                self._asked.popitem()[1].set_exception(error)
            self._changed.notify_all()

    def _work(self) -> None:
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._failure)
            try:
                outputs = self._engine.step() if self._failure is None else []
            except Exception as error:
                self._fail(error)
                return
            for output in outputs:
                if output.finished and (future := self._asked.pop(output.request_id, None)) is not None:
                    future.set_result(output)


def _send_one_at_a_time(core: Any) -> None:
    """vLLM's synchronous client (0.32) is made for one thread: two messages at once would mix."""
    send, lock = core._send_input, threading.Lock()

    def locked(*message: Any) -> None:
        with lock:
            send(*message)

    core._send_input = locked
