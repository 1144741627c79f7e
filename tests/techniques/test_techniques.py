"""What each technique answers on which machine, and what it does beyond the common contract."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from powertrain.cost.fitting import PLANNED_SHARE, ROOM, fitting_tokens, longest_example, memory_of_examples
from powertrain.cost.workload import Workload
from powertrain.models.kernels import build
from powertrain.models.kernels.losses import token_loss
from powertrain.planner import PinRefused, ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import IGNORE, Facts, NotApplied, Proposal, Refusal
from powertrain.records.plan import Why
from powertrain.techniques.activation_checkpointing import ActivationCheckpointing
from powertrain.techniques.allocator import Allocator
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.base import PlannedRun
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.techniques.fp16 import Fp16
from powertrain.techniques.loader import Loader
from powertrain.techniques.micro_batch import MicroBatch
from powertrain.techniques.tf32 import Tf32
from powertrain.techniques.threads import Threads
from powertrain.techniques.torch_compile import TorchCompile
from powertrain.training.loop import new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

MakeSetup = Callable[..., Setup]
RECIPE = Recipe()


def on_cpu(facts: Facts, *instructions: str, **peaks: float) -> Facts:
    measured = peaks or {"fp32": 1e11, "bf16": 8e11}
    return replace(facts, hardware=replace(facts.hardware, device="cpu", instructions=instructions, peak_flops_per_s=measured))


@pytest.mark.parametrize("unit", ["amx_bf16", "avx512_bf16"])
def test_bf16_is_proposed_on_a_cpu_that_multiplies_it(facts: Facts, unit: str) -> None:
    answer = ask_anew(Bf16.name, on_cpu(facts, "avx2", unit), RECIPE)
    assert isinstance(answer, Proposal)
    assert unit in answer.because
    assert answer.claim.step_time == pytest.approx((1 / 8, 9 / 16))


def test_bf16_is_refused_where_it_is_emulated_or_measured_no_faster(facts: Facts, gpu_facts: Callable[..., Facts]) -> None:
    assert isinstance(ask_anew(Bf16.name, on_cpu(facts, "avx2", "avx512f"), RECIPE), Refusal)
    assert isinstance(ask_anew(Bf16.name, on_cpu(facts, "avx512_bf16", fp32=1e11, bf16=1.1e11), RECIPE), Refusal)
    turing = ask_anew(Bf16.name, gpu_facts((7, 5)), RECIPE)
    assert isinstance(turing, Refusal)
    assert turing.possible is None
    assert "7.5" in turing.because


def test_the_gpus_generation_decides_between_the_half_precisions(gpu_facts: Callable[..., Facts]) -> None:
    def chosen(capability: tuple[int, int]) -> list[bool]:
        return [isinstance(ask_anew(t.name, gpu_facts(capability), RECIPE), Proposal) for t in (Bf16, Fp16, Tf32)]

    assert chosen((9, 0)) == chosen((8, 0)) == [True, False, False]
    assert chosen((7, 5)) == chosen((7, 0)) == [False, True, False]
    assert chosen((6, 1)) == [False, False, False]


@pytest.mark.parametrize(("architecture", "has_bf16"), [("gfx90a", True), ("gfx942", True), ("gfx1100", True),
                                                         ("gfx1030", False)])
def test_an_amd_gpu_is_not_taken_for_one_of_nvidia(gpu_facts: Callable[..., Facts], architecture: str, has_bf16: bool) -> None:
    there = gpu_facts(None, architecture=architecture, peak_flops_per_s={})
    bf16, fp16, tf32 = (ask_anew(technique.name, there, RECIPE) for technique in (Bf16, Fp16, Tf32))
    assert isinstance(bf16, Proposal) is has_bf16
    assert isinstance(fp16, Refusal)
    assert fp16.why is (Why.NOT_NEEDED if has_bf16 else Why.HARDWARE_LACKS)
    assert isinstance(tf32, Refusal)
    assert tf32.why is Why.HARDWARE_LACKS


def test_tf32_sets_both_of_torchs_switches(make_setup: MakeSetup) -> None:
    setup = Tf32().apply(make_setup())
    with pytest.raises(NotApplied, match="fp32 products are computed in"):
        Tf32().confirm(setup)
    try:
        for work in setup.runtime:
            work()
        Tf32().confirm(setup)
        assert torch.get_float32_matmul_precision() == "high"        # torch's compiler asks this, and it may raise
    finally:
        torch.set_float32_matmul_precision("highest")


def test_fp16_scales_the_loss_and_trains_like_fp32(make_setup: MakeSetup) -> None:
    plain = make_setup()
    scaled = Fp16().apply(make_setup())
    Fp16().confirm(scaled)
    losses = []
    for setup in (plain, scaled):
        state = new_state(setup, 0.1)
        assert state.scaler.is_enabled() is (setup is scaled)
        losses.append([float(s.loss) for s in train(setup, state, Schedule("constant", 1e-3, 5), 1.0)])
    assert losses[1] == pytest.approx(losses[0], rel=3e-3)


def test_fp16_skips_the_step_whose_gradients_overflow_and_halves_the_scale(make_setup: MakeSetup) -> None:
    setup = Fp16().apply(make_setup())
    state = new_state(setup, 0.0)
    before = [p.detach().clone() for p in setup.model.parameters()]
    setup = replace(setup, loss=lambda *arguments: token_loss(*arguments) * 1e38)
    for _ in train(setup, state, Schedule("constant", 1e-3, 1), 1.0):
        pass
    assert all(torch.equal(p, old) for p, old in zip(setup.model.parameters(), before, strict=True))
    assert state.scaler.get_scale() == 2.0**15


def test_fp16_without_loss_scaling_is_not_fp16(setup: Setup) -> None:
    changed = Fp16().apply(setup)
    with pytest.raises(NotApplied, match="not scaled"):
        Fp16().confirm(replace(changed, precision=replace(changed.precision, loss_scaling=False)))


def test_tf32_is_confirmed_only_while_fp32_products_are_left(setup: Setup) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        changed = Tf32().apply(setup)
        with pytest.raises(NotApplied):
            Tf32().confirm(changed)
        for enter_setting in changed.runtime:
            enter_setting()
        Tf32().confirm(changed)
        with pytest.raises(NotApplied, match="no fp32 products"):
            Tf32().confirm(Bf16().apply(changed))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_master_weights_and_their_gradients_stay_fp32_under_bf16(make_setup: MakeSetup) -> None:
    setup = Bf16().apply(make_setup())
    setup.batch_loss(setup.prepare(0)[0]).backward()
    assert {p.dtype for p in setup.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in setup.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("rows", [1, 5, 64, 1000])
@pytest.mark.parametrize("tied", [True, False])
def test_the_chunked_loss_has_the_plain_losss_gradients(make_setup: MakeSetup, rows: int, tied: bool) -> None:
    model = make_setup(tied_head=tied).model
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 50, (33,), generator=generator)
    targets[::3] = IGNORE
    results = []
    for loss in (token_loss, ChunkedCrossEntropy(rows).loss, ChunkedCrossEntropy(rows, "cpp").loss):
        hidden = torch.randn(33, 32, generator=torch.Generator().manual_seed(4), requires_grad=True)
        model.zero_grad()
        value = loss(model, hidden, targets)
        (value * 0.37).backward()
        results.append((value.detach(), hidden.grad, model.head_weight.grad))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)


def test_the_loss_is_computed_by_our_own_kernel_where_there_is_one(facts: Facts, gpu_facts: Callable[..., Facts],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(facts: Facts) -> ChunkedCrossEntropy | None:
        large = replace(facts, data=replace(facts.data, train_batch_size=10**6))         # logits that are worth it
        return ChunkedCrossEntropy.settings_of(ask_anew("chunked_cross_entropy", large, RECIPE))

    here, rows = on_cpu(replace(facts, software=replace(facts.software, missing={}))), (1 << 22) // facts.model.vocabulary
    monkeypatch.setattr(build, "is_built", lambda source: True)
    assert answer(here) == ChunkedCrossEntropy(rows, "cpp")
    without = replace(here, software=replace(here.software, missing={"c++ compiler": "not installed"}))
    assert answer(without) == ChunkedCrossEntropy(rows, "torch")
    for there, pinned, because in ((here, "triton", "the kernel triton is for 'cuda', and this run computes on 'cpu'"),
                                   (gpu_facts((8, 0)), "cpp", "the kernel cpp is for 'cpu', and this run computes on 'cuda'"),
                                   (without, "cpp", "the kernel cpp needs what is missing here, c++ compiler; use")):
        with pytest.raises(PinRefused, match=re.escape(because)):
            make_plan(there, Recipe(techniques={"chunked_cross_entropy": {"kernels": pinned}}), 100)


def test_rows_that_train_nothing_never_reach_the_head(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    original = torch.Tensor.logsumexp
    monkeypatch.setattr(torch.Tensor, "logsumexp", lambda self, *a, **k: rows.append(len(self)) or original(self, *a, **k))
    targets = torch.full((40,), IGNORE)
    targets[5:12] = 1
    ChunkedCrossEntropy(4).loss(setup.model, torch.randn(40, 32), targets)
    assert rows == [4, 3]


def test_a_batch_without_trained_rows_has_no_loss_and_no_gradient(setup: Setup) -> None:
    hidden = torch.randn(6, 32, requires_grad=True)
    loss = ChunkedCrossEntropy(4).loss(setup.model, hidden, torch.full((6,), IGNORE))
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()


def test_the_chunked_loss_keeps_no_logits(setup: Setup) -> None:
    kept: list[int] = []
    hidden = torch.randn(64, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        ChunkedCrossEntropy(8).loss(setup.model, hidden, torch.zeros(64, dtype=torch.int64))
    assert max(kept) < 64 * 50               # rows x vocabulary


def test_a_frozen_head_gets_no_gradient_in_whatever_type_it_is_stored(make_setup: MakeSetup) -> None:
    model = make_setup(tied_head=False).model
    model.head.requires_grad_(False)
    model.head.weight.data = model.head.weight.data.bfloat16()
    targets = torch.randint(0, 50, (33,), generator=torch.Generator().manual_seed(2))
    targets[::3] = IGNORE
    results = []
    for loss in (token_loss, ChunkedCrossEntropy(8).loss):
        hidden = torch.randn(33, 32, generator=torch.Generator().manual_seed(4), requires_grad=True)
        kept: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
            value = loss(model, hidden, targets)
        value.backward()
        results.append((value.detach(), hidden.grad))
        assert model.head.weight.grad is None
    assert kept == [hidden.shape]            # its gradient; the head's, (50, 32), was not even made
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_evaluation_makes_no_gradient_of_the_head(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, targets = torch.randn(20, 32), torch.zeros(20, dtype=torch.int64)
    expected = ChunkedCrossEntropy(8).loss(setup.model, hidden, targets).detach()
    monkeypatch.setattr(torch.Tensor, "exp_", lambda *_: pytest.fail("the softmax was made, which only a gradient needs"))
    with torch.no_grad():
        assert torch.equal(ChunkedCrossEntropy(8).loss(setup.model, hidden, targets), expected)


def test_the_loss_in_chunks_pays_where_few_tokens_are_trained_or_the_vocabulary_is_large(facts: Facts) -> None:
    def answer(trained_share: float, vocabulary: int) -> Proposal | Refusal:
        model = replace(facts.model, vocabulary=vocabulary, head_parameters=vocabulary * 32, matmul_parameters=100_000)
        data = replace(facts.data, trained_share=trained_share)
        return ask_anew(ChunkedCrossEntropy.name, replace(facts, model=model, data=data), RECIPE)

    few, all_of_them, large = answer(0.3, 1000), answer(1.0, 1000), answer(1.0, 50_000)
    assert isinstance(few, Proposal)
    assert few.numbers["skipped_share"] == pytest.approx(0.17, abs=0.005)
    assert few.claim.step_time[1] < 1
    assert isinstance(all_of_them, Refusal)
    assert isinstance(large, Proposal)


def test_a_gpu_attends_to_all_lengths_in_one_call_where_it_can(lora_facts: Facts, gpu_facts: Callable[..., Facts]) -> None:
    def kernel(capability: tuple[int, int] = (9, 0), pins: dict[str, object] | None = None, **model: object) -> tuple[str, str]:
        asked = replace(lora_facts, hardware=gpu_facts(capability).hardware, model=replace(lora_facts.model, **model))
        answer = ask_anew(AttentionKernel.name, asked, Recipe.model_validate({"techniques": pins or {}}))
        assert isinstance(answer, Proposal)
        return answer.technique.kernel, answer.because

    assert kernel()[0] == "varlen"
    for answer, says in ((kernel((7, 5)), "capability 8.0"), (kernel(dropout=0.1), "model.dropout is 0.1"),
                         (kernel(pins={"bf16": "off"}), "computes in tf32"), (kernel(head_width=20), "multiple of 8")):
        assert answer[0] == "sdpa"
        assert says in answer[1]


@pytest.mark.parametrize(("torch_version", "kernel"), [("2.11.0+cu128", "sdpa"), ("2.12.0", "varlen")])
def test_one_call_for_all_lengths_needs_a_torch_that_has_it(lora_facts: Facts, gpu_facts: Callable[..., Facts],
                                                            torch_version: str, kernel: str) -> None:
    software = replace(lora_facts.software, versions={**lora_facts.software.versions, "torch": torch_version})
    answer = ask_anew(AttentionKernel.name, replace(lora_facts, hardware=gpu_facts((9, 0)).hardware, software=software), RECIPE)
    assert isinstance(answer, Proposal)
    assert answer.technique.kernel == kernel
    assert ("needs torch 2.12 or newer, and this is torch 2.11.0+cu128" in answer.because) is (kernel == "sdpa")


def test_varlen_attention_in_fp32_is_noticed_before_the_run(setup: Setup) -> None:
    changed = AttentionKernel("varlen").apply(setup)
    with pytest.raises(NotApplied, match="computes in fp32"):
        AttentionKernel("varlen").confirm(changed)
    AttentionKernel("varlen").confirm(Bf16().apply(changed))


def test_blocks_are_not_compiled_for_lengths_that_never_come_again(lora_facts: Facts) -> None:
    usable = replace(lora_facts, software=replace(lora_facts.software, missing={}))
    answer = ask_anew(TorchCompile.name, usable, Recipe(max_steps=100_000))
    assert isinstance(answer, Refusal)
    assert (answer.possible, answer.why) == (None, Why.DOES_NOT_APPLY)


def test_micro_batches_divide_the_batch_evenly_where_they_can(facts: Facts) -> None:
    def chosen(batch: int, block: int) -> int | None:
        asked = replace(facts, data=replace(facts.data, train_batch_size=batch, block=block))
        answer = ask_anew(MicroBatch.name, replace(asked, hardware=replace(asked.hardware, device="cpu")), RECIPE)
        return answer.technique.examples if isinstance(answer, Proposal) else None

    assert chosen(64, 256) == 16             # 4,096 tokens
    assert chosen(60, 256) == 15
    assert chosen(12, 64) is None            # all at once
    assert chosen(37, 256) == 16             # a prime: 16 + 16 + 5
    assert chosen(4, 8192) == 1


def test_micro_batches_shrink_with_the_memory(facts: Facts) -> None:
    small = replace(facts, hardware=replace(facts.hardware, device="cpu", free_memory_bytes=24 << 20),
                    data=replace(facts.data, train_batch_size=64, block=256))
    answer = ask_anew(MicroBatch.name, small, RECIPE)
    assert isinstance(answer, Proposal)
    assert answer.technique.examples < 16
    assert "memory" in answer.because


def test_checkpointing_is_proposed_only_where_the_memory_does_not_suffice(facts: Facts) -> None:
    def answer(free_bytes: int) -> Proposal | Refusal:
        asked = replace(facts, hardware=replace(facts.hardware, free_memory_bytes=free_bytes),
                        model=replace(facts.model, layers=48), data=replace(facts.data, block=1024))
        return ask_anew(ActivationCheckpointing.name, asked, RECIPE)

    assert isinstance(answer(64 << 30), Refusal)
    tight = answer(8 << 20)
    assert isinstance(tight, Proposal)
    assert tight.claim.peak_memory_bytes < 0


@pytest.mark.parametrize("every", [1, 2, 3])
def test_checkpointing_recomputes_every_nth_block_and_keeps_the_bits(make_setup: MakeSetup, every: int) -> None:
    runs: list[list[int]] = []
    gradients = []
    for setup in (make_setup("gpt2", layers=3, dropout=0.3), make_setup("gpt2", layers=3, dropout=0.3)):
        changed = ActivationCheckpointing(every).apply(setup) if runs else setup
        count: list[int] = []
        for index, block in enumerate(setup.model.blocks):
            block.register_forward_pre_hook(lambda *_, index=index, count=count: count.append(index))
        torch.manual_seed(3)
        changed.batch_loss(setup.prepare(0)[0]).backward()
        runs.append(count)
        gradients.append([p.grad for p in setup.model.parameters()])
    assert len(runs[1]) == 3 + len([i for i in range(3) if i % every == 0])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(("workers", "ahead"), [(1, 1), (3, 2), (2, 50)])
def test_loader_threads_keep_the_order_of_the_steps(setup: Setup, workers: int, ahead: int) -> None:
    wanted = [setup.prepare(step) for step in range(2, 9)]
    found = list(Loader(workers, ahead).load(setup.prepare, range(2, 9), setup.device))
    for one, other in zip(found, wanted, strict=True):
        assert [batch.lengths for batch in one] == [batch.lengths for batch in other]
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))


def test_a_loader_whose_data_fails_says_so_in_the_run(setup: Setup) -> None:
    def broken(step: int) -> list:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(Loader(2, 2).load(broken, range(3), setup.device))


def test_threads_follow_the_cores_of_the_process(facts: Facts) -> None:
    now = torch.get_num_threads()
    answer = ask_anew(Threads.name, replace(facts, hardware=replace(facts.hardware, device="cpu", cores=now + 3)), RECIPE)
    assert isinstance(answer, Proposal)
    assert answer.technique == Threads(now + 3)
    as_many = replace(facts, hardware=replace(facts.hardware, device="cpu", cores=now))
    assert isinstance(ask_anew(Threads.name, as_many, RECIPE), Refusal)


@pytest.mark.parametrize("kernel", ["math", "bmm", "ragged", "sdpa"])
def test_each_attention_kernel_can_be_pinned(setup: Setup, kernel: str) -> None:
    changed = AttentionKernel(kernel).apply(setup)
    AttentionKernel(kernel).confirm(changed)
    loss = changed.batch_loss(setup.prepare(0)[0])
    torch.testing.assert_close(loss, setup.batch_loss(setup.prepare(0)[0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("wrong", [lambda: AttentionKernel("fast"), lambda: MicroBatch(0), lambda: ChunkedCrossEntropy(0),
                                   lambda: ActivationCheckpointing(0), lambda: Loader(-1), lambda: Threads(0)])
def test_settings_that_cannot_be_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"techniques\."):
        wrong()


def test_a_compiler_that_silently_runs_eagerly_is_noticed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with pytest.raises(NotApplied, match="fell back to running eagerly"):
        TorchCompile().confirm(TorchCompile().apply(setup))


def test_compiling_is_left_to_runs_that_earn_it_back(facts: Facts) -> None:
    usable = replace(facts.software, missing={})
    machine = replace(facts.hardware, device="cpu", instructions=(), peak_flops_per_s={"fp32": 2e11},
                      bandwidth_bytes_per_s=4e10)
    asked = replace(facts, hardware=machine, software=usable, model=replace(facts.model, layers=12, width=512,
                                                                            matmul_parameters=38_000_000))

    def answer(steps: int, dropout: float = 0.0) -> Proposal | Refusal:
        return ask_anew(TorchCompile.name, replace(asked, model=replace(asked.model, dropout=dropout)),
                                    Recipe(max_steps=steps))

    short, long = answer(10), answer(100_000)
    assert isinstance(short, Refusal)
    assert short.why is Why.WOULD_NOT_PAY
    assert short.possible == TorchCompile()
    assert isinstance(long, Proposal)
    assert "pays after step" in long.because
    assert isinstance(answer(100_000, dropout=0.2), Refusal)
    without = replace(asked, software=replace(usable, missing={"c++ compiler": "not installed"}))
    refused = ask_anew(TorchCompile.name, without, Recipe(max_steps=100_000))
    assert isinstance(refused, Refusal)
    assert refused.possible is None


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no heap of glibc's")
def test_a_run_too_short_to_compile_the_pool_keeps_memory_in_glibcs_heap(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(facts.hardware, device="cpu", peak_flops_per_s={"fp32": 2e11}, bandwidth_bytes_per_s=4e10)
    asked = replace(facts, hardware=machine, software=replace(facts.software, missing={}))

    def kind(steps: int, facts: Facts = asked) -> str:
        answer = ask_anew(Allocator.name, facts, Recipe(max_steps=steps))
        assert isinstance(answer, Proposal)
        assert isinstance(answer.technique, Allocator)
        return answer.technique.kind

    monkeypatch.setattr(build, "is_built", lambda source: False)
    assert (kind(3), kind(10_000_000)) == ("glibc", "pool")
    no_compiler = replace(asked, software=replace(asked.software, missing={"c++ compiler": "not installed"}))
    assert kind(10_000_000, no_compiler) == "glibc"
    monkeypatch.setattr(build, "is_built", lambda source: source == build.POOL)
    assert kind(3) == "pool"


def test_compiled_blocks_serve_every_layer_and_run_other_shapes_plainly(make_setup: MakeSetup) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    setup = replace(make_setup(layers=4), micro_batch=5)                 # passes of 5, 5 and 4 examples
    changed = TorchCompile().apply(setup)
    TorchCompile().confirm(changed)
    losses = [float(s.loss) for s in train(changed, new_state(changed, 0.0), Schedule("constant", 1e-3, 2), 1.0)]
    plain = replace(make_setup(layers=4), micro_batch=5)
    expected = [float(s.loss) for s in train(plain, new_state(plain, 0.0), Schedule("constant", 1e-3, 2), 1.0)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_every_study_that_a_technique_names_is_stored() -> None:
    root = Path(__file__).resolve().parents[2]
    named = {study for file in (root / "src" / "powertrain" / "techniques").glob("*.py")
             for study in re.findall(r"20\d\d-\d\d-\d\d_[\w-]+", file.read_text(encoding="utf-8"))}
    assert named
    assert not [study for study in named if not (root / "studies" / study / "evidence.json").is_file()]


def test_memory_is_asked_of_the_step_as_it_is_decided(facts: Facts) -> None:
    plain = Workload(64, 256, micro_batch=64, device="cuda")
    decided = replace(plain, dtype="bf16", kernel="sdpa", attention_saves_scores=False, packed_tokens=512, lengths={"max": 900})
    one = PlannedRun.of(facts, RECIPE, decided).one_example()
    assert (one.dtype, one.kernel, one.device) == ("bf16", "sdpa", "cuda")
    assert (one.micro_batch, one.packed_tokens, one.longest) == (1, None, longest_example(facts.data))
    hardware = replace(facts.hardware, free_memory_bytes=1 << 30)
    tokens, of_plain = (fitting_tokens(facts.model, each, hardware, 1024) for each in (decided, plain))
    assert tokens > of_plain > 0


def test_a_pass_may_use_more_memory_where_one_example_takes_half_of_it(facts: Facts) -> None:
    step = Workload(64, 4, micro_batch=64)
    first_bytes, example_bytes = memory_of_examples(facts.model, step, 4)
    hardware = replace(facts.hardware, free_memory_bytes=int((first_bytes + 4.5 * example_bytes) / PLANNED_SHARE))
    assert ROOM * hardware.free_memory_bytes < first_bytes
    assert fitting_tokens(facts.model, step, hardware, 4) == 4 * 4
