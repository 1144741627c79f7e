"""Compilations, counted as torch really makes them; what is still to come, reckoned from some that were made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor

from powertrain.diagnosis.probe import Compilation, CompileWatch, most_compilations, still_to_come_s, told_apart

LIMIT = torch._dynamo.config.recompile_limit
FORWARD, BACKWARD = Compilation("forward", 2.0), Compilation("backward", 1.0)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def squared() -> Callable[[Tensor], Tensor]:
    """Compiled for each length anew; no code is generated, which would take a compiler and seconds."""
    return torch.compile(lambda x: (x * x).sum(), dynamic=False, backend="aot_eager")


def test_every_new_shape_is_one_compilation_and_a_known_one_is_none(squared: Callable[[Tensor], Tensor]) -> None:
    with CompileWatch() as watch:
        counted = []
        for length in (3, 3, 5, 3, 7):
            squared(torch.ones(length))
            counted.append(len(watch.take()))
    assert counted == [1, 0, 1, 0, 1]


def test_torch_gives_a_function_up_at_its_limit(squared: Callable[[Tensor], Tensor]) -> None:
    with CompileWatch() as watch:
        per_step = []
        for length in range(2, LIMIT + 6):
            squared(torch.ones(length))
            per_step.append(watch.take())
    made = sum(map(len, per_step))
    assert made == most_compilations(per_step) == LIMIT
    assert all(one.part == "forward" and one.seconds > 0 for step in per_step for one in step)


def test_nothing_is_counted_after_the_watch(squared: Callable[[Tensor], Tensor]) -> None:
    with CompileWatch() as watch:
        pass
    squared(torch.ones(3))
    assert watch.take() == ()


def test_what_has_not_compiled_lately_will_not() -> None:
    assert still_to_come_s([(FORWARD,), (FORWARD,), (), ()], steps_left=100) == 0.0
    assert still_to_come_s([(), ()], steps_left=100) == 0.0


def test_compiling_goes_on_at_its_rate_in_the_steps_that_are_left() -> None:
    assert still_to_come_s([(FORWARD,), (), (FORWARD,), ()], steps_left=4) == pytest.approx(4 * 0.5 * 2.0)


def test_compiling_ends_where_torch_gives_up() -> None:
    both = (FORWARD, BACKWARD)
    assert still_to_come_s([both] * 4, steps_left=1000) == pytest.approx((2 * LIMIT - 8) * 1.5)


def test_what_was_compiled_before_counts_towards_the_limit() -> None:
    blocks = (FORWARD,) * 2
    assert still_to_come_s([blocks] * 2, steps_left=1000, before=[(), blocks * 1]) == pytest.approx((2 * LIMIT - 6) * 2.0)
    assert still_to_come_s([blocks], steps_left=1000, before=[blocks] * LIMIT) == 0.0


def step(forward: float, backward: float) -> dict[str, float]:
    return {"data": 0.5, "forward": forward, "backward": backward}


def test_a_step_that_compiles_takes_as_long_without_it_as_those_that_do_not() -> None:
    parts, found = told_apart([step(4.0, 2.0), step(1.0, 1.5), step(1.0, 1.5)], [(FORWARD,), (), ()])
    assert parts[0] == step(1.0, 1.5)                            # 2 s of compiling were told, and 3.5 s are missing elsewhere
    assert [one.seconds for one in found[0]] == pytest.approx([3.5])
    assert (parts[1], found[1]) == (step(1.0, 1.5), ())


def test_a_step_is_never_made_longer_and_waiting_for_data_is_no_compiling() -> None:
    parts, found = told_apart([{"data": 9.0, "forward": 2.5, "backward": 0.2}, step(1.0, 1.5)], [(FORWARD,), ()])
    assert parts[0] == pytest.approx({"data": 9.0, "forward": 0.5, "backward": 0.2})
    assert found[0][0].seconds == pytest.approx(2.0)


def test_where_every_step_compiles_what_torch_tells_counts() -> None:
    parts, found = told_apart([step(4.0, 2.0)] * 2, [(FORWARD, BACKWARD)] * 2)
    assert parts[0] == step(2.0, 1.0)
    assert [one.seconds for one in found[0]] == pytest.approx([2.0, 1.0])
