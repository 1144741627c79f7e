import numpy as np
import pytest

from powertrain.data import order
from powertrain.data.order import (
    SORTED_MOST,
    cursor,
    epoch_order,
    in_seeded_order,
    keyed_places,
    seeded_order,
    step_examples,
)

PINNED = [131, 929, 594, 805, 814, 654, 691, 801]       # written down once, as below


@pytest.mark.parametrize("examples", [1, 2, 5, 123])
def test_an_epoch_is_a_permutation(examples):
    assert sorted(epoch_order(42, 0, examples)) == list(range(examples))


def test_the_order_is_the_same_in_every_version():
    # written down once: a resumed run must continue with the examples that the interrupted one had left
    assert seeded_order(42, 0, 8).tolist() == [7, 1, 6, 4, 3, 5, 0, 2]


@pytest.mark.parametrize("count", [1, 99, 100, 101, 1234])
def test_an_order_that_is_made_part_by_part_is_the_same(count, monkeypatch):
    monkeypatch.setattr(order, "DRAWN_AT_ONCE", 100)
    assert list(in_seeded_order(7, 3, count)) == seeded_order(7, 3, count).tolist()


def test_seeds_and_epochs_give_different_orders():
    orders = [epoch_order(seed, epoch, 123).tolist() for seed in (0, 1, 2**63 - 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_a_shared_order_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(42, 0, 5)[0] = 1


@pytest.mark.parametrize(("batch", "examples"), [(1, 1), (3, 10), (4, 4), (5, 123), (7, 5), (32, 3)])
def test_steps_visit_every_example_once_per_epoch(batch, examples):
    epochs = 3
    steps = -(-epochs * examples // batch)
    stream = np.concatenate([step_examples(42, step, batch, examples) for step in range(steps)])
    assert len(stream) == steps * batch
    for epoch in range(epochs):
        part = stream[epoch * examples:(epoch + 1) * examples]
        np.testing.assert_array_equal(part, epoch_order(42, epoch, examples))


def test_a_step_depends_on_no_step_before_it():
    alone = step_examples(42, 57, 7, 123)
    epoch_order.cache_clear()
    for step in range(57):
        step_examples(42, step, 7, 123)
    np.testing.assert_array_equal(step_examples(42, 57, 7, 123), alone)


def test_the_cursor_says_where_a_step_begins():
    assert cursor(0, 4, 10) == (0, 0)
    assert cursor(2, 4, 10) == (0, 8)
    assert cursor(3, 4, 10) == (1, 2)
    epoch, position = cursor(3, 4, 10)
    assert step_examples(42, 3, 4, 10)[0] == epoch_order(42, epoch, 10)[position]


@pytest.mark.parametrize("examples", [1, 2, 3, 5, 123, 4096, 70_001])
def test_a_keyed_order_is_a_permutation(examples):
    found = keyed_places(42, 0, examples, np.arange(examples))
    assert sorted(found.tolist()) == list(range(examples))


def test_a_keyed_order_is_the_same_in_every_version_and_for_each_place_alone():
    assert keyed_places(42, 0, 1000, np.arange(8)).tolist() == PINNED
    assert keyed_places(42, 0, 1000, np.array([5])).tolist() == PINNED[5:6]
    assert keyed_places(42, 1, 1000, np.arange(8)).tolist() != PINNED


def test_a_keyed_order_spreads_neighbours_evenly():
    count, found = 70_000, keyed_places(7, 3, 70_000, np.arange(70_000))
    steps = np.abs(np.diff(found)) / count
    assert abs(steps.mean() - 1 / 3) < 0.01              # of two independent draws
    for part in np.array_split(found, 7):                # each part of the epoch comes from the whole of the data
        counts = np.bincount(part * 10 // count, minlength=10)
        assert counts.min() > 900
        assert counts.max() < 1100


def test_steps_of_many_examples_visit_each_once_and_hold_no_epoch(monkeypatch):
    monkeypatch.setattr(order, "SORTED_MOST", 0)
    monkeypatch.setattr(order, "CHUNK", 8)
    monkeypatch.setattr(order, "epoch_order", None)
    order._keyed_chunk.cache_clear()
    stream = np.concatenate([step_examples(42, step, 7, 123) for step in range(36)])
    for epoch in (0, 1):
        part = stream[epoch * 123:(epoch + 1) * 123]
        np.testing.assert_array_equal(part, keyed_places(42, epoch, 123, np.arange(123)))
    order._keyed_chunk.cache_clear()
    far = step_examples(1, 10**9, 32, 10**12)            # a permutation of 8 TB, had it to be held
    assert len(set(far.tolist())) == 32
    assert far.max() < 10**12


def test_runs_of_before_sort_any_number():
    count = SORTED_MOST + 1
    sorted_before = seeded_order(42, 0, count)[:5].tolist()
    assert step_examples(42, 0, 5, count, "sorted").tolist() == sorted_before != step_examples(42, 0, 5, count).tolist()
