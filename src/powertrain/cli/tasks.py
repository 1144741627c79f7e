"""`powertrain evaluate --tasks`: the tasks of lm-eval on a trained model."""

from __future__ import annotations

from pathlib import Path

from powertrain.cli import output
from powertrain.cli.options import say
from powertrain.records import WrongUse, several, to_plain


def show_tasks(model: str, names: str, *, folder: Path | None, limit: int | None, shots: int | None, trusts_code: bool,
               templated: bool, base: str | None, provider: str | None, as_json: bool) -> None:
    """Run tasks, whose names are separated by commas, and print a row or an object for each metric."""
    from powertrain.use.harness import check_harness, run_tasks
    from powertrain.use.opening import open_model

    asked = [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        raise WrongUse("--tasks names no task; name one, such as --tasks lambada_openai, or a task's YAML file")
    check_harness()
    opened = open_model(model, base=base, provider=provider, say=say)
    say(f"running {several(len(asked), 'task')}: {', '.join(asked)}")
    found = run_tasks(opened, asked, folder=folder, limit=limit, shots=shots, trusts_code=trusts_code, templated=templated)
    if as_json:
        for one in found:
            output.print_json({"event": "task", **to_plain(one)})
        return
    output.print_rows([(one.task, f"{one.metric.replace('_', ' ')} {one.value:.4g}"
                        + (f" +- {one.error:.2g}" if one.error is not None else "")
                        + f" ({several(one.examples, 'example')}, {several(one.shots, 'shot')}"
                        + (f", filter {one.filter}" if one.filter != "none" else "") + ")") for one in found])
