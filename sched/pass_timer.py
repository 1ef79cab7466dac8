"""One rank's questions to its timing model, checked and rounded (C-43, V-70)."""

from __future__ import annotations

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
        self.prefill_ratio = config.speedup_ratio
        self.decode_ratio = config.decode_ratio
        self.total_kv_tokens = config.total_kv_tokens

    def prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """Contribution of the prefill part (C-41)."""
        try:
            raw = float(self.model.predict_prefill_ms(batch_size, mean_isl, mean_prefix))
        except PasstimeError:
            raise
        except Exception as error:
            raise provider_error("prefill", error) from error
        return contribution_ms(checked_prefill_ms(raw), self.prefill_ratio)

    def decode_ms(self, batch_size: int, kv_tokens: int) -> float:
        """Contribution of the decode part: ``kv_tokens`` is Σ sequence length (C-42)."""
        try:
            raw = float(
                self.model.predict_decode_ms(
                    batch_size, kv_tokens, kv_tokens // batch_size, self.total_kv_tokens
                )
            )
        except PasstimeError:
            raise
        except Exception as error:
            raise provider_error("decode", error) from error
        return contribution_ms(checked_decode_ms(raw), self.decode_ratio)

    def pass_ms(self, shape: PassShape) -> float:
        """Contribution of a whole pass; a pass without work takes no time and asks nothing.

        A pass that prefills is divided by the prefill ratio, a pure decode pass by the decode one.
        """
        if not (shape.prefill_requests or shape.decode_requests):
            return 0.0
        model = self.model
        assert isinstance(model, PassModel)
        try:
            raw = float(model.predict_pass_ms(shape))
        except PasstimeError:
            raise
        except Exception as error:
            raise provider_error("pass", error) from error
        ratio = self.prefill_ratio if shape.prefill_requests else self.decode_ratio
        return contribution_ms(checked_decode_ms(raw), ratio)


def provider_error(part: str, error: Exception) -> ProviderError:
    """What a model raised, with the part of the pass it was asked about (C-43)."""
    return ProviderError(f"external {part} prediction failed: {type(error).__name__}: {error}")
