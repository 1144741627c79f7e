"""The moving average of the weights: by formula, for every optimizer, in checkpoints, and without a trace in the training."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from driver import TINY, run_ranks
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import load_folder
from powertrain.recipe import resolve
from powertrain.records import WrongUse
from powertrain.records.checkpoints import FILES, checkpoints_in, newest_checkpoint
from powertrain.records.event_log import read_events
from powertrain.records.events import Evaluated, Memory, Step
from powertrain.run.prepare import prepare
from powertrain.training.averages import Averaging
from powertrain.training.optimizers import ROWS, Optimizer
from powertrain.training.updates import RunOptimizer

Cli = Callable[..., tuple[int, str, str]]
Train = Callable[..., Path]
DECAY = 0.75
SMALL = [*TINY, "sample.tokens=0", "eval_steps=4"]
UPDATES = [(row, flat) for row in ROWS if "cpu" in row.devices for flat in (False, True) if row.can_be_flat or not flat]


class Two(nn.Module):
    """A matrix and a vector; the vector is the last thing that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 512 * 16).view(512, 16))
        self.vector = nn.Parameter(torch.linspace(1, 2, 16))

    def pull(self, step: int) -> None:
        """Make the gradients of one step."""
        for weight in self.parameters():
            weight.grad = torch.sin(weight.detach() * (step + 1))


def made(row: object, model: nn.Module, *, flat: bool = False, decay: float | None = DECAY) -> RunOptimizer:
    settings = {name: setting.default for name, setting in row.settings.items()}      # type: ignore[attr-defined]
    return Optimizer(row, 0.05, settings=settings, flat=flat, average_decay=decay)(model, 0.1)     # type: ignore[arg-type]


def averages_by_formula(history: list[list[Tensor]]) -> list[Tensor]:
    """The mean of the weights after each step, with shares that fall by the decay and sum to 1, in fp64."""
    steps = len(history)
    shares = [DECAY ** (steps - step) * (1 - DECAY) / (1 - DECAY ** steps) for step in range(1, steps + 1)]
    assert math.isclose(sum(shares), 1.0)
    return [sum(share * weights[place].double() for share, weights in zip(shares, history, strict=True))      # type: ignore[misc]
            for place in range(len(history[0]))]


@pytest.mark.parametrize(("row", "flat"), UPDATES, ids=lambda value: getattr(value, "name", value))
def test_the_average_is_the_mean_of_the_weights_after_each_step(row: object, flat: bool) -> None:
    model, plain = Two(), Two()
    optimizer, alone = made(row, model, flat=flat), made(row, plain, flat=flat, decay=None)
    history: list[list[Tensor]] = []
    for step in range(7):
        for one, updates in ((model, optimizer), (plain, alone)):
            one.pull(step)
            updates.gather()
            updates.step()
            updates.follow(step + 1)
            updates.zero_grad()
        history.append([weight.detach().clone() for weight in model.parameters()])
    assert all(map(torch.equal, model.parameters(), plain.parameters())), "training is the same to the bit"
    expected = averages_by_formula(history)
    with optimizer.averaged():
        for weight, average in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(weight.double(), average, rtol=1e-6, atol=1e-6)      # sums of seven fp32 terms
        assert not torch.equal(model.matrix, history[-1][0])
    assert all(map(torch.equal, model.parameters(), history[-1])), "the weights are back, to the bit"


@pytest.mark.parametrize(("row", "flat"), UPDATES, ids=lambda value: getattr(value, "name", value))
def test_a_restored_optimizer_goes_on_with_the_same_bytes(row: object, flat: bool) -> None:
    def go_on(model: Two, optimizer: RunOptimizer, steps: range) -> None:
        for step in steps:
            model.pull(step)
            optimizer.gather()
            optimizer.step()
            optimizer.follow(step + 1)
            optimizer.zero_grad()

    model, other = Two(), Two()
    optimizer, resumed = made(row, model, flat=flat), made(row, other, flat=flat)
    go_on(model, optimizer, range(3))
    kept = {name: {key: value.clone() for key, value in optimizer.moments()[weight].items()}
            for name, weight in model.named_parameters()}
    assert all("average" in held for held in kept.values())
    with torch.no_grad():
        for weight, found in zip(other.parameters(), model.parameters(), strict=True):
            weight.copy_(found)
    resumed.restore({weight: kept[name] for name, weight in other.named_parameters()})
    go_on(model, optimizer, range(3, 6))
    go_on(other, resumed, range(3, 6))
    assert isinstance(optimizer, Averaging)
    assert isinstance(resumed, Averaging)
    for one, two in zip(optimizer.averages.values(), resumed.averages.values(), strict=True):
        assert torch.equal(one, two)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_before_the_first_step_nothing_is_averaged() -> None:
    model = Two()
    before = model.matrix.detach().clone()
    with made(ROWS[0], model).averaged():
        assert torch.equal(model.matrix, before)


# ------------------------------------------------------------------------------------------------ runs


def model_in(path: Path) -> Decoder:
    found = load_folder(path / "model", dropout=0.0)
    assert isinstance(found, Decoder)
    return found


def test_a_run_evaluates_and_writes_the_average_and_trains_as_without(train: Train) -> None:
    path, plain = train("run", f"ema.decay={DECAY}", "save_steps=1", "save_total_limit=20"), train("plain")
    ours, theirs = ([(event.loss, event.grad_norm) for event in read_events(one / "events.jsonl") if isinstance(event, Step)]
                    for one in (path, plain))
    assert ours == theirs, "training is the same to the bit"
    published = checkpoints_in(path / "checkpoints")
    name = "blocks.1.mlp_out.weight"
    history = [[load_file(folder / "model.safetensors")[name]] for folder in published.values()]
    assert len(history) == 11
    (average,), model = averages_by_formula(history), model_in(path)
    weight = model.get_parameter(name).detach()
    torch.testing.assert_close(weight.double(), average, rtol=1e-6, atol=1e-6)
    assert torch.equal(weight, load_file(published[11] / "optimizer.safetensors")[f"{name}.average"])
    assert torch.equal(history[-1][0], model_in(plain).get_parameter(name))
    evaluated, without = ([event.loss for event in read_events(one / "events.jsonl") if isinstance(event, Evaluated)]
                          for one in (path, plain))
    assert len(evaluated) == len(without) == 3
    assert all(one != other for one, other in zip(evaluated, without, strict=True))


@pytest.mark.parametrize("more", [[], ["techniques.flat_parameters=on"], ["optimizer=muon"],
                                  ["load_best_model_at_end=true", "max_eval_samples=2"]], ids=" ".join)
def test_a_run_that_is_killed_goes_on_with_the_same_bytes(cli: Cli, text: Path, tmp_path: Path, more: list[str]) -> None:
    words = ["train", f"data={text}", *SMALL, "ema.decay=0.9", *more]
    assert cli(*words, "--output", "whole")[0] == 0
    assert cli(*words, "--output", "run", fault=("step", 7))[0] == -9
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    for name in ("run", "whole"):
        newest, _ = newest_checkpoint(tmp_path / name / "checkpoints")
        assert newest is not None
    ours, theirs = ([(newest_checkpoint(tmp_path / name / "checkpoints")[0] / file).read_bytes() for file in FILES[:2]]    # type: ignore[operator]
                    + [(tmp_path / name / "model" / "model.safetensors").read_bytes()] for name in ("run", "whole"))
    assert ours == theirs


@pytest.mark.parametrize("technique", ["data_parallel", "sharding", "tensor_parallel", "pipeline_parallel"])
def test_processes_that_share_a_run_have_the_average_of_one_process(
        cache: Path, text: Path, tmp_path: Path, train: Train, technique: str) -> None:
    words = ["ema.decay=0.9", "model.tied_head=false", "model.dropout=0", "techniques.bf16=off"]
    alone = train("alone", *words)
    ended = run_ranks(["train", f"data={text}", *SMALL, *words, f"techniques.{technique}=on", "--output",
                       str(tmp_path / "shared")], cache, tmp_path, [None, None])
    assert [code for code, _ in ended] == [0, 0], ended
    ours, theirs = (dict(model_in(path).named_parameters()) for path in (tmp_path / "shared", alone))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4)       # the same terms in another order


def test_the_prediction_counts_the_average(train: Train) -> None:
    steps = ["max_steps=20", "train_batch_size=8"]               # from so many steps on the memory of one is watched
    measured, plain = ([event for event in read_events(train(name, *steps, *words) / "events.jsonl")
                        if isinstance(event, Memory)]
                       for name, words in (("run", ["ema.decay=0.9"]), ("plain", [])))
    weights_bytes = sum(weight.nbytes for weight in Decoder(model_in(train("again")).config).parameters())
    predicted = [sum(found[0].predicted.values()) for found in (measured, plain)]
    assert predicted[0] - predicted[1] == weights_bytes
    assert measured[0].allocated_bytes - plain[0].allocated_bytes == weights_bytes


def test_deepspeed_and_an_average_are_refused_together(text: Path, cache: Path) -> None:
    pytest.importorskip("deepspeed", reason="the engine can only be asked for where it is installed")
    words = ["ema.decay=0.9", "techniques.sharding={engine: deepspeed, stage: 2}"]
    with pytest.raises(WrongUse, match=r"no average is kept \(ema.decay=0.9\); use techniques.sharding.engine=fsdp"):
        prepare(resolve(None, [f"data={text}", *SMALL, *words]), cache, lambda said: None, processes=2)


@pytest.mark.parametrize("value", ["1", "0", "-0.5", "often"])
def test_a_decay_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(WrongUse, match=r"ema\.decay"):
        resolve(None, [f"ema.decay={value}"])
