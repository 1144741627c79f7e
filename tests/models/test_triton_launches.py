"""A step of training launches Triton's kernels as they were compiled for every GPU: types, warps, pieces and programs.

Triton's own launch path runs, with a driver that compiles each launch for a GPU and then notes it: no GPU is needed. Results
are not computed: test_triton_kernels.py compares them, and test_triton_compiled.py looks for spills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed, whose launch path this runs: pip install triton")

from test_triton_compiled import FP32, NUMBERS  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from powertrain.models.adapters.attached import add_adapters  # noqa: E402
from powertrain.models.adapters.targets import AdapterConfig  # noqa: E402
from powertrain.models.config import FAMILIES, make_config  # noqa: E402
from powertrain.models.decoder import Block, Decoder  # noqa: E402
from powertrain.models.kernels import triton_losses  # noqa: E402
from powertrain.models.kernels.attention import math_attention  # noqa: E402
from powertrain.models.kernels.fused import triton_kernels as kernels  # noqa: E402
from powertrain.models.kernels.fused.block import Functions, HandWritten  # noqa: E402
from powertrain.models.kernels.losses import Terms  # noqa: E402
from powertrain.records import Batch  # noqa: E402

LENGTHS, WIDTH = (5, 1, 17), 48
TOKENS = sum(LENGTHS)
ALL = {kernel for kernel in vars(kernels).values() if isinstance(kernel, JITFunction)}


@dataclass(frozen=True)
class Launch:
    """One launch, as the driver was asked for it."""

    kernel: str
    signature: dict[str, str]
    arguments: dict[str, Any]
    warps: int
    grid: tuple[int, ...]


class NoDriver:
    """Compiles for an H100, and notes launches instead of loading and starting them."""

    launches: ClassVar[list[Launch]] = []
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232_448},
                            load_binary=lambda *binary: (None, None, 0, 0, 1024))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*words: Any) -> None:
            arguments = dict(zip(source.fn.arg_names, words[9:], strict=True))
            self.launches.append(Launch(source.fn.__name__, source.signature, arguments, metadata.num_warps, words[:3]))
        return launch


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoDriver())
    monkeypatch.setattr(NoDriver, "launches", [])
    yield NoDriver.launches
    for kernel in (*ALL, triton_losses._cross_entropy_rows):
        kernel.device_caches.clear()


def take_a_step(family: str, method: str) -> None:
    """Forward and backward in bf16, through the hand-written blocks, as training runs them."""
    heads = {} if family in ("gpt2", "gpt_neox") else {"kv_heads": 1}
    model = Decoder(make_config(family, vocabulary=50, layers=2, width=WIDTH, heads=2, context=64, dropout=0.0, **heads)[0])
    if method == "lora":
        add_adapters(model, AdapterConfig(r=4))
    parts = Functions.of(kernels.TritonParts(model.config))
    hand = [HandWritten(block, parts) for block in model.blocks if isinstance(block, Block)]
    tokens = torch.randint(0, 50, (TOKENS,))
    batch = Batch(tokens, tokens, torch.cat([torch.arange(length) for length in LENGTHS]), LENGTHS, TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch, attention=math_attention, run_block=lambda _, index, *rest: hand[index](*rest))
    logits.float().mean().backward()


def programs_needed(launch: Launch) -> tuple[int, ...]:
    """As many as cover the kernel's tensors: one for each row, and where a row is in pieces for each of those."""
    given = launch.arguments
    if launch.kernel == "_turn_heads":
        return TOKENS, given["heads"], 1
    if launch.kernel.startswith("_swiglu"):
        return TOKENS, -(-given["width"] // given["BLOCK"]), 1
    assert given["BLOCK"] >= given["width"]              # one program has a whole row
    return TOKENS, 1, 1


def types_of(kernel: str, name: str) -> set[str]:
    """Types of a tensor that test_triton_compiled.py compiles; gradients that a head's own norm reads are turned in fp32."""
    if name in FP32[kernel]:
        return {"*fp32"}
    return {"*bf16", "*fp32"} if kernel == "_turn_heads" else {"*bf16"}


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_step_launches_what_is_compiled_for_every_gpu(launches: list[Launch], method: str) -> None:
    for family in FAMILIES:
        take_a_step(family, method)
    assert {launch.kernel for launch in launches} == {kernel.__name__ for kernel in ALL}
    for launch in launches:
        assert launch.grid == programs_needed(launch), launch
        unread = set() if launch.arguments.get("HAS_ADDED", True) else {"added", "joined"}
        for name in launch.arguments.keys() - unread:
            value, kind = launch.arguments[name], launch.signature[name]
            if isinstance(value, torch.Tensor):
                assert kind in types_of(launch.kernel, name), (launch.kernel, name)
                assert value.stride(-1) == 1, (launch.kernel, name)
            elif name in NUMBERS:
                assert kind in ("i32", "constexpr"), (launch.kernel, name)       # Triton makes a constant of 1


@pytest.mark.parametrize(("width", "block", "warps"), [(768, 1024, 4), (2048, 2048, 4), (4096, 4096, 8), (8192, 8192, 8)])
def test_wide_rows_get_more_warps(launches: list[Launch], width: int, block: int, warps: int) -> None:
    parts = kernels.TritonParts(make_config("llama", vocabulary=50, layers=1, width=width, heads=8, context=16)[0])
    x, norm = torch.ones(2, width), kernels.NormWeights(torch.ones(width))
    normalised, _ = parts._normalise(x, norm, torch.bfloat16)
    parts._normalise_back(x, x.bfloat16(), normalised, norm)
    assert [(launch.arguments["BLOCK"], launch.warps) for launch in launches] == [(block, warps)] * 2


@pytest.mark.parametrize("terms", [None, Terms(label_smoothing=0.1, z_loss=1e-4)])
@pytest.mark.parametrize("gradient", [False, True])
def test_the_loss_is_launched_as_it_is_compiled(launches: list[Launch], terms: Terms | None, gradient: bool) -> None:
    logits, targets = torch.randn(TOKENS, 330).bfloat16(), torch.randint(0, 330, (TOKENS,))
    losses, changed = triton_losses.triton_rows(logits, targets, terms, gradient=gradient, every=False)
    assert losses.shape == ((TOKENS,) if terms is None else (3, TOKENS))
    assert (changed is logits) is gradient
    (launch,) = launches
    asked = triton_losses.piece(330)
    assert (launch.grid, launch.arguments["BLOCK"], launch.warps) == ((TOKENS, 1, 1), asked["BLOCK"], asked["num_warps"])
    assert (launch.signature["logits"], launch.signature["targets"], launch.signature["losses"]) == ("*bf16", "*i64", "*fp32")
    assert (launch.arguments["HAS_TERMS"], launch.arguments["HAS_GRADIENT"]) == (terms is not None, gradient)
