"""Where kernels run in tests: in Triton's interpreter on the CPU, or on a GPU, never both at once.

``triton.jit`` decides at import, by TRITON_INTERPRET, what a kernel becomes. A plain pytest run
compiles kernels (and runs them where there is a GPU); ``test_interpreter.py`` starts a second
pytest with the interpreter over ``numerics/``, so the same checks hold in both places.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

MISSING = [name for name in ("torch", "triton") if find_spec(name) is None]
collect_ignore_glob = ["test_compiled.py", "test_plans.py", "numerics/*"] if MISSING else []

if not MISSING:
    import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_report_header() -> list[str]:
    if not MISSING:
        return []
    return [f"kernels: NOT TESTED, {' and '.join(MISSING)} are not installed"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        device = "cpu" if INTERPRETED else pytest.param("cuda", marks=pytest.mark.gpu)
        metafunc.parametrize("device", [device], indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where to run: skipped where that is a GPU and there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


@pytest.fixture(scope="session", autouse=INTERPRETED)
def mended_interpreter() -> Iterator[None]:
    """Mend two faults of the interpreter, here, so that the kernels need no special case.

    It keeps bf16 as bit patterns and multiplies those (the products are exact in float32); and
    rounding up to e4m3 loses the carry into the exponent (124 becomes 64).
    """
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot, convert_float = (
        interpreter.InterpreterBuilder.create_dot,
        interpreter._convert_float,
    )

    def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def mended_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    def mended_convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert_float(data, source, target, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", mended_dot)
        patch.setattr(interpreter, "_convert_float", mended_convert)
        yield
