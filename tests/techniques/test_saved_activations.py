"""What a hand-written block does not keep comes back with the same numbers, and as little of it as has to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from kinds_of_runs import LORA, make_ragged
from torch import Tensor

from not_compiled import NotCompiled
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.kernels.attention import bmm_attention, math_attention, sdpa_attention
from powertrain.models.kernels.fused.saving import PlainHost
from powertrain.models.kernels.slabs import Slabs
from powertrain.records import NotApplied
from powertrain.techniques.frozen_backward import FrozenBackward
from powertrain.techniques.fused_blocks import ByHand, FusedBlocks
from powertrain.techniques.packing import Packing
from powertrain.techniques.saved_activations import KINDS, SavedActivations
from powertrain.training.loop import new_state, train
from powertrain.training.memory import MemoryLedger
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Precision, Setup

KEPT = dict.fromkeys(KINDS, "keep")
ALL = {"inner": "recompute", "heads": "recompute", "mixed": "offload", "normalised": "offload"}
WAYS = ({"inner": "recompute"}, {"heads": "recompute"}, {"inner": "recompute", "heads": "recompute"}, {"inner": "offload"},
        {"heads": "offload"}, {"mixed": "offload"}, {"normalised": "offload"}, ALL, dict.fromkeys(KINDS, "offload"))


@pytest.fixture(autouse=True)
def forgotten_compilations() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def by_hand(adapters: AdapterConfig | None = LORA, *, kernel: Any = sdpa_attention, **asked: Any) -> Setup:
    """Run by hand, not compiled."""
    setup = Packing(tokens=120).apply(replace(make_ragged(adapters, layers=4, **asked), attention=kernel))
    for name, parameter in setup.model.named_parameters():   # norms at identity would hide what is left out of them
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0, 0.3, generator=torch.Generator().manual_seed(len(parameter)))
    return NotCompiled().apply(setup)


def gradients_of(setup: Setup, seed: int = 3) -> list[Tensor]:
    setup.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = setup.batch_loss(setup.prepare(0)[0])
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in setup.model.parameters() if parameter.requires_grad)]


@pytest.mark.parametrize("actions", WAYS, ids=lambda actions: " ".join(f"{kind}-{action}" for kind, action in actions.items()))
@pytest.mark.parametrize("adapters", [None, LORA], ids=["full", "lora"])
def test_gradients_keep_their_bits(adapters: AdapterConfig | None, actions: Mapping[str, str]) -> None:
    found = SavedActivations(**(KEPT | actions)).apply(by_hand(adapters))
    for gradient, expected in zip(gradients_of(found), gradients_of(by_hand(adapters)), strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("kernel", [math_attention, bmm_attention, sdpa_attention])
@pytest.mark.parametrize(("family", "asked"), [("qwen3", {}), ("gemma", {}), ("gpt_neox", {"kv_heads": 2}),
                                               ("gpt2", {"kv_heads": 2, "dropout": 0.2})])
def test_any_kernel_family_and_dropout(kernel: Any, family: str, asked: dict[str, Any]) -> None:
    found = SavedActivations(**ALL).apply(by_hand(None, kernel=kernel, family=family, **asked))
    for gradient, expected in zip(gradients_of(found), gradients_of(by_hand(None, kernel=kernel, family=family, **asked)),
                                  strict=True):
        assert torch.equal(gradient, expected)


def test_bf16_is_no_further_from_fp32_than_when_all_is_kept() -> None:
    def distance(setup: Setup) -> float:
        exact = gradients_of(by_hand())
        found = gradients_of(replace(setup, precision=Precision(torch.bfloat16)))
        return float(sum((a.float() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)))

    assert distance(SavedActivations(**ALL).apply(by_hand())) < 1.1 * distance(by_hand())


@pytest.mark.parametrize("actions", [actions for actions in WAYS if "offload" not in actions.values()], ids=str)
def test_memory_is_really_given_back(actions: Mapping[str, str]) -> None:
    def forward_bytes(setup: Setup) -> int:
        batch, held = setup.prepare(0)[0], []
        with MemoryLedger(torch.device("cpu")) as ledger:
            held.append(setup.batch_loss(batch))
        return ledger.peak_bytes

    setup = by_hand()
    tokens, c = len(setup.prepare(0)[0].tokens), setup.model.config
    columns = {"inner": 2 * c.mlp_width, "heads": (c.heads + 2 * c.kv_heads) * c.head_width}
    saved = forward_bytes(setup) - forward_bytes(SavedActivations(**(KEPT | actions)).apply(by_hand()))
    one_block = 4 * tokens * sum(columns[kind] for kind in actions)
    assert 3 * one_block <= saved <= 4 * one_block           # the last block's may be there at the peak, with what comes after


def test_only_as_many_blocks_as_are_asked_for_put_something_away() -> None:
    setup = SavedActivations(blocks=3).apply(by_hand())
    assert [block.saving is not None for block in setup.run_block.blocks] == [True, True, True, False]
    upper = by_hand(AdapterConfig(r=4, target_modules=r"model\.layers\.[23]\..*"))
    setup = SavedActivations(blocks=1).apply(upper)
    assert [block.saving is not None for block in setup.run_block.blocks] == [False, False, True, False]


class Counting(PlainHost):
    """What went, and in which order it came back."""

    def __init__(self) -> None:
        object.__setattr__(self, "log", [])

    def put(self, tensor: Tensor) -> Any:
        self.log.append(("put", tensor.numel()))
        return super().put(tensor)

    def fetch(self, stay: Any) -> Tensor:
        self.log.append(("fetch", stay.numel()))
        return super().fetch(stay)


def test_what_is_out_is_a_copy_that_comes_back_once() -> None:
    setup, host = SavedActivations(**dict.fromkeys(KINDS, "offload")).apply(by_hand()), Counting()
    saving = replace(setup.run_block.blocks[0].saving, host=host)
    blocks = tuple(replace(block, saving=saving) for block in setup.run_block.blocks)
    gradients_of(replace(setup, run_block=ByHand(blocks)))
    count = 5 * len(blocks)                                  # both norms' results, heads, inner, mixed
    assert [kind for kind, _ in host.log] == ["put"] * count + ["fetch"] * count
    sizes = [size for _, size in host.log]
    assert sorted(sizes[:count]) == sorted(sizes[count:])
    assert saving.freed == 4 * len(blocks)        # the norms' pair is one


def in_larger_memory(layers: tuple[int, ...]) -> Any:
    """A kernel whose result is, in these blocks, a part of what else its memory holds."""
    def kernel(*given: Any, layer: int, **more: Any) -> Tensor:
        mixed = sdpa_attention(*given, layer=layer, **more)
        return torch.cat([mixed, mixed])[:len(mixed)] if layer in layers else mixed

    return kernel


def test_what_shares_its_memory_stays() -> None:
    setup = SavedActivations(**(KEPT | {"mixed": "offload"})).apply(by_hand(kernel=in_larger_memory((0, 1, 2, 3))))
    for gradient, expected in zip(gradients_of(setup), gradients_of(by_hand()), strict=True):
        assert torch.equal(gradient, expected)
    assert setup.run_block.blocks[0].saving.freed == 0


def test_evaluation_puts_nothing_away() -> None:
    setup = SavedActivations(**ALL).apply(by_hand())
    with torch.no_grad():
        setup.batch_loss(setup.prepare(0)[0])
    assert setup.run_block.blocks[0].saving.freed == 0


def test_a_run_with_compiled_blocks_learns_the_same() -> None:
    def losses(*techniques: Any) -> list[float]:
        setup = make_ragged(LORA)
        for technique in techniques:
            setup = technique.apply(setup)
        for technique in techniques:
            technique.confirm(setup)
        return [float(step.loss) for step in train(setup, new_state(setup, 0.1), Schedule("constant", 1e-2, 4), 1.0)]

    assert losses(FusedBlocks(), SavedActivations(**ALL), FrozenBackward(), Packing(100)) == pytest.approx(losses(), rel=1e-5)


def test_confirm_notices_blocks_that_keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    technique = SavedActivations(**ALL)
    with pytest.raises(NotApplied, match="keep all that they need"):
        technique.confirm(by_hand())
    with pytest.raises(NotApplied, match="not as fused blocks"):
        technique.apply(make_ragged(LORA))
    setup = technique.apply(by_hand())
    technique.confirm(setup)
    monkeypatch.setattr("powertrain.models.kernels.fused.saving._is_alone", lambda *_: False)
    with pytest.raises(NotApplied, match="0 tensors of 4 blocks"):
        technique.confirm(setup)


def test_confirm_notices_one_block_and_other_actions_and_leaves_no_gradients() -> None:
    technique = SavedActivations(**(KEPT | {"mixed": "offload"}))
    with pytest.raises(NotApplied, match="3 tensors of 4 blocks"):
        technique.confirm(technique.apply(by_hand(kernel=in_larger_memory((2,)))))
    setup = technique.apply(by_hand())
    with pytest.raises(NotApplied, match="keep all that they need"):
        SavedActivations().confirm(setup)
    technique.confirm(setup)
    assert all(parameter.grad is None for parameter in setup.model.parameters())


@pytest.mark.parametrize("setting", [{"mixed": "recompute"}, {"normalised": "recompute"}, {"inner": "drop"}, {"blocks": 0}])
def test_settings_that_cannot_be_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"techniques\.saved_activations\."):
        SavedActivations(**setting)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory and streams need a GPU")
def test_gradients_are_the_same_by_way_of_pinned_memory() -> None:
    def on_gpu(setup: Setup) -> Setup:
        return replace(setup, model=setup.model.cuda(), device=torch.device("cuda"))

    kept, light = on_gpu(by_hand()), SavedActivations(**dict.fromkeys(KINDS, "offload")).apply(on_gpu(by_hand()))
    for step in range(3):                                    # buffers are used again
        for batch in (batch.to(kept.device) for batch in kept.prepare(step)):
            for setup in (kept, light):
                setup.model.zero_grad(set_to_none=True)
                setup.batch_loss(batch).backward()
            for one, other in zip(light.model.parameters(), kept.model.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)


def test_pieces_of_any_size_are_cut_from_slabs_and_none_overlap() -> None:
    asked: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    slabs, sizes = Slabs(allocate, slab_bytes=4096), (300, 7, 900, 513, 5000, 20)
    pieces = [slabs.cut(size, torch.bfloat16).fill_(number) for number, size in enumerate(sizes)]
    assert asked == [4096, 4096, 10_000]     # the last is larger than a slab; what comes after it fits the slab before
    assert [len(piece) for piece in pieces] == list(sizes)
    assert all((piece == number).all() for number, piece in enumerate(pieces))
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)


def test_copies_fill_slabs_without_gaps() -> None:
    """torch rounds up to a power of two, and the rest of a slab would be lost: 120 GiB for the 91 of an 8B model."""
    asked: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    tensors = [torch.randn(30, 20).T, torch.randn(700).bfloat16(), torch.tensor(3.0), torch.zeros(0, 2), torch.randn(2500)]
    slabs = Slabs(allocate, slab_bytes=4096)
    copies = [slabs.copy(tensor) for tensor in tensors]
    total = sum(tensor.nbytes for tensor in tensors)
    assert asked == [4096] * -(-total // 4096)
    for tensor, pieces in zip(tensors, copies, strict=True):
        values = torch.cat([*pieces, torch.empty(0, dtype=torch.uint8)]).view(tensor.dtype).view(tensor.shape)
        assert torch.equal(values, tensor)
