"""Training, evaluation, generation and checkpoints on a GPU, or on one that is not there: wrong devices, and host syncs.

Each run goes through what `powertrain train` calls: facts, plan, `build_setup` with every confirmation, the loop, the held-out
loss, generation, and a checkpoint that is saved and loaded. Each technique meets each method that it can be with, and each
family each method. Where torch has CUDA the runs go on this machine's GPU, and the first step is compared with the CPU's.
Elsewhere they go on a fake GPU (fake_cuda.py), which has no numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from powertrain.machine import cpp_compiler, one_at_a_time
from powertrain.models.config import FAMILIES
from powertrain.techniques import CATALOGUE
from powertrain.techniques.shared_prompt import CHANGING

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
TORCH = Path(torch.__file__).parent
FLAGS = ("-std=c++20", "-O0", "-shared", "-fPIC")
BEGIN = ("import ctypes, sys; [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in sys.argv[1:]]\n"
         "import cuda_runs; cuda_runs.main()")
METHODS = ("full", "lora", "qlora")
TURING = (7, 5)
TRITON = {"kernels": "triton"}

IS_REAL = torch.backends.cuda.is_built()
pytestmark = pytest.mark.skipif(IS_REAL and not torch.cuda.is_available(),
                                reason="this torch is built for CUDA and sees no GPU; the fake one needs a build without CUDA")


@dataclass(frozen=True)
class Bundle:
    """Techniques that a recipe pins together, and the methods that they can be with."""

    pins: Mapping[str, Any]
    methods: tuple[str, ...] = METHODS
    capability: tuple[int, int] = (9, 0)
    objective: str = "next_token"
    families: tuple[str, ...] = tuple(FAMILIES)

    def case(self, method: str, family: str) -> dict[str, Any]:
        """Return the run with one of the methods, as cuda_runs.py takes it."""
        return {"family": family, "method": method, "techniques": self.pins, "capability": self.capability,
                "objective": self.objective}


BUNDLES = {
    "the plan's own": Bundle({}),
    "triton": Bundle({"fused_blocks": TRITON}),
    "offloaded": Bundle({"fused_blocks": TRITON, "saved_activations": {"inner": "offload", "heads": "recompute"}}),
    "recorded": Bundle({"cuda_graph": "on", "chunked_cross_entropy": {"rows": 16}}, ("full", "lora")),
    "fp16": Bundle({}, capability=TURING),
    "flat": Bundle({"flat_parameters": "on"}),
    "tf32": Bundle({"tf32": "on"}, ("full", "lora")),
    "checkpointed": Bundle({"activation_checkpointing": "on"}),
    "padded": Bundle({"packing": "off", "micro_batch": {"examples": 2}, "length_grouping": "on",
                      "attention_kernel": {"kernel": "sdpa"}}),
    "math": Bundle({"attention_kernel": {"kernel": "math"}, "chunked_cross_entropy": {"rows": 16}}),
    "int8": Bundle({"int8_base": "on"}, ("lora",)),
    "fp8": Bundle({"fp8_base": "on"}, ("lora",)),
    "frozen": Bundle({"frozen_base": {"dtype": "fp16"}}, ("lora",), TURING),
    "dequantised": Bundle({"dequantised_cache": "on"}, ("qlora",)),
    "8-bit states": Bundle({"eight_bit_adamw": "on"}, ("full", "lora")),
    "paged": Bundle({"paged_adamw": "on"}, ("full", "qlora")),       # states below 100,000 numbers are never paged
    "pairs": Bundle({"stored_reference": "on", "shared_prompt": "on"}, objective="dpo",
                    families=tuple(family for family in FAMILIES if family not in CHANGING)),
    "pairs and their reference": Bundle({"stored_reference": "off"}, ("full", "lora"), objective="dpo"),
    "rated answers": Bundle({}, ("lora",), objective="kto"),
}

WAITING = {"eight_bit_adamw", "paged_adamw"}     # bitsandbytes waits for the GPU after the update of each tensor

NOT_EMULATED = {
    "threads": "it is for CPUs", "whole_pass": "it is for CPUs",
    "torch_compile": "Inductor asks the driver about the device; its CUDA code is compiled offline elsewhere",
    **dict.fromkeys(("sharding", "tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel"),
                    "it needs several processes, which tests/training and tests/launch have on CPUs"),
}

CASES: dict[str, dict[str, Any]] = {}
for number, (name, bundle) in enumerate(BUNDLES.items()):
    for shift, method in enumerate(bundle.methods):
        family = bundle.families[(number + 3 * shift) % len(bundle.families)]
        CASES[f"{name}, {method}, {family}"] = bundle.case(method, family)
EVERY = {f"{name}, {method}, {family}": bundle.case(method, family)                    # with --combinations
         for name, bundle in BUNDLES.items() for method in bundle.methods for family in bundle.families}
COVERED = {(case["family"], case["method"]) for case in CASES.values()}
for family, method in ((family, method) for family in FAMILIES for method in METHODS):
    if (family, method) not in COVERED:
        CASES[f"the plan's own, {method}, {family}"] = {"family": family, "method": method}

FAULTS = {
    "cpu tensor": "found at least two devices, cuda:0 and cpu", "item": "HostSync: aten::_local_scalar_dense",
    "if": "HostSync: aten::_local_scalar_dense", "cpu": "HostSync: aten::_to_copy", "nonzero": "HostSync: aten::nonzero",
    "mask": "HostSync: aten::index", "numpy": ".numpy() is not supported"}


def library(folder: Path) -> Path:
    """Return fake_cuda.cpp as a library in `folder`, compiled once for this source and this torch."""
    folder.mkdir(parents=True, exist_ok=True)
    told = SOURCE.read_text(encoding="utf-8") + torch.__version__
    path, compiler = folder / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.so", cpp_compiler()
    with one_at_a_time(folder):              # other workers and other suites of this checkout
        if not path.exists():
            assert compiler is not None, "fake CUDA tensors need a C++ compiler: install g++"
            made = path.with_suffix(f".{os.getpid()}")
            subprocess.run([compiler, str(SOURCE), *FLAGS, f"-I{TORCH / 'include'}", "-o", str(made), f"-L{TORCH / 'lib'}",
                            f"-Wl,-rpath,{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"], check=True)
            os.replace(made, path)
    return path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", EVERY if metafunc.config.getoption("--combinations") else CASES)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """What became of each case and each planted fault, in a process of its own, which believes that it has a GPU."""
    libraries = [] if IS_REAL else [str(library(request.config.rootpath / ".pytest_cache" / "fake_cuda"))]
    more = EVERY if request.config.getoption("--combinations") else {}
    faults = {} if IS_REAL else {fault: {"family": "llama", "method": "full", "fault": fault} for fault in FAULTS}
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests / "techniques"), str(tests / "gpu"), *sys.path]
    done = subprocess.run([sys.executable, "-c", BEGIN, *libraries], input=json.dumps(CASES | more | faults), text=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: found for line in lines for name, found in line.items()}


def test_a_run_leaves_nothing_on_the_cpu_and_waits_only_where_it_may(outcomes: Mapping[str, Any], case: str) -> None:
    found = outcomes[case]
    if "refused" in found and IS_REAL:
        pytest.skip(f"not with this GPU and this software: {found['refused']}")
    assert "error" not in found, found["trace"]
    assert "refused" not in found, found["refused"]
    pins = (EVERY | CASES)[case].get("techniques", {})
    assert {name for name, setting in pins.items() if setting != "off"} <= set(found["techniques"])
    # torch sees no wait of bitsandbytes on a real GPU
    assert bool(found["waited"]) is (not IS_REAL and bool(WAITING & set(found["techniques"])))


@pytest.mark.skipif(not IS_REAL, reason="a fake GPU has no numbers")
def test_the_first_step_is_that_of_the_cpu(outcomes: Mapping[str, Any], case: str) -> None:
    found = outcomes[case]
    if "refused" in found:
        pytest.skip(f"not with this GPU and this software: {found['refused']}")
    expected = found["on_the_cpu"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.03)


@pytest.mark.skipif(IS_REAL, reason="faults are planted on a fake GPU")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(outcomes: Mapping[str, Any], fault: str) -> None:
    assert FAULTS[fault] in outcomes[fault].get("error", "nothing was found")


def test_every_technique_is_met_or_the_table_says_why_not(outcomes: Mapping[str, Any]) -> None:
    met = {technique for case in CASES for technique in outcomes[case].get("techniques", ())}
    assert met | set(NOT_EMULATED) == {technique.name for technique in CATALOGUE}
    assert not met & set(NOT_EMULATED)


def test_every_family_is_met_with_every_method() -> None:
    assert {(case["family"], case["method"]) for case in CASES.values()} == {(f, m) for f in FAMILIES for m in METHODS}


def test_triton_kernels_are_launched(outcomes: Mapping[str, Any]) -> None:
    with_kernels = [case for case in CASES if case.startswith(("triton", "offloaded")) and "gpt" not in case]    # no LayerNorm
    assert with_kernels
    assert all(outcomes[case]["launched"] > 0 for case in with_kernels)
