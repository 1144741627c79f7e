"""What the verdict names first, and what it promises, for runs that are crippled in one way each."""

from __future__ import annotations

import pytest
from observations import GOOD, STEP_S, reckoned, seen, tried

from powertrain.diagnosis.observed import Between, Bound, Observed
from powertrain.diagnosis.verdict import amdahl, causes
from powertrain.diagnosis.wording import sentences

# planted cause -> (what was seen of it, what its cure has to say in the recipe)
CRIPPLED: dict[str, tuple[Observed, tuple[str, ...]]] = {
    "data": (seen(step_s=(0.3,) * 20, parts={**GOOD.parts, "data": 0.2005},
                  remedies=(reckoned("data", "techniques.loader=on", 0.5),)), ("techniques.loader=on",)),
    "host overhead": (seen(step_s=(0.4,) * 20, passes=32, parts={"data": 0.001, "forward": 0.13, "backward": 0.26,
                                                                "optimizer": 0.009},
                           remedies=(tried("host overhead", "techniques.micro_batch.examples=8", 3.0),)),
                      ("techniques.micro_batch.examples=8",)),
    "padding": (seen(step_s=(0.2,) * 20, parts={"forward": 0.06, "backward": 0.13, "optimizer": 0.01}, flops=1.4e11,
                     padding_flops=7e10, padding_tokens=2048, remedies=(reckoned("padding", "techniques.packing=on", 0.05),)),
                ("techniques.packing=on",)),
    "evaluation": (seen(evaluation=Between("eval_steps", 0.3, 1)), ("eval_steps=200",)),
    "checkpointing": (seen(checkpoint=Between("save_steps", 0.5, 1)), ("save_steps=500",)),
    "logging": (seen(logging=Between("logging_steps", 0.05, 1)), ("logging_steps=50",)),
    "compute": (seen(step_s=(0.31,) * 20, dtype="fp32", parts={"forward": 0.1, "backward": 0.2, "optimizer": 0.01},
                     remedies=(tried("compute", "techniques.bf16=on", 2.6),)), ("techniques.bf16=on",)),
    "too few threads": (seen(step_s=(0.18,) * 20, threads=1, parts={"forward": 0.06, "backward": 0.11, "optimizer": 0.01},
                             remedies=(tried("too few threads", "techniques.threads.threads=2", 1.7),)),
                        ("techniques.threads.threads=2",)),
    "memory capacity": (seen(step_s=(0.125,) * 20, flops=9e10, recompute_flops=2e10,
                             remedies=(tried("memory capacity", "techniques.activation_checkpointing=off", 1.2),)),
                        ("techniques.activation_checkpointing=off",)),
    "recompilation": (seen(steps=100, recompilations=7, recompile_s=60.0,
                           remedies=(reckoned("recompilation", "techniques.torch_compile=off", 0.0),)),
                      ("techniques.torch_compile=off",)),
    "busy machine": (seen(step_s=(0.2,) * 20, parts={"forward": 0.06, "backward": 0.12, "optimizer": 0.02},
                          stolen_share=0.5, others_cores=2.0), ()),
    "throttling": (seen(throttled_share=0.4, throttled_by="a CPU quota of the control group"), ()),
}


@pytest.mark.parametrize("planted", CRIPPLED)
def test_the_planted_cause_is_named_first_with_its_cure(planted: str) -> None:
    observed, words = CRIPPLED[planted]
    first = causes(observed)[0]
    assert first.name == planted
    assert first.cure.words == words
    assert first.predicted > 1.02


@pytest.mark.parametrize("planted", CRIPPLED)
def test_no_cure_promises_more_than_the_bound_of_its_cause_unless_it_was_seen(planted: str) -> None:
    for cause in causes(CRIPPLED[planted][0]):
        assert 1.0 <= cause.predicted <= cause.bound + 1e-9 or cause.basis.startswith("measured")
        assert 0 <= cause.share <= 1
        assert cause.evidence
        assert cause.name in tuple(Bound)


def test_a_run_that_nothing_holds_back_is_bound_by_what_it_computes() -> None:
    first = causes(GOOD)[0]
    assert (first.name, first.predicted) == ("compute", 1.0)
    assert first.share == pytest.approx(0.7)
    assert first.bound == pytest.approx(1 / 0.3)


def test_a_run_that_moves_more_than_it_computes_is_bound_by_memory_bandwidth() -> None:
    assert causes(seen(flops=1e10, moved_bytes=1.2e9))[0].name == "memory bandwidth"


def test_a_small_step_that_neither_products_nor_traffic_explain_is_bound_by_overhead() -> None:
    assert causes(seen(flops=1e9, moved_bytes=1e6))[0].name == "host overhead"


def test_a_model_split_over_devices_waits_for_itself() -> None:
    split = next(cause for cause in causes(seen(split_over=2)) if cause.name == "device split")
    assert split.bound == pytest.approx(2.0, rel=0.02)
    assert "CUDA_VISIBLE_DEVICES" in split.cure.says


def test_what_cannot_be_counted_is_not_called_overhead() -> None:
    assert causes(seen(flops=None))[0].name == "compute"


def test_the_cost_between_steps_counts_into_the_shares_of_all_causes() -> None:
    plain, evaluating = causes(GOOD)[0], causes(seen(evaluation=Between("eval_steps", 10 * STEP_S, 10)))
    compute = next(cause for cause in evaluating if cause.name == "compute")
    assert compute.share == pytest.approx(plain.share / 2, rel=0.01)


def test_an_interval_that_fires_after_the_last_step_only_costs_nothing() -> None:
    assert "evaluation" not in {cause.name for cause in causes(seen(evaluation=Between("eval_steps", 5.0, 1000)))}


def test_an_interval_is_made_no_rarer_than_twice_a_run() -> None:
    first = causes(seen(steps=30, evaluation=Between("eval_steps", 1.0, 1)))[0]
    assert first.cure.words == ("eval_steps=15",)


def test_an_interval_that_cannot_be_rarer_is_not_named_as_its_own_cure() -> None:
    first = causes(seen(steps=40, evaluation=Between("eval_steps", 8.5, 20)))[0]
    assert first.name == "evaluation"
    assert first.cure.says == "train longer, or make each time shorter: to evaluate every 20 of 40 steps is not too often"
    assert (first.cure.words, first.predicted) == ((), 1.0)


def test_a_cure_and_its_evidence_name_what_is_done_too_often() -> None:
    first = causes(seen(steps=4000, evaluation=Between("eval_steps", 8.5, 20)))[0]
    assert first.cure.says.startswith("evaluate every ")
    assert first.cure.says.endswith(" steps instead of every 20")
    assert "an evaluation takes 8.5 s and comes every 20 steps (eval_steps=20); a step takes " in first.evidence[0].what


def test_the_interval_of_a_cure_takes_at_most_two_percent_of_the_run() -> None:
    first = causes(seen(steps=10**6, checkpoint=Between("save_steps", 3.0, 20)))[0]
    every = int(first.cure.words[0].partition("=")[2])
    assert 3.0 / every / (STEP_S + 3.0 / every) <= 0.02


def test_a_speed_seen_of_a_step_is_promised_for_the_steps_only() -> None:
    half_outside = seen(evaluation=Between("eval_steps", 100 * STEP_S, 100), steps=100_000,
                        remedies=(tried("compute", "techniques.bf16=on", 2.0),))
    compute = next(cause for cause in causes(half_outside) if cause.name == "compute")
    assert compute.predicted == pytest.approx(2 / 1.5, rel=0.01)


def test_what_was_tried_goes_before_what_was_only_reckoned() -> None:
    remedies = (reckoned("padding", "techniques.packing=on", 0.0), tried("padding", "techniques.length_grouping=on", 1.1))
    padded = next(cause for cause in causes(seen(padding_tokens=2048, remedies=remedies)) if cause.name == "padding")
    assert padded.cure.words == ("techniques.length_grouping=on",)


def test_a_cure_that_was_tried_in_vain_promises_nothing() -> None:
    in_vain = seen(step_s=(0.4,) * 20, remedies=(tried("host overhead", "techniques.micro_batch.examples=8", 0.9),))
    overhead = next(cause for cause in causes(in_vain) if cause.name == "host overhead")
    assert overhead.predicted == 1.0


def test_steps_that_grow_longer_on_an_idle_machine_are_throttled() -> None:
    rising = tuple(0.1 + 0.005 * step for step in range(20))
    found = {cause.name for cause in causes(seen(step_s=rising))}
    assert "throttling" in found
    assert "throttling" not in {cause.name for cause in causes(seen(step_s=rising, stolen_share=0.3))}
    assert "throttling" not in {cause.name for cause in causes(seen(step_s=tuple(reversed(rising))))}


def test_longer_steps_of_more_tokens_are_not_throttled() -> None:
    rising = tuple(0.1 + 0.005 * step for step in range(20))
    in_step = seen(step_s=rising, step_slots=tuple(20_000 * taken for taken in rising))
    assert "throttling" not in {cause.name for cause in causes(in_step)}
    assert "throttling" in {cause.name for cause in causes(seen(step_s=rising, step_slots=(2048.0,) * 20))}


def test_a_few_unequal_steps_make_no_trend() -> None:
    few, mixed = (0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.4), (0.1, 0.1, 0.5, 0.1, 0.2, 0.1, 0.2, 0.1, 0.3, 0.1, 0.1, 0.3)
    for step_s in (few, mixed):
        assert "throttling" not in {cause.name for cause in causes(seen(step_s=step_s))}


def test_amdahl_ends_where_a_share_of_everything_would_promise_infinity() -> None:
    assert amdahl(0.5) == 2.0
    assert amdahl(1.0) == 100.0
    assert amdahl(-0.1) == 1.0


def test_every_bound_has_words_for_the_case_that_the_recipe_cannot_help() -> None:
    advised = {name for name, entry in sentences()["bound"].items() if "advice" in entry}
    assert advised == {bound.name.lower() for bound in Bound}
