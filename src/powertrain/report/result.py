"""What a run came to: speed against the plan, quality against gzip, a sample, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.report.cautions import BUSY
from powertrain.report.figures import count, digits, duration, flops, memory, perplexity
from powertrain.report.plan import Row

FULLER = 1.1                 # times the memory of the watched step: the fullest step's is named beside it


def result_rows(events: Sequence[Mapping[str, Any]], folder: str, gzip_bits_per_byte: float | None) -> list[Row]:
    """From the run's events: (title, text) rows. Speed is of training alone, without evaluation and saving."""
    last = {event["event"]: event for event in events}
    steps = [event for event in events if event["event"] == "step"]
    end = last["end"]
    not_saved = f", but {end['not_saved']}" if end.get("not_saved") else ""
    rows = [("Result", f"{end['reason']} at step {end['step']:,}{not_saved}")]
    if steps:
        rows += _speed_rows(steps, last.get("resume") or last["start"])
    if "evaluation" in last:
        rows.append(("Held-out", quality(last["evaluation"], gzip_bits_per_byte)))
    if "adapters" in last:
        rows.append(("Adapters", _adapters(last["adapters"]["modules"])))
    if end.get("clipped_steps"):
        rows.append(("Clipped", f"{end['clipped_steps']:,} of {end['step']:,} steps had a gradient over max_grad_norm"))
    rows += _memory_rows(last.get("memory"), end.get("peak_memory_bytes"))
    return rows + _next_rows(end["reason"], folder, last.get("resume") or last["start"])


def quality(evaluation: Mapping[str, Any], gzip_bits_per_byte: float | None) -> str:
    text = (f"loss {evaluation['loss']:.4f} nats a token (perplexity {digits(perplexity(evaluation['loss']))}) on "
            f"{count(evaluation['tokens'])} tokens")
    if evaluation.get("bits_per_byte") is not None:
        text += f"; {evaluation['bits_per_byte']:.3f} bits per byte"
        if gzip_bits_per_byte is not None:
            text += f", where gzip -9 needs {gzip_bits_per_byte:.3f} for the same text"
    return text


def _adapters(modules: Mapping[str, Mapping[str, float]]) -> str:
    """The mean of each figure over the adapted modules, and where it is largest."""
    names = next(iter(modules.values()))
    parts = []
    for name in names:
        most = max(modules, key=lambda module: modules[module][name])
        mean = sum(told[name] for told in modules.values()) / len(modules)
        parts.append(f"{name.replace('_', ' ')} {mean:.3g} on average, at most {modules[most][name]:.3g} ({most})")
    return "; ".join(parts)


def _speed_rows(steps: Sequence[Mapping[str, Any]], start: Mapping[str, Any]) -> list[Row]:
    estimate, load = start["estimate"], start.get("load") or 0.0
    seconds, tokens = sum(step["seconds"] for step in steps), sum(step["real_tokens"] for step in steps)
    trained = sum(step["tokens"] for step in steps)
    learned = "" if trained == tokens else f" ({count(trained)} of them learned)"
    text = f"{count(tokens)} tokens{learned} in {duration(seconds)} of training: {count(tokens / seconds)} tokens/s"
    if estimate:
        share = tokens / seconds * estimate["flops_per_token"] / estimate["peak_flops_per_s"]
        low_s, high_s = estimate["step_s"]
        basis = estimate["basis"].partition("; step: ")[2].partition("; ")[0]
        text += (f", {share:.0%} of the measured {flops(estimate['peak_flops_per_s'])} in {estimate['dtype']}; the plan "
                 f"expected {count(estimate['tokens_per_step'] / high_s)} to {count(estimate['tokens_per_step'] / low_s)}"
                 + (f" ({basis})" if basis else ""))
        if load > BUSY and tokens / seconds < estimate["tokens_per_step"] / high_s:
            text += f"; the machine was not idle: its load was {load:.2g} when the run began"
    return [("Speed", text)]


def _memory_rows(measured: Mapping[str, Any] | None, peak_bytes: int | None) -> list[Row]:
    process = f"the process: {memory(peak_bytes)} at the peak" if peak_bytes else ""
    if measured is None:
        return [("Memory", process)] if process else []
    allocated, predicted = measured["allocated_bytes"], sum(measured["predicted"].values())
    text = f"{memory(allocated)} of tensors at the peak of step {measured['step']:,}; the plan expected {memory(predicted)}"
    text += f" ({predicted / allocated - 1:+.1%})" if allocated else ""
    if (fullest := measured.get("fullest_bytes", 0)) > FULLER * predicted:
        text += f", and {memory(fullest)} for passes as full as they may come"
    if measured.get("reserved_bytes"):
        text += f"; {memory(measured['reserved_bytes'])} reserved"
    return [("Memory", f"{text}; {process}" if process else text)]


def _next_rows(reason: str, folder: str, start: Mapping[str, Any]) -> list[Row]:
    if reason != "finished":
        return [("Go on", f"powertrain train --resume {folder}")]
    has_adapter, task = start.get("method") in ("lora", "qlora"), start.get("task", "causal")
    what, opens = ("Adapter", start.get("opens_in", "peft")) if has_adapter else ("Model", "transformers")
    use = {"causal": f"powertrain generate {folder} --prompt TEXT" if start.get("method") == "scratch"
           else f"powertrain chat {folder}", "seq2seq": f"powertrain generate {folder} --prompt TEXT"}
    commands = [use[task]] if task in use else []
    commands += [f"powertrain evaluate {folder}", f"powertrain runs show {folder}", f"powertrain report {folder}"]
    commands += [f"powertrain export {folder} --to merged --output FOLDER"] if has_adapter and opens else []
    return [(what, f"{folder}/model opens in powertrain" + (f" and {opens}" if opens else "")),
            *[("Next" if number == 0 else "", command) for number, command in enumerate(commands)]]
