"""`powertrain audit PATH --convert` and `--verify`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.audit.conversion import Conversion
from powertrain.audit.convert import convert
from powertrain.audit.reading import read_subject
from powertrain.audit.recipe_text import TITLES, account_json, account_rows, recipe_yaml
from powertrain.cli import output
from powertrain.cli.environment import budget_s, cache_folder, say
from powertrain.records import WrongUse, to_plain
from powertrain.report.figures import memory

if TYPE_CHECKING:
    from powertrain.audit.verify import Verified


def refuse_together(*, convert: bool, verify: bool, apply: bool, sarif: Path | None, markdown: Path | None,
                    output: Path | None) -> None:
    """Raises WrongUse for options of which one would be passed over in silence."""
    given = {"--convert": convert, "--verify": verify, "--apply": apply, "--sarif": sarif is not None,
             "--markdown": markdown is not None}
    names = [name for name, here in given.items() if here]
    if len(names) > 1:
        raise WrongUse(f"{' and '.join(names)} cannot be combined; use one at a time")
    if verify and output is not None:
        raise WrongUse("--verify writes no file; use --output with --convert or --apply")


def convert_to_recipe(path: Path, *, out: Path | None = None, as_json: bool = False) -> None:
    """The equivalent recipe on stdout, or in `out`, with the account of every key."""
    conversion = convert(read_subject(path))
    text = recipe_yaml(conversion, _recognised(path))
    if out is not None:
        if out.exists():
            raise WrongUse(f"{out} already exists; name another file, or delete it")
        out.write_text(text, encoding="utf-8")
    if as_json:
        output.print_json({"event": "conversion", "path": str(path), "framework": conversion.subject.framework,
                           "recipe": conversion.values, "missing": list(conversion.missing), "keys": account_json(conversion),
                           "written": None if out is None else str(out)})
    elif out is None:
        print(text, end="", flush=True)
    else:
        output.print_rows(_summary(conversion, out))


def verify_recipe(path: Path, *, budget: str = "2m", as_json: bool = False) -> None:
    """The recipe with its plan against the original's way of doing it, measured here."""
    from powertrain.audit.verify import verify

    conversion = convert(read_subject(path))
    with tempfile.TemporaryDirectory(prefix="powertrain-") as folder:
        found = verify(conversion, Path(folder), cache_folder(), budget_s(budget), say)
    comparison, parity = found.comparison, found.parity
    if as_json:
        output.print_json({"event": "verification", "path": str(path), "says": found.sentence(), "apart": list(found.apart),
                           "original": dict(found.rendering.pins), "comparison": to_plain(comparison),
                           "parity": to_plain(parity), "plan": [step.technique.name for step in found.plan.steps]})
        return
    output.print_rows(verified_rows(found))


def verified_rows(found: Verified) -> list[tuple[str, str]]:
    """(title, text): both arms, what was measured of them, and in what the plain one differs from the original."""
    comparison, parity = found.comparison, found.parity
    rows: list[tuple[str, str]] = [("Original", _pins(found.rendering.pins)),
                                   ("Plan", ", ".join(step.technique.name for step in found.plan.steps) or "no technique")]
    if comparison is not None:
        slow, fast = comparison.tokens_per_s
        original, ours = (memory(peak) for peak in comparison.peak_memory_bytes)
        rows += [("Speed", f"{found.sentence()}, over {comparison.pairs} pairs of windows"),
                 ("Tokens/s", f"{fast:,.0f} against {slow:,.0f}"), ("Memory", f"{ours} against {original} at the peak"),
                 ("Same losses", f"not seen: {found.why_no_parity}" if parity is None else
                  f"{'yes' if parity.holds else 'NO'}: {parity.because}")]
    else:
        rows.append(("Speed", found.sentence()))
    return [*rows, *(("Differs", one) for one in found.apart)]


def _recognised(path: Path) -> str:
    from powertrain.audit.configs import why_recognised

    return why_recognised(path) if path.suffix != ".py" else "a training script"


def _summary(conversion: Conversion, out: Path) -> list[tuple[str, str]]:
    counts = {fate: sum(row[0] == fate for row in account_rows(conversion)) for fate in ("translated", "default", *TITLES)}
    rows = [("Recipe", f"{out}: train it with `powertrain train {out}`"),
            ("Keys", ", ".join(f"{count} {fate}" for fate, count in counts.items() if count))]
    rows += [("Missing", one) for one in conversion.missing]
    for fate, key, said, became in account_rows(conversion):
        if fate in ("not supported", "unknown", "unread"):
            rows.append((fate.capitalize(), f"{said or key}: {became}"))
    return rows


def _pins(pins: dict[str, Any] | Any) -> str:
    shown = [name if pin == "on" else f"{name} {dict(pin)}" if isinstance(pin, dict) else f"{name} {pin}"
             for name, pin in pins.items()]
    return ", ".join(shown) or "no technique"
