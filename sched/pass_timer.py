"""One rank's questions to its timing model, checked and rounded (C-43, V-70)."""

from __future__ import annotations

from collections.abc import Callable

from passtime.errors import PasstimeError, ProviderError
from passtime.sched.config import EngineConfig
from passtime.sched.timing import (
    PassModel,
    PassShape,
    TimingModel,
    asks_whole_pass,
    checked_decode_ms,
    checked_prefill_ms,
    contribution_ms,
)


class PassTimer:
    """Durations as they enter the clock: what the model says, over the speed-up ratio."""

    def __init__(self, model: TimingModel, config: EngineConfig) -> None:
        """Ratios and pool size come from ``config``."""
        self.model = model
        self.whole_pass = asks_whole_pass(model)
        self._prefill_ratio = config.speedup_ratio
        self._decode_ratio = config.decode_ratio
        self._total_kv_tokens = config.total_kv_tokens

    def prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """Contribution of the prefill part (C-41)."""
        raw = _ask(
            "prefill", lambda: self.model.predict_prefill_ms(batch_size, mean_isl, mean_prefix)
        )
        return contribution_ms(checked_prefill_ms(raw), self._prefill_ratio)

    def decode_ms(self, batch_size: int, kv_tokens: int) -> float:
        """Contribution of the decode part: ``kv_tokens`` is Σ sequence length (C-42)."""
        raw = _ask(
            "decode",
            lambda: self.model.predict_decode_ms(
                batch_size, kv_tokens, kv_tokens // batch_size, self._total_kv_tokens
            ),
        )
        return contribution_ms(checked_decode_ms(raw), self._decode_ratio)

    def pass_ms(self, shape: PassShape) -> float:
        """Contribution of a whole pass; a pass without work takes no time and asks nothing.

        A pass that prefills is divided by the prefill ratio, a pure decode pass by the decode one.
        """
        if not (shape.prefill_requests or shape.decode_requests):
            return 0.0
        model = self.model
        assert isinstance(model, PassModel)
        raw = _ask("pass", lambda: model.predict_pass_ms(shape))
        ratio = self._prefill_ratio if shape.prefill_requests else self._decode_ratio
        return contribution_ms(checked_decode_ms(raw), ratio)


def _ask(part: str, question: Callable[[], float]) -> float:
    """The model's answer; whatever it raises becomes a ProviderError with its context (C-43)."""
    try:
        return float(question())
    except PasstimeError:
        raise
    except Exception as error:
        raise ProviderError(
            f"external {part} prediction failed: {type(error).__name__}: {error}"
        ) from error
