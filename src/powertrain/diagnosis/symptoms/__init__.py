"""The symptoms that a run's events may show, one file each, in the order in which they are asked."""

from __future__ import annotations

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom
from powertrain.diagnosis.symptoms.clipped_always import ClippedAlways
from powertrain.diagnosis.symptoms.divergence import Divergence
from powertrain.diagnosis.symptoms.ended_early import EndedEarly
from powertrain.diagnosis.symptoms.late_plateau import LatePlateau
from powertrain.diagnosis.symptoms.lost_work import LostWork
from powertrain.diagnosis.symptoms.memory_over_prediction import MemoryOverPrediction
from powertrain.diagnosis.symptoms.never_evaluated import NeverEvaluated
from powertrain.diagnosis.symptoms.no_progress import NoProgress
from powertrain.diagnosis.symptoms.not_finite import NotFinite
from powertrain.diagnosis.symptoms.nothing_trained import NothingTrained
from powertrain.diagnosis.symptoms.out_of_memory import OutOfMemory
from powertrain.diagnosis.symptoms.overfitting import Overfitting
from powertrain.diagnosis.symptoms.skipped_steps import SkippedSteps
from powertrain.diagnosis.symptoms.slow_down import SlowDown
from powertrain.diagnosis.symptoms.slow_steps import SlowSteps
from powertrain.diagnosis.symptoms.spikes import Spikes
from powertrain.diagnosis.symptoms.stalled import Stalled
from powertrain.diagnosis.symptoms.still_falling import StillFalling
from powertrain.diagnosis.symptoms.uniform_loss import UniformLoss
from powertrain.diagnosis.symptoms.unlike_prediction import UnlikePrediction
from powertrain.diagnosis.symptoms.vanishing_gradients import VanishingGradients
from powertrain.diagnosis.symptoms.warned import Warned
from powertrain.records.findings import SEVERITIES, Finding

SYMPTOMS: tuple[type[Symptom], ...] = (
    Stalled, NotFinite, OutOfMemory, EndedEarly, Divergence, NothingTrained, UniformLoss, NoProgress, Spikes, SkippedSteps,
    VanishingGradients, ClippedAlways, Overfitting, LatePlateau, StillFalling, NeverEvaluated,
    SlowDown, SlowSteps, LostWork, MemoryOverPrediction, UnlikePrediction, Warned)

__all__ = ["SYMPTOMS", "Symptom", "symptoms_of"]


def symptoms_of(run: RunRecord) -> list[Finding]:
    """The worst first; of two with one cause, the one that explains the other."""
    found = {symptom: list(symptom.find(run)) for symptom in SYMPTOMS}
    there = {symptom.name for symptom, findings in found.items() if findings}
    kept = [finding for symptom, findings in found.items() if not symptom.gives_way_to & there for finding in findings]
    return sorted(kept, key=lambda finding: SEVERITIES.index(finding.severity))
