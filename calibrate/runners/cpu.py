"""The CPU as a device: a NumPy transformer in a process of its own, one core, thread CPU time.

A process of its own because the number of BLAS threads can only be set before NumPy is loaded,
and because it can be killed without harm to the measurement. What is measured is CPU time of one
core, not latency: other load on the machine stretches the wall clock, not this.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import passtime
from passtime.calibrate.clock import CPU_POLICY, Telemetry
from passtime.calibrate.log import Batch
from passtime.calibrate.plan import Plan, pool_tokens
from passtime.calibrate.runners import OutOfDeviceMemory, RunnerFailed
from passtime.calibrate.runners.protocol import (
    Ran,
    Ready,
    Refused,
    Reply,
    Request,
    Run,
    Setup,
    framed,
    read_frame,
)
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import BYTES, ModelShape

ONE_THREAD = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
CLOCK = CPU_POLICY
DEFAULT_MODEL = "tiny"
DEFAULT_BUDGET_S = 30.0

MAX_PROCESS_PER_THREAD = 1.05
ANSWER_TIMEOUT_S = 120.0

POLICY: Mapping[str, Any] = {
    "runner": "NumPy transformer, one core",
    "attention": "causal",
    "clock": "thread_cpu",
    "dtype": "float32",
    "threads": 1,
}


def computed_model(model: ModelShape) -> ModelShape:
    """The shape that is really run: whatever its dtypes say, NumPy computes in float32."""
    return msgspec.structs.replace(model, dtype="float32", linear_dtype=None, kv_dtype=None)


def visit_s(model: ModelShape, pass_s: float) -> float:
    """Seconds of a visit: there is nothing to make ready."""
    return CLOCK.visit_s(pass_s)


def memory_bytes(model: ModelShape, batch: Batch) -> int:
    """Weights, KV pool and activations of a pass, in float32; exact but for the allocator."""
    shape = computed_model(model)
    new_tokens = sum(new for new, _ in batch.prefill) + len(batch.decode)
    kv_tokens = pool_tokens(batch)
    width = 3 * shape.hidden_size + 2 * shape.query_size
    if shape.moe is not None:
        width += shape.moe.experts_per_token * 3 * shape.moe.expert_ffn_size
    rotations = kv_tokens * shape.head_dim
    activations = new_tokens * width + (len(batch.prefill) + len(batch.decode)) * shape.vocab_size
    floats = (activations + rotations) * BYTES["float32"]
    return shape.weight_bytes + kv_tokens * shape.kv_bytes_per_token + floats


def open_runner(*, facts: DeviceFacts, model: ModelShape, plan: Plan, seed: int) -> CpuRunner:
    """A runner whose pool holds the plan's largest batch."""
    kv_tokens = max(map(pool_tokens, plan.batches))
    return CpuRunner(facts=facts, model=model, kv_tokens=kv_tokens, seed=seed)


class CpuRunner:
    """Runs passes in the measuring process; see :class:`passtime.calibrate.runners.Runner`."""

    def __init__(
        self, *, facts: DeviceFacts, model: ModelShape, kv_tokens: int, seed: int = 0
    ) -> None:
        """Start the process with a KV pool of ``kv_tokens``; RunnerFailed if it does not come up.

        ``limited`` tells whether BLAS really keeps to one thread.
        """
        self.facts = facts
        self.model = computed_model(model)
        self.policy = POLICY
        self.kernel_hash: str | None = None
        self._process = _start_process()
        self._batch: Batch | None = None
        try:
            ready = self._ask(Setup(model=self.model, kv_tokens=kv_tokens, seed=seed))
        except BaseException:
            self.close()
            raise
        assert isinstance(ready, Ready)
        self.software: Mapping[str, Any] = {**ready.software, "passtime": passtime.__version__}
        self.process_per_thread = ready.process_per_thread

    @property
    def limited(self) -> bool:
        """Whether the thread that is timed does all the work."""
        return self.process_per_thread <= MAX_PROCESS_PER_THREAD

    @property
    def pid(self) -> int:
        """The measuring process."""
        return self._process.pid

    def memory_bytes(self, batch: Batch) -> int:
        """Memory that the batch needs, weights included."""
        return memory_bytes(self.model, batch)

    def prepare(self, batch: Batch) -> Batch:
        """Nothing to make ready: inputs are drawn in the measuring process, untimed."""
        return batch

    def release(self, work: Batch) -> None:
        """Nothing was taken."""

    def facts_of(self, work: Batch) -> Mapping[str, Any]:
        """Nothing beside the times."""
        return {}

    def checks(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """None beside the one for threads, made when the process starts."""
        return iter(())

    def empty(self) -> None:
        """A function call: no launch to speak of."""

    def replay(self, work: Batch, inner: int) -> float:
        """CPU seconds of ``inner`` passes, one after the other."""
        reply = self._ask(Run(batch=work, inner=inner))
        assert isinstance(reply, Ran)
        return reply.thread_s

    def telemetry(self) -> Telemetry:
        """Nothing is known of the core's clock; too many threads are worth a flag."""
        return Telemetry(flags=() if self.limited else ("threads",))

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let other work pass."""
        time.sleep(seconds)

    def close(self) -> None:
        """End the process: it stops by itself when its input ends, at the latest after a pass."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ask(self, request: Request) -> Reply:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(framed(request))
            process.stdin.flush()
            answering, _, _ = select.select([process.stdout], [], [], ANSWER_TIMEOUT_S)
        except (BrokenPipeError, ValueError):
            raise RunnerFailed(self._how_it_ended()) from None
        if not answering:
            process.kill()
            raise RunnerFailed(f"the measuring process gave no answer in {ANSWER_TIMEOUT_S:.0f} s")
        body = read_frame(process.stdout)
        if body is None:
            raise RunnerFailed(self._how_it_ended())
        reply = msgspec.msgpack.decode(body, type=Ready | Ran | Refused)
        if isinstance(reply, Refused):
            raise OutOfDeviceMemory(reply.message)
        return reply

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "the measuring process closed its pipe"
        if status < 0:
            return f"the measuring process was ended by signal {-status}"
        return f"the measuring process ended with status {status}"


def _start_process() -> subprocess.Popen[bytes]:
    home = str(Path(passtime.__file__).resolve().parent.parent)
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **dict.fromkeys(ONE_THREAD, "1"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    # -P: the folder we are started in may hold a sched/ or numpy/ of its own.
    command = [sys.executable, "-P", "-m", "passtime.calibrate.runners.cpu_worker"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        process_group=0,  # Ctrl-C reaches the parent alone, also while NumPy is being imported
    )
