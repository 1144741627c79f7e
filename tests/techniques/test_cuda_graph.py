"""Passes of one shape, and what is recorded of them. Where there is no GPU, what would be recorded is done again instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kinds_of_runs import LORA, make_ragged, ragged_facts
from torch.utils._python_dispatch import TorchDispatchMode

from powertrain.data.example import Example
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.kernels.attention import OverEnds, masked_over_ends, math_attention
from powertrain.planner import ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import Facts, Layout, NotApplied
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.techniques.cuda_graph import CudaGraph
from powertrain.techniques.fp16 import Fp16
from powertrain.techniques.fused_blocks import FusedBlocks
from powertrain.techniques.packing import Packing
from powertrain.training.loop import backward, evaluate, new_state, train
from powertrain.training.replayed_passes import PassShape, ReplayedPass, lay_out, shape_of, static_sums
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

PACKED = Packing(tokens=120, multiple=120)
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "index by a mask"}   # a GPU has to be read


class AtOnce:
    """A recorder for machines without CUDA: what was recorded is done again."""

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        return work


class Operators(TorchDispatchMode):
    """Writes down which operators run, on which shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        name = function._schema.name
        if name.startswith("aten::index") and any(x.dtype == torch.bool for x in tensors[1:]):
            name = "index by a mask"
        self.seen.append((name, tuple(tuple(x.shape) for x in tensors)))
        return function(*args, **(kwargs or {}))


def replayed(setup: Setup, *others: Any, recorder: Callable[[], Any] = AtOnce) -> Setup:
    for technique in (PACKED, *others, CudaGraph()):
        setup = technique.apply(setup)
    assert isinstance(setup.run_pass, ReplayedPass)
    return replace(setup, run_pass=ReplayedPass(setup.run_pass.shape, recorder))


def gradients_of(setup: Setup, loss: torch.Tensor) -> list[torch.Tensor]:
    setup.model.zero_grad(set_to_none=True)
    loss.backward()
    return [parameter.grad for parameter in setup.model.parameters() if parameter.requires_grad]


def losses_of(setup: Setup, steps: int = 6) -> list[float]:
    return [float(step.loss) for step in train(setup, new_state(setup, 0.1), Schedule("constant", 1e-2, steps), 1.0)]


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize(("family", "adapters"), [("llama", None), ("llama", LORA), ("gpt2", None), ("qwen3", LORA)])
def test_a_pass_of_constant_shape_has_the_same_loss_and_gradients(family: str, adapters: AdapterConfig | None,
                                                                  chunked: bool) -> None:
    others = (ChunkedCrossEntropy(rows=13),) if chunked else ()
    heads = {"kv_heads": 2} if family == "gpt2" else {}
    plain = Packing(tokens=120).apply(make_ragged(adapters, family=family, **heads))
    static = replayed(make_ragged(adapters, family=family, **heads), *others)
    for ours, theirs in zip(static.prepare(0), plain.prepare(0), strict=True):
        assert len(ours.tokens) == 120 != len(theirs.tokens)
        found, expected = static_sums(static, ours, static.run_pass.shape)["loss"], plain.batch_loss(theirs)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        for gradient, wanted in zip(gradients_of(static, found), gradients_of(plain, expected), strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


def test_a_sliding_window_stays_inside_documents() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(23, 4, 8), torch.randn(23, 2, 8), torch.randn(23, 2, 8)
    ends = torch.tensor([0, 1, 6, 23, 23, 23], dtype=torch.int32)
    wanted = math_attention(q, k, v, (1, 5, 17), layer=0, dropout=0.0, window=3, scale=0.3)
    found = OverEnds(masked_over_ends, ends, 17)(q, k, v, (23,), layer=0, dropout=0.0, window=3, scale=0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_empty_documents_and_rows_without_a_target_change_nothing() -> None:
    setup = replayed(make_ragged(LORA), ChunkedCrossEntropy(rows=200))
    batch, shape = setup.prepare(0)[0], setup.run_pass.shape
    tight = replace(shape, documents=len(batch.lengths), rows=batch.trained_tokens)
    wide = replace(shape, documents=50, rows=shape.tokens)
    losses = [static_sums(setup, lay_out(replace(batch, layout=None), wanted), wanted)["loss"] for wanted in (tight, wide)]
    gradients = [gradients_of(setup, loss) for loss in losses]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_every_row_with_a_target_is_there_once() -> None:
    setup = replayed(make_ragged(LORA))
    for batch in setup.prepare(0):
        rows = batch.layout.rows.tolist()
        assert len(set(rows)) == len(rows) == setup.run_pass.shape.rows
        assert set(np.flatnonzero(batch.targets.numpy() != -100)) <= set(rows)


def test_all_passes_are_the_same_operators_on_the_same_shapes_and_none_waits() -> None:
    setup = replayed(make_ragged(LORA), ChunkedCrossEntropy(rows=32))
    kinds, batches = [], [batch for step in range(3) for batch in setup.prepare(step)]
    assert len({batch.lengths for batch in batches}) == len(batches) > 6
    for batch in batches:
        with Operators() as operators:
            static_sums(setup, replace(batch, lengths=batches[0].lengths), setup.run_pass.shape)["loss"].backward()
        setup.model.zero_grad(set_to_none=True)
        kinds.append(operators.seen)
    assert all(seen == kinds[0] for seen in kinds)
    assert not {name for name, _ in kinds[0]} & WAITS
    with Operators() as asking:
        setup.loss(setup.model, torch.zeros(len(batches[0].targets), setup.model.config.width), batches[0].targets)
    assert {name for name, _ in asking.seen} & WAITS                 # the test can see it


def test_nothing_is_compiled_a_second_time() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    setup, counter = replayed(make_ragged(LORA)), CompileCounter()
    batches = [batch for step in range(2) for batch in setup.prepare(step)]
    run = torch.compile(lambda ends, q: masked_over_ends(q, q, q, ends, 120, None, 1.0), backend=counter, dynamic=False)
    for batch in batches:
        run(batch.layout.ends, torch.ones(len(batch.tokens), 2, 8))
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("adapters", [None, LORA], ids=["full", "lora"])
def test_a_run_of_replayed_passes_learns_the_same(adapters: AdapterConfig | None) -> None:
    setup = replayed(make_ragged(adapters), ChunkedCrossEntropy(rows=64))
    found, expected = losses_of(setup), losses_of(make_ragged(adapters))
    assert found == pytest.approx(expected, rel=1e-5)
    assert setup.run_pass.counts["recorded"] == 1
    assert setup.run_pass.counts["replayed"] > 12                    # several passes a step
    held_out = setup.examples[:9]
    eager = Packing(tokens=120).apply(replace(make_ragged(adapters), model=setup.model))
    assert evaluate(setup, held_out, tokens_per_byte=None).loss == \
        pytest.approx(evaluate(eager, held_out, tokens_per_byte=None).loss, rel=1e-6)


def test_fp16_is_recorded_with_the_scale_of_the_run() -> None:
    setup, eager = Fp16().apply(replayed(make_ragged(LORA))), Fp16().apply(PACKED.apply(make_ragged(LORA)))
    CudaGraph().confirm(setup)                                       # without a scale
    assert losses_of(setup) == pytest.approx(losses_of(eager), rel=1e-3)


@pytest.mark.parametrize("first", [True, False])
def test_a_pass_that_does_not_fit_runs_eagerly_into_the_same_gradients(first: bool) -> None:
    setup = replayed(make_ragged(LORA))
    batches = sorted(setup.prepare(0), key=lambda batch: -batch.trained_tokens)
    chosen = batches[0 if first else -1]
    batches = [replace(batch, layout=None) if batch is chosen else batch for batch in batches]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    tokens = sum(batch.trained_tokens for batch in batches)
    for _ in range(2):                                               # the second step finds the buffers of the first
        setup.model.zero_grad(set_to_none=True)
        loss = backward(setup, scaler, batches, tokens)["loss"]
        found = [parameter.grad.clone() for parameter in setup.model.parameters() if parameter.requires_grad]
        plain = make_ragged(LORA)
        expected_loss = backward(plain, scaler, plain.prepare(0), tokens)["loss"]
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        expected = [parameter.grad for parameter in plain.model.parameters() if parameter.requires_grad]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert setup.run_pass.counts == {"recorded": 1, "replayed": 2 * len(batches) - 2, "eager": 2}


def test_an_example_that_is_longer_than_a_pass_runs_eagerly() -> None:
    made = make_ragged(LORA)
    long = Example(np.arange(130, dtype=np.int64) % 50, np.arange(1, 131, dtype=np.int64) % 50)
    setup = replayed(replace(made, examples=[*made.examples[:27], long]))
    plain = replace(make_ragged(LORA), examples=setup.examples)
    assert losses_of(setup, 2) == pytest.approx(losses_of(plain, 2), rel=1e-5)
    assert setup.run_pass.counts["eager"] == 1

def test_a_longer_document_more_documents_or_more_targets_do_not_fit() -> None:
    setup = replayed(make_ragged(LORA))
    batch, shape = replace(setup.prepare(0)[0], layout=None), setup.run_pass.shape
    assert lay_out(batch, shape).layout is not None
    for smaller in (replace(shape, documents=len(batch.lengths) - 1), replace(shape, longest=max(batch.lengths) - 1),
                    replace(shape, rows=batch.trained_tokens - 1), replace(shape, tokens=119), replace(shape, lengths=(120,))):
        assert lay_out(batch, smaller).layout is None


def test_the_shape_is_that_of_most_passes_with_room() -> None:
    setup = PACKED.apply(make_ragged(LORA))
    passes = [batch for step in range(4) for batch in setup.prepare(step)]
    shape = shape_of(passes)
    assert (shape.tokens, shape.lengths) == (120, None)
    assert shape.documents > max(len(batch.lengths) for batch in passes)
    assert max(batch.trained_tokens for batch in passes) <= shape.rows <= 120
    assert shape_of(passes, context=40).longest == 40


def test_blocks_of_one_length_keep_their_kernel(make_setup: Callable[..., Setup]) -> None:
    setup = replace(make_setup(), micro_batch=7)
    assert shape_of(setup.prepare(0)) == PassShape(84, 7, 12, 84, (12,) * 7)
    graphed = CudaGraph().apply(setup)
    graphed = replace(graphed, run_pass=ReplayedPass(graphed.run_pass.shape, AtOnce))
    assert losses_of(graphed, 3) == pytest.approx(losses_of(replace(make_setup(), micro_batch=7), 3), rel=1e-6)
    assert graphed.run_pass.counts["eager"] == 0


def test_weights_that_change_in_place_are_seen_and_those_that_move_are_recorded_again() -> None:
    setup = replayed(make_ragged(LORA))
    batch, scaler = setup.prepare(0)[0], torch.amp.GradScaler("cpu", enabled=False)

    def loss() -> float:
        return float(backward(setup, scaler, [batch], batch.trained_tokens)["loss"])

    before = loss()
    weight = next(parameter for parameter in setup.model.parameters() if parameter.requires_grad)
    with torch.no_grad():
        weight += 1.0                        # as an optimizer, or a checkpoint that is loaded
    changed = loss()
    assert changed != pytest.approx(before, rel=1e-4)
    assert setup.run_pass.counts["recorded"] == 1
    weight.data = weight.data.clone()
    assert loss() == pytest.approx(changed, rel=1e-6)
    assert setup.run_pass.counts["recorded"] == 2


def test_a_weight_without_a_gradient_is_left_to_decay_nowhere() -> None:
    setup = replayed(make_ragged(None))
    unused = torch.nn.Parameter(torch.ones(3, 3))
    setup.model.register_parameter("unused", unused)
    losses_of(setup, 2)
    assert unused.grad is None
    assert torch.equal(unused, torch.ones(3, 3))


def test_a_layout_travels_with_its_batch() -> None:
    batch = replayed(make_ragged(LORA)).prepare(0)[0]
    moved = batch.to(torch.device("meta"))
    assert isinstance(moved.layout, Layout)
    assert {moved.layout.ends.device.type, moved.layout.rows.device.type} == {"meta"}


def test_confirm_is_content_with_what_is_replayed() -> None:
    setup = replayed(make_ragged(LORA))
    CudaGraph().confirm(setup)
    assert all(parameter.grad is None for parameter in setup.model.parameters())


class Forgetful(AtOnce):
    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        return lambda: None


class Late(AtOnce):
    """Reads the numbers of the recording, whatever is in its memory now."""

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        done: list[None] = []
        return lambda: done.append(None) if done else (work(), done.append(None))


@pytest.mark.parametrize("recorder", [Forgetful, Late])
def test_confirm_notices_a_replay_that_does_not_do_the_work(recorder: type[AtOnce]) -> None:
    with pytest.raises(NotApplied, match="is not the eager one"):
        CudaGraph().confirm(replayed(make_ragged(LORA), recorder=recorder))


def test_confirm_notices_passes_of_other_shapes_and_passes_that_run_eagerly() -> None:
    setup = replayed(make_ragged(LORA))
    with pytest.raises(NotApplied, match=r"set techniques\.packing\.multiple"):
        CudaGraph().confirm(replace(setup, collate=Packing(tokens=120).collate))
    with pytest.raises(NotApplied, match="passes are run by"):
        CudaGraph().confirm(make_ragged(LORA))


# ------------------------------------------------------------------------------------------------ what it answers


@pytest.fixture
def on_gpu(gpu_facts: Callable[..., Facts], lora_facts: Facts) -> Facts:
    return replace(lora_facts, hardware=gpu_facts().hardware, software=gpu_facts().software)


def pinned(**others: Any) -> Recipe:
    return Recipe.model_validate({"techniques": {"cuda_graph": "on", **others}})


def test_it_is_possible_on_a_gpu_and_says_that_no_study_chose_it(on_gpu: Facts) -> None:
    answer = ask_anew(CudaGraph.name, on_gpu, Recipe())
    assert answer.possible == CudaGraph()
    assert "no study" in answer.because
    plan = make_plan(on_gpu, pinned(), 100)
    steps = {step.technique.name: step.technique for step in plan.steps}
    assert "cuda_graph" in steps
    packing = steps["packing"]
    assert isinstance(packing, Packing)
    assert packing.tokens == packing.multiple
    assert packing.halved() == replace(packing, tokens=packing.tokens // 2, multiple=packing.tokens // 2)


@pytest.mark.parametrize(("change", "why"), [
    ({"model": {"dropout": 0.1}}, "draws new numbers"), ({"model": {"provider": "transformers"}}, "transformers"),
    ({"model": {"frozen_dtype": "nf4"}}, "bitsandbytes"), ({"hardware": {"device": "cpu"}}, "CUDA GPU"),
    ({"hardware": {"compute_capability": (7, 5)}}, "reads the lengths on the device"),
    ({"recipe": {"packing": "off"}}, "needs packing"), ({"recipe": {"bf16": "off", "tf32": "off"}}, "fp32"),
    ({"recipe": {"activation_checkpointing": "on"}}, "random state"),
    ({"recipe": {"attention_kernel": {"kernel": "sdpa"}}}, "needs varlen")], ids=str)
def test_it_refuses_with_the_reason(on_gpu: Facts, change: dict[str, Any], why: str) -> None:
    facts = replace(on_gpu, hardware=replace(on_gpu.hardware, **change.get("hardware", {})),
                    model=replace(on_gpu.model, **change.get("model", {})))
    answer = ask_anew(CudaGraph.name, facts, pinned(**change.get("recipe", {})))
    assert why in answer.because
    assert answer.possible is None


def test_ls_lora_is_refused_for_its_penalty(on_gpu: Facts) -> None:
    model = ragged_facts(on_gpu, AdapterConfig(r=4, kind="lslora")).model
    assert "penalty" in ask_anew(CudaGraph.name, replace(on_gpu, model=model), Recipe()).because


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_recorded_run_learns_the_same_on_a_gpu(by_hand: bool) -> None:
    others = (Bf16(), AttentionKernel("varlen"), ChunkedCrossEntropy(rows=64), *((FusedBlocks(),) if by_hand else ()))

    def make(*techniques: Any) -> Setup:
        setup = make_ragged(LORA)
        setup = replace(setup, model=setup.model.cuda(), device=torch.device("cuda"))
        for technique in (PACKED, *others, *techniques):
            setup = technique.apply(setup)
        return setup

    graphed = make(CudaGraph())
    CudaGraph().confirm(graphed)
    assert losses_of(graphed) == pytest.approx(losses_of(make()), rel=1e-2)
    assert graphed.run_pass.counts["recorded"] == 1

