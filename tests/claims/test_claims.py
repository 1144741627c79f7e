"""claims.yaml, how it is read, and a run of claims from end to end: on its form, not on how fast anything is."""

import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import yaml

from driver import TINY
from powertrain import planner
from powertrain.claims import experiments
from powertrain.claims import session as claim_sessions
from powertrain.claims.claim import METRICS, catalogue, read_catalogue, why_not
from powertrain.claims.experiments import Bound, Outcome, arms_of, carry_out, reading
from powertrain.claims.probes import PROBES, Context, Measured
from powertrain.claims.session import ClaimSession, by_experiment
from powertrain.claims.verdicts import judge
from powertrain.cli import claiming
from powertrain.evidence import studies
from powertrain.evidence.clock import CannotRun, Pace
from powertrain.evidence.profile import Profile
from powertrain.evidence.stats import OutOfTime
from powertrain.recipe import resolve_words
from powertrain.records import Hardware, Software, WrongUse
from powertrain.records.evidence import (
    CONFIRMED,
    INCONCLUSIVE,
    INVALID,
    NO_EFFECT,
    NOT_HERE,
    SMALLER,
    ArmRun,
    Comparison,
    Interval,
    Parity,
    Study,
    Window,
)

# every row of the documents' table of claims
ROWS = {
    "000": "01a 01b 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24",
    "001": "01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18 19 20",
    "002": "01a 01b 01c 02 03 04 05 06 07 08 09 10 11",
    "003": "01 02 03a 03b 04 05 06 07 08 09 10 11 12 13 14 15 16",
    "004": "01 02a 02b 03 04 05 06 07 08 09 10 11"}

TWO = """
documents: {"000": a machine}
experiments:
  thrift: {kind: reasoned, because: two and two, value: 4}
  a-pair: {kind: arms, words: [default], a: [seed=1], b: [seed=2]}
claims:
  - {id: 000-01, document: "000", what: w, claimed: c, range: [3, 5], unit: sums, better: higher, experiment: thrift, prior: p}
  - {id: 000-02, document: "000", what: w, claimed: c, range: null, unit: times as fast, better: higher,
     experiment: a-pair, prior: p}
"""


def test_every_row_of_the_documents_table_is_there():
    ids = [claim.id for claim in catalogue().claims]
    wanted = [f"{document}-{row}" for document, rows in ROWS.items() for row in rows.split()]
    assert len(wanted) == 87
    missing = [row for row in wanted if not any(name == row or name.startswith(f"{row}-") for name in ids)]
    assert not missing
    strange = [name for name in ids if not any(name == row or name.startswith(f"{row}-") for row in wanted)]
    assert not strange


def test_rows_are_in_order():
    assert [claim.id for claim in catalogue().claims] == sorted(claim.id for claim in catalogue().claims)


def test_every_claim_says_what_to_expect_and_why_nothing_is_measured_where_nothing_is():
    assert all(claim.prior and claim.claimed and claim.what for claim in catalogue().claims)
    assert all(len(found.because) > 20 for found in catalogue().experiments.values() if found.kind == "reasoned")


def test_every_recipe_of_an_experiment_resolves_and_pins_techniques_that_exist():
    for experiment in catalogue().experiments.values():
        for words in claiming._recipes(experiment):
            pins = resolve_words(words).recipe.techniques
            assert set(pins) <= set(planner.BY_NAME), experiment.name
        if experiment.technique is not None:
            assert experiment.technique in planner.BY_NAME


def test_every_probe_exists_and_takes_its_settings():
    for experiment in catalogue().experiments.values():
        if experiment.kind == "probe":
            inspect.signature(PROBES[experiment.probe]).bind(None, **experiment.settings)


def test_every_metric_can_be_read():
    losses = {"detail": {"losses": [[4.0, 2.0], [4.4, 2.2]]}}
    assert all(read(metric, outcome=dict(losses), steps=2 if metric == "first_steps" else None) for metric in METRICS)


def test_what_a_claim_needs_is_a_word_that_is_known():
    gpu = Hardware("NVIDIA H100", "cuda", 8, 1 << 36, 1 << 36, compute_capability=(9, 0), devices=2)
    software = Software(dict.fromkeys(("bitsandbytes", "unsloth", "flash_attn", "deepspeed", "triton"), "1"), {})
    for claim in catalogue().claims:
        why_not(claim.needs, gpu, software)


# ------------------------------------------------------------------------------------------------ reading the file


@pytest.mark.parametrize(("old", "new", "said"), [
    ("prior: p}\n  - {id: 000-02", "prior: p, colour: red}\n  - {id: 000-02", "claim 000-01: colour"),
    ("because: two", "reason: two", "experiment thrift: reason"),
    ("id: 000-02", "id: 000-01", "000-01 twice"),
    ("experiment: a-pair", "experiment: thrift", "no claim uses a-pair"),
    ("experiment: a-pair", "experiment: nothing", "there is no experiment 'nothing'"),
    ("range: [3, 5]", "range: [5, 3]", "is no range"),
    ("range: [3, 5]", "range: null", "needs a range"),
    ("better: higher, experiment: thrift", "better: more, experiment: thrift", "claim 000-01: better"),
    ("b: [seed=2]", "b: [seed=1]", "do not differ"),
    ("kind: arms", "kind: legs", "experiment a-pair: kind"),
    ("value: 4", "value: 4, verdict: confirmed", "either `verdict` or `value`"),
    ("id: 000-02", "id: 001-02", "is of document '000'"),
    ('what: w, claimed: c, range: null', 'what: 5, claimed: c, range: null', "claim 000-02: what"),
    ("experiment: a-pair, prior: p", "experiment: a-pair", "claim 000-02: prior"),
    ("experiment: a-pair", "experiment: a-pair, metric: colour", "metric='colour'"),
    ("experiment: a-pair", "experiment: a-pair, metric: first_steps", "`steps` belongs to metric first_steps"),
    ("kind: arms, words", "kind: arms, exactness: GREAT, words", "experiment a-pair: exactness")])
def test_a_mistake_in_the_file_is_named(old, new, said):
    assert old in TWO
    read_catalogue(TWO)
    with pytest.raises(ValueError, match=r".") as caught:
        read_catalogue(TWO.replace(old, new, 1))
    assert said in str(caught.value)


def test_an_id_means_all_its_parts():
    known = catalogue()
    assert [claim.id for claim in known.find(["000-02"])] == ["000-02-memory", "000-02-speed"]
    assert [claim.id for claim in known.find(["000-02-speed", "000-02"])] == ["000-02-speed", "000-02-memory"]
    with pytest.raises(KeyError):
        known.find(["000-99"])


# ------------------------------------------------------------------------------------------------ needs


@pytest.mark.parametrize(("need", "reason"), [
    ("cuda", "the claim needs an NVIDIA GPU"), ("cuda>=8.0", "the claim needs an NVIDIA GPU"),
    ("two_gpus", "the claim needs two GPUs"),
    ("bitsandbytes", "not installed"), ("compiler", "torch.compile cannot work here"),
    ("gpu:RTX 2080 Ti", "this machine is a CPU")])
def test_what_is_missing_on_a_cpu_is_said(need, reason):
    software = Software({}, {"bitsandbytes": "not installed", "c++ compiler": "none is on the PATH"})
    found = why_not([need], Hardware("a CPU", "cpu", 2, 1 << 33, 1 << 33), software)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(("devices", "holds"), [(1, False), (2, True)])
def test_two_gpus_are_two(devices, holds):
    gpu = Hardware("a GPU", "cuda", 2, 1 << 33, 1 << 33, compute_capability=(9, 0), devices=devices)
    assert (why_not(["two_gpus"], gpu, Software({}, {})) is None) == holds


@pytest.mark.parametrize(("device", "devices", "cores", "reason"), [
    ("cpu", 1, 2, None), ("cpu", 1, 1, "there is one core"), ("cuda", 2, 1, None), ("cuda", 1, 8, "there is one GPU")])
def test_two_processes_have_a_device_or_a_core_each(device, devices, cores, reason):
    found = why_not(["two_processes"], Hardware("it", device, cores, 1 << 33, 1 << 33, devices=devices), Software({}, {}))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(("need", "capability", "holds"), [
    ("cuda>=8.0", (8, 0), True), ("cuda>=8.0", (7, 5), False), ("cuda<8.0", (7, 5), True), ("cuda<8.0", (9, 0), False),
    ("cuda", (7, 5), True)])
def test_compute_capabilities_are_compared(need, capability, holds):
    gpu = Hardware("a GPU", "cuda", 2, 1 << 33, 1 << 33, compute_capability=capability)
    assert (why_not([need], gpu, Software({}, {})) is None) == holds


def test_a_need_that_nobody_knows_is_a_mistake():
    with pytest.raises(ValueError, match="moonlight"):
        why_not(["moonlight"], Hardware("a CPU", "cpu", 2, 1 << 33, 1 << 33), Software({}, {}))


# ------------------------------------------------------------------------------------------------ reading and judging


def window(seconds, waiting=0.0, tokens=100):
    return Window(1, 2, seconds, tokens, tokens, 0, {"data": waiting, "copy": 0.0, "forward": seconds - waiting})


def two_arms(claim_id="000-02", **changes):
    """A made-up outcome in which B takes half the time and owes 3 s."""
    known = read_catalogue(TWO)
    claim = known.find([claim_id])[0]
    experiment = known.experiment_of(claim)
    arms = arms_of(experiment)
    runs = tuple(ArmRun(arm.name, 1.0, 1.0, 2, (window(seconds, seconds / 4),) * 5, (3.0, 2.0), (1.0, 1.0), 99)
                 for arm, seconds in zip(arms, (2.0, 1.0), strict=True))
    comparison = Comparison(arms[0].name, arms[1].name, Interval(2.0, 1.9, 2.1), 5, "faster", "twice", (50.0, 100.0), (99, 99),
                            compile_s=3.0)
    found = {"arms": arms, "runs": runs, "comparison": comparison, "allocated_bytes": (100, 80)} | changes
    return claim, Outcome(experiment, **found)


def read(metric, **changes):
    claim, outcome = two_arms(**changes.pop("outcome", {}))
    return reading(dataclasses.replace(claim, metric=metric, **changes), outcome)


def test_metrics_are_read_off_two_arms():
    assert read("speed").median == 2.0
    assert read("speed", inverse=True) == Interval(1 / 2.0, 1 / 2.1, 1 / 1.9)
    assert read("peak_memory") == Interval(0.8, 0.8, 0.8)
    assert read("data_wait").median == pytest.approx(0.25)
    assert read("busy").median == pytest.approx(0.75)
    assert read("busy_ratio").median == pytest.approx(1.0)
    assert read("steps_per_s").median == pytest.approx(2.0)
    assert read("loss", outcome={"detail": {"losses": [[4.0, 2.0], [4.4, 2.2]]}}).median == pytest.approx(1.1)


def test_the_first_steps_pay_for_what_is_compiled():
    # A takes 1 s a step; B half of that, and 3 s before
    assert read("first_steps", steps=2).median == pytest.approx(2 / (3 + 1))
    assert read("first_steps", steps=600).median == pytest.approx(600 / (3 + 300))


def test_a_probe_is_read_by_its_value_or_by_its_detail():
    claim, outcome = two_arms()
    experiment = dataclasses.replace(outcome.experiment, kind="probe", probe="p")
    spread = {"median": 2.0, "low": 1.0, "high": 4.0}
    measured = Measured(Interval(2.0, 1.0, 3.0), "u", "a", "b", {"share": 0.5, "spread": spread})
    outcome = Outcome(experiment, measured=measured)
    assert reading(claim, outcome) == Interval(2.0, 1.0, 3.0)
    assert reading(dataclasses.replace(claim, metric="share"), outcome) == Interval(0.5, 0.5, 0.5)
    assert reading(dataclasses.replace(claim, metric="spread"), outcome) == Interval(2.0, 1.0, 4.0)


def test_arms_that_do_not_learn_the_same_decide_nothing():
    claim, outcome = two_arms(parity=Parity("ROUNDING", False, "losses differ", 4, 0.5, 0.5))
    found = judge(claim, outcome, None)
    assert found.verdict == INCONCLUSIVE
    assert "do not learn the same" in found.because


def test_a_run_without_a_speed_decides_nothing():
    claim, outcome = two_arms()
    comparison = dataclasses.replace(outcome.comparison, speed=None, verdict=INVALID, because="all gradients are zero")
    found = judge(claim, dataclasses.replace(outcome, comparison=comparison), None)
    assert (found.verdict, found.measured) == (INCONCLUSIVE, None)
    assert "all gradients are zero" in found.because


def test_an_experiment_that_failed_says_why():
    claim, outcome = two_arms()
    found = judge(claim, Outcome(outcome.experiment, failed="no room"), None)
    assert (found.verdict, found.because) == (INCONCLUSIVE, "it could not be measured: no room")


def test_a_bound_decides_without_timing():
    claim, outcome = two_arms()
    found = judge(claim, Outcome(outcome.experiment, outcome.arms, bound=Bound(1.01, ("optimizer",))), None)
    assert found.verdict == NO_EFFECT
    assert "Amdahl" in found.because


class Arena:
    """One whose profiles are made up, and that times nothing."""

    def __init__(self, optimizer_s):
        self.optimizer_s = optimizer_s

    def profile(self, arm, *, steps=3):
        return Profile(1.0, {"products": 1 - self.optimizer_s, "optimizer": self.optimizer_s})

    def compare(self, *_, **__):
        raise CannotRun("timed")


def carried_out(optimizer_s, **changes):
    claim, outcome = two_arms()
    experiment = dataclasses.replace(outcome.experiment, technique="fused_adamw")
    bench = Context(Path(), 0.0, Arena(optimizer_s), Path())
    return carry_out(experiment, [dataclasses.replace(claim, **changes)], bench)


def test_what_cannot_matter_is_not_timed():
    found = carried_out(0.001)
    assert found.bound.acts_on == ("optimizer",)
    assert found.bound.times < 1.02
    assert found.failed is None


def test_what_may_matter_is_timed_and_so_is_a_claimed_cost():
    assert carried_out(0.1).failed == "timed"
    assert carried_out(0.001, range=(0.9, 0.95)).failed == "timed"


def test_an_experiment_that_runs_out_of_time_has_no_outcome(monkeypatch, tmp_path):
    def measure(context):
        raise OutOfTime("too late")

    monkeypatch.setattr(experiments, "PROBES", {"late": measure})
    claim, outcome = two_arms()
    experiment = dataclasses.replace(outcome.experiment, kind="probe", probe="late")
    assert carry_out(experiment, [claim], Context(tmp_path, 0.0, Arena(0.1), tmp_path)) is None


def test_arithmetic_is_decided_by_the_same_rules():
    claim, outcome = two_arms("000-01")
    found = judge(claim, Outcome(outcome.experiment), None)
    assert (found.verdict, found.measured) == (CONFIRMED, Interval(4.0, 4.0, 4.0))
    assert "By arithmetic: two and two" in found.because


def test_an_experiment_is_carried_out_once_for_all_its_claims():
    known = catalogue()
    groups = list(by_experiment(known, known.claims))
    assert [experiment.name for experiment, _ in groups].count("checkpointing-lora") == 1
    assert sum(len(claims) for _, claims in groups) == len(known.claims)
    kinds = [experiment.kind == "reasoned" for experiment, _ in groups]
    assert kinds == sorted(kinds, reverse=True)


# ------------------------------------------------------------------------------------------------ studies of claims


def claim_study(name, date, fingerprint="here", **verdicts):
    rows = [{"id": name, "verdict": verdict} for name, verdict in verdicts.items()]
    return Study(name, "claims", "w", date, "c", None, {"fingerprint": fingerprint}, {}, findings={"claims": rows})


def test_the_newest_verdict_of_this_machine_counts(tmp_path):
    for study in (claim_study("2026-11-21_claims-10", "2026-11-21", a="new"),
                  claim_study("2026-11-21_claims-9", "2026-11-21", a="old", b="x"),
                  claim_study("2026-12-01_claims", "2026-12-01", "elsewhere", a="theirs")):
        studies.save(tmp_path / study.name, study, {})
    found = claim_sessions.known_verdicts(tmp_path, "here")
    assert {name: (known["verdict"], known["study"]) for name, known in found.items()} == {
        "a": ("new", "2026-11-21_claims-10"), "b": ("x", "2026-11-21_claims-9")}


def test_claims_without_a_verdict_come_first_and_then_the_oldest(tmp_path):
    for study in (claim_study("2026-11-21_claims-10", "2026-11-21", a="x"), claim_study("by-name", "2026-11-20", c="x"),
                  claim_study("2026-11-21_claims-2", "2026-11-21", b="x")):
        studies.save(tmp_path / study.name, study, {})
    known = claim_sessions.known_verdicts(tmp_path, "here")
    assert claim_sessions.in_turn(["a", "b", "d"], known) == ["d"]
    assert claim_sessions.in_turn(["a", "b", "c"], known) == ["c", "b", "a"]


def test_a_study_is_replaced_whole_as_it_grows(tmp_path, facts):
    folder = tmp_path / "studies" / "2026-11-21_claims"
    for verdict in ("first", "second"):
        studies.save(folder, claim_study("x", "2026-11-21", a=verdict), facts, over=True)
    assert studies.load(folder).findings["claims"][0]["verdict"] == "second"
    assert studies.load(folder).name == folder.name
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


# ------------------------------------------------------------------------------------------------ from end to end


@pytest.fixture
def place(tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POWERTRAIN_CACHE", str(cache))
    return tmp_path


@pytest.fixture
def small(place, source, monkeypatch):
    """A catalogue of a sum, a pair of tiny arms, and something that this machine does not have."""
    words = yaml.safe_dump([f"data={source}", *TINY, "model.dropout=0"], default_flow_style=True, width=10**6).strip()
    text = TWO.replace("words: [default], a: [seed=1], b: [seed=2]",
                       f"words: {words}, a: [techniques.fused_adamw=off], b: [techniques.fused_adamw=on], "
                       "exactness: ROUNDING, seconds: 1")
    text += '  - {id: 000-03, document: "000", what: w, claimed: c, range: null, unit: times as fast, better: higher, ' \
            'experiment: a-pair, needs: [two_gpus], prior: p}\n'
    monkeypatch.setattr("powertrain.claims.claim.catalogue", lambda: read_catalogue(text))
    pace = Pace(window_s=0.001, pairs=5, most_pairs=5, warm_up_s=0.0)
    monkeypatch.setattr("powertrain.claims.probes.Context", lambda *given: Context(*given, pace=pace))
    return place


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_run_of_claims_ends_in_a_study_and_a_report(small, capsys):
    claiming.report(as_json=True)
    before = {row["id"]: row for row in printed(capsys)}
    assert [row["verdict"] for row in before.values()] == [None, None, NOT_HERE]
    assert before["000-02"]["because"] == "not measured yet: powertrain claims run 000-02"

    claiming.run([], budget="120s", study=None, as_json=True)
    *rows, end = printed(capsys)
    assert [row["id"] for row in rows] == ["000-01", "000-02", "000-03"]
    assert rows[0]["verdict"] == CONFIRMED
    assert rows[1]["measured"]["median"] > 0
    assert rows[1]["parity"]["holds"]
    assert rows[2]["verdict"] == NOT_HERE
    assert end["left"] == []

    found = studies.load(Path(end["folder"]))
    assert found.kind == "claims"
    assert found.noise_floor is not None
    assert [arm.name.removeprefix("a-pair: techniques.fused_adamw=") for arm in found.arms] == ["off", "off again", "on"]
    assert len(found.runs) == 4
    assert all(arm.plan is not None for arm in found.arms)
    assert found.findings["experiments"]["a-pair"]["comparison"] == 1

    claiming.report(as_json=True)
    after = {row["id"]: row for row in printed(capsys)}
    assert all(row["study"] == found.name for row in after.values())
    claiming.report(as_json=False)
    claiming.show_list(as_json=False)
    out = capsys.readouterr().out
    assert "000-02" in out
    assert "the claim needs two GPUs" in out


def test_what_there_is_no_time_for_is_left_and_the_rest_is_kept(small, capsys):
    claiming.run([], budget="0.5s", study="short", as_json=True)
    *rows, end = printed(capsys)
    assert [row["id"] for row in rows] == ["000-01", "000-03"]
    assert end["left"] == ["a-pair"]
    assert Path("studies/short/evidence.json").is_file()


def test_the_next_run_takes_what_has_no_verdict_yet(small, capsys, monkeypatch):
    claiming.run(["000-01", "000-03"], budget="60s", study=None, as_json=True)
    capsys.readouterr()
    heard = []
    monkeypatch.setattr(ClaimSession, "decide", lambda self, claims, *_: heard.extend(claim.id for claim in claims))
    claiming.run([], budget="60s", study=None, as_json=True)
    assert heard == ["000-02"]


def test_a_claim_that_nobody_made_is_refused(place):
    with pytest.raises(WrongUse, match="000-99"):
        claiming.run(["000-99"], budget="1m", study=None, as_json=False)


def test_the_shipped_arithmetic_is_decided_in_no_time(place, capsys):
    claiming.run(["000-23"], budget="60s", study=None, as_json=True)
    row, end = printed(capsys)
    assert row["verdict"] == SMALLER
    assert end["noise_floor"] is None


def test_the_list_has_a_line_for_every_claim(place, capsys):
    claiming.show_list(as_json=True)
    rows = printed(capsys)
    assert [row["id"] for row in rows] == [claim.id for claim in catalogue().claims]
    assert all(row["decidable"] or row["because"] for row in rows)
