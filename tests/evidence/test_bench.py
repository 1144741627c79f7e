"""The performance suite: what is asserted is seen to hold and to fail, and a small one runs from end to end.

Nothing here depends on how fast anything is: verdicts on speed come from recorded numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from powertrain.evidence import bench as suites
from powertrain.evidence import studies
from powertrain.evidence.assertions import (
    Setting,
    accumulation_takes_no_more,
    losses_agree,
    memory_grows,
    memory_is_as_predicted,
    trains,
)
from powertrain.evidence.bench import Suite, findings
from powertrain.evidence.clock import Arena, Probe
from powertrain.evidence.loading import data_side, loader_rates
from powertrain.evidence.notebook import Notebook
from powertrain.recipe import resolve_words
from powertrain.records.evidence import Arm, ArmRun, Comparison, Interval, Study, Window
from powertrain.run.prepare import Prepared, prepare

MIB = 2**20
WORDS = ("model.layers=1", "model.width=32", "model.heads=2", "data.tokenizer=char", "data.block=16", "data.max_chars=3000",
         "train_batch_size=4", "max_steps=50", "sample.prompt=", "techniques.threads=off", "techniques.bf16=off")


LOSSES = (3.0, 2.9, 2.8, 2.7)


def tried(amount: int, *, measured: float | None = 100.0, predicted: float | None = 100.0, dtype: str = "fp32",
          **changes: Any) -> Setting:
    """One of several settings that all did well; memory in MiB."""
    probe = Probe(LOSSES, (1.0, 1.1, 1.2, 1.3), None if measured is None else round(measured * MIB))
    nothing = cast(Any, None)                # neither recipe nor plan: no assertion reads them
    return Setting(amount, Arm(f"setting {amount}", ()), nothing, nothing, dtype,
                   None if predicted is None else round(predicted * MIB), replace(probe, **changes))


class TestAssertions:
    def test_every_setting_trains(self) -> None:
        assert trains("loader", [tried(1), tried(2)]).holds

    @pytest.mark.parametrize(("fault", "says"), [
        ({"error": "the loader is not in force"}, "setting 2: the loader is not in force"),
        ({"losses": (3.0, float("nan"))}, "setting 2: the losses are not finite (3, nan)"),
        ({"losses": ()}, "setting 2: the losses are not finite"),
        ({"grad_norms": (0.0, 0.0)}, "setting 2: all gradients are zero")])
    def test_one_that_does_not_train_fails(self, fault: dict[str, Any], says: str) -> None:
        found = trains("loader", [tried(1), tried(2, **fault)])
        assert not found.holds
        assert says in found.because

    def test_memory_grows_with_the_micro_batch(self) -> None:
        found = memory_grows([tried(4, measured=40), tried(1, measured=10), tried(2, measured=20)])
        assert found is not None
        assert found.holds
        assert found.because == "setting 1 10.0 MiB, setting 2 20.0 MiB, setting 4 40.0 MiB"

    @pytest.mark.parametrize("larger", [9.0, 10.0])
    def test_memory_that_does_not_grow_fails(self, larger: float) -> None:
        found = memory_grows([tried(1, measured=10), tried(2, measured=larger)])
        assert found is not None
        assert not found.holds
        assert f"setting 2 take {larger:.1f} MiB where setting 1 take 10.0 MiB" in found.because

    def test_nothing_is_said_of_memory_that_nobody_counted(self) -> None:
        assert memory_grows([tried(1, measured=None), tried(2, measured=None)]) is None
        assert memory_is_as_predicted("precision", [tried(1, predicted=None), tried(2, measured=None)]) is None
        assert accumulation_takes_no_more([tried(1), tried(2, error="no")]) is None

    def test_memory_within_5_percent_of_its_prediction_holds(self) -> None:
        found = memory_is_as_predicted("micro-batch", [tried(1, predicted=104.9), tried(2, predicted=95.1)])
        assert found is not None
        assert found.holds
        assert found.because.startswith("at most 4.9% apart: setting 1")

    @pytest.mark.parametrize("predicted", [105.2, 94.8])
    def test_memory_further_from_its_prediction_fails(self, predicted: float) -> None:
        found = memory_is_as_predicted("micro-batch", [tried(1), tried(2, predicted=predicted), tried(4, predicted=103)])
        assert found is not None
        assert not found.holds
        assert found.because.startswith("1 of 3 are further apart: setting 2 100.0 MiB, predicted")
        assert "setting 4" not in found.because

    def test_of_a_tiny_model_a_mebibyte_decides_nothing(self) -> None:
        found = memory_is_as_predicted("micro-batch", [tried(1, measured=2, predicted=2.9)])
        assert found is not None
        assert found.holds
        found = memory_is_as_predicted("micro-batch", [tried(1, measured=2, predicted=3.1)])
        assert found is not None
        assert not found.holds

    def test_more_passes_may_take_less_memory(self) -> None:
        found = accumulation_takes_no_more([tried(1, measured=100), tried(2, measured=60), tried(4, measured=60)])
        assert found is not None
        assert found.holds

    def test_more_passes_that_take_more_memory_fail(self) -> None:
        found = accumulation_takes_no_more([tried(1), tried(2, measured=101)])
        assert found is not None
        assert not found.holds

    def test_more_memory_that_the_arithmetic_foretold_holds_and_is_said(self) -> None:
        found = accumulation_takes_no_more([tried(1), tried(2, measured=110, predicted=111)])
        assert found is not None
        assert found.holds
        assert "setting 2 take more, as predicted" in found.because

    def test_losses_that_are_the_same_numbers_agree(self) -> None:
        settings = [tried(0), tried(1), tried(2)]
        agreed = losses_agree("loader", "BITWISE", settings)
        assert agreed is not None
        assert agreed.holds
        assert [setting.parity is not None for setting in settings] == [False, True, True]

    def test_a_loader_that_changes_the_last_bit_fails(self) -> None:
        agreed = losses_agree("loader", "BITWISE", [tried(0), tried(1), tried(2, losses=(3.0, 2.9, 2.8, 2.7000001))])
        assert agreed is not None
        assert not agreed.holds
        assert agreed.because.startswith("setting 2:")

    @pytest.mark.parametrize(("dtype", "factor", "holds"), [
        ("fp32", 1.00002, True), ("fp32", 1.001, False), ("bf16", 1.002, True), ("bf16", 1.03, False)])
    def test_losses_may_be_apart_by_the_rounding_of_their_type(self, dtype: str, factor: float, holds: bool) -> None:
        other = tried(2, losses=tuple(loss * factor for loss in LOSSES), dtype=dtype)
        agreed = losses_agree("accumulation", "ROUNDING", [tried(1), other])
        assert agreed is not None
        assert agreed.holds is holds

    def test_settings_that_did_not_run_are_not_compared(self) -> None:
        assert losses_agree("loader", "BITWISE", [tried(0, error="no"), tried(1)]) is None
        assert losses_agree("loader", "BITWISE", [tried(0), tried(1, error="no")]) is None


@pytest.mark.parametrize(("batch", "sizes", "passes"), [
    (1, [1], [1]), (3, [1, 2, 3], [1, 2]), (8, [1, 2, 4, 8], [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12], [1, 2, 4, 8]),
    (512, [1, 4, 16, 128, 512], [1, 2, 4, 8])])
def test_sizes_and_passes_double_up_to_the_batch(batch: int, sizes: list[int], passes: list[int]) -> None:
    assert suites.micro_batch_sizes(batch) == sizes
    assert suites.numbers_of_passes(batch) == passes


# ------------------------------------------------------------------------------------------------ with a recipe


@pytest.fixture(scope="module")
def prepared(cache: Path) -> Prepared:
    return prepare(resolve_words(WORDS), cache, lambda text: None)


@pytest.fixture
def suite(prepared: Prepared) -> Suite:
    return suites.make_suite(WORDS, prepared)


def techniques(plan: Any) -> dict[str, Any]:
    return {step.technique.name: step.technique for step in plan.steps}


class TestSuite:
    def test_the_micro_batch_is_the_batch_there_and_the_rest_of_the_plan_stays(self, suite: Suite) -> None:
        for setting in suite.tables["micro-batch"]:
            assert setting.arm.words[-1] == f"train_batch_size={setting.amount}"
            assert setting.prepared.recipe.train_batch_size == setting.prepared.facts.data.train_batch_size == setting.amount
            found = techniques(setting.plan)
            assert found.pop("micro_batch").examples == setting.amount
            assert {name: step for name, step in techniques(suite.base.plan).items() if name != "micro_batch"} == found

    def test_accumulation_keeps_the_batch(self, suite: Suite) -> None:
        found = {setting.amount: techniques(setting.plan)["micro_batch"].examples for setting in suite.tables["accumulation"]}
        assert found == {1: 4, 2: 2, 4: 1}
        assert {setting.arm.words for setting in suite.tables["accumulation"]} == {WORDS}

    def test_without_workers_there_is_no_loader(self, suite: Suite) -> None:
        found = [techniques(setting.plan).get("loader") for setting in suite.tables["loader"]]
        assert found[0] is None
        assert [loader.workers for loader in found[1:]] == [1, 2, 4]

    def test_fp32_comes_first_and_what_is_not_here_has_its_reason(self, suite: Suite, prepared: Prepared) -> None:
        found = [setting.arm.name for setting in suite.tables["precision"]]
        assert found[0] == "fp32"
        assert set(found) | set(suite.not_here["precision"]) == {"fp32", "tf32", "fp16", "bf16"}
        if prepared.facts.hardware.device == "cpu":
            assert "TF32" in suite.not_here["precision"]["tf32"]

    def test_every_arm_has_a_name_of_its_own(self, suite: Suite) -> None:
        names = [setting.arm.name for table in suite.tables.values() for setting in table]
        assert len(set(names)) == len(names)

    def test_what_does_not_fit_is_said_and_not_tried(self, suite: Suite, prepared: Prepared) -> None:
        needed = [setting.predicted_bytes or 0 for setting in suite.tables["micro-batch"]]
        hardware = replace(prepared.facts.hardware, free_memory_bytes=(needed[0] + needed[-1]) // 2)
        small = suites.make_suite(WORDS, replace(prepared, facts=replace(prepared.facts, hardware=hardware)))
        assert small.tables["micro-batch"][0].amount == 1
        assert "4 examples" not in [setting.arm.name for setting in small.tables["micro-batch"]]
        assert "are free" in small.not_here["micro-batch"]["4 examples"]

    def test_dropout_is_off_so_that_losses_can_be_compared(self, prepared: Prepared) -> None:
        model = replace(prepared.facts.model, dropout=0.2, adapter_dropout=0.1)
        dropping = replace(prepared, facts=replace(prepared.facts, model=model))
        assert suites.without_dropout(WORDS, prepared) == WORDS
        assert suites.without_dropout(WORDS, dropping) == (*WORDS, "model.dropout=0", "lora.dropout=0")
        assert any("dropout is off" in note for note in suites.make_suite(("lora.dropout=0",), prepared).notes)


def test_the_loaders_make_the_batches_of_the_plan(suite: Suite) -> None:
    for setting in suite.tables["loader"]:
        setup = data_side(setting.prepared, setting.plan)
        feed = setup.loader(setup.prepare, range(3), setup.device)
        tokens = [[batch.tokens.tolist() for batch in passes] for passes in feed]
        assert tokens == [[batch.tokens.tolist() for batch in setup.prepare(step)] for step in range(3)]


def test_rates_are_taken_by_turns_and_leave_no_thread_behind(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr("powertrain.evidence.loading.WINDOW_S", 0.0)
    plans = [setting.plan for setting in suite.tables["loader"][:2]]
    found = loader_rates(suite.base.prepared, plans, time.monotonic() + 60)
    assert all(len(rates) >= 5 for rates in found)
    assert all(rate > 0 for rates in found for rate in rates)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


# ------------------------------------------------------------------------------------------------ with recorded numbers


@dataclass
class Recorded:
    """An arena that gives what was recorded: arm's name -> its probe; speeds of all arms are those of `speeds`."""

    probes: dict[str, Probe]
    speeds: dict[str, float]

    def probe(self, arm: Arm, *, steps: int = 4, precision: str | None = None, seed: int | None = None) -> Probe:
        return self.probes.get(arm.name, Probe((3.0, 2.9, 2.8, 2.7), (1.0,) * 4, 1 << 20))

    def compare(self, a: Arm, b: Arm, pace: Any = None, *, margin: float = 0.02,
                deadline: float | None = None) -> tuple[Comparison, ArmRun, ArmRun]:
        speed = self.speeds.get(b.name, 1.0)
        runs = [ArmRun(arm.name, 1.0, 0.1, 3, (Window(4, 2, 1.0, 64, 64, 0, {"data": 0.25, "forward": 0.75}),), (3.0,), (1.0,),
                       1 << 20) for arm in (a, b)]
        verdict = "harmful" if speed < 0.98 else "no effect"
        comparison = Comparison(a.name, b.name, Interval(speed, speed, speed), 6, verdict, f"{speed:.3f} times as fast",
                                (64, 64 * speed), (1, 1))
        return comparison, runs[0], runs[1]

    def control(self, arm: Arm, pace: Any = None, deadline: float | None = None) -> tuple[Comparison, ArmRun, ArmRun]:
        return self.compare(arm, replace(arm, name=f"{arm.name} again"))

    def profile(self, arm: Arm, *, steps: int = 3) -> Any:
        raise NotImplementedError


def recorded(suite: Suite, *, seconds: float = 600.0, probes: dict[str, Probe] | None = None,
             speeds: dict[str, float] | None = None) -> dict[str, Any]:
    notebook = Notebook(Recorded(probes or {}, speeds or {}), WORDS, lambda text: None, time.monotonic() + seconds)
    suites.bench(suite, notebook)
    return findings(suite, notebook) | {"noise_floor": notebook.noise_floor}


@pytest.fixture
def quick(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """The suite, whose loaders by themselves are not timed."""
    rates = [[each] * 5 for each in (100.0, 150.0, 100.0, 50.0)]
    monkeypatch.setattr(suites, "loader_rates", lambda prepared, plans, deadline: rates)
    return suite


def test_a_slow_setting_is_reported_and_fails_nothing(quick: Suite) -> None:
    good = {setting.arm.name: Probe((3.0, 2.9, 2.8, 2.7), (1.0,) * 4, setting.predicted_bytes)
            for table in quick.tables.values() for setting in table}
    told = recorded(quick, probes=good, speeds={"2 workers": 0.7})
    assert all(assertion.holds for assertion in quick.assertions), quick.assertions
    table = told["tables"]["loader"]
    row = dict(zip(table["columns"], table["rows"][2], strict=True))
    assert (row["workers"], row["times as fast"], row["verdict"]) == (2, 0.7, "harmful")
    assert (row["batches/s"], row["times as many"], row["waiting for data %"]) == (100.0, 1.0, 25.0)
    assert [row[2] for row in table["rows"]] == [1.0, 1.5, 1.0, 0.5]     # times as many batches as without workers
    assert not quick.not_reached
    assert told["noise_floor"] == 0.0
    assert {assertion.what for assertion in quick.assertions} >= {
        "micro-batch: memory grows with it", "micro-batch: peak memory is what was predicted, within 5%",
        "accumulation: more passes take no more memory than one pass", "loader: it does not change the losses",
        "accumulation: losses stay within rounding of one pass"}


def test_a_setting_that_learns_something_else_fails(quick: Suite) -> None:
    recorded(quick, probes={"2 passes": Probe((3.0, 2.0, 1.0, 0.5), (1.0,) * 4, 1 << 20)})
    wrong = [assertion for assertion in quick.assertions if not assertion.holds]
    assert "accumulation: losses stay within rounding of one pass" in [assertion.what for assertion in wrong]


def test_a_setting_that_cannot_run_fails_and_is_not_timed(quick: Suite) -> None:
    told = recorded(quick, probes={"2 workers": Probe((), (), None, "there is not enough memory")})
    wrong = [assertion for assertion in quick.assertions if not assertion.holds]
    assert "2 workers: there is not enough memory" in next(
        assertion.because for assertion in wrong if assertion.what == "loader: every setting trains")
    assert quick.tables["loader"][2].comparison is None
    assert told["tables"]["loader"]["rows"][2][-1] == "there is not enough memory"


def test_what_the_budget_does_not_reach_is_said(quick: Suite) -> None:
    told = recorded(quick, seconds=-1.0)
    assert quick.assertions == []
    names = {f"{table}: {setting.arm.name}" for table, settings in quick.tables.items() for setting in settings}
    assert names <= set(told["not_reached"])


def test_tables_are_plain_numbers_and_words_of_the_same_width(quick: Suite) -> None:
    for table in recorded(quick)["tables"].values():
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        assert all(cell is None or isinstance(cell, (int, float, str)) for row in table["rows"] for cell in row)


# ------------------------------------------------------------------------------------------------ from end to end


def test_a_small_suite_runs_and_is_a_study(cache: Path, suite: Suite, tmp_path: Path) -> None:
    tables = {"micro-batch": suite.tables["micro-batch"][::2], "loader": suite.tables["loader"][:2],
              "precision": [], "accumulation": suite.tables["accumulation"][:2]}
    small = replace(suite, tables=tables)

    def hurry(text: str) -> None:
        """All the time for what is tried, and seconds for each comparison."""
        if " against " in text:
            notebook.ends_at = time.monotonic() + 1
        elif text.startswith("loader: batches"):
            notebook.ends_at = time.monotonic() + 20
        elif text.startswith("equal plans"):
            notebook.ends_at = time.monotonic() + 600

    with Arena(cache) as arena:
        notebook = Notebook(arena, WORDS, hurry, time.monotonic() + 600)
        suites.bench(small, notebook)
    failed = [assertion for assertion in small.assertions if not assertion.holds]
    assert not failed
    assert {assertion.what for assertion in small.assertions} >= {
        "loader: it does not change the losses", "accumulation: losses stay within rounding of one pass"}
    assert small.control is not None
    assert any(setting.comparison is not None for table in small.tables.values() for setting in table)
    study = Study("bench", "bench", "what", "2026-11-21", "powertrain bench", None, {}, {}, runs=tuple(notebook.runs),
                  comparisons=tuple(notebook.comparisons), noise_floor=notebook.noise_floor,
                  findings=findings(small, notebook))
    studies.save(tmp_path / "study", study, small.base.prepared.facts)
    read = studies.load(tmp_path / "study")
    assert [row[0] for row in read.findings["tables"]["micro-batch"]["rows"]] == [1, 4]
    assert read.findings["tables"]["micro-batch"]["rows"][0][1], "its peak was counted"
