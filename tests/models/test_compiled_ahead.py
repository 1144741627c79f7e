"""Parts of a block that are compiled ahead: kept for later processes, right for any length, and never trusted when damaged."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from test_fused_blocks import ByHand, distance, gradients, make_batch, make_model

from powertrain.models.kernels.fused.compiled import CompiledPart, StoredPart, built, describe, load, settle, structure_of
from powertrain.models.kernels.fused.parts import LeaveWeights, Linear, NormWeights, Wanted

pytestmark = pytest.mark.skipif(not torch._inductor.cpp_builder.get_cpp_compiler(), reason="no C++ compiler")


def functions_of(run: ByHand) -> list[StoredPart]:
    return [part for part in vars(run.blocks[0].functions).values() if isinstance(part, StoredPart)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the libraries of a small Llama with adapters, compiled once for these tests."""
    path = tmp_path_factory.mktemp("code")
    model = make_model("llama", "lora")
    run = ByHand(model, partial(StoredPart, folder=path))
    gradients(model, run)
    assert not any(part.is_compiled for part in functions_of(run))
    assert settle(functions_of(run), ahead=True)
    assert all(part.is_compiled for part in functions_of(run))
    return path


def test_what_is_loaded_serves_every_length_and_traces_nothing(folder: Path) -> None:
    model = make_model("llama", "lora")
    run = ByHand(model, partial(StoredPart, folder=folder))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for lengths in ((5, 17), (30, 2, 9), (64,), (3, 3, 3)):
        batch = make_batch(lengths)
        apart = distance(gradients(model, run, batch=batch), gradients(model, None, batch=batch))
        assert max(apart.values()) < 1e-5
    assert not settle(functions_of(run), ahead=True)
    assert all(part.is_compiled for part in functions_of(run))
    assert not torch._dynamo.utils.counters["stats"]


def test_it_computes_to_the_bit_what_is_compiled_at_the_first_call(folder: Path) -> None:
    model, batch = make_model("llama", "lora"), make_batch((30, 2, 9))
    ours = gradients(model, ByHand(model, partial(StoredPart, folder=folder)), batch=batch)
    theirs = gradients(model, ByHand(model, CompiledPart), batch=batch)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_damaged_library_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    whole = next(folder.glob("enter-*.so"))
    copy, told = tmp_path / whole.name, (tmp_path / whole.name).with_suffix(".json")
    told.write_bytes(whole.with_suffix(".json").read_bytes())
    copy.write_bytes(whole.read_bytes())
    assert load(copy) is not None
    copy.write_bytes(whole.read_bytes()[:5000])
    assert load(copy) is None
    copy.write_bytes(whole.read_bytes())
    told.write_text("{")
    assert load(copy) is None


@pytest.mark.parametrize("ahead", [True, False], ids=["cannot be", "shall not be"])
def test_what_is_not_compiled_ahead_is_compiled_at_the_first_call(ahead: bool, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    if ahead:
        folder.write_text("no folder can be made here")
    model, batch = make_model("llama", "lora"), make_batch((30, 2, 9))
    run = ByHand(model, partial(StoredPart, folder=folder))
    gradients(model, run, batch=batch)
    for part in functions_of(run)[1:]:
        part.wanted.clear()                  # one that cannot be compiled says as much as four
    settle(functions_of(run), ahead=ahead)
    assert not folder.is_dir()
    found = gradients(model, run, batch=batch)
    assert all(part.is_compiled for part in functions_of(run))
    assert max(distance(found, gradients(model, None, batch=batch)).values()) < 1e-5


def test_no_more_compilers_are_started_than_the_machine_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("powertrain.models.kernels.fused.compiled.make",
                        lambda jobs, processes: asked.extend((len(jobs), processes)))
    monkeypatch.setattr("powertrain.models.kernels.fused.compiled.compilers_at_once", lambda: 2)
    model = make_model("llama", "lora")
    run = ByHand(model, partial(StoredPart, folder=tmp_path))
    gradients(model, run)
    settle(functions_of(run), ahead=True)
    assert asked[0] > asked[1] == 2


def test_the_kind_of_a_call_is_its_layout_but_not_its_number_of_rows() -> None:
    weights = (torch.zeros(4, 3), Wanted(weights=True, input=False), None)

    def kind(*tensors: torch.Tensor) -> object:
        found = describe((*tensors, *weights), len(tensors[0]))
        return None if found is None else found[0]

    assert kind(torch.zeros(5, 3)) == kind(torch.zeros(9, 3))
    assert kind(torch.zeros(5, 3)) != kind(torch.zeros(5, 3, dtype=torch.bfloat16))
    assert kind(torch.zeros(5, 3)) != kind(torch.zeros(5, 6)[:, :3])
    assert kind(torch.zeros(3, 5).t()) is None           # its strides are the number of rows
    assert kind(torch.zeros(1, 3)) is None


def test_a_weight_with_as_many_rows_as_tokens_is_no_tensor_of_tokens() -> None:
    linear = Linear(torch.zeros(8, 8))
    weights = LeaveWeights(linear, NormWeights(torch.zeros(8)), linear, linear, torch.bfloat16)
    eight, nine = describe((torch.zeros(8, 8), weights), 8), describe((torch.zeros(9, 8), weights), 9)
    assert eight is not None
    assert nine is not None
    assert eight[0] == nine[0]


def test_products_in_8_bits_are_left_to_the_other_compiler() -> None:
    assert describe((torch.zeros(5, 3), Linear(torch.zeros(4, 3), scales=torch.zeros(4))), 5) is None


def test_a_nest_of_tuples_comes_back_from_its_structure() -> None:
    tensors = [torch.zeros(1), torch.ones(2)]
    nest = (tensors[0], Wanted(weights=True, input=False), Linear(tensors[1], None), torch.bfloat16)
    assert built(structure_of(nest, [0]), tensors) == nest


def test_another_configuration_has_a_library_of_its_own(folder: Path) -> None:
    model = make_model("llama", "lora", kv_heads=2)
    run = ByHand(model, partial(StoredPart, folder=folder))
    gradients(model, run)
    assert all(part.wanted for part in functions_of(run) if part.function.__name__.startswith("enter"))


def test_who_only_loads_does_not_import_the_compiler() -> None:
    code = "import sys, powertrain.models.kernels.fused.compiled; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
