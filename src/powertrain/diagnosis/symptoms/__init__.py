"""The symptoms that a run's events may show, in the order in which they are asked: each is a function in a topic file."""

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms import ending, gradients, learning, processes, speed
from powertrain.records.findings import Finding, rules_of, worst_first

SYMPTOMS = rules_of(ending, gradients, learning, speed, processes)


def symptoms_of(run: RunRecord) -> tuple[Finding, ...]:
    """Return what a run's events show, the worst first; of two findings with one cause, the one that explains the other."""
    return worst_first((found for symptom in SYMPTOMS for found in symptom.find(run)), SYMPTOMS)
