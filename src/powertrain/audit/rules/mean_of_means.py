"""Micro-batches of unequal token counts weighted alike."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class MeanOfMeans(Rule):
    name = "mean_of_means"
    rests_on = "features: F28 (equal batches train equally only if the loss counts tokens); documentation: transformers #34191"
    gives_way_to = frozenset({"accumulation_not_divided"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        padded = subject.value("data.padding") not in (None, False, "max_length", "do_not_pad")
        for step in training_steps(subject.script) if subject.script else ():
            accumulation = step.accumulation
            if accumulation is None or not padded or "num_items" in step.script.text or "n_tokens" in step.script.text:
                continue
            every = step.script.words(accumulation[1])
            divided = next((node for statement in step.node.body for node in (statement, *step.script.reached(statement))
                            if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div)
                            and step.script.words(node).replace(" ", "").endswith("/" + every.replace(" ", ""))
                            | step.script.words(node).replace(" ", "").endswith("/=" + every.replace(" ", ""))), None)
            if divided is not None:
                yield cls.found(
                    "low", "short micro-batches count as much as long ones", "Each micro-batch's loss is the mean of its own "
                    "tokens, and the step is the mean of those means: a token of a short example weighs more than one of a "
                    "long example, and another split of the same batch trains differently",
                    step.script.evidence(divided), subject.settings.get("data.padding"), expected=NO_SPEED,
                    risk=Risk("none", "low", "medium"),
                    cure=Cure("Sum the losses of the tokens, and divide by the trained tokens of the whole step"))
