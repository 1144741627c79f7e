"""What the run itself warned of, as far as no other symptom says it."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import OUT_OF_MEMORY, Symptom
from powertrain.records.findings import Cure, Finding

PROMISED = ("could not be saved", "passed over checkpoint")  # something that should be on the disk is not
NAMED = 3


class Warned(Symptom):
    name = "warned"
    rests_on = "fact: the run's warnings"

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        messages = [str(happened.event.get("message", "")) for happened in run.history.of("warning")]
        messages = [message for message in messages if OUT_OF_MEMORY not in message]
        if not messages:
            return
        unsaved = [message for message in messages if any(words in message for words in PROMISED)]
        yield cls.found(
            "moderate" if unsaved else "low",
            f"the run warned {'once' if len(messages) == 1 else f'{len(messages)} times'}"
            + (": not all that it should have saved is saved" if unsaved else ""),
            (unsaved or messages)[0], messages[:NAMED], Cure("free space on the disk, or make it writable, and save again"
                                                            if unsaved else "do what the warning says"),
            expected="the run can go on from where it is" if unsaved else "no warning")
