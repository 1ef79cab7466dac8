"""How long passes take: one question per pass, or one for a stretch of passes (C-43, V-70)."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from itertools import accumulate, repeat

import numpy as np

from passtime.errors import PasstimeError
from passtime.sched.config import EngineConfig
from passtime.sched.pass_timer import PassTimer, provider_error
from passtime.sched.timing import (
    EXACT_NS,
    DecodeStretchModel,
    FixedTiming,
    FloatArray,
    PassShape,
    PolynomialTiming,
    TimingModel,
    checked_decode_ms,
    contribution_ms,
)

_FEW_PASSES = 40  # below, a loop of scalar questions is quicker than one of arrays
_MANY_PASSES = 128  # from here on an array is quicker than a loop of additions


def durations(model: TimingModel, config: EngineConfig) -> Durations:
    """The durations of a rank's passes by ``model``."""
    if type(model) is FixedTiming:
        return FixedDurations(model, config)
    return Durations(model, config)


class Durations(PassTimer):
    """What a model says; each executed pass is asked about exactly once, and no other is."""

    def __init__(self, model: TimingModel, config: EngineConfig) -> None:
        """Ratios and pool size come from ``config``."""
        super().__init__(model, config)
        self._answers_many = isinstance(model, DecodeStretchModel)
        # nobody counts the questions to a built-in model: it may be asked too much
        self._may_ask_more = type(model) is PolynomialTiming
        self._predict_decode_ms = model.predict_decode_ms

    def decode_ms(self, batch_size: int, kv_tokens: int) -> float:
        """As in ``PassTimer``."""
        context, total = kv_tokens // batch_size, self.total_kv_tokens
        try:
            raw = float(self._predict_decode_ms(batch_size, kv_tokens, context, total))
        except PasstimeError:
            raise
        except Exception as error:
            raise provider_error("decode", error) from error
        return quick_contribution_ms(raw, self.decode_ratio)

    def decode_stretch(
        self,
        ends_ms: array[float],
        now_ms: float,
        batch: int,
        kv_tokens: int,
        passes: int,
        cut_ms: float,
    ) -> None:
        """Append to ``ends_ms`` the ends of up to ``passes`` decode passes of one batch.

        They start at ``now_ms``; ``kv_tokens`` is that of the first (C-42). The first pass to end
        at ``cut_ms`` or later is the last. If the model fails, the passes before are there.
        """
        if passes >= _FEW_PASSES and self._answers_many:
            if cut_ms == math.inf:
                self._extend(ends_ms, now_ms, batch, kv_tokens, passes)
                return
            if self._may_ask_more:
                self._extend_to(ends_ms, now_ms, batch, kv_tokens, passes, cut_ms)
                return
        predict, total, ratio = self._predict_decode_ms, self.total_kv_tokens, self.decode_ratio
        try:
            for tokens in range(kv_tokens, kv_tokens + passes * batch, batch):
                raw = float(predict(batch, tokens, tokens // batch, total))
                now_ms += quick_contribution_ms(raw, ratio)
                ends_ms.append(now_ms)
                if now_ms >= cut_ms:
                    return
        except PasstimeError:
            raise
        except Exception as error:
            raise provider_error("decode", error) from error

    def whole_pass_stretch(
        self, ends_ms: array[float], now_ms: float, shape: PassShape, passes: int, cut_ms: float
    ) -> None:
        """As :meth:`decode_stretch`, for a model that is asked about whole passes.

        ``shape`` is that of the first pass.
        """
        for step in range(passes):
            grown = shape._replace(
                decode_kv_tokens=shape.decode_kv_tokens + step * shape.decode_requests,
                decode_kv_max=shape.decode_kv_max + step,
            )
            now_ms += self.pass_ms(grown)
            ends_ms.append(now_ms)
            if now_ms >= cut_ms:
                return

    def _extend(
        self, ends_ms: array[float], now_ms: float, batch: int, kv_tokens: int, passes: int
    ) -> None:
        """Ask about all passes at once."""
        model = self.model
        assert isinstance(model, DecodeStretchModel)
        kv = np.arange(kv_tokens, kv_tokens + passes * batch, batch)
        try:
            answer = model.predict_decode_many(batch, kv, self.total_kv_tokens)
            raw = np.array(answer, dtype=np.float64)
        except PasstimeError:
            raise
        except Exception as error:
            raise provider_error("decode", error) from error
        fine = np.isfinite(raw) & (raw >= 0.0)
        good = passes if fine.all() else int(np.argmin(fine))
        steps = contributions_ms(raw[:good], self.decode_ratio)
        if good:
            steps[0] += now_ms
            np.add.accumulate(steps, out=steps)  # one after the other, as a clock adds
            ends_ms.frombytes(steps.tobytes())
        if good < passes:
            checked_decode_ms(float(raw[good]))

    def _extend_to(
        self,
        ends_ms: array[float],
        now_ms: float,
        batch: int,
        kv_tokens: int,
        passes: int,
        cut_ms: float,
    ) -> None:
        """Ask in growing pieces until ``cut_ms`` is reached."""
        start, piece = len(ends_ms), _FEW_PASSES
        while passes:
            piece = min(2 * piece, passes)
            self._extend(ends_ms, now_ms, batch, kv_tokens, piece)
            now_ms = ends_ms[-1]
            if now_ms >= cut_ms:
                break
            kv_tokens += piece * batch
            passes -= piece
        _cut(ends_ms, start, cut_ms)


class FixedDurations(Durations):
    """Two constants: nobody is asked."""

    def __init__(self, model: FixedTiming, config: EngineConfig) -> None:
        """Both contributions are rounded once."""
        super().__init__(model, config)
        self._prefill_ms = contribution_ms(model.prefill_ms, self.prefill_ratio)
        self._decode_ms = contribution_ms(model.decode_ms, self.decode_ratio)

    def prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """The prefill constant."""
        return self._prefill_ms

    def decode_ms(self, batch_size: int, kv_tokens: int) -> float:
        """The decode constant."""
        return self._decode_ms

    def decode_stretch(
        self,
        ends_ms: array[float],
        now_ms: float,
        batch: int,
        kv_tokens: int,
        passes: int,
        cut_ms: float,
    ) -> None:
        """The decode constant, added again and again."""
        step_ms = self._decode_ms
        cuts = cut_ms != math.inf
        if cuts and step_ms > 0:
            passes = min(passes, max(1, int((cut_ms - now_ms) / step_ms) + 2))
        if passes < _FEW_PASSES:
            for _ in range(passes):
                now_ms += step_ms
                ends_ms.append(now_ms)
                if now_ms >= cut_ms:
                    return
            return
        start = len(ends_ms)
        if passes < _MANY_PASSES:
            sums = accumulate(repeat(step_ms, passes), initial=now_ms)
            next(sums)
            ends_ms.extend(sums)
        else:
            steps = np.full(passes, step_ms)
            steps[0] += now_ms
            np.add.accumulate(steps, out=steps)
            ends_ms.frombytes(steps.tobytes())
        if cuts:
            _cut(ends_ms, start, cut_ms)


def quick_contribution_ms(raw_ms: float, ratio: float) -> float:
    """``contribution_ms`` of a raw decode time that is checked first.

    One below a second is rounded on the spot: nearly every pass comes here, and here it is
    compiled with the core.
    """
    if ratio == 1.0 and 0.0 <= raw_ms < 1000.0:
        nanoseconds = raw_ms / 1000.0 * 1e9
        nearest = float(int(nanoseconds + 0.5))
        if -0.4999 <= nanoseconds - nearest <= 0.4999:
            return nearest / 1e9 * 1000.0
    return contribution_ms(checked_decode_ms(raw_ms), ratio)


def _cut(ends_ms: array[float], start: int, cut_ms: float) -> None:
    """Drop what comes after the first entry from ``start`` on that is at ``cut_ms`` or later."""
    del ends_ms[bisect_left(ends_ms, cut_ms, start) + 1 :]


def contributions_ms(raw_ms: FloatArray, ratio: float) -> FloatArray:
    """``contribution_ms`` of every entry, bit for bit.

    Up to 2**50 ns the conversions back and forth return the nanoseconds they started from, so
    only the first rounding and that of the division can change a value. Entries close to a tie,
    or larger, take the scalar way.
    """
    exact, nanoseconds = _rounded_ns(raw_ms / 1000.0)
    if ratio not in (0.0, 1.0):
        divided_exactly, divided = _rounded_ns(_seconds(nanoseconds) / ratio)
        exact &= divided_exactly
        nanoseconds = divided
    contributions: FloatArray = _seconds(nanoseconds) * 1000.0
    for index in np.flatnonzero(~exact).tolist():
        contributions[index] = contribution_ms(float(raw_ms[index]), ratio)
    return contributions


def _rounded_ns(seconds: FloatArray) -> tuple[np.ndarray, FloatArray]:
    """Which entries are surely rounded right, and whole nanoseconds."""
    nanoseconds = seconds * 1e9
    nearest = np.rint(nanoseconds)
    exact = (nanoseconds < EXACT_NS) & (np.abs(nanoseconds - nearest) <= 0.4999)
    return exact, nearest


def _seconds(nanoseconds: FloatArray) -> FloatArray:
    whole = np.floor(nanoseconds / 1e9)
    seconds: FloatArray = whole + (nanoseconds - whole * 1e9) / 1e9
    return seconds
