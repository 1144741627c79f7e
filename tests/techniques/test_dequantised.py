"""4-bit weights made whole less often: how often, and with the same bits in every result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kinds_of_runs import LORA, make_ragged, ragged_facts

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.kernels.quantised import Packed, QuantisedLinear
from powertrain.planner import ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import Effect, Facts, NotApplied, Plan, Proposal, Refusal
from powertrain.records.plan import Why
from powertrain.techniques.activation_checkpointing import ActivationCheckpointing
from powertrain.techniques.base import Technique
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.dequantised_cache import DequantisedCache
from powertrain.training.loop import apply_plan, backward, new_state
from powertrain.training.setup import Setup

pytest.importorskip("bitsandbytes")
MODULES = 7                                  # of a block: q, k, v, o, gate, up, down
LAYERS = 2


def in_force(*techniques: Technique, adapters: AdapterConfig = LORA) -> Setup:
    steps = tuple(Proposal(technique, "test", Effect((1.0, 1.0), 0, "guess: test")) for technique in techniques)
    return apply_plan(make_ragged(adapters, four_bit=True), Plan(steps, ()))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """While it lasts, the rows that were unpacked, call by call."""
    calls: list[int] = []
    unpack = Packed.unpack

    def counting(self: Packed, dtype: torch.dtype) -> torch.Tensor:
        calls.append(self.rows)
        return unpack(self, dtype)

    with monkeypatch.context() as patched:
        patched.setattr(Packed, "unpack", counting)
        yield calls


def step_of(setup: Setup) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of a step in one pass, and its gradients."""
    torch.manual_seed(5)
    micro_batches = setup.prepare(0)
    tokens = sum(batch.trained_tokens for batch in micro_batches)
    loss = backward(setup, new_state(setup, 0.1).scaler, micro_batches, tokens)["loss"]
    gradients = [parameter.grad for parameter in setup.model.parameters() if parameter.grad is not None]
    setup.model.zero_grad(set_to_none=True)
    return loss, gradients


def same(a: tuple[torch.Tensor, list[torch.Tensor]], b: tuple[torch.Tensor, list[torch.Tensor]]) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def test_a_block_that_is_computed_again_unpacks_once_for_that_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, again = in_force(), in_force(ActivationCheckpointing())
    expected = step_of(plain)
    with counted(monkeypatch) as calls:
        found = step_of(again)
    # forward and backward; what the down projection gives is never computed again, and its gradient unpacks as ever
    assert len(calls) == 2 * MODULES * LAYERS
    assert same(found, expected)


def test_nothing_is_kept_from_one_step_to_the_next() -> None:
    setup = in_force(ActivationCheckpointing())
    step_of(setup)
    assert all(linear.again is None for linear in setup.model.modules() if isinstance(linear, QuantisedLinear))


@pytest.mark.parametrize("adapters", [AdapterConfig(r=4, use_dora=True), AdapterConfig(r=4, use_dora=True, dropout=0.1),
                                      replace(LORA, target_modules=r".*layers\.1\.mlp.*")], ids=["dora", "dropped", "upper"])
def test_whoever_else_reads_the_weights_reads_the_same(adapters: AdapterConfig) -> None:
    plain = in_force(adapters=adapters)
    assert same(step_of(in_force(ActivationCheckpointing(), adapters=adapters)), step_of(plain))
    assert same(step_of(in_force(DequantisedCache(1), adapters=adapters)), step_of(plain))


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("others", [(), (Bf16(),)], ids=["fp32", "bf16"])
def test_blocks_that_are_kept_whole_are_not_unpacked(monkeypatch: pytest.MonkeyPatch, blocks: int,
                                                     others: tuple[Technique, ...]) -> None:
    cached = in_force(*others, DequantisedCache(blocks))
    with counted(monkeypatch) as calls:
        found = step_of(cached)
    first_has_no_gradient_of_its_input = 3   # q, k and v of the first block
    assert len(calls) == (0 if blocks == LAYERS else 2 * MODULES - first_has_no_gradient_of_its_input)
    assert same(found, step_of(in_force(*others)))


def test_weights_that_are_whole_in_another_type_are_noticed() -> None:
    with pytest.raises(NotApplied, match=r"0 blocks are kept dequantised in torch\.bfloat16, not 1"):
        in_force(DequantisedCache(1), Bf16())


def test_as_many_blocks_are_offered_as_fit_and_none_until_it_is_asked_for(facts: Facts) -> None:
    quantised = ragged_facts(facts, LORA, method="qlora", frozen_dtype="nf4")
    quantised = replace(quantised, hardware=replace(quantised.hardware, instructions=(), free_memory_bytes=1 << 30))
    answer: Any = ask_anew(DequantisedCache.name, quantised, Recipe())
    assert isinstance(answer, Refusal)
    assert answer.possible == DequantisedCache(2)
    short = replace(quantised, hardware=replace(quantised.hardware, free_memory_bytes=1 << 20))
    tight: Any = ask_anew(DequantisedCache.name, short, Recipe())
    assert (tight.possible, tight.why) == (None, Why.NO_ROOM)
    assert tight.numbers["needed_bytes"] > tight.numbers["room_bytes"]
    pinned = Recipe.model_validate({"techniques": {"dequantised_cache": {"blocks": 1}}})
    with_it, without = make_plan(quantised, pinned, 100), make_plan(quantised, Recipe(), 100)
    assert with_it.estimate is not None
    assert without.estimate is not None
    more = with_it.estimate.total_memory_bytes - without.estimate.total_memory_bytes
    assert more == 4 * quantised.model.matmul_parameters // 2


def test_a_model_without_4_bit_weights_has_nothing_to_keep(facts: Facts) -> None:
    answer: Any = ask_anew(DequantisedCache.name, ragged_facts(facts, LORA), Recipe())
    assert answer.possible is None
    assert "no weight is in 4 bits" in answer.because
