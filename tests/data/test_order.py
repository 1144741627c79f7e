import numpy as np
import pytest

from powertrain.data.order import cursor, epoch_order, seeded_order, step_examples


@pytest.mark.parametrize("examples", [1, 2, 5, 123])
def test_an_epoch_is_a_permutation(examples):
    assert sorted(epoch_order(42, 0, examples)) == list(range(examples))


def test_the_order_is_the_same_in_every_version():
    # written down once: a resumed run must continue with the examples that the interrupted one had left
    assert seeded_order(42, 0, 8).tolist() == [7, 1, 6, 4, 3, 5, 0, 2]


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
