"""What several rooms' tests share: a tiny model with data, the machine's facts, and the public data beside the checkout."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from driver import TINY, Fault, run_cli
from powertrain.data.example import Blocks, Example, collate
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.models.kernels import build
from powertrain.records import IGNORE, DataFacts, Facts, Hardware, Software, WrongUse
from powertrain.training.optimizers import plain_adamw
from powertrain.training.setup import Setup, plain_setup

torch.set_num_threads(1)                     # tiny tensors: a second thread would only wait
os.environ["OMP_NUM_THREADS"] = "1"          # so it would in the processes that tests start, beside those of other tests
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"    # else each process that compiles starts two more that load torch

# The files that take longest go first, so that no worker begins one of them when the others are done.
LONGEST = ("test_ledger.py", "test_cuda_runs.py", "test_ray.py", "test_readme.py", "test_processes.py", "test_killed.py",
           "test_eight_bit_bases.py", "test_compiled_ahead.py", "test_sharded_run.py", "test_contract.py",
           "test_pipeline.py", "test_clock.py", "test_resume.py", "test_features.py", "test_learned.py",
           "test_optimizers.py", "test_shipped_recipes.py", "test_sharded.py", "test_bridge_adapters.py",
           "test_audit_recipe_command.py", "test_claim_probes.py", "test_out_of_memory.py")

NO_BF16 = "this CPU has no products in bf16"
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=0, help="kills more, at random moments, in tests/launch/test_killed.py")
    parser.addoption("--bad-inputs", action="store_true", help="every case of tests/faults/bad_inputs.py, in ten minutes")
    parser.addoption("--faults", metavar="FOLDER", help="every fault of tests/faults/, and a folder for what was counted")
    parser.addoption("--minutes", type=float, default=2, help="with --faults, of random faults")
    parser.addoption("--every", type=int, default=1, help="with --faults, each N-th fault only, on a busy machine")
    parser.addoption("--combinations", action="store_true",
                     help="every technique of a GPU with every family and method, in tests/gpu/test_cuda_runs.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gc.collect()
    gc.freeze()                              # a million objects of the libraries, which no later collection looks at again
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test of the attention kernel in bf16 where the kernel has refused that, on a CPU that cannot compute in bf16."""
    try:
        return (yield)
    except WrongUse as error:
        if NO_BF16 in str(error) and not build.load(build.RAGGED).has_bf16():
            pytest.skip(NO_BF16)
        raise


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for a second thread; what a test's run has set is not left to the tests after it."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shakespeare() -> Path:
    """tiny-shakespeare, which is not part of this project."""
    path = SHARED_DATA / "tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip(f"{path} is missing: it lies beside the developers' checkouts; this test needs tiny-shakespeare there")
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text with some structure, of which a tiny model can learn something. No test changes it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)), encoding="utf-8")
    return path


@pytest.fixture
def source(text: Path, tmp_path: Path) -> Path:
    """The same text, in the test's own folder."""
    return Path(shutil.copy(text, tmp_path))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token stores and measurements of all the tests that run commands.

    The machine's peaks are kept in it however busy the machine is: else each command of a test would measure them again.
    """
    from powertrain.facts import hardware, machine_watch

    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_watch.Meanwhile, "disturbed_by", "")
        hardware.read_hardware(folder)
    return folder


@pytest.fixture
def cli(cache: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs `powertrain WORDS` in a process of its own: (exit code, stdout, stderr)."""

    def run(*words: str, fault: Fault | None = None, folder: Path = tmp_path, env: Mapping[str, str] | None = None
            ) -> tuple[int, str, str]:
        return run_cli(words, cache, folder, fault, env)

    return run


@pytest.fixture
def words(text: Path) -> list[str]:
    """The command of a run that takes a second, into the folder run."""
    return ["train", f"data={text}", *TINY, "--output", "run"]


@pytest.fixture
def tiny(source: Path) -> list[str]:
    """`key=value` words of a run that takes a second."""
    return [f"data={source}", *TINY]


def examples_with_gaps(count: int, block: int = 12, vocabulary: int = 50) -> list[Example]:
    """Random examples in which an uneven share of the targets trains nothing, so that a mean of means would differ."""
    draw = np.random.default_rng(3)
    blocks = Blocks(draw.integers(0, vocabulary, count * block + 1).astype(np.uint16), block, block)
    examples = []
    for i in range(count):
        targets = blocks[i].targets.copy()
        targets[: i % block] = IGNORE
        examples.append(Example(blocks[i].inputs, targets))
    return examples


@pytest.fixture
def make_setup() -> Callable[..., Setup]:
    """Setups of equal weights and data: 28 examples, 14 a step."""

    def make(family: str = "llama", **model: object) -> Setup:
        torch.manual_seed(1)
        config, _ = make_config(family, **({"vocabulary": 50, "layers": 2, "width": 32, "heads": 2, "context": 16} | model))
        return plain_setup(Decoder(config), examples_with_gaps(28), collate, train_batch_size=14, seed=5,
                           optimizer=plain_adamw(1e-2, (0.9, 0.95), 1e-8))

    return make


@pytest.fixture
def setup(make_setup: Callable[..., Setup]) -> Setup:
    return make_setup()


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """The real machine and software, and the facts of the tiny setup."""
    from powertrain.facts.hardware import read_hardware
    from powertrain.facts.model import model_facts
    from powertrain.facts.software import read_software

    config, _ = make_config("llama", vocabulary=50, layers=2, width=32, heads=2, context=16)
    data = DataFacts("test", "0" * 64, 1, 400, 400, "char", 50, 337, 60, 60, block=12, stride=12, examples=28,
                     train_batch_size=14)
    hardware: Hardware = read_hardware(tmp_path_factory.mktemp("cache"))
    software: Software = read_software()
    return Facts(hardware, software, model_facts(config), data)


@pytest.fixture(scope="session")
def gpu_facts(facts: Facts) -> Callable[..., Facts]:
    """The same run on a GPU that need not be here: for what techniques answer, not for what they do."""

    def make(capability: tuple[int, int] = (9, 0), **changes: object) -> Facts:
        hardware = Hardware("a GPU", "cuda", 8, 80 << 30, 79 << 30, compute_capability=capability,
                            peak_flops_per_s={"fp32": 5e13, "tf32": 3e14, "bf16": 7e14, "fp16": 7e14},
                            bandwidth_bytes_per_s=3e12)
        software = replace(facts.software, versions={**facts.software.versions, "torch": "2.13.0+cu130", "triton": "3.0"},
                           missing={})
        return replace(facts, hardware=replace(hardware, **changes), software=software)

    return make
