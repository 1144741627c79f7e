"""Runs on this machine's GPU, or else on a fake one, through what `powertrain train` calls. A process of its own.

Prints what became of each case.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import real_cuda
import torch
from kinds_of_runs import SIZES, ragged_examples

from example_folders import chat_folder, examples_of, json_lines
from powertrain.data.example import Example, collate_padded
from powertrain.facts.data import example_facts
from powertrain.facts.hardware import read_hardware, read_processor
from powertrain.facts.model import model_facts
from powertrain.facts.software import read_software
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import FAMILIES, ModelConfig, make_config
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.quantised import quantise_base
from powertrain.planner import make_plan
from powertrain.recipe import Recipe
from powertrain.records import DataFacts, Facts
from powertrain.records.checkpoints import newest_checkpoint
from powertrain.records.plan import PinRefused
from powertrain.run.material import Material
from powertrain.run.prepare import Prepared, build_setup
from powertrain.training.checkpoint import Save, load_checkpoint
from powertrain.training.loop import State, StepResult, evaluate, new_state, train
from powertrain.training.objectives import objective_of
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup
from powertrain.use.generation import Sampling, generate_ids, open_feed

STEPS, BATCH, EXAMPLES = 1, 3, 6
VOCABULARY = 330                             # of the tokenizer of example_folders.py
IS_REAL = torch.backends.cuda.is_built()


@dataclass(frozen=True)
class Run:
    """One run: what is trained, how, and which techniques the recipe pins."""

    family: str
    method: str
    techniques: Mapping[str, Any] = field(default_factory=dict)
    capability: Sequence[int] = (9, 0)
    objective: str = "next_token"
    fault: str = ""


def prepared_for(run: Run, hardware: Any, folder: Path) -> Prepared:
    """Return the plan of the run with all that it is made of, as `powertrain plan` has it. Files are made in `folder`."""
    heads = {"kv_heads": 2 if FAMILIES[run.family].grouped_heads else 4, "heads": 4}
    sizes = SIZES | heads | {"width": 64, "layers": 1, "vocabulary": VOCABULARY}
    config, _ = make_config(run.family, **sizes)  # type: ignore[arg-type]
    adapters = None if run.method == "full" else AdapterConfig(r=4, alpha=8.0)
    recipe = Recipe.model_validate({"method": run.method, "max_steps": STEPS, "train_batch_size": BATCH, "seed": 5,
                                    "objective": {"name": run.objective}, "model": {"path": "nowhere"},
                                    "techniques": run.techniques})
    stored = {"full": "fp32", "lora": "bf16", "qlora": "nf4"}[run.method]
    model = model_facts(config, method=run.method, adapters=adapters, frozen_dtype=stored)
    objective = objective_of(recipe)
    training, held_out, data = texts() if objective.rows == "answers" else answers(objective.rows, folder)
    facts = Facts(hardware, read_software(hardware), model, data, loss_has_terms=objective.has_terms,
                  has_reference=objective.has_reference)
    plan = make_plan(facts, recipe, STEPS)
    resolved: Any = SimpleNamespace(recipe=recipe)
    material = Material(resolved, model, data, training, held_out, collate_padded, None,  # type: ignore[arg-type]
                        partial(build, config, adapters, run.method), config=config, adapters=adapters)
    return Prepared(facts, material, plan, STEPS)


Examples = tuple[Sequence[Example], Sequence[Example], DataFacts]           # to train on, held out, and what is known of them


def texts() -> Examples:
    """Return examples of several lengths."""
    examples = ragged_examples(EXAMPLES)
    lengths = sorted(example.tokens for example in examples)
    quantiles = {"min": lengths[0], "p10": lengths[1], "p50": lengths[3], "p90": lengths[4], "max": lengths[-1]}
    data = DataFacts("test", "0" * 64, 1, 400, 400, "char", 50, 337, 60, 60, block=sum(lengths) // len(lengths), stride=12,
                     examples=len(examples), train_batch_size=BATCH, kind="conversation", max_length=lengths[-1],
                     length_quantiles=quantiles, trained_share=0.7)
    return examples, examples[:2], data


def answers(rows: str, folder: Path) -> Examples:
    """Return pairs of answers, or rated ones: `rows` says which."""
    compared: list[object] = [{"prompt": f"what is {number}?", "chosen": "it is three" * (1 + number % 2), "rejected": "a cat"}
                              for number in range(EXAMPLES)]
    store = examples_of(json_lines(folder / "pairs.jsonl", compared), tokenizer_folder=chat_folder(folder / "tokenizer"),
                        cache=folder, max_length=64, validation_share=0.3, learns=rows)
    return store.training, store.validation, example_facts(store, train_batch_size=BATCH)


def build(config: ModelConfig, adapters: AdapterConfig | None, method: str) -> Decoder:
    """Return the model on the CPU, as run/material.py has it."""
    model = Decoder(config)
    if method != "full":
        model.to(torch.bfloat16)
    if method == "qlora":
        quantise_base(model, type="nf4", double=True)
    if adapters is not None:
        add_adapters(model, adapters)
    return model


Device = fake_cuda.FakeCuda | real_cuda.RealCuda


@dataclass(frozen=True)
class Found:
    """The techniques that were in force, and the first step's numbers (0 on a fake GPU)."""

    techniques: tuple[str, ...]
    loss: float
    grad_norm: float


def carry_out(run: Run, device: Device, folder: Path) -> Found:
    """Train, evaluate, write, save, load and train on."""
    if isinstance(device, fake_cuda.FakeCuda):
        device.capability = (run.capability[0], run.capability[1])
    hardware = read_hardware(folder, measure=False)
    hardware = replace(hardware, peak_flops_per_s=dict(hardware.datasheet_flops_per_s), bandwidth_bytes_per_s=3e12)
    assert hardware.device == "cuda"
    prepared = prepared_for(run, hardware, folder)
    with device.answering():                 # what a technique confirms, it may read
        setup = with_fault(build_setup(prepared), run.fault)
    apart = [name for name, tensor in setup.model.state_dict().items() if tensor.device.type != "cuda"]
    assert not apart, f"on the CPU: {apart}"
    state = new_state(setup, 0.1)
    first = take_steps(setup, state, STEPS)[0]
    device.waited = []                       # tables that the first step moves to the GPU, once
    with device.answering() as read:
        evaluate(setup, prepared.material.held_out, tokens_per_byte=None)
    assert len(read) == device.counts, f"an evaluation waits once, and this one {len(read)} times"
    write(setup, device)
    again = round_trip(prepared, setup, state, device, folder)
    take_steps(setup, again, 1)
    with device.answering():
        return Found(prepared.plan.names, float(first.loss), float(first.grad_norm))


def on_the_cpu(run: Run, folder: Path) -> Found:
    """The first step of the same model on the same examples, on the CPU, in fp32, with what a CPU's plan has."""
    prepared = prepared_for(replace(run, techniques={}), read_processor(), folder)
    setup = build_setup(prepared)
    [first] = take_steps(setup, new_state(setup, 0.1), 1)
    return Found(prepared.plan.names, float(first.loss), float(first.grad_norm))


def take_steps(setup: Setup, state: State, steps: int) -> list[StepResult]:
    schedule, results = Schedule("cosine", 1e-3, state.step + steps), []
    for result in train(setup, state, schedule, 1.0):
        results.append(result)
        for number in (result.loss, result.grad_norm, *result.terms.values(), *result.metrics.values()):
            assert number.device.type == setup.device.type
            assert not number.dim()
        if IS_REAL:
            torch.cuda.synchronize()         # as whoever reads the laps has to
        assert len(result.laps.parts()) >= 4
    assert state.step == schedule.total_steps
    return results


def write(setup: Setup, device: Device) -> None:
    """Write three tokens after a prompt of five: the host reads the logits, and then nothing else of the GPU."""
    with setup.precision.context(setup.device), device.answering() as read:
        feed, ids = open_feed(setup.model, [1, 2, 3, 4, 5])
        written = list(generate_ids(feed, ids, Sampling(3, temperature=0.8, top_k=5)))
    assert len(written) == 3
    assert len(read) == 3 * device.counts


def round_trip(prepared: Prepared, setup: Setup, state: State, device: Device, folder: Path) -> State:
    """Save the state beside the run, load it into a new one, and return that. Each weight and moment comes back as it was.

    The host waits only for what it decides by, and the thread that writes waits for the copies.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place, device.answering():
        fake_cuda.Event.waits.clear()
        with device.answering() as read:
            save = Save(Path(place), state)
        save.finish()
        if device.counts:
            assert not set(read) & set(fake_cuda.COPIES), "the host waits for a copy"
            assert (len(fake_cuda.Event.waits), save.copying_s) == (1, 1.0)
            assert save.pinned_bytes > 0
        found, rejected = newest_checkpoint(Path(place))
        assert found is not None
        assert not rejected
        again = new_state(setup, 0.1)
        load_checkpoint(found, again)
    assert (again.step, again.trained_tokens) == (state.step, state.trained_tokens)
    before, after = state.optimizer.moments(), again.optimizer.moments()
    assert before.keys() == after.keys()
    for weight, moments in before.items():
        assert {name: (value.shape, value.dtype, value.device) for name, value in moments.items()} == \
               {name: (value.shape, value.dtype, value.device) for name, value in after[weight].items()}
    return again


def with_fault(setup: Setup, fault: str) -> Setup:
    """Return the setup with a fault that users of GPUs meet."""
    return FAULTS[fault](setup) if fault else setup


def _left_on_the_host(setup: Setup) -> Setup:
    block = setup.run_block

    def run_block(one: Any, index: int, x: Any, *others: Any) -> Any:
        return block(one, index, x + torch.ones(x.shape[-1]), *others)

    return replace(setup, run_block=run_block)


def _reading(read: Any, setup: Setup) -> Setup:
    run_pass = setup.run_pass

    def reading(*given: Any) -> Any:
        sums = run_pass(*given)
        read(sums["loss"])
        return sums

    return replace(setup, run_pass=reading)


FAULTS = {
    "cpu tensor": _left_on_the_host,
    "item": partial(_reading, lambda loss: loss.item()),
    "if": partial(_reading, lambda loss: 1 if loss > 3 else 0),
    "cpu": partial(_reading, lambda loss: loss.cpu()),
    "nonzero": partial(_reading, lambda loss: loss[None].nonzero()),
    "mask": partial(_reading, lambda loss: loss[None][loss[None] > 3]),
    "numpy": partial(_reading, lambda loss: loss.numpy(force=True)),
}


def main() -> None:
    """Carry out the runs of the standard input; print a line for each: what was in force or the error, and the seconds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device: Device = real_cuda.RealCuda() if IS_REAL else fake_cuda.start()
    with device, tempfile.TemporaryDirectory() as folder:
        for name, given in json.load(sys.stdin).items():
            began, device.launched, device.waited = time.perf_counter(), [], []
            found: dict[str, Any]
            try:
                found = asdict(carry_out(Run(**given), device, Path(folder)))
                found |= {"launched": len(device.launched), "waited": device.waited}
                if IS_REAL:
                    found["on_the_cpu"] = asdict(on_the_cpu(Run(**given), Path(folder)))
            except PinRefused as refusal:
                found = {"refused": str(refusal)}
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)
                ours = [f"{frame.filename}:{frame.lineno}" for frame in place if "powertrain" in frame.filename]
                found = {"error": f"{type(error).__name__}: {error}", "at": ours[-3:], "trace": traceback.format_exc()}
            print(json.dumps({name: found | {"seconds": time.perf_counter() - began}}), flush=True)
