"""The reference as a child process that answers cases, with a time limit for when it hangs."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from cases import REPOSITORY

WORKER = Path(__file__).parent / "reference_worker.py"


def reference_python() -> Path:
    """Its interpreter: PASSTIME_REFERENCE_PYTHON, by default what ``make parity`` builds."""
    default = REPOSITORY / ".venv-reference" / "bin" / "python"
    return Path(os.environ.get("PASSTIME_REFERENCE_PYTHON", default))


class Reference:
    """Asks the reference one case after the other; a hung or dead worker is started anew."""

    def __init__(self, *, limit_s: float = 5.0) -> None:
        """``limit_s``: after so long without an answer the reference counts as hung."""
        self._limit_s = limit_s
        self._worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Reference:
        """Start on first use."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the worker."""
        self.stop()

    def ask(self, case: dict[str, Any]) -> dict[str, Any]:
        """Its answer: ok, error, or ``{"status": "hung"}`` / ``{"status": "aborted"}``."""
        if self._worker is None:
            self._worker = subprocess.Popen(
                [str(reference_python()), str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        try:
            self._worker.stdin.write(json.dumps(case).encode() + b"\n")
            self._worker.stdin.flush()
        except BrokenPipeError:
            self.stop()
            return {"status": "aborted"}
        if not select.select([self._worker.stdout], [], [], self._limit_s)[0]:
            self.stop()
            return {"status": "hung"}
        line = self._worker.stdout.readline()
        if not line:
            self.stop()
            return {"status": "aborted"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End the worker, whatever it is doing."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None
