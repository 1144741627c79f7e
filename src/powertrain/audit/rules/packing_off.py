"""Short examples side by side, each padded to the longest of its batch."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import added, set_to
from powertrain.audit.reckoning import at_most
from powertrain.audit.resolved import examples_per_pass, is_on, is_unread, seen, value
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.cost.workload import padding_share
from powertrain.records.findings import Cure, Finding, Risk, Severity

CAN_PACK = ("trl", "axolotl", "llama-factory", "modelforge", "lora-trainer")
WORTH = 0.1                  # of the slots; less is within what machines vary by
BESIDE = ("training.max_length", "training.per_device_train_batch_size", "training.learning_rate", "training.output_dir")


class PackingOff(Rule):
    name = "packing_off"
    rests_on = "technique: packing; features: F11 (packed with positions that restart, examples do not see each other)"
    gives_way_to = frozenset({"padding_to_max_length"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.framework not in CAN_PACK or is_unread(subject, "training.packing") or is_on(subject, "training.packing"):
            return
        if is_on(subject, "training.padding_free") or value(subject, "training.train_sampling_strategy") == "group_by_length":
            return                           # there is little padding left
        each, data = examples_per_pass(subject), where.data
        known = data is not None and bool(data.length_quantiles)
        share = padding_share(data.length_quantiles, each) if data is not None and known and each else None
        if (data is not None and data.kind == "blocks") or (share is not None and share < WORTH) or each == 1:
            return
        severity: Severity = "low" if share is None else "moderate"
        if share is None:
            why = "Each batch is padded to its longest example; how much of it is padding follows from the examples' " \
                  "lengths, which are not known here"
        else:
            why = f"Padded to the longest of {each}, {share:.0%} of the slots are padding, by the lengths of the examples here"
        edits = set_to(subject, "training.packing", True)
        if "training.packing" not in subject.settings:
            edits = added(subject, BESIDE, "packing", True)
        yield cls.found(severity, "packing is off", why, seen(subject, "training.packing"),
                        seen(subject, "training.per_device_train_batch_size"),
                        expected=at_most(share, "the share of padding") if share else UNMEASURED,
                        risk=Risk("low", "low", "low"),
                        cure=Cure("Pack examples; a step then has more of them, so accumulate less if the batch is to stay",
                                  edits, ("techniques.packing=on",)))
