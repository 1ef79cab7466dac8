"""The optional compiled build: ``PASSTIME_COMPILE=1 pip install .`` compiles the lock-step core.

The sources are the same and so are the results; mypyc turns the typed classes of
``sched/lockstep/`` into C. Needs a C compiler; without the variable the build is pure Python.
"""

import os
from pathlib import Path

from setuptools import setup

if os.environ.get("PASSTIME_COMPILE") == "1":
    from mypyc.build import mypycify

    modules = sorted(
        str(path)
        for path in Path("src/passtime/sched/lockstep").glob("*.py")
        if path.name != "__init__.py"
    )
    options = ["--strict", "--follow-imports=silent", "--ignore-missing-imports"]
    setup(ext_modules=mypycify([*options, *modules], opt_level="3"))
else:
    setup()
