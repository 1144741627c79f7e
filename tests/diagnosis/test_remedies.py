"""Changes of a recipe that might help: the words resolve, and say what the planner would have decided without the pins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from observations import GOOD, reckoned, seen

from powertrain import planner
from powertrain.diagnosis.observed import Observed, Remedy
from powertrain.diagnosis.remedies import counted_once, remedies_of, unpinned, with_words, words_for
from powertrain.run.prepare import Prepared

Make = Callable[..., Prepared]


def remedies(prepared: Prepared, observed: Observed) -> dict[str, Remedy]:
    """By the cause that they are against."""
    return {remedy.against: remedy for remedy in remedies_of(prepared.facts, prepared.recipe, prepared.plan, observed)}


def planned_with(prepared: Prepared, words: tuple[str, ...]) -> Mapping[str, Any]:
    """Technique -> what the plan has, of the recipe with these words."""
    plan = planner.make_plan(prepared.facts, with_words(prepared.recipe, words), prepared.total_steps)
    return {step.technique.name: step.technique for step in plan.steps}


# cause -> (words that cripple the run, what was seen, the words of the cure)
PLANTED: dict[str, tuple[list[str], Observed, tuple[str, ...]]] = {
    "host overhead": (["techniques.micro_batch.examples=1"], seen(passes=10.0, pass_s=0.005, flops=1e9, moved_bytes=1e6),
                      ("techniques.micro_batch=off",)),
    "compute": (["techniques.bf16=off"], seen(dtype="fp32", flops=1.75e10), ("techniques.bf16=on",)),
    "too few threads": (["techniques.threads.threads=1"], seen(threads=1), ("techniques.threads.threads=2",)),
    "memory capacity": (["techniques.activation_checkpointing=on"], seen(recompute_flops=2e10),
                        ("techniques.activation_checkpointing=off",)),
    "recompilation": (["techniques.torch_compile=on"], seen(recompilations=12, recompile_s=40.0),
                      ("techniques.torch_compile=off",)),
    "data": ([], seen(step_s=(0.3,) * 20, parts={**GOOD.parts, "data": 0.2005}),
             ("techniques.loader.workers=3", "techniques.loader.ahead=6")),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_has_a_remedy_whose_words_resolve(cause: str, well_prepared: Make) -> None:
    words, observed, cure = PLANTED[cause]
    prepared = well_prepared(*words)
    found = remedies(prepared, observed)[cause]
    assert found.cure.words == cure
    assert found.kept is not None
    assert 0 <= found.kept < 1
    assert found.basis.startswith("formula")
    assert found.speed is None                                   # nobody tried it yet
    planned_with(prepared, cure)


@pytest.mark.parametrize("cause", PLANTED)
def test_a_run_without_the_planted_cause_gets_no_such_remedy(cause: str, well_prepared: Make) -> None:
    assert cause not in remedies(well_prepared(), seen(parts={**GOOD.parts, "data": 0.0}))


def test_the_planner_is_asked_anew_without_the_pin(well_prepared: Make) -> None:
    prepared = well_prepared("techniques.micro_batch.examples=1")
    other = unpinned(prepared.facts, prepared.recipe, ("micro_batch",))
    assert other is not None
    assert planner.workload_of(prepared.facts, other).micro_batch > 1
    assert unpinned(prepared.facts, prepared.recipe, ("bf16",)) is None       # which is not pinned


def test_words_make_one_plan_into_another(well_prepared: Make) -> None:
    slow, plain = well_prepared("techniques.micro_batch.examples=2", "techniques.bf16=off"), well_prepared()
    names = ("micro_batch", "bf16")
    words = words_for(slow.facts, slow.recipe, slow.plan, plain.plan, names)
    wanted = {step.technique.name: step.technique for step in plain.plan.steps}
    assert {name: planned_with(slow, words).get(name) for name in names} == {name: wanted.get(name) for name in names}


def test_numbers_and_truths_in_words_are_no_text(well_prepared: Make) -> None:
    recipe = with_words(well_prepared().recipe, ("techniques.loader.workers=3", "techniques.loader.pinned=True"))
    assert recipe.techniques["loader"] == {"workers": 3, "pinned": True}


def test_the_memory_that_needs_recomputing_is_not_told_to_do_without(well_prepared: Make) -> None:
    needed = seen(recompute_flops=2e10, recomputing_is_needed=True)
    assert "memory capacity" not in remedies(well_prepared("techniques.activation_checkpointing=on"), needed)


def test_more_workers_are_asked_where_some_were_too_few(well_prepared: Make) -> None:
    waiting = seen(step_s=(0.3,) * 20, parts={**GOOD.parts, "data": 0.05})
    few = well_prepared("techniques.loader.workers=1", "techniques.loader.ahead=2")
    assert remedies(few, waiting)["data"].cure.words == ("techniques.loader.workers=2", "techniques.loader.ahead=4")


def test_one_change_against_two_causes_has_its_gain_once() -> None:
    against = reckoned("host overhead", "techniques.packing=on", 0.0), reckoned("padding", "techniques.packing=on", 0.0)
    observed = seen(step_s=(0.2,) * 20, parts={"forward": 0.06, "backward": 0.13, "optimizer": 0.01}, padding_tokens=500.0)
    first, second = counted_once(against, observed)
    assert {first.kept, second.kept} == {0.0, 1.0}
    dropped = first if first.kept == 1.0 else second
    assert "which has the same cure" in dropped.basis


def test_the_remedies_of_a_recipe_are_counted_once(well_prepared: Make) -> None:
    found = remedies(well_prepared("techniques.micro_batch.examples=1"),
                     seen(passes=10.0, pass_s=0.005, flops=1e9, moved_bytes=1e6, padding_tokens=500.0))
    assert found["host overhead"].cure.words == found["padding"].cure.words
    assert ["which has the same cure" in found[name].basis for name in ("host overhead", "padding")] == [False, True]
