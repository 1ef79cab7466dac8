"""The measuring process of the CPU: builds the transformer, runs batches, reports thread time.

Started by :mod:`passtime.calibrate.runners.cpu` with one BLAS thread. It lives as long as its
standard input: a parent that dies, however it dies, takes it along.
"""

from __future__ import annotations

import gc
import os
import platform
import signal
import sys
import time
from typing import Any

import msgspec
import numpy as np

from passtime.calibrate.log import Batch
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
from passtime.calibrate.runners.transformer import Segment, Transformer

GEMM_SIZE = 1024  # about 20 ms to 50 ms on one core


def main() -> int:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; parent decides
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a stray print must not break a message
    gc.disable()
    worker = Worker()
    decoder = msgspec.msgpack.Decoder(Setup | Run)
    while (body := read_frame(sys.stdin.buffer)) is not None:
        try:
            replies.write(framed(worker.answer(decoder.decode(body))))
            replies.flush()
        except BrokenPipeError:
            break
    return 0


class Worker:
    """Holds the model between requests."""

    def __init__(self) -> None:
        """Empty until the first request."""
        self._transformer: Transformer | None = None
        self._rng = np.random.default_rng()

    def answer(self, request: Request) -> Reply:
        """Do what is asked; running out of memory is an answer too."""
        try:
            match request:
                case Setup():
                    return self._set_up(request)
                case Run():
                    return self._run(request)
        except MemoryError as error:
            return Refused(out_of_memory=True, message=str(error) or "out of memory")

    def _set_up(self, request: Setup) -> Ready:
        self._transformer = Transformer(
            request.model, kv_tokens=request.kv_tokens, seed=request.seed
        )
        self._rng = np.random.default_rng(request.seed)
        return Ready(software=software(), process_per_thread=process_per_thread())

    def _run(self, request: Run) -> Reply:
        transformer = self._transformer
        assert transformer is not None, "Setup comes first"
        segments = segments_of(request.batch)
        if segments[-1].end > transformer.kv_tokens:
            message = f"{segments[-1].end} KV tokens wanted, the pool has {transformer.kv_tokens}"
            return Refused(out_of_memory=True, message=message)
        new_tokens = sum(segment.new for segment in segments)
        token_ids = self._rng.integers(0, transformer.shape.vocab_size, new_tokens)
        started_ns = time.thread_time_ns()
        for _ in range(request.inner):
            transformer.forward(token_ids, segments)
        return Ran(thread_s=(time.thread_time_ns() - started_ns) / 1e9)


def segments_of(batch: Batch) -> list[Segment]:
    """Prompt chunks, then decoding requests, side by side in the pool: nobody shares KV."""
    shares = [(new, prefix) for new, prefix in batch.prefill] + [(1, kv) for kv in batch.decode]
    segments: list[Segment] = []
    start = 0
    for new, prefix in shares:
        segments.append(Segment(start=start, prefix=prefix, new=new))
        start = segments[-1].end
    return segments


def process_per_thread() -> float:
    """CPU time of the process over that of this thread, during matrix products."""
    square = np.ones((GEMM_SIZE, GEMM_SIZE), dtype=np.float32)
    product = square @ square
    process_ns, thread_ns = time.process_time_ns(), time.thread_time_ns()
    np.matmul(square, square, out=product)
    thread_ns = time.thread_time_ns() - thread_ns
    return (time.process_time_ns() - process_ns) / thread_ns


def software() -> dict[str, Any]:
    """Versions that the times depend on."""
    config: dict[str, Any] = np.show_config(mode="dicts")  # type: ignore[assignment]
    blas = config.get("Build Dependencies", {}).get("blas", {})
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
        "blas_core": os.environ.get("OPENBLAS_CORETYPE"),
    }


if __name__ == "__main__":
    sys.exit(main())
