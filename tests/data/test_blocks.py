import numpy as np
import pytest
import torch

from powertrain.data.example import Blocks, Example, collate, evaluation_blocks
from powertrain.records import IGNORE, WrongUse


def stream(tokens: int) -> np.ndarray:
    return np.arange(tokens, dtype=np.uint16) + 7


def test_targets_are_the_inputs_shifted_by_one():
    example = Blocks(stream(20), block=5, stride=3)[2]
    assert example.inputs.tolist() == [13, 14, 15, 16, 17]
    assert example.targets.tolist() == [14, 15, 16, 17, 18]
    assert example.inputs.dtype == example.targets.dtype == np.int64


@pytest.mark.parametrize("tokens", [6, 7, 123])
@pytest.mark.parametrize("block", [1, 4, 5])
@pytest.mark.parametrize("stride", [1, 3, 5, 200])
def test_every_block_that_fits_is_there_and_none_that_does_not(tokens, block, stride):
    blocks = Blocks(stream(tokens), block, stride)
    starts = [i * stride for i in range(tokens) if i * stride + block + 1 <= tokens]
    assert [int(example.inputs[0]) - 7 for example in blocks] == starts
    assert len(blocks) == len(starts)
    assert all(len(example.inputs) == len(example.targets) == block for example in blocks)


def test_a_block_longer_than_the_data_is_refused_with_the_longest_that_fits():
    assert len(Blocks(stream(10), block=9, stride=9)) == 1
    with pytest.raises(WrongUse, match=r"a block of 10 tokens is longer than the 10 tokens of training data; "
                                       r"use data\.block=9 or less"):
        Blocks(stream(10), block=10, stride=10)


@pytest.mark.parametrize("tokens", [0, 1])
def test_data_too_short_for_any_block_is_refused(tokens):
    with pytest.raises(WrongUse, match=f"the training data has {tokens} tokens, and a block needs at least 2"):
        Blocks(stream(tokens), block=1, stride=1)


def test_blocks_are_a_sequence():
    blocks = Blocks(stream(20), block=5, stride=5)
    assert blocks[-1].inputs[0] == blocks[len(blocks) - 1].inputs[0]
    assert [example.inputs[0] for example in blocks[1:]] == [12, 17]
    for outside in (len(blocks), -len(blocks) - 1):
        with pytest.raises(IndexError):
            blocks[outside]


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 6, 7, 123])
@pytest.mark.parametrize("block", [1, 5, 200])
def test_evaluation_covers_every_token_but_the_first_once(tokens, block):
    examples = evaluation_blocks(stream(tokens), block)
    targets = [int(token) for example in examples for token in example.targets]
    assert targets == stream(tokens)[1:].tolist()
    assert all(len(example.inputs) == block for example in examples[:-1])
    assert all(example.inputs[0] == example.targets[0] - 1 for example in examples)


def test_collate_lays_examples_end_to_end_with_positions_restarting():
    first = Example(np.array([1, 2, 3]), np.array([2, 3, 4]))
    second = Example(np.array([9]), np.array([8]))
    batch = collate([first, second])
    assert batch.tokens.tolist() == [1, 2, 3, 9]
    assert batch.targets.tolist() == [2, 3, 4, 8]
    assert batch.positions.tolist() == [0, 1, 2, 0]
    assert batch.lengths == (3, 1)
    assert batch.trained_tokens == 4
    assert {batch.tokens.dtype, batch.targets.dtype, batch.positions.dtype} == {torch.int64}


def test_collate_keeps_ignored_targets_and_does_not_count_them():
    batch = collate([Example(np.array([1, 2, 3]), np.array([IGNORE, 3, IGNORE]))])
    assert batch.targets.tolist() == [IGNORE, 3, IGNORE]
    assert batch.trained_tokens == 1


def test_a_batch_does_not_share_memory_with_the_mapped_tokens():
    tokens = stream(10)
    batch = collate([Blocks(tokens, 4, 4)[0]])
    tokens[:] = 0
    assert batch.tokens.tolist() == [7, 8, 9, 10]
