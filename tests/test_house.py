"""The house rules: four links, who may import whom, what a light install loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
LAYERS = ("calibrate", "kernels", "profiles", "sched")

# Who may import whom among the layers; everybody may import passtime.errors.
ALLOWED = {
    "sched": {"sched"},
    "profiles": {"profiles", "sched"},
    "kernels": {"kernels", "profiles", "calibrate.log"},
    "calibrate": {"calibrate", "kernels", "profiles", "sched"},
}
HEAVY = {"torch", "triton"}


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not used here"
            assert node.module is not None
            yield node.module


@pytest.mark.parametrize("name", LAYERS)
def test_link_resolves_to_its_folder(name: str) -> None:
    link = REPOSITORY / "src" / "passtime" / name
    assert link.is_symlink()
    assert link.resolve() == REPOSITORY / name


def test_standard_library_keeps_its_own_sched(tmp_path: Path) -> None:
    code = "import sched; print(hasattr(sched, 'scheduler'))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout == "True\n"


@pytest.mark.parametrize("layer", LAYERS)
def test_arrows_point_down(layer: str) -> None:
    for path in sorted((REPOSITORY / layer).rglob("*.py")):
        for name in imports_of(path):
            top, _, rest = name.partition(".")
            if top != "passtime" or not rest or rest == "errors":
                assert not (layer in ("sched", "profiles") and top in HEAVY), f"{path}: {name}"
                assert top not in LAYERS or top == "sched" == name, f"{path}: {name}"
                continue
            assert any(
                rest == allowed or rest.startswith(f"{allowed}.") for allowed in ALLOWED[layer]
            ), f"{path}: {layer} may not import {name}"


def test_profiles_know_only_the_timing_door_of_sched() -> None:
    for path in sorted((REPOSITORY / "profiles").rglob("*.py")):
        known = {name for name in imports_of(path) if name.startswith("passtime.sched")}
        assert known <= {"passtime.sched.timing"}, f"{path}: {known}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("passtime.sched.simulate", ("scipy", "rich", "torch", "triton", "matplotlib")),
        ("passtime.profiles.provider", ("scipy.optimize", "rich", "torch", "triton")),
        ("passtime.cli", ("scipy", "torch", "triton", "matplotlib")),
    ],
)
def test_importing_is_light(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
