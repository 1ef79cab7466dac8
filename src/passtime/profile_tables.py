"""Profiles as tables for people: provenance, box, coefficients, errors, predictions."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table

from passtime.memory import GIB, MemorySum
from passtime.profiles.document import (
    Accuracy,
    Errors,
    Profile,
    load_profile,
    shipped_profiles,
)
from passtime.profiles.predict import Predictor, decode_shape, prefill_shape
from passtime.profiles.provider import ProfileTiming

_MEANINGS = {
    "launch_ms": ("ms", "any pass: host and launches"),
    "linear_flops_per_s": ("FLOP/s", "linear layers"),
    "weight_bytes_per_s": ("byte/s", "streaming weights"),
    "linear_overlap": ("", "visible share of the shorter of the two"),
    "token_ms": ("ms", "per token: norms, rotary embedding, activations"),
    "tile_share": ("", "share of the linear work padded to whole tiles"),
    "attention_flops_per_s": ("FLOP/s", "prefill attention"),
    "prefill_kv_bytes_per_s": ("byte/s", "prefill attention reading keys and values"),
    "attention_overlap": ("", "visible share of the shorter of the two"),
    "decode_kv_bytes_per_s": ("byte/s", "decode attention reading keys and values"),
    "decode_skew": ("", "how far unequal decodes cost as if all were the longest"),
    "decode_ramp_ms": ("ms", "latency that decode attention cannot hide"),
    "decode_ramp_tokens": ("tokens", "KV at which half of it is reached"),
    "prefill_request_ms": ("ms", "per prompt"),
    "decode_request_ms": ("ms", "per decoding request"),
    "row_ms_per_token": ("ms", "per token of the longest row, passes with prompts"),
    "row_overlap": ("", "visible share of the shorter: that row, other attention"),
    "mixed_ms": ("ms", "any pass with prompts and decodes"),
    "mixed_request_ms": ("ms", "per decoding request of such a pass"),
    "mixed_kv_ms": ("ms", "per KV token of such a pass"),
    "mixed_request_kv_ms": ("ms", "per decoding request and KV token of such a pass"),
}
_AXIS_WORDS = {
    "prompts": "prompts",
    "new_tokens": "new tokens",
    "prompt_context": "mean context of a new token",
    "decodes": "decoding requests",
    "decode_context": "mean context of a decode, tokens",
}


def profile_list() -> list[dict[str, str]]:
    """The shipped profiles: name, kind, device, model."""
    found = []
    for name in shipped_profiles():
        profile = load_profile(name)
        found.append(
            {
                "name": name,
                "kind": profile.device_kind,
                "device": profile.device.name,
                "model": profile.model.name,
            }
        )
    return found


def profile_list_table(profiles: list[dict[str, str]]) -> Table:
    """One profile a row."""
    table = Table()
    for column in ("name", "kind", "device", "model"):
        table.add_column(column)
    for profile in profiles:
        table.add_row(*profile.values())
    return table


def profile_view(profile: Profile) -> Group:
    """Everything a reader needs to judge a profile."""
    return Group(
        provenance_table(profile),
        box_table(profile),
        coefficient_table(profile),
        errors_table(profile.errors),
        prediction_table(profile),
    )


def provenance_table(profile: Profile) -> Table:
    """Where the numbers come from."""
    table = Table(title=profile.name, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _provenance(profile):
        table.add_row(name, value)
    return table


def _provenance(profile: Profile) -> Iterator[tuple[str, str]]:
    device, model, made = profile.device, profile.model, profile.provenance
    yield "device", f"{device.name} ({profile.device_kind}), {device.memory_bytes / GIB:.1f} GiB"
    if device.peak_flops and device.peak_bytes_per_s:
        peaks = f"{device.peak_flops / 1e12:.0f} TFLOP/s, {device.peak_bytes_per_s / 1e9:.0f} GB/s"
        yield "datasheet peaks", peaks
    yield "timed", made.timed
    split = f"TP {profile.parallelism.tensor_parallel}"
    kept = model.kv_dtype or model.dtype
    yield "model", f"{model.name}, {model.linear_dtype or model.dtype}, KV in {kept}, {split}"
    yield "model class", profile.model_class
    yield "made by", made.made_by
    for name, value in (
        ("measured at", made.measured_at),
        ("log, SHA-256", made.log_sha256),
        ("kernels", made.kernel_hash),
    ):
        if value:
            yield name, value
    if made.software:
        yield "software", ", ".join(f"{name} {value}" for name, value in made.software.items())
    graphs = profile.engine.graph_sizes
    yield "graph sizes", ", ".join(map(str, graphs)) if graphs else "none: nothing is padded"
    if (overhead := profile.engine.launch_overhead_ms) is not None:
        yield "launch overhead", f"{overhead:.4g} ms"
    held_out = sum(point.held_out for point in profile.points)
    yield "points", f"{len(profile.points)}, of which {held_out} were never fitted"
    for note in made.notes:
        yield "note", note


def box_table(profile: Profile) -> Table:
    """The measured box: predictions inside it interpolate."""
    table = Table(title="measured box")
    table.add_column("regime")
    table.add_column("axis")
    for column in ("from", "to"):
        table.add_column(column, justify="right")
    for regime, axes in profile.box.items():
        for axis, edge in axes.items():
            table.add_row(regime, _AXIS_WORDS[axis], f"{edge.low:,.4g}", f"{edge.high:,.6g}")
    return table


def coefficient_table(profile: Profile) -> Table:
    """Coefficients with unit and meaning; rates also as efficiencies of the device's peaks."""
    table = Table(title="coefficients")
    table.add_column("coefficient")
    for column in ("value", "unit", "of the peak"):
        table.add_column(column, justify="right" if column != "unit" else "left")
    table.add_column("meaning")
    for name, (unit, meaning) in _MEANINGS.items():
        value = getattr(profile.coefficients, name)
        device = profile.device
        peak = {"FLOP/s": device.peak_flops, "byte/s": device.peak_bytes_per_s}.get(unit)
        share = f"{value / peak:.1%}" if peak else ""
        table.add_row(name, f"{value:.4g}", unit, share, meaning)
    return table


def errors_table(errors: Errors) -> Table:
    """The one report for all model classes."""
    floor = errors.noise_floor_percent
    noise = "no repeats, noise unknown" if floor is None else f"noise floor {floor:.2f} %"
    table = Table(
        title="errors, % of the measured time",
        caption=f"{noise}; worst regime: {errors.worst_regime}",
    )
    table.add_column("points")
    for column in ("number", "mean", "p90", "max", "bias"):
        table.add_column(column, justify="right")
    for name, accuracy in _error_rows(errors):
        table.add_row(
            name,
            str(accuracy.points),
            f"{accuracy.mape_percent:.2f}",
            f"{accuracy.p90_percent:.2f}",
            f"{accuracy.max_percent:.1f}",
            f"{accuracy.bias_percent:+.2f}",
        )
    return table


def _error_rows(errors: Errors) -> Iterator[tuple[str, Accuracy]]:
    yield "in sample", errors.in_sample
    if errors.held_out is not None:
        yield "held out, 5 folds pooled", errors.held_out
    for regime, accuracy in errors.by_regime.items():
        yield f"  {regime}", accuracy
    if errors.planned is not None:
        yield "withheld by the plan", errors.planned
    for axis, accuracy in errors.extrapolation.items():
        yield f"beyond half the {_AXIS_WORDS.get(axis, axis)}", accuracy


def prediction_table(profile: Profile) -> Table:
    """What the profile says of a few passes, with its interval and where the pass lies."""
    table = Table(title="predictions")
    table.add_column("pass")
    for column in ("ms", "from", "to"):
        table.add_column(column, justify="right")
    table.add_column("box")
    timing, predictor = ProfileTiming(profile), Predictor.of(profile)
    shapes = [
        (f"prefill 1 × {isl} new, {prefix} cached", prefill_shape(1, isl + prefix, prefix))
        for isl, prefix in ((128, 0), (512, 0), (2048, 0), (2048, 8192), (8192, 0))
    ]
    shapes += [
        (f"decode {batch} × {context}", decode_shape(batch, batch * context))
        for batch, context in ((1, 1024), (8, 2048), (32, 2048), (128, 2048), (8, 32768))
    ]
    for name, shape in shapes:
        interval = timing.predict_interval(shape)
        bounds = [f"{b:.4g}" for b in (interval.low_ms, interval.high_ms)] if interval else ["", ""]
        table.add_row(name, f"{predictor.pass_ms(shape):.4g}", *bounds, predictor.coverage(shape))
    return table


def memory_table(memory: MemorySum) -> Table:
    """The sum behind num_gpu_blocks."""
    table = Table(title="memory of one rank")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    for name, size in (
        ("device", memory.device_bytes),
        (f"usable, {memory.utilization:g} of it", memory.usable_bytes),
        ("weights", -memory.weight_bytes),
        ("activations", -memory.activation_bytes),
        ("reserve", -memory.reserve_bytes),
        ("left for KV", memory.kv_bytes),
    ):
        table.add_row(name, f"{size / GIB:.3f}")
    table.add_section()
    per_block = memory.kv_bytes_per_token * memory.block_size
    table.add_row("KV bytes per token", f"{memory.kv_bytes_per_token:,}")
    table.add_row(f"bytes per block of {memory.block_size} tokens", f"{per_block:,}")
    table.add_row("num_gpu_blocks", f"{memory.num_gpu_blocks:,}")
    return table
