"""Is this table physically possible? Run before every fit, and as a command.

Published tables have implied 20 TB/s on a 3.35 TB/s card, held sums over repeats as if they were
one call, or been copies of one another. Each rule here would have caught one of these; each finding
says what was expected, what was found, and where.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from passtime.calibrate.laws import Bench, unphysical
from passtime.calibrate.points import columns, latencies, sigmas
from passtime.profiles.document import MeasuredPoint, Profile
from passtime.profiles.law import Work
from passtime.profiles.predict import PassColumns
from passtime.sched.timing import FloatArray

Severity: TypeAlias = Literal["fault", "warning"]

PEAK_TOLERANCE = 1.05  # clocks above the nominal boost, rounding of the table
COLD_BYTES = 200e6  # rows that move less may run out of a cache
MAX_ABOVE_PEAK = 0.01  # share of rows that may be glitches
THOUSANDFOLD = 1 / 300.0  # of a peak: no kernel is that slow on its largest row
DROP = 0.10  # more work, this much less time
MAX_DROPS = 0.20  # share of steps
MIN_STEPS = 20  # fewer steps say nothing about a table as a whole
NOISES = 3.0  # a drop within so many standard errors of the two points is noise
GLITCH = 1.8  # off its neighbours on both sides by this factor
MAX_SPREAD_PERCENT = 10.0
OTHER_SCALE = 1.25  # median ratio between two measurements of the same shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule that was broken. A fault refuses the table, a warning is to be looked at."""

    rule: str
    severity: Severity
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What every row implies, per second of its time."""

    flops: FloatArray
    bytes_per_s: FloatArray
    bytes_moved: FloatArray


def check_points(
    points: Sequence[MeasuredPoint],
    bench: Bench | None,
    *,
    lines: Sequence[int] | None = None,
    reference: Sequence[MeasuredPoint] = (),
) -> list[Finding]:
    """All rules that the given facts allow.

    ``bench`` is None where the model is unknown: then the datasheet's rules are left out, and a
    warning says so. ``lines`` are the points' lines in their file; ``reference`` holds other
    measurements of some of the same shapes.
    """
    where = [f"line {line}" for line in lines or ()] or [f"point {n}" for n in range(len(points))]
    findings = []
    if bench is None:
        findings.append(
            Finding(
                rule="datasheet",
                severity="warning",
                message="model unknown: rates were not compared with any datasheet",
            )
        )
    else:
        findings += _datasheet(points, bench, where)
    findings += _monotone(points, where)
    findings += _outliers(points, where)
    findings += _spread(points)
    findings += _duplicates(points, where)
    findings += _other_scale(points, reference)
    return findings


def check_profile(profile: Profile) -> list[Finding]:
    """Coefficients against the device's peaks, and the profile's own points."""
    bench = Bench(
        model=profile.model,
        engine=profile.engine,
        device=profile.device,
        model_class=profile.model_class,
    )
    findings = [
        Finding(rule="coefficients", severity="fault", message=fault)
        for fault in unphysical(profile.coefficients, bench)
    ]
    return findings + check_points(profile.points, bench)


def implied_rates(points: Sequence[MeasuredPoint], work: Work) -> Rates:
    """Least work over time: every weight once, every cached key and value once."""
    passes, seconds = columns(points), latencies(points) / 1e3
    moved = _least_bytes(passes, work)
    pairs = passes.prefill_pairs + passes.decode_kv_tokens
    tokens = passes.prefill_new_tokens + passes.decode_requests
    flops = tokens * work.flops_per_token + pairs * work.flops_per_pair
    return Rates(flops=flops / seconds, bytes_per_s=moved / seconds, bytes_moved=moved)


def _least_bytes(passes: PassColumns, work: Work) -> FloatArray:
    cached = passes.decode_kv_tokens + passes.prefill_prefix_tokens
    return work.weight_bytes + cached * work.kv_bytes_per_token


def _datasheet(
    points: Sequence[MeasuredPoint], bench: Bench, where: Sequence[str]
) -> list[Finding]:
    device, rates = bench.device, implied_rates(points, bench.work)
    peak_flops, peak_bytes = device.peak_flops, device.peak_bytes_per_s
    if not peak_flops or not peak_bytes:
        return []
    if bench.model.linear_dtype == "float8_e4m3":
        peak_flops *= 2.0
    findings = []
    cold = rates.bytes_moved > max(COLD_BYTES, 4.0 * (device.l2_bytes or 0))
    for rule, rate, peak, unit, rows in (
        ("bandwidth", rates.bytes_per_s, peak_bytes, "byte/s", cold),
        ("compute", rates.flops, peak_flops, "FLOP/s", np.ones(len(points), dtype=bool)),
    ):
        above = rows & (rate > PEAK_TOLERANCE * peak)
        if above.sum() > MAX_ABOVE_PEAK * max(rows.sum(), 1):
            worst = int(np.argmax(np.where(rows, rate, 0.0)))
            findings.append(
                Finding(
                    rule=rule,
                    severity="fault",
                    message=f"{int(above.sum())} of {int(rows.sum())} rows imply more than the "
                    f"{peak:.3g} {unit} of a {device.name}; the worst ({where[worst]}) "
                    f"{rate[worst]:.3g} {unit}, {rate[worst] / peak:.1f} times the peak",
                )
            )
    best = max(
        float((rates.flops / peak_flops).max()), float((rates.bytes_per_s / peak_bytes).max())
    )
    if best < THOUSANDFOLD or best > 1.0 / THOUSANDFOLD:
        scale = "large (µs read as ms?)" if best < THOUSANDFOLD else "small (s read as ms?)"
        findings.append(
            Finding(
                rule="unit",
                severity="fault",
                message=f"the best row reaches {best:.2g} of the device's peaks: times look a "
                f"thousand times too {scale}",
            )
        )
    return findings


def _monotone(points: Sequence[MeasuredPoint], where: Sequence[str]) -> list[Finding]:
    """Along every axis, more work with clearly less time."""
    steps, drops, worst, at = 0, 0, 0.0, ""
    noise = sigmas(points)
    for line in _lines(points):
        for first, second in pairwise(line):
            steps += 1
            fall = 1.0 - points[second].latency_ms / points[first].latency_ms
            if fall > DROP + NOISES * float(np.hypot(noise[first], noise[second])):
                drops += 1
                if fall > worst:
                    worst, at = fall, f"{where[first]} to {where[second]}"
    if not drops:
        return []
    share = drops / steps
    return [
        Finding(
            rule="monotone",
            severity="fault" if steps >= MIN_STEPS and share > MAX_DROPS else "warning",
            message=f"{drops} of {steps} steps to more work take over {DROP:.0%} less time; the "
            f"worst ({at}) {worst:.0%} less",
        )
    ]


def _outliers(points: Sequence[MeasuredPoint], where: Sequence[str]) -> list[Finding]:
    """Points off both their neighbours, on every axis that has neighbours on both sides."""
    judged: defaultdict[int, list[bool]] = defaultdict(list)
    for line in _lines(points):
        for before, here, after in zip(line, line[1:], line[2:], strict=False):
            middle = (points[before].latency_ms * points[after].latency_ms) ** 0.5
            ratio = points[here].latency_ms / middle
            low, high = sorted((points[before].latency_ms, points[after].latency_ms))
            outside = not low <= points[here].latency_ms <= high
            judged[here].append(outside and not 1 / GLITCH < ratio < GLITCH)
    glitches = [index for index, axes in sorted(judged.items()) if all(axes)]
    if not glitches:
        return []
    shown = ", ".join(where[index] for index in glitches[:5])
    return [
        Finding(
            rule="outlier",
            severity="warning",
            message=f"{len(glitches)} isolated outliers, over {GLITCH} times off their "
            f"neighbours on every axis: {shown}{' …' if len(glitches) > 5 else ''}",
        )
    ]


def _spread(points: Sequence[MeasuredPoint]) -> list[Finding]:
    spreads = [point.spread_percent for point in points if point.spread_percent is not None]
    if not spreads or (median := float(np.median(spreads))) <= MAX_SPREAD_PERCENT:
        return []
    return [
        Finding(
            rule="spread",
            severity="warning",
            message=f"repeats of a point deviate by {median:.1f} % (median): no fit can be better",
        )
    ]


def _duplicates(points: Sequence[MeasuredPoint], where: Sequence[str]) -> list[Finding]:
    """Equal shapes twice: copies if their times are equal, a disagreement if they are far apart."""
    seen: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, point in enumerate(points):
        seen[_shape(point)].append(index)
    repeated = [found for found in seen.values() if len(found) > 1]
    copies = [f for f in repeated if len({points[i].latency_ms for i in f}) == 1]
    apart = [
        f
        for f in repeated
        if max(points[i].latency_ms for i in f) > OTHER_SCALE * min(points[i].latency_ms for i in f)
    ]
    findings = []
    for rule, found, words in (
        ("duplicate", copies, "are exact copies, times included"),
        ("disagreement", apart, f"differ by more than a factor {OTHER_SCALE}"),
    ):
        if found:
            example = " and ".join(where[index] for index in found[0][:2])
            findings.append(
                Finding(
                    rule=rule,
                    severity="warning",
                    message=f"{len(found)} shapes occur more than once and {words}, e.g. {example}",
                )
            )
    return findings


def _other_scale(
    points: Sequence[MeasuredPoint], reference: Sequence[MeasuredPoint]
) -> list[Finding]:
    known = {_shape(point): point.latency_ms for point in reference}
    ratios = [point.latency_ms / known[_shape(point)] for point in points if _shape(point) in known]
    if not ratios:
        return []
    ratio = float(np.median(ratios))
    if 1 / OTHER_SCALE < ratio < OTHER_SCALE:
        return []
    return [
        Finding(
            rule="scale",
            severity="fault",
            message=f"times are {ratio:.2f} times those of another table for the same "
            f"{len(ratios)} shapes: sums over repeats, or another unit?",
        )
    ]


def _shape(point: MeasuredPoint) -> tuple[int, ...]:
    return (
        point.prefill_requests,
        point.prefill_new_tokens,
        point.prefill_prefix_tokens,
        point.prefill_pairs,
        point.decode_requests,
        point.decode_kv_tokens,
        point.decode_kv_max,
    )


def _lines(points: Sequence[MeasuredPoint]) -> list[list[int]]:
    """Runs of points that differ in one size only (per request), in ascending order of it."""
    sizes = [
        (
            point.prefill_requests,
            point.prefill_new_tokens / max(point.prefill_requests, 1),
            point.prefill_prefix_tokens / max(point.prefill_requests, 1),
            point.decode_requests,
            point.decode_kv_tokens / max(point.decode_requests, 1),
            point.decode_kv_max - point.decode_kv_tokens / max(point.decode_requests, 1),
        )
        for point in points
    ]
    runs = []
    for axis in range(5):
        groups: defaultdict[tuple[float, ...], dict[float, int]] = defaultdict(dict)
        for index, size in enumerate(sizes):
            if size[axis] or axis == 2:
                groups[size[:axis] + size[axis + 1 :]][size[axis]] = index
        runs += [[line[key] for key in sorted(line)] for line in groups.values() if len(line) > 1]
    return runs
