"""What audit rules share: how they say what they found, by the wording in findings.yaml, and what they reckon with.

A rule is a function that yields `found(...)`: how severe it is, what was seen, and the facts that its sentences need. Its
entry in findings.yaml has `why`, `cure` and `rests_on` (the document, fact or technique behind the rule), and may have:

    gives_way_to names of rules: where one of them finds something, it explains this finding too
    recipe       words of a Powertrain recipe for the same cure
    expected     unmeasured, starts, unchanged, or what the cure changes (`says`) and on what that rests (`basis`)
    breaking, accuracy, difficulty   what the cure may cost
    title        in place of the first line of the rule's docstring
    parts        phrases that are left out where one of their facts is not known, or where the fact of their name does not hold
    cases        by name, what is said differently; `found(case=...)` names the case
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, wraps
from importlib import resources
from itertools import islice
from string import Formatter
from typing import Any

import yaml

from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Shown, Subject
from powertrain.cost.fitting import own_bytes, planned_room_bytes, total_bytes
from powertrain.cost.workload import Workload
from powertrain.records import Facts, findings
from powertrain.records.findings import Cure, Edit, Expected, Finding, Risk, Rule, Severity

GIB = 2**30
SAID = re.compile(r"\s*(print\(|[fr]*[\"']|$)")  # of a line that Python cannot parse: what it says does nothing else
OF_DATABRICKS = "# Databricks notebook source"            # first line of a notebook that is kept as Python
_Yaml: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)     # of plain values; the compiled loader where it is installed
EXPECTED: Mapping[Any, Expected] = {
    None: findings.NO_SPEED, "unmeasured": findings.UNMEASURED,
    "starts": Expected("the run starts", "none"),                # of cures for what ends a run before its first step
    "unchanged": Expected("nothing changes", "none")}            # of cures for settings that do nothing


Found = Callable[[str, Subject], Finding]    # puts into words what a rule of this name found
Findings = Iterator[Found]


def found(severity: Severity, *seen: Shown, edits: tuple[Edit, ...] = (), expected: Expected | None = None, case: str = "",
          only: str = "", **facts: Any) -> Found:
    """Return what a rule found: the evidence, edits of the file where they are safe, and the facts of its sentences.

    Of `seen`, a key stands for its setting or its default, and code of a script for its words. `only`: when it holds.
    """
    def worded(name: str, subject: Subject) -> Finding:
        said = wording()[name]
        said = {**said, **said["cases"][case]} if case else said
        phrases = {part: _phrase(part, text, facts) for part, text in said.get("parts", {}).items()}

        def filled(text: str) -> str:
            return text.format_map({**facts, **phrases})

        told = said.get("expected")
        usual = Expected(filled(told["says"]), filled(told["basis"])) if isinstance(told, dict) else EXPECTED[told]
        cure = Cure(filled(said["cure"]), edits, tuple(filled(said.get("recipe", "")).split()))
        risk = Risk(said.get("breaking", "none"), said.get("accuracy", "none"), said.get("difficulty", "low"))
        made = findings.finding(severity, filled(said.get("title", "")), filled(said["why"]), *map(subject.shown, seen),
                                cure=cure, expected=expected or usual, risk=risk)
        return replace(made, when=only)

    return worded


def wording() -> Mapping[str, Mapping[str, Any]]:
    """Return findings.yaml: the name of a rule -> what its findings say."""
    return _read("findings.yaml")


def known(name: str) -> Any:
    """Return what known.yaml lists under a name."""
    return _read("known.yaml")[name]


@cache
def _read(name: str) -> Mapping[str, Any]:
    text = (resources.files("powertrain") / "audit" / name).read_text(encoding="utf-8")
    read: Mapping[str, Any] = yaml.load(text, _Yaml)
    return read


def rule(ask: Callable[[Subject, Circumstances], Findings]) -> Rule[Any]:
    """Make a rule of a function of a subject and its circumstances."""
    @wraps(ask)
    def asked(subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        # what a command switches off is meant to be off
        in_part = script is not None and (script.command is not None or not all(
            map(SAID.match, script.unparsed.splitlines())))
        of_cells = script is not None and (script.path.suffix == ".ipynb" or script.text.startswith(OF_DATABRICKS))
        unsure = (in_part and ask.__name__ in known("rules_on_what_lacks").split()) or (
            of_cells and ask.__name__ in known("rules_on_whole_files").split())
        given = ask(subject, where) if not unsure else ()
        return (_without_our_figures(worded(ask.__name__, subject), where) for worded in given)

    said = wording()[ask.__name__]
    return Rule(ask.__name__, said["rests_on"], asked, frozenset(said.get("gives_way_to", "").split()))


def code_rule(ask: Callable[[Script, Subject, Circumstances], Findings]) -> Rule[Any]:
    """Make a rule of a function that asks only scripts, not configs, and is given the script first."""
    @wraps(ask)
    def of_script(subject: Subject, where: Circumstances) -> Findings:
        return ask(subject.script, subject, where) if subject.script is not None else iter(())

    return rule(of_script)


def code_rule_once(ask: Callable[[Script, Subject, Circumstances], Findings]) -> Rule[Any]:
    """Make a rule as `code_rule` does that reports the first place only: who mends it finds the others beside it."""
    @wraps(ask)
    def of_first(script: Script, subject: Subject, where: Circumstances) -> Findings:
        return islice(ask(script, subject, where), 1)

    return code_rule(of_first)


def _without_our_figures(finding: Finding, where: Circumstances) -> Finding:
    """Return the finding; without what our studies found, which are of a CPU, where the machine is not known to be one."""
    ours = finding.expected.basis.startswith("study:")
    return replace(finding, expected=findings.UNMEASURED) if ours and not where.on_cpu else finding


def _phrase(part: str, text: str, facts: Mapping[str, Any]) -> str:
    """Return a phrase with its facts; "" where one of them is not known, or the fact of its own name does not hold."""
    needed = [name.partition(".")[0] for _, name, _, _ in Formatter().parse(text) if name]
    needed += [part] if part in facts else []
    holds = all(name in facts and facts[name] is not None and facts[name] is not False for name in needed)
    return text.format_map(facts) if holds else ""


def at_most(share: float, of_what: str) -> Expected:
    """Return Amdahl's bound of removing a share of the step."""
    times = 1 / (1 - share)
    return Expected(f"at most {times:.2f} times as fast", f"formula: Amdahl, 1 / (1 - {share:.3f}); {of_what}", (1.0, times))


def reckonable(where: Circumstances) -> Facts | None:
    """Return the facts, where memory and work of the subject's model can be reckoned."""
    facts = where.facts
    return facts if facts is not None and facts.model.provider == "native" and facts.model.shapes else None


def as_trained(subject: Subject, facts: Facts) -> Workload:
    """Return one step as the subject takes it: padded passes of its micro-batch, attention without saved scores, all logits."""
    micro = subject.examples_per_pass or 1
    examples = subject.examples_per_step or max(micro, facts.data.train_batch_size)
    return Workload(examples, facts.data.block, micro_batch=micro, dtype=subject.products_dtype or "fp32",
                    attention_saves_scores=False, kernel="sdpa", lengths=facts.data.length_quantiles,
                    device=facts.hardware.device, threads=facts.hardware.cores)


def room(subject: Subject, where: Circumstances, *, four_bits: bool = True) -> tuple[float, float] | None:
    """Return (GiB that a step of the subject needs if it keeps all activations, GiB that are free); None if not known.

    Without `four_bits` the frozen weights are taken as bf16.
    """
    facts = reckonable(where)
    if facts is None or where.hardware is None:
        return None
    model = facts.model if four_bits else replace(facts.model, method="lora", frozen_dtype="bf16", unquantised_dtype="")
    needed = total_bytes(model, as_trained(subject, facts)) + own_bytes(facts.hardware.device)
    return needed / GIB, planned_room_bytes(facts.hardware) / GIB
