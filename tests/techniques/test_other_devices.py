"""What a run does otherwise on devices that are not here: Macs, WSL2, Jetsons, Windows, several GPUs."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from powertrain.models import model as models
from powertrain.models.bridge import model as bridge
from powertrain.models.kernels import losses
from powertrain.models.model import sent
from powertrain.planner import ask_anew
from powertrain.recipe import Recipe
from powertrain.records import Facts, NotApplied, Proposal, Refusal
from powertrain.run.prepare import draws_taken_back
from powertrain.techniques.allocator import CUDA_SETTING, Allocator
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.training.memory import peak_memory_bytes
from powertrain.training.objectives import embedding_noise
from powertrain.training.setup import Setup

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


@pytest.mark.parametrize(("device", "named"), [("cpu", []), ("cuda", ["cuda"]), ("mps", ["mps"])])
def test_only_the_runs_own_device_takes_its_draws_back(device: str, named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With no devices named, torch warns at length where there are several GPUs, and touches all of them."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: asked.extend(devices))
    draws_taken_back(torch.device(device))
    assert [str(one) for one in asked] == named


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
