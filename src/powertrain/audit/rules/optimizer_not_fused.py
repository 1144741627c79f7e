"""AdamW in many small kernels where torch has it in one."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.code_editing import with_argument
from powertrain.audit.editing import set_to
from powertrain.audit.reckoning import at_most, reckonable
from powertrain.audit.resolved import is_unread, method, products_dtype
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.cost.work import step_work
from powertrain.records.findings import Cure, Edit, Expected, Finding

ADAMS = ("adam", "adamw")


class OptimizerNotFused(Rule):
    name = "optimizer_not_fused"
    rests_on = "technique: fused_adamw; features: F4 (without it torch uses foreach, which is no Python loop either)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        own = subject.settings.get("optimizer.name")
        if subject.value("training.optim") == "adamw_torch":
            asked, says = subject.settings["training.optim"], 'Use optim="adamw_torch_fused"'
            edits = set_to(subject, "training.optim", "adamw_torch_fused")
        elif own is not None and str(own.value).rpartition(".")[2].lower() in ADAMS:
            if subject.on("optimizer.fused") or is_unread(subject, "optimizer.fused"):
                return
            asked, edits, says = own, _argument(subject), "Pass fused=True to AdamW"
        else:
            return
        cure = Cure(says, edits, ("techniques.fused_adamw=on",))
        little = "; of adapters there is little to update" if method(subject) in ("lora", "qlora") else ""
        yield cls.found("low", "AdamW is not the fused one", "The update of all trained weights takes several kernels "
                        f"instead of one, and foreach needs a copy of them more at the peak{little}", asked,
                        expected=_bound(subject, where), cure=cure)


def _argument(subject: Subject) -> tuple[Edit, ...]:
    """The argument in the script's own call."""
    call = subject.script.sections.get("optimizer") if subject.script is not None else None
    return with_argument(subject.script, call, "fused", "True") if subject.script is not None and call is not None else ()


def _bound(subject: Subject, where: Circumstances) -> Expected:
    """Amdahl: the optimizer's part of the bytes that a step moves, which is what it is made of."""
    facts = reckonable(where)
    if facts is None:
        return UNMEASURED
    work = step_work(facts.model, [[facts.data.block] * facts.data.train_batch_size], products_dtype(subject) or "fp32")
    share = work.optimizer_bytes / (work.optimizer_bytes + work.gemm_bytes + work.elementwise_bytes)
    return at_most(share, "the optimizer's part of the bytes that a step moves")
