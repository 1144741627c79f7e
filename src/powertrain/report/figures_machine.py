"""A run against its machine: the roofline, and memory by component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powertrain.records.events import Memory
from powertrain.records.timeline import History, spread, steady_speeds
from powertrain.report.chart import Axis, Note, Plot, Point, Row, Rows, Segment, Series, stacked
from powertrain.report.figures import flops, memory
from powertrain.report.page import Cell, Figure, Missing, Table

PEAK_COLOURS = {"fp32": "green", "tf32": "orange", "bf16": "blue", "fp16": "purple"}
COMPONENT_COLOURS = ("blue", "green", "sky", "orange", "purple", "yellow", "red", "ink")
GIB = 2**30


def roofline(history: History, estimate: Mapping[str, Any] | None, hardware: Mapping[str, Any]) -> Figure | Missing:
    """Achieved FLOP/s against arithmetic intensity, under the limits that were measured on this machine."""
    peaks, bandwidth = hardware.get("peak_flops_per_s") or {}, hardware.get("bandwidth_bytes_per_s")
    if not peaks or not bandwidth:
        return Missing("roofline", "This machine's peaks were not measured (`powertrain facts --measure`).")
    if not estimate or not (speeds := steady_speeds(history)):
        return Missing("roofline", "The FLOPs of a step are not known for this run.")
    slow, reached, fast = (speed * estimate["flops_per_token"] for speed in spread(speeds))
    datasheet = hardware.get("datasheet_flops_per_s") or {}
    peak, ridge = estimate["peak_flops_per_s"], estimate["peak_flops_per_s"] / bandwidth
    intensity, known = _intensity(estimate, bandwidth)
    low, high = min(ridge, intensity) / 30, max(max(peaks.values()) / bandwidth, intensity) * 30
    marks: list[Any] = []
    for dtype, limit in sorted(peaks.items(), key=lambda found: found[1]):
        roof = ((low, low * bandwidth), (limit / bandwidth, limit), (high, limit))
        marks.append(Series(f"{dtype}, measured {flops(limit)}", roof, PEAK_COLOURS.get(dtype, "grey")))
    marks += [Series(f"{dtype}, datasheet {flops(limit)}", ((limit / bandwidth, limit), (high, limit)),
                     PEAK_COLOURS.get(dtype, "grey"), "dashed") for dtype, limit in datasheet.items()]
    share = reached / peak
    marks += [Series(f"this run, {flops(reached)}", ((intensity, reached),), "red", "circle" if known else "ring"),
              Note(intensity, reached, f"{share:.0%} of the {estimate['dtype']} peak", "red")]
    title = (f"The run reached {flops(reached)}: {share:.0%} of the {estimate['dtype']} peak measured on this machine")
    rows: list[tuple[Cell, ...]] = [(f"{dtype} GEMM peak, measured", limit, limit / bandwidth)
                                    for dtype, limit in peaks.items()]
    rows += [(f"{dtype}, datasheet (dense)", limit, limit / bandwidth)
             for dtype, limit in datasheet.items()]
    rows += [("this run, median step", reached, intensity), ("this run, 10% of the steps are below", slow, intensity),
             ("this run, 10% of the steps are above", fast, intensity)]
    return Figure(
        "roofline", title, (Plot(Axis("arithmetic intensity, FLOP per byte moved", log=True),
                                 Axis("FLOP per second", log=True), tuple(marks)),),
        f"Lines: the measured limits of this machine, for matrix products and for a copy ({bandwidth / 1e9:.3g} GB/s, "
        "the slope). Dashed lines: the vendor's datasheet. The run's speed is the FLOPs that the mathematics needs (causal "
        "attention counted exactly, recomputation not counted) per second of its steps. "
        + ("The bytes are the operands and results of the matrix products and the optimizer's state, each moved once."
           if known else "Ring: the bytes were not recorded. The plan expected compute to be the limit, so the true point lies "
                         "here or further right; only its height is measured."),
        (Table(("", "FLOP/s", "FLOP per byte (of a limit: its ridge)"), tuple(rows)),))


def _intensity(estimate: Mapping[str, Any], bandwidth: float) -> tuple[float, bool]:
    """FLOP per byte of a step, and whether that is known or only the least it can be."""
    if estimate.get("bytes_per_step"):
        return estimate["flops_per_step"] / estimate["bytes_per_step"], True
    if estimate["bound_by"] != "compute":    # then the floor is the time that its bytes take
        return estimate["flops_per_step"] / (estimate["floor_s"] * bandwidth), True
    return estimate["peak_flops_per_s"] / bandwidth, False


def memory_by_component(history: History, estimate: Mapping[str, Any] | None, device: str) -> Figure | Missing:
    """Predicted memory stacked by component, beside what was allocated, and what the process held."""
    event = history.of(Memory)[-1].event if history.of(Memory) else Memory()
    predicted = dict(event.predicted or (estimate or {}).get("memory_bytes") or {})
    allocated = event.allocated_bytes
    resident = history.ends.peak_memory_bytes if history.ends else None
    if not predicted and not allocated and not resident:
        return Missing("memory", "Neither a prediction nor a measurement was recorded.")
    process = "allocated by torch, at the run's end" if device == "cuda" else "resident memory of the whole process"
    rows = [Row("predicted", stacked(predicted, GIB, COMPONENT_COLOURS), says=memory(sum(predicted.values())))
            ] if predicted else []
    rows += [Row("measured, allocated", (Segment(0.0, allocated / GIB, "grey", "allocated"),), says=memory(allocated))
             ] if allocated else []
    rows += [Row("process peak", (), (Point(resident / GIB, "red", label=process, shape="bar"),), memory(resident))
             ] if resident else []
    return Figure(
        "memory", _memory_title(sum(predicted.values()), allocated, resident),
        (Rows(Axis("GiB", low=0.0), tuple(rows)),),
        "Predicted: the memory that is allocated at the peak of a step, by formula"
        + (f", for step {event.step:,}, whose memory was measured. "
           f"The fullest possible passes take {memory(event.fullest_bytes)}. "
           if event.fullest_bytes else ", before the run. ")
        + ("Allocated: the most that torch held during that step. " if allocated else
           "The allocated memory was not measured in this run. ")
        + (f"Process peak: {process}." if resident else ""), (_memory_table(predicted, event, resident, process),))


def _memory_title(predicted: float, allocated: float | None, resident: float | None) -> str:
    if predicted and allocated:
        return (f"{memory(allocated)} were allocated at the peak; the prediction of {memory(predicted)} is "
                f"{_off(predicted / allocated - 1)}")
    if predicted:
        held = f"; the process held {memory(resident)} with its libraries" if resident else ""
        return f"{memory(predicted)} were predicted to be allocated at the peak{held}"
    return f"The most memory in use was {memory(allocated or resident or 0)}"


def _off(error: float) -> str:
    return "the same" if abs(error) < 0.0005 else f"{abs(error):.1%} too {'high' if error > 0 else 'low'}"


def _memory_table(predicted: Mapping[str, float], event: Memory, resident: float | None, process: str) -> Table:
    rows: list[tuple[Cell, ...]] = [(f"predicted: {name.replace('_', ' ')}", size, size / 2**20)
                                    for name, size in predicted.items()]
    rows += [("predicted: all", sum(predicted.values()), sum(predicted.values()) / 2**20)] if predicted else []
    rows += [(f"measured: {name}", size, size / 2**20)
             for name, size in (("allocated", event.allocated_bytes), ("reserved", event.reserved_bytes)) if size]
    rows += [(f"measured: {process}", resident, resident / 2**20)] if resident else []
    return Table(("", "bytes", "MiB"), tuple(rows))
