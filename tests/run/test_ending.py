"""Runs that end early by their held-out loss, and models made of the best checkpoint: killed or not, the same bytes."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from driver import TINY, run_processes
from powertrain.recipe import resolve
from powertrain.records import WrongUse
from powertrain.records.checkpoints import FILES, checkpoints_in, newest_checkpoint
from powertrain.records.event_log import read_all_events, read_events
from powertrain.records.events import BestModel, CheckpointRejected, End, Evaluated, Event, ModelSaved, StoppedEarly
from powertrain.run.ending import early_stop, without_improvement
from powertrain.run.folder import RunFolder, is_complete
from powertrain.run.part import new_run
from powertrain.run.prepare import prepare
from powertrain.run.session import run
from powertrain.training.ranks import joined

Cli = Callable[..., tuple[int, str, str]]
AnEvent = TypeVar("AnEvent", bound=Event)
SMALL = [*TINY, "sample.tokens=0", "eval_steps=2", "max_eval_samples=2", "save_steps=3"]
# the loss hardly changes, so that after the first evaluation none is lower by half a nat: the end is at step 2 + 2 x 2
STILL = [*SMALL, "learning_rate=1e-6", "early_stopping_patience=2", "early_stopping_threshold=0.5"]
STOPS_AT = 6
# clipped gradients and a rate far too large: the loss rises after the first steps, and stays finite
RISING = [*SMALL, "learning_rate=10.0", "lr_scheduler_type=constant", "optimizer=sgd", "model.dropout=0",
          "load_best_model_at_end=true", "save_total_limit=1"]


def happened(run: Path, kind: type[AnEvent]) -> list[AnEvent]:
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, kind)]


def files_of(run: Path) -> list[bytes]:
    newest, rejected = newest_checkpoint(run / "checkpoints")
    assert newest is not None
    assert not rejected
    return [(newest / name).read_bytes() for name in FILES[:2]] + [(run / "model" / "model.safetensors").read_bytes()]


@pytest.fixture
def train(text: Path, cache: Path, tmp_path: Path) -> Callable[..., Path]:
    def start(name: str, *words: str) -> Path:
        resolved = resolve(None, [f"data={text}", *words, f"output_dir={tmp_path / name}"])
        with new_run(prepare(resolved, cache, lambda said: None), lambda event: None, lambda *_: "") as part:
            run(part)
        return tmp_path / name

    return start


# ------------------------------------------------------------------------------------------------ early stopping


losses = st.lists(st.one_of(st.floats(0, 4), st.sampled_from([1.0, 1.25, 1.5, math.nan, math.inf])), min_size=1, max_size=12)


@given(losses=losses, patience=st.integers(1, 4), threshold=st.sampled_from([0.0, 0.25, 1.0]))
def test_the_rule_is_that_of_transformers(losses: list[float], patience: int, threshold: float) -> None:
    callback = EarlyStoppingCallback(patience, threshold)
    arguments: Any = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
    state, control = TrainerState(), TrainerControl()
    recipe = resolve(None, [f"early_stopping_patience={patience}", f"early_stopping_threshold={threshold}"]).recipe
    evaluations: dict[int, float] = {}
    for step, loss in enumerate(losses, 1):
        evaluations[step] = loss
        callback.on_evaluate(arguments, state, control, metrics={"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:        # Trainer._determine_best_metric
            state.best_metric = loss
        if not math.isfinite(losses[0]):
            continue                         # transformers keeps a first loss that is not finite as the best one for ever
        assert without_improvement(evaluations, threshold) == callback.early_stopping_patience_counter
        assert (early_stop(recipe, evaluations, 99) is not None) == control.should_training_stop
        if control.should_training_stop:
            break


def test_a_run_ends_after_as_many_evaluations_without_a_lower_loss(train: Callable[..., Path]) -> None:
    path = train("run", *STILL)
    (told,), (end,) = happened(path, StoppedEarly), happened(path, End)
    assert (told.step, told.in_row, told.best_step, told.total_steps) == (STOPS_AT, 2, told.best_step, 11)
    assert (end.reason, end.because, end.step) == ("finished", "early_stopping", STOPS_AT)
    during = [event for event in happened(path, Evaluated) if not event.final]
    assert [event.step for event in during] == [2, 4, 6]
    assert told.loss == during[-1].loss
    assert told.best_loss == min(event.loss for event in during)
    (final,) = (event for event in happened(path, Evaluated) if event.final)
    assert final.tokens > during[-1].tokens, "of all held-out text"
    assert is_complete(RunFolder(path), read_events(path / "events.jsonl"))
    newest, _ = newest_checkpoint(path / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{STOPS_AT:06d}"


def test_without_patience_nothing_ends_early(train: Callable[..., Path]) -> None:
    path = train("run", *SMALL, "learning_rate=1e-6")
    (end,) = happened(path, End)
    assert (end.because, end.step) == ("last_step", 11)
    assert not happened(path, StoppedEarly)


@pytest.mark.parametrize("fault", [("step", 5), ("step", 6), ("signal", 3), ("signal", 4), ("signal", 6)], ids=str)
def test_a_run_that_is_killed_or_stopped_ends_early_at_the_same_step_with_the_same_bytes(
        cli: Cli, text: Path, tmp_path: Path, fault: tuple[str, int]) -> None:
    words = ["train", f"data={text}", *STILL]
    assert cli(*words, "--output", "whole")[0] == 0
    assert cli(*words, "--output", "run", fault=fault)[0] in (-9, 75)
    code, out, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert "Early end" in out
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")
    (told,), (whole,) = (happened(tmp_path / name, StoppedEarly) for name in ("run", "whole"))
    assert told.sentence == whole.sentence
    ours, theirs = ([(event.step, event.loss, event.final) for event in happened(tmp_path / name, Evaluated)]
                    for name in ("run", "whole"))
    assert ours == theirs
    assert "there is nothing left to train" in cli("train", "--resume", "run")[2]


# ------------------------------------------------------------------------------------------------ the best checkpoint


def weights_in(path: Path, weight: str = "blocks.0.mlp_in.weight") -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")[weight]


def test_the_model_is_that_of_the_best_evaluation_and_its_checkpoint_is_never_pruned(train: Callable[..., Path]) -> None:
    path = train("run", *RISING)
    during = [event for event in happened(path, Evaluated) if not event.final]
    best = min(during, key=lambda event: (event.loss, event.step))
    (told,), (saved,) = happened(path, BestModel), happened(path, ModelSaved)
    assert best.step < 11, "the losses of this test do not rise"
    assert (told.best_step, told.best_loss, told.step, told.loss) == (best.step, best.loss, 11, during[-1].loss)
    assert (saved.weights_step, saved.step) == (best.step, 11)
    published = checkpoints_in(path / "checkpoints")
    assert list(published) == [best.step, 11], "save_total_limit=1 keeps the newest and the best"
    from powertrain.models.huggingface.folder import load_folder

    model = load_folder(path / "model", dropout=0.0)
    assert torch.equal(model.blocks[0].mlp_in.weight, weights_in(published[best.step]))       # type: ignore[union-attr]
    assert not torch.equal(model.blocks[0].mlp_in.weight, weights_in(published[11]))          # type: ignore[union-attr]
    (final,) = (event for event in happened(path, Evaluated) if event.final)
    assert (final.step, final.weights_step) == (11, best.step)


def test_a_run_whose_last_step_is_the_best_loads_nothing_and_has_the_same_bytes(
        train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from powertrain.run import best

    falling = [*SMALL, "eval_steps=5"]
    plain = train("plain", *falling)
    monkeypatch.setattr(best, "load_checkpoint", lambda *_: pytest.fail("nothing is to be loaded"))
    path = train("run", *falling, "load_best_model_at_end=true")
    assert [told.best_step for told in happened(path, BestModel)] == [11]
    assert files_of(path) == files_of(plain)


@pytest.mark.parametrize("fault", [("step", 1), ("step", 7), ("step", 11), ("signal", 6), ("model", 0)], ids=str)
def test_a_run_that_is_killed_or_stopped_makes_the_same_model(
        cli: Cli, text: Path, tmp_path: Path, fault: tuple[str, int]) -> None:
    words = ["train", f"data={text}", *RISING]
    assert cli(*words, "--output", "whole")[0] == 0
    assert cli(*words, "--output", "run", fault=fault)[0] in (-9, 75, 3)
    code, out, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert "Best" in out
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")
    assert (happened(tmp_path / "run", BestModel)[-1].best_step, happened(tmp_path / "run", ModelSaved)[-1].weights_step) == (
        happened(tmp_path / "whole", BestModel)[-1].best_step,) * 2


def test_a_damaged_best_checkpoint_gives_way_to_the_next_best(
        train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from powertrain.run import session

    take_best = session.take_best

    def damaged(part: Any) -> None:
        best = min(part.state.evaluations, key=lambda step: part.state.evaluations[step])
        path = part.folder.checkpoints / f"step-{best:06d}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        take_best(part)

    monkeypatch.setattr(session, "take_best", damaged)
    path = train("run", *RISING)
    (rejected,), (told,) = happened(path, CheckpointRejected), happened(path, BestModel)
    best = min((event for event in happened(path, Evaluated) if not event.final), key=lambda event: event.loss)
    assert rejected.name == f"step-{best.step:06d}"
    assert told.best_step == 11


# ------------------------------------------------------------------------------------------------ several processes


PLAIN = ["techniques.fused_blocks=off"]      # as sharded blocks are: one call rounds elsewhere


def _process(rank: int, port: int, folder: str, cache: str, source: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ranks = joined()
    rising = [*RISING, *PLAIN]
    for name, words in (("early", STILL), ("best", rising), ("sharded", [*rising, "techniques.sharding=on"])):
        prepared = prepare(resolve(None, [f"data={source}", *words, f"output_dir={Path(folder, name)}"]), Path(cache),
                           lambda said: None, processes=2)
        with new_run(prepared, lambda event: None, lambda *_: "", ranks) as part:
            run(part)
        assert len(set(ranks.each((part.state.step, part.weights_step, part.early is None)))) == 1
    torch.distributed.destroy_process_group()


def test_processes_agree_on_the_end_and_on_the_best_checkpoint(text: Path, cache: Path, tmp_path: Path) -> None:
    prepare(resolve(None, [f"data={text}", *STILL]), cache, lambda said: None)        # the tokens are cached before both look
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_processes(_process, 2, port, str(tmp_path), str(cache), str(text))
    assert [told.step for told in happened(tmp_path / "early", StoppedEarly)] == [STOPS_AT]
    models = [torch.cat([tensor.flatten() for tensor in _model(tmp_path / name)]) for name in ("best", "sharded")]
    torch.testing.assert_close(*models, rtol=1e-3, atol=1e-3)      # the same terms in another order, at a large rate
    for name in ("best", "sharded"):
        best = min((event for event in happened(tmp_path / name, Evaluated) if not event.final), key=lambda event: event.loss)
        assert [told.best_step for told in happened(tmp_path / name, BestModel)] == [best.step]
        assert best.step < 11
    assert len(read_all_events(tmp_path / "early" / "events.jsonl")) > 0


def _model(path: Path) -> list[torch.Tensor]:
    from powertrain.models.huggingface.folder import load_folder

    return [weight.detach() for weight in load_folder(path / "model", dropout=0.0).parameters()]


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(("words", "said"), [
    (["early_stopping_patience=2", "eval_steps=0"], "early_stopping_patience=2 compares losses .* set eval_steps=1$"),
    (["early_stopping_patience=2", "eval_steps=250"], "eval_steps=250 evaluates every 250 steps, and the run has 11"),
    (["load_best_model_at_end=true", "data.validation_share=0"], "load_best_model_at_end=True .* no example is held out"),
    (["early_stopping_threshold=0.1"], "set early_stopping_patience=3 too")], ids=lambda value: str(value)[:40])
def test_what_no_evaluation_could_decide_is_refused(text: Path, cache: Path, words: list[str], said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        prepare(resolve(None, [f"data={text}", *TINY, *words]), cache, lambda said: None)
