"""A learning rate of one method used with another."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import added, set_to
from powertrain.audit.resolved import method, number, seen
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

KEY = "training.learning_rate"
ADAM = ("adam", "ademamix", "lion")          # names of optimizers whose step is about the learning rate itself
ADAPTERS = (4e-5, 2e-2)      # around TRL's and PEFT's 1e-4 .. 2e-4: a rate below is one of full tuning
FULL = (1e-7, 3e-4)          # around 1e-5 .. 5e-5
USUAL = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}
BESIDE = ("training.per_device_train_batch_size", "training.num_train_epochs", "training.output_dir")


class LearningRateUnfit(Rule):
    name = "learning_rate_unfit"
    rests_on = "documentation: TRL (LoRA needs about 10 times the learning rate of full tuning)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        how, rate = method(subject), number(subject, KEY)
        optim = str(subject.value("training.optim") or "adamw").lower()
        if how is None or rate is None or not rate or not any(name in optim for name in ADAM):
            return
        low, high = FULL if how == "full" else ADAPTERS
        if low <= rate <= high:
            return
        if how == "full":
            follows = "training hardly moves" if rate < low else "what the model had learned is soon overwritten"
        else:
            follows = "adapters start at zero and hardly move" if rate < low else "the loss diverges easily"
        why = f"{rate:g} for {'all weights' if how == 'full' else 'adapters'}, where about {USUAL[how]:g} is usual: {follows}"
        edits = set_to(subject, KEY, USUAL[how]) or (
            added(subject, BESIDE, "learning_rate", USUAL[how]) if KEY not in subject.settings else ())
        yield cls.found("moderate", f"a learning rate that does not fit {'full tuning' if how == 'full' else 'LoRA'}", why,
                        seen(subject, KEY), expected=NO_SPEED,
                        cure=Cure(f"Start from {USUAL[how]:g}", edits, (f"learning_rate={USUAL[how]:g}",)))
