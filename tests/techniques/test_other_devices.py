"""What a run does otherwise on devices that are not here: Macs, WSL2, Jetsons, Windows, several GPUs."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from powertrain.cost.fitting import total_bytes
from powertrain.models import model as models
from powertrain.models.bridge import model as bridge
from powertrain.models.kernels import attention, losses
from powertrain.models.model import sent
from powertrain.planner import ask_anew, make_plan, workload_of
from powertrain.recipe import Recipe
from powertrain.records import Facts, NotApplied, Proposal, Refusal
from powertrain.run.prepare import draws_taken_back
from powertrain.shapes import fused_attention, gpu_attention
from powertrain.techniques.allocator import CUDA_SETTING, Allocator
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.techniques.fp16 import Fp16
from powertrain.training.loop import seed_pass
from powertrain.training.memory import MemoryLedger, peak_memory_bytes, step_ledger
from powertrain.training.objectives import embedding_noise
from powertrain.training.setup import Setup
from powertrain.use import opening

MakeSetup = Callable[..., Setup]


@pytest.mark.parametrize(("device", "without_wait"), [("cuda", True), ("mps", False), ("cpu", False)])
def test_a_temporary_tensor_is_waited_for_where_it_may_be_read_later(device: str, without_wait: bool) -> None:
    asked: list[bool] = []
    temporary: Any = SimpleNamespace(to=lambda device, non_blocking: asked.append(non_blocking))
    sent(temporary, torch.device(device))
    assert asked == [without_wait]


def test_the_bridge_and_the_noise_send_what_they_make_so(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(temporary: torch.Tensor, device: torch.device) -> torch.Tensor:
        seen.append(len(temporary))
        return sent(temporary, device)

    monkeypatch.setattr(bridge, "sent", watched)
    monkeypatch.setattr(models, "sent", watched)
    bridge.Layout((3, 2), torch.device("cpu"))
    setup = make_setup()
    (batch,) = setup.prepare(0)[:1]
    with embedding_noise(setup.model, batch, 5.0):
        setup.model.hidden(batch)
    assert seen == [5, len(batch.tokens)]


@pytest.mark.parametrize(("system", "release", "proposed"), [
    ("Linux", "6.1.0-13-amd64", True), ("Linux", "5.15.153.1-microsoft-standard-WSL2", False),
    ("Linux", "5.15.136-tegra", False), ("Windows", "11", False)])
def test_expandable_segments_are_for_drivers_that_bear_them(
        gpu_facts: Callable[..., Facts], monkeypatch: pytest.MonkeyPatch, system: str, release: str, proposed: bool) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    assert isinstance(ask_anew(Allocator.name, gpu_facts(), Recipe()), Proposal if proposed else Refusal)
    assert isinstance(ask_anew(Allocator.name, gpu_facts(basis="published"), Recipe()), Proposal)


def test_expandable_segments_are_not_for_amd(gpu_facts: Callable[..., Facts]) -> None:
    for basis in ("measured", "published"):
        amd = gpu_facts(capability=None, architecture="gfx942", basis=basis)
        assert "pytorch#187343" in ask_anew(Allocator.name, amd, Recipe()).because


@pytest.mark.parametrize(("peaks", "chosen", "possible"), [
    ({"fp32": 5e12, "bf16": 10e12, "fp16": 10e12}, "bf16", {"bf16", "fp16"}),
    ({"fp32": 5e12, "bf16": 5e12, "fp16": 10e12}, "fp16", {"bf16", "fp16"}),
    ({"fp32": 5e12, "bf16": 5e12, "fp16": 5e12}, "fp32", {"bf16", "fp16"}),
    ({"fp32": 5e12, "fp16": 10e12}, "fp16", {"bf16", "fp16"}),
    ({}, "fp32", {"bf16", "fp16"})])
def test_a_mac_multiplies_in_the_type_that_was_measured_to_be_fast(peaks: dict[str, float], chosen: str, possible: set[str],
                                                                   gpu_facts: Callable[..., Facts]) -> None:
    mac = gpu_facts(capability=None, device="mps", peak_flops_per_s=peaks)
    asked = {kind.name: ask_anew(kind.name, mac, Recipe()) for kind in (Bf16, Fp16)}
    assert [name for name, answer in asked.items() if isinstance(answer, Proposal)] == [chosen] * (chosen != "fp32")
    assert {name for name, answer in asked.items() if isinstance(answer, Proposal) or answer.possible} == possible


def test_a_mac_with_a_torch_that_steps_over_overflow_in_vain_computes_no_fp16(gpu_facts: Callable[..., Facts]) -> None:
    mac = gpu_facts(capability=None, device="mps", peak_flops_per_s={"fp32": 5e12, "fp16": 10e12})
    old = replace(mac, software=replace(mac.software, versions={**mac.software.versions, "torch": "2.12.1"}))
    assert isinstance(ask_anew(Fp16.name, mac, Recipe()), Proposal)
    answer = ask_anew(Fp16.name, old, Recipe())
    assert isinstance(answer, Refusal)
    assert "pytorch#186360" in answer.because
    assert answer.possible is None


def test_tf32_is_off_on_amd(gpu_facts: Callable[..., Facts]) -> None:
    assert "no one has tried TF32" in ask_anew("tf32", gpu_facts(capability=None, architecture="gfx942"), Recipe()).because


def test_a_torch_that_does_not_tell_its_allocators_settings_gets_none(gpu_facts: Callable[..., Facts]) -> None:
    facts = gpu_facts()
    old = replace(facts, software=replace(facts.software, versions={**facts.software.versions, "torch": "2.11.0+cu130"}))
    assert "torch 2.11.0+cu130 does not tell" in ask_anew(Allocator.name, old, Recipe()).because


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
                    reason="this torch does not tell its allocator's settings: the technique is refused")
def test_expandable_segments_are_read_back_from_the_allocator(make_setup: MakeSetup, recwarn: pytest.WarningsRecorder) -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    setup = Allocator("cuda").apply(make_setup())
    try:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        with pytest.raises(NotApplied, match="without expandable_segments:True"):
            Allocator("cuda").confirm(setup)
        for work in setup.runtime:
            work()
        Allocator("cuda").confirm(setup)
    finally:
        torch._C._accelerator_setAllocatorSettings(before or CUDA_SETTING.replace("True", "False"))
    assert not recwarn.list                  # torch.cuda.memory._set_allocator_settings warns


@pytest.mark.parametrize(("device", "static"), [("mps", False), ("cuda", True)])
def test_rows_with_a_target_are_found_by_what_the_device_has(device: str, static: bool, monkeypatch: pytest.MonkeyPatch
                                                             ) -> None:
    counts: Any = SimpleNamespace(device=torch.device(device), nonzero=lambda: torch.tensor([[7]]))
    targets: Any = type("Targets", (), {"__ne__": lambda self, other: counts})()
    found: list[int] = []
    monkeypatch.setattr(torch, "nonzero_static", lambda counts, size: torch.full((size, 1), 3))
    monkeypatch.setattr(losses, "chunked_loss", lambda *given: found.extend(given[4].tolist()))
    ChunkedCrossEntropy(rows=8).loss(None, None, targets, trained=2)                 # type: ignore[arg-type]
    assert found == ([3, 3] if static else [7])


@pytest.mark.parametrize(("device", "named"), [("cpu", []), ("cuda:1", ["cuda: cuda:1"]), ("mps", ["mps: mps"])])
def test_only_the_runs_own_device_takes_its_draws_back(device: str, named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With no devices named, torch warns at length where there are several GPUs, and touches all of them.

    With no kind named, torch before 2.13 asks the generators of CUDA on a Mac too.
    """
    asked: list[str] = []
    for kind in ("cuda", "mps"):
        module = torch.get_device_module(kind)
        monkeypatch.setattr(module, "get_rng_state", lambda one, kind=kind: asked.append(f"{kind}: {one}"))
        monkeypatch.setattr(module, "set_rng_state", lambda state, one: None)
    with draws_taken_back(torch.device(device)):
        assert asked == named


def test_draws_inside_change_nothing_after() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with draws_taken_back(torch.device("cpu")):
        torch.rand(7)
    assert torch.equal(torch.rand(3), expected)


def test_windows_has_no_module_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=123)))
    assert peak_memory_bytes(torch.device("cpu")) == 123


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What Metal has handed to this process: `held` bytes, of which `pooled` are free in torch's pool."""
    memory = SimpleNamespace(held=700, pooled=200)

    def empty_cache() -> None:
        memory.held, memory.pooled = memory.held - memory.pooled, 0

    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    monkeypatch.setattr(torch.mps, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: memory.held)
    return memory


@pytest.mark.parametrize(("standing", "expected"), [(None, 900), (0, 400)])
def test_the_memory_of_a_step_on_a_mac_is_what_metal_hands_out_for_it(metal: SimpleNamespace, standing: int | None,
                                                                      expected: int) -> None:
    with MemoryLedger(torch.device("mps"), standing) as ledger:
        metal.held += 400
    assert (ledger.peak_bytes, ledger.reserved_bytes) == (expected, 0)
    assert peak_memory_bytes(torch.device("mps")) == 900


def test_between_steps_metal_knows_what_stands(metal: SimpleNamespace, make_setup: MakeSetup) -> None:
    setup = make_setup()
    with step_ledger(torch.device("mps"), setup.model, setup.optimizer(setup.model, 0.1)) as ledger:
        metal.held += 1
    assert ledger.peak_bytes == 501


def test_a_model_is_opened_on_the_gpu_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = SimpleNamespace(adapter=None, tokenizer_folder=None)
    sent_to: list[torch.device] = []
    model = SimpleNamespace(to=lambda device: sent_to.append(device) or SimpleNamespace(eval=lambda: None))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name, given in (("find_parts", found), ("choose", None), ("load_parts", model), ("open_tokenizer", None)):
        monkeypatch.setattr(opening, name, lambda *words, given=given, **named: given)
    opening.open_model("a model")
    assert sent_to == [torch.device("mps")]


def test_the_seed_of_a_pass_is_also_that_of_a_macs_generator(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, seeds = replace(make_setup(), device=torch.device("mps")), []
    monkeypatch.setattr(torch.mps, "_is_in_bad_fork", lambda: False, raising=False)
    monkeypatch.setattr(torch.mps, "manual_seed", seeds.append)
    (batch,) = setup.prepare(0)[:1]
    seed_pass(setup, 3, batch)
    assert seeds == [torch.initial_seed()]


@pytest.mark.parametrize(("device", "capability", "architecture", "nbytes", "masked", "kernel"), [
    ("cuda", (9, 0), "", 2, False, "flash"), ("cuda", (8, 0), "", 2, True, "efficient"),
    ("cuda", (8, 0), "", 4, False, "efficient"),
    ("cuda", (7, 5), "", 2, False, "efficient"), ("cuda", None, "gfx942", 2, False, "flash"),
    ("cuda", None, "gfx1030", 2, False, "math"), ("mps", None, "", 2, False, "math")])
def test_the_kernel_that_torch_takes_for_attention(device: str, capability: tuple[int, int] | None, architecture: str,
                                                   nbytes: int, masked: bool, kernel: str) -> None:
    fused = fused_attention(device, capability, architecture)
    assert gpu_attention(fused, nbytes, 64, masked=masked) == kernel
    assert gpu_attention(fused, nbytes, 65, masked=True) == "math"


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("window", [None, 3])
def test_keys_and_values_are_repeated_where_the_kernel_needs_as_many_heads(
        kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **words: Any) -> torch.Tensor:
        asked.append((k.shape[1], words["enable_gqa"]))
        return plain(q, k, v, **words)

    monkeypatch.setattr(attention, "kernel_of_torch", lambda *given, masked: kernel)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watched)
    q, k, v = (torch.randn(11, heads, 8) for heads in (4, 2, 2))
    words: Any = {"layer": 0, "dropout": 0.0, "window": window, "scale": 0.35}
    found = attention.sdpa_attention(q, k, v, (5, 6), **words)
    assert asked == [(4, False) if kernel == "efficient" else (2, True)] * 2
    torch.testing.assert_close(found, attention.math_attention(q, k, v, (5, 6), **words))


def test_attention_that_falls_back_on_a_gpu_is_not_in_force(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(config=SimpleNamespace(head_width=64, window=None),
                                  parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    technique = AttentionKernel("sdpa")
    setup = replace(technique.apply(make_setup()), model=config)
    monkeypatch.setattr(attention, "torch_falls_back", lambda *given, masked: False)
    technique.confirm(setup)
    monkeypatch.setattr(attention, "torch_falls_back", lambda *given, masked: True)
    with pytest.raises(NotApplied, match="store the attention weights of all pairs"):
        technique.confirm(setup)


@pytest.mark.parametrize(("masked", "expected", "fused", "falls"), [
    (False, "flash", False, True), (True, "efficient", False, True), (False, "efficient", True, False),
    (False, "math", False, False)])
def test_torch_is_asked_which_kernel_a_training_pass_gets(masked: bool, expected: str, fused: bool, falls: bool,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    def can_use(asked: Any) -> bool:
        assert asked.query.requires_grad
        assert (asked.attn_mask is not None) == masked
        return fused

    monkeypatch.setattr(attention, "kernel_of_torch", lambda *given, masked: expected)
    for kernel in ("flash", "efficient", "cudnn"):
        monkeypatch.setattr(attention.cuda, f"can_use_{kernel}_attention", can_use)
    assert attention.torch_falls_back(torch.device("cpu"), torch.float16, 64, masked=masked) is falls


@pytest.mark.parametrize(("changes", "words", "stored"), [
    ({"compute_capability": (7, 5)}, "memory-efficient kernel runs", False),
    ({"device": "mps", "compute_capability": None}, "all pairs of tokens are stored", True),
    ({"compute_capability": None, "architecture": "gfx1030"}, "all pairs of tokens are stored", True)])
def test_the_plan_says_which_attention_runs_and_counts_its_memory(gpu_facts: Callable[..., Facts], changes: dict[str, Any],
                                                                  words: str, stored: bool) -> None:
    facts = gpu_facts(**changes)
    plan = make_plan(facts, Recipe(), 10)
    kernel = next(step for step in plan.steps if step.technique.name == AttentionKernel.name)
    assert words in kernel.because
    here = workload_of(facts, plan)
    assert here.attention_saves_scores is stored
    grouped, half = replace(facts.model, kv_heads=1), replace(here, dtype="bf16")
    # flash repeats the gradients of keys and values in the backward pass; the efficient kernel gets them repeated
    nbytes, by_flash = (total_bytes(grouped, each) for each in (half, replace(half, fused_attention=("flash",))))
    assert nbytes > by_flash if stored else nbytes != by_flash
