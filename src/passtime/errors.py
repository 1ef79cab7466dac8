"""What can go wrong, one tree.

PasstimeError                   exit code
├── InputError               2  something handed to us is wrong: file, place, found, wanted
│   ├── ConfigError          2  an engine configuration
│   ├── TraceError           2  a trace or a workload's description
│   └── DocumentError        2  a profile, a measurement log, a model shape
├── CommandError             1  a rank refused a command and is as it was (C-15)
├── RunError                 1  it ran and could not finish
│   ├── DeadEndError         1  nothing can advance time while requests wait (R-15)
│   ├── LiveLockError        1  passes follow one another without progress (R-15)
│   ├── ProviderError        1  a timing model failed or answered nonsense (C-43)
│   └── PoisonedError        1  an engine group after such a failure (C-57)
└── DeviceError              3  no suitable device, or it cannot be measured

Asserts are for our own mistakes; these are for everybody else's.
"""

from __future__ import annotations

from typing import ClassVar


class PasstimeError(Exception):
    """Root of the tree; ``exit_code`` is what the command line returns for it."""

    exit_code: ClassVar[int] = 1


class InputError(PasstimeError):
    """Something the user handed over is wrong."""

    exit_code = 2


class ConfigError(InputError):
    """An engine or launch configuration cannot be used (C-1 … C-5)."""


class TraceError(InputError):
    """A trace, or the description of a workload, cannot be used (R-20 … R-35)."""


class DocumentError(InputError):
    """A profile, a measurement log or a model shape cannot be used."""


class CommandError(PasstimeError):
    """A rank refused a command; rank and pending pass are exactly as they were (C-15)."""


class RunError(PasstimeError):
    """A run started and could not finish."""


class DeadEndError(RunError):
    """Nothing can advance simulated time while requests are in flight (R-15)."""


class LiveLockError(RunError):
    """Passes follow one another without output or progress (R-15, V-86)."""


class ProviderError(RunError):
    """A timing model raised, or answered something that is no duration (C-43)."""


class PoisonedError(RunError):
    """An engine group refuses work after a rank failed in mid-pass (C-57)."""


class DeviceError(PasstimeError):
    """No suitable device, or measuring on it is impossible."""

    exit_code = 3
