"""What a symptom is blamed on, and the words of its cure."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from made_histories import STEP_S, STEPS, events, falling, level, norms, record, start
from test_symptoms import BAD, CASES, NAN, OOM, SLOW_PROCESS, shared, slow, spiked

from powertrain.diagnosis.diagnose import causes_of
from powertrain.diagnosis.observed import Bound
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms import symptoms_of
from powertrain.recipe import resolve
from powertrain.records.findings import Finding


def only(run: RunRecord, rule: str) -> Finding:
    found = [finding for finding in symptoms_of(run) if finding.rule == rule]
    assert len(found) == 1, symptoms_of(run)
    return found[0]


def evidence(finding: Finding) -> str:
    return "\n".join(one.what for one in finding.evidence)


@pytest.mark.parametrize("name", CASES)
def test_the_words_of_a_cure_are_a_recipe(name: str, tmp_path: Path):
    words = symptoms_of(CASES[name].there())[0].cure.words
    resolve("default", words)                # raises WrongUse for a key or a value that no recipe has


class TestNotFinite:
    def test_a_gradient_that_grew_without_a_limit_gets_one(self):
        end = NAN | {"message": "the loss of step 151 is not finite (nan); x"}
        run = record(events(falling(150), [*norms(147), 5.0, 40.0, 900.0], held_out={}, total_steps=300, end=end),
                     recipe={"max_grad_norm": 0.0})
        found = only(run, "not_finite")
        assert found.cure.words == ("max_grad_norm=1",)
        assert "grew" in evidence(found)
        assert "step 151" in found.title

    def test_a_learning_rate_far_above_the_default_is_lowered(self):
        run = record(events(falling(100), [*norms(97), 5.0, 40.0, 900.0], held_out={}, end=NAN, total_steps=STEPS),
                     recipe={"learning_rate": 0.5})
        assert "learning_rate=0.001" in only(run, "not_finite").cure.words

    def test_from_the_first_step_on_it_was_no_update(self):
        run = record(events([], held_out={}, end=NAN | {"message": "the loss of step 1 is not finite (nan); x"}))
        assert "no update" in only(run, "not_finite").why

    def test_a_gradient_that_is_not_finite_is_the_first_sign(self):
        run = record(events(falling(80), [*norms(60), math.nan, *norms(19)], held_out={}, end=NAN))
        assert "step 61" in only(run, "not_finite").title

    def test_weights_that_are_not_finite_are_told_by_the_end(self):
        end = NAN | {"message": "after step 80 3 weights are not finite, a.b the first; nothing was saved"}
        assert "3 weights" in only(record(events(falling(80), held_out={}, end=end)), "not_finite").title

    def test_the_ends_of_a_guarded_run_are_told(self):
        end = NAN | {"error": {"kind": "gradient_not_finite", "step": 81, "norm": "inf"}}
        found = only(record(events(falling(80), held_out={}, end=end)), "not_finite")
        assert "gradient is not finite (inf) at step 81" in found.title
        end = NAN | {"error": {"kind": "too_many_bad_steps", "step": 86, "in_row": 6}}
        found = only(record(events(falling(80), held_out={}, end=end)), "not_finite")
        assert "step after step at step 81" in found.title

    def test_steps_whose_updates_were_not_made_end_nothing(self):
        losses = [*falling(99), math.nan, *falling(100)]
        run = record(events(losses, held_out={}, between=[BAD]))
        assert not [one for one in symptoms_of(run) if one.rule == "not_finite"]
        assert "training examples 3, 4" in evidence(only(run, "bad_steps"))

    def test_a_run_that_went_back_lost_no_work_to_a_kill(self):
        rewound = {"event": "warning", "about": "rewound", "step": 60, "bad_step": 80, "examples": [3, 4]}
        written = events(between=[rewound])
        again = [event | {"time": 1.0} for event in written if event["event"] == "step" and 60 < event["step"] <= 80]
        run = record(written, all_events=[*written, *again])
        assert run.history.repeated_steps == 20
        assert [one.rule for one in symptoms_of(run) if one.rule in ("lost_work", "bad_steps")] == ["bad_steps"]
        assert "back to step 60 after step 80" in evidence(only(run, "bad_steps"))

    def test_divergence_to_nan_is_one_finding(self):
        climbing = [*falling(100), *(3.0 + 0.2 * at for at in range(40))]
        end = NAN | {"message": "the loss of step 141 is not finite (inf); x"}
        found = symptoms_of(record(events(climbing, [*norms(100), *(1.2**at for at in range(40))], held_out={}, end=end)))
        assert [one.rule for one in found if one.severity != "good"] == ["not_finite"]


class TestSpikes:
    def test_one_that_lasted_is_blamed_on_the_update_before_it(self):
        found = only(CASES["spikes"].there(), "spikes")
        assert found.severity == "moderate"
        assert "step 151" in evidence(found)
        assert "back after 6 steps" in evidence(found)
        assert "grew 6" in evidence(found)

    def test_one_that_is_back_at_once_was_its_batch(self):
        found = only(record(events(spiked(150))), "spikes")
        assert found.severity == "low"
        assert "the batch and not the weights" in found.why
        assert not found.cure.words

    def test_one_in_each_epoch_is_an_example_that_returns(self):
        run = record(events(spiked(60, 103, 148, 190), [30.0 if at in (60, 103, 148, 190) else 0.5 for at in range(STEPS)]),
                     facts={"data": {"examples": 8 * 50}}, recipe={"max_grad_norm": 0.0})
        run_found = only(run, "spikes")
        assert "0 epochs" not in run_found.why
        assert run_found.cure.words == ("max_grad_norm=1",)

    def test_many_are_how_the_data_is(self):
        found = only(record(events(spiked(*range(30, 200, 11)))), "spikes")
        assert found.cure.words == ("train_batch_size=16",)

    def test_early_ones_ask_for_a_warm_up(self):
        run = record(events(spiked(*range(17, 22), losses=falling()), [*norms(16), 30.0, *norms(183)]),
                     recipe={"warmup_ratio": 0.0})
        assert "warmup_ratio=0.03" in only(run, "spikes").cure.words

    def test_the_fall_of_the_first_steps_is_none(self):
        assert "spikes" not in [one.rule for one in symptoms_of(record(events(falling(rate=30.0))))]


class TestLearning:
    def test_a_divergence_is_dated(self):
        found = only(CASES["divergence"].there(), "divergence")
        number = int(found.why.split("about step ")[1].split(",")[0])
        assert 115 <= number <= 140

    def test_a_loss_that_blew_up_and_came_back_is_one_finding(self):
        away = [3.0, 3.0, 3.0, *(3.0 + 4.0 * min(at, 100 - at) / 10 for at in range(100)), *level(97, 2.5)]
        run = record(events(away, norms(usual=40.0), held_out={200: 2.5, 150: 2.5, 190: 2.5}), recipe={"learning_rate": 3.0})
        found = [one for one in symptoms_of(run) if one.severity != "good"]
        assert [one.rule for one in found] == ["divergence"]
        assert found[0].severity == "critical"
        assert "learning_rate=0.001" in found[0].cure.words

    def test_no_progress_names_the_side_of_the_learning_rate(self):
        for rate, says in ((1e-6, "below"), (0.5, "above")):
            found = only(record(events(level(STEPS, 5.0)), recipe={"learning_rate": rate}), "no_progress")
            assert says in found.why
            assert found.cure.words == ("learning_rate=0.001",)

    def test_a_pretrained_model_that_learns_nothing_new_may_know_it_already(self):
        run = record(events(level(STEPS, 2.0)), recipe={"method": "lora", "model": {"path": "m"}, "learning_rate": 2e-4})
        found = only(run, "no_progress")
        assert found.severity == "moderate"
        assert "may know this data" in found.why

    def test_a_plateau_at_a_constant_rate_asks_for_a_schedule(self):
        losses = falling(60, rate=8.0) + level(240, 3.0)
        happened = [event | {"learning_rate": 1e-3} if event["event"] == "step" else event for event in events(losses)]
        assert only(record(happened, recipe={"lr_scheduler_type": "constant"}), "late_plateau").cure.words == \
            ("lr_scheduler_type=cosine",)

    def test_a_plateau_says_where_it_began(self):
        words = only(CASES["late_plateau"].there(), "late_plateau").cure.words
        assert 40 <= int(words[0].removeprefix("max_steps=")) <= 90

    def test_noise_that_hides_the_slope_is_no_plateau(self):
        noisy = falling(300, first=3.2, last=3.0, noise=0.4)
        assert "late_plateau" not in [one.rule for one in symptoms_of(record(events(noisy)))]

    def test_overfitting_ends_at_the_best_evaluation(self):
        found = only(CASES["overfitting"].there(), "overfitting")
        assert found.cure.words == ("max_steps=120",)
        assert found.severity == "moderate"

    def test_a_held_out_loss_that_rises_with_the_training_loss_is_no_overfitting(self):
        run = record(events(level(STEPS, 3.0), held_out={40: 3.0, 80: 3.0, 120: 3.05, 160: 3.1, 200: 3.2}))
        assert "overfitting" not in [one.rule for one in symptoms_of(run)]

    def test_one_evaluation_after_many_epochs_is_too_few(self):
        run = record(events(falling(rate=6.0), held_out={200: 3.1}), facts={"data": {"examples": 80}})
        assert only(run, "never_evaluated").cure.words == ("eval_steps=20",)

    def test_gradients_ten_times_the_limit_are_worse_than_twice(self):
        assert [only(record(events(grad_norms=norms(usual=usual))), "clipped_always").severity for usual in (3.0, 30.0)] == \
            ["low", "moderate"]


class TestTime:
    def test_a_slow_down_is_dated_and_so_is_its_manner(self):
        found = only(CASES["slow_down"].there(), "slow_down")
        assert "from step 121 on" in found.title
        assert "at once, about step 121" in evidence(found)

    def test_a_drift_began_slowly(self):
        drifting = [STEP_S * (1 + max(0.0, (at - 60) / 140)) for at in range(STEPS)]
        assert "slowly" in evidence(only(record(events(seconds=drifting)), "slow_down"))

    def test_a_stretch_between_has_an_end(self):
        assert "between steps 81 and 120" in only(record(events(seconds=slow(range(80, 120), 0.3))), "slow_down").title

    def test_parts_that_grew_alike_are_the_machine(self):
        assert "the machine itself" in only(CASES["slow_down"].there(), "slow_down").why

    def test_waiting_that_grew_is_the_data(self):
        waiting = {"data": 0.061, "copy": 0.0, "forward": 0.03, "optimizer": 0.01, "backward": 0.059}
        run = record(events(seconds=slow(range(120, 200), 0.16), parts=dict.fromkeys(range(121, 201), waiting)))
        found = only(run, "slow_down")
        assert found.keys == ("techniques.loader",)
        assert found.cure.words == ("techniques.loader=on",)

    def test_a_full_memory_is_named(self):
        run = record(events(seconds=slow(range(120, 200), 0.16), end={"peak_memory_bytes": int(15.9 * 2**30)}))
        assert "swapped" in only(run, "slow_down").why

    def test_a_continuation_on_a_busy_machine_is_named(self):
        resume = start(event="resume", step=120, load=3.5)
        del resume["time"]
        run = record(events(seconds=slow(range(120, 200), 0.16), between=[resume]))
        assert "load of 3.5" in evidence(only(run, "slow_down"))

    def test_smaller_passes_after_memory_ran_out_are_no_second_finding(self):
        run = record(events(seconds=slow(range(100, 200), 0.16), between=[OOM]))
        assert [one.rule for one in symptoms_of(run) if one.severity != "good"] == ["out_of_memory"]

    def test_steps_with_more_tokens_take_longer_and_are_not_slow(self):
        happened = [event | {"real_tokens": 3800, "padding_tokens": 200} if event["event"] == "step" and event["step"] > 120
                    else event for event in events(seconds=slow(range(120, 200), 0.2))]
        assert "slow_down" not in [one.rule for one in symptoms_of(record(happened))]

    def test_slow_steps_at_an_interval_have_it_named(self):
        assert "every 25 steps" in only(CASES["slow_steps"].there(), "slow_steps").title

    @pytest.mark.parametrize(("kind", "key"), [("evaluation", "eval_steps"), ("checkpoint", "save_steps")])
    def test_slow_steps_after_what_the_run_does_are_blamed_on_it(self, kind: str, key: str):
        done = [{"event": kind, "step": number, "loss": 3.5, "tokens": 4000, "seconds": 0.02} for number in range(25, 200, 25)]
        run = record(events(seconds=slow(range(25, 200, 25), 0.5), between=done, held_out={}))
        assert only(run, "slow_steps").cure.words == (f"{key}=50",)

    def test_slow_steps_at_the_interval_of_the_log_are_its(self):
        run = record(events(seconds=slow(range(9, 200, 10), 0.3)))
        assert only(run, "slow_steps").cure.words == ("logging_steps=100",)

    def test_slow_steps_that_wait_for_data_want_a_loader(self):
        waiting = {"data": 0.4, "copy": 0.0, "forward": 0.03, "optimizer": 0.01, "backward": 0.06}
        run = record(events(seconds=slow(range(10, 200, 25), 0.5), parts=dict.fromkeys(range(11, 201, 25), waiting)))
        assert only(run, "slow_steps").cure.words == ("techniques.loader=on",)


class TestEnds:
    def test_a_kill_near_the_end_of_memory_is_blamed_on_it(self):
        run = record(events(falling(80), ended=False, total_steps=STEPS),
                     facts={"hardware": {"free_memory_bytes": 105 << 20, "memory_bytes": 128 << 20}})
        assert "for its memory" in only(run, "ended_early").why

    def test_a_run_that_says_that_it_does_not_fit_is_critical(self):
        end = {"reason": "failed", "message": "step 3 does not fit the memory (no room), and its largest pass cannot be halved"}
        run = record(events(falling(40), held_out={}, end=end, total_steps=STEPS))
        assert only(run, "out_of_memory").severity == "critical"

    def test_another_failure_is_told_in_its_own_words(self):
        end = {"reason": "failed", "message": "the disk is full"}
        found = only(record(events(falling(40), held_out={}, end=end, total_steps=STEPS)), "ended_early")
        assert (found.severity, found.why) == ("critical", "the disk is full")

    def test_where_locks_cannot_be_seen_no_end_is_claimed(self):
        run = record(events(falling(80), ended=False, total_steps=STEPS), being_written=None)
        assert "ended_early" not in [one.rule for one in symptoms_of(run)]

    def test_lost_work_asks_for_the_interval_that_loses_least(self):
        word, = only(CASES["lost_work"].there(), "lost_work").cure.words
        assert 1 < int(word.removeprefix("save_steps=")) < 100

    def test_passes_that_memory_forced_are_pinned(self):
        assert only(CASES["out_of_memory"].there(), "out_of_memory").cure.words == ("techniques.micro_batch.examples=2",)

    def test_a_run_that_has_not_written_a_step_yet_is_given_time(self):
        assert not symptoms_of(record(events([], ended=False, total_steps=900), being_written=True, silent_s=50))


class TestProcesses:
    def test_communication_names_the_gradients_and_fewer_processes(self):
        run = record(shared(communication=0.31), techniques={"data_parallel": {"processes": 2}})
        run.plan["steps"][0]["numbers"] = {"summed_bytes": 440 << 20}
        found = only(run, "communication")
        assert found.severity == "moderate"
        assert found.why == ("the sum of 440 MiB of gradients over 2 processes takes 31 ms of a step, in which nothing is "
                             "computed")
        assert "--processes 1" in found.cure.says
        assert found.cure.words == ("train_batch_size=16",)
        assert found.numbers["share"] == pytest.approx(0.31, rel=0.01)
        assert found.numbers["most"] == pytest.approx(1 / 0.69)

    @pytest.mark.parametrize(("techniques", "words"), [
        ({"packing": {"tokens": 4096}}, ("techniques.packing.tokens=2048",)),
        ({"micro_batch": {"examples": 4}}, ("techniques.micro_batch.examples=2",)), ({}, ("train_batch_size=16",))])
    def test_uneven_tokens_ask_for_smaller_passes(self, techniques: dict[str, dict[str, int]], words: tuple[str, ...]):
        found = only(record(shared(waiting=0.2, imbalance=1.4), techniques=techniques), "imbalance")
        assert found.title == "one process computes 1.4 times the tokens of the mean process"
        assert "20% of the steps' time" in evidence(found)
        assert found.cure.words == words

    def test_waiting_with_even_tokens_blames_what_else_runs(self):
        found = only(record(shared(waiting=0.4)), "imbalance")
        assert found.severity == "moderate"
        assert found.title == "processes wait 40% of the steps' time for the slowest one"
        assert "other programs" in found.cure.says
        assert not found.cure.words

    @pytest.mark.parametrize(("part", "words"), [("backward", ()), ("data", ("techniques.loader=on",))])
    def test_a_slow_process_is_named_with_its_machine(self, part: str, words: tuple[str, ...]):
        events_ = [*shared(waiting=0.4)]
        events_.insert(100, SLOW_PROCESS | {"part": part, "time": events_[99]["time"]})
        run = record(events_)
        found = only(run, "straggler")
        assert found.title == "process 1 on node-2 takes 1.5 times as long as the median process"
        assert found.cure.words == words
        assert (found.numbers["rank"], found.numbers["own_s"]) == (1, 0.09)
        assert [one.rule for one in symptoms_of(run) if one.severity != "good"] == ["straggler"]     # the waiting is its doing

    def test_the_verdict_has_the_share_of_both(self):
        causes = {cause.name: cause for cause in causes_of(record(shared(communication=0.31, waiting=0.2)))}
        assert causes[Bound.COMMUNICATION].share == pytest.approx(0.31, rel=0.01)
        assert causes[Bound.IMBALANCE].share == pytest.approx(0.2, rel=0.01)
        assert "31 ms of a step's 100 ms" in causes[Bound.COMMUNICATION].evidence[0].what
        assert Bound.COMMUNICATION not in {cause.name for cause in causes_of(record(events()))}
