"""Weights that a recipe freezes or lets learn slower: by name, for every optimizer, in checkpoints, and in the prediction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapted_models import make_base, with_adapter
from driver import TINY, run_ranks
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.models.groups import factors_of, freeze
from powertrain.models.huggingface.folder import load_folder
from powertrain.models.selection import Selection
from powertrain.recipe import resolve
from powertrain.records import WrongUse
from powertrain.records.checkpoints import FILES, newest_checkpoint
from powertrain.records.event_log import read_events
from powertrain.records.events import Memory
from powertrain.run.prepare import build_setup, prepare
from powertrain.training.optimizers import ROWS, Optimizer, selection_of

Cli = Callable[..., tuple[int, str, str]]
Train = Callable[..., Path]
SMALL = [*TINY, "sample.tokens=0"]
LOWEST = ["weights.freeze=[embedding.*, position_embedding.*, blocks.0.*]", "model.tied_head=false"]
SLOWER = ["weights.learning_rates={blocks.0.*: 0.5, '*.bias': 2}", "weights.layer_decay=0.8"]
UPDATES = [(row, flat) for row in ROWS if "cpu" in row.devices for flat in (False, True) if row.can_be_flat or not flat]


def small(family: str = "llama") -> Decoder:
    torch.manual_seed(1)
    return Decoder(make_config(family, layers=3, width=32, heads=2, vocabulary=40, context=16, tied_head=False)[0])


# ------------------------------------------------------------------------------------------------ names and factors


def test_a_blocks_rate_falls_with_its_depth() -> None:
    factors = {name: factors_of(model, Selection(layer_decay=0.5))[weight] for model in [small()]
               for name, weight in model.named_parameters()}
    assert factors["head.weight"] == factors["norm.weight"] == 1.0
    assert [factors[f"blocks.{layer}.qkv.weight"] for layer in range(3)] == [0.125, 0.25, 0.5]
    assert factors["embedding.weight"] == 0.0625


def test_the_last_pattern_that_matches_holds_beside_the_depth() -> None:
    model = small()
    selection = Selection(learning_rates={"blocks.*": 10.0, "*.qkv.*": 3.0}, layer_decay=0.5)
    factors = {name: factors_of(model, selection)[weight] for name, weight in model.named_parameters()}
    assert factors["blocks.2.mlp_in.weight"] == 5.0
    assert factors["blocks.2.qkv.weight"] == 1.5
    assert factors["head.weight"] == 1.0


@pytest.mark.parametrize("pattern", ["embedding.weight", "embedding.*", "model.embed_tokens.*", "*embed_tokens*"])
def test_a_weight_has_our_name_and_hugging_faces(pattern: str) -> None:
    model = small()
    freeze(model, Selection((pattern,)))
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["embedding.weight"]


@pytest.mark.parametrize(("selection", "said"), [
    (Selection(("embeding.*",)), r"'embeding\.\*', which matches no trained weight; their names are blocks\.\*\.attention_norm"
                                 r".*did you mean embedding\.weight"),
    (Selection(("*",)), r"freezes all 21 weights"),
    (Selection(("*.q_proj.*",)), r"matches model\.layers\.0\.self_attn\.q_proj\.weight, and that is a part of the weight "
                                 r"blocks\.0\.qkv\.weight together with .*k_proj.*v_proj")], ids=lambda value: str(value)[:30])
def test_a_pattern_that_cannot_be_meant_is_refused(selection: Selection, said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        freeze(small(), selection)


def test_a_rate_for_a_frozen_weight_is_refused() -> None:
    model = small()
    freeze(model, Selection(("embedding.*",)))
    with pytest.raises(WrongUse, match=r"weights.learning_rates has 'embedding\.\*', which matches no trained weight"):
        factors_of(model, Selection(("embedding.*",), {"embedding.*": 0.5}))


# ------------------------------------------------------------------------------------------------ updates


@pytest.mark.parametrize(("row", "flat"), UPDATES, ids=lambda value: getattr(value, "name", value))
def test_a_slower_weight_is_updated_as_with_a_smaller_learning_rate(row: Any, flat: bool) -> None:
    settings = {name: setting.default for name, setting in row.settings.items()}
    selection = Selection(learning_rates={"blocks.1.*": 0.25})

    def updated(factor: float, chosen: Selection) -> dict[str, torch.Tensor]:
        model = small()
        optimizer = Optimizer(row, 0.01, settings=settings, flat=flat, selection=chosen)(model, 0.1)
        for step in range(3):
            for weight in model.parameters():
                weight.grad = torch.sin(weight.detach() * 50 + step)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * factor * group["lr_factor"]
            optimizer.gather()
            optimizer.step()
            optimizer.zero_grad()
        return {name: weight.detach() for name, weight in model.named_parameters()}

    alike, slow, chosen = updated(1.0, Selection()), updated(0.25, Selection()), updated(1.0, selection)
    for name, weight in chosen.items():
        assert torch.equal(weight, (slow if name.startswith("blocks.1.") else alike)[name]), name
    assert not torch.equal(alike["blocks.1.qkv.weight"], slow["blocks.1.qkv.weight"])


# ------------------------------------------------------------------------------------------------ runs


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in load_folder(path / "model", dropout=0.0).named_parameters()}


@pytest.mark.parametrize("more", [[], ["techniques.activation_checkpointing=on"], ["techniques.flat_parameters=on"],
                                  ["optimizer=muon"], ["techniques.bf16=on"], ["ema.decay=0.5"]], ids=" ".join)
def test_frozen_weights_stay_to_the_bit_and_are_in_no_checkpoint(train: Train, text: Path, cache: Path, more: list[str]
                                                                 ) -> None:
    path = train("run", *LOWEST, *more)
    begun = build_setup(prepare(resolve(None, [f"data={text}", *SMALL, *LOWEST]), cache, lambda said: None)).model
    before, after = dict(begun.named_parameters()), weights_of(path)
    assert set(before) == set(after)
    frozen = {name for name in before if name.startswith(("embedding.", "position_embedding.", "blocks.0."))}
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    newest, _ = newest_checkpoint(path / "checkpoints")
    assert newest is not None
    assert set(load_file(newest / "model.safetensors")) == set(before) - frozen


def test_the_other_gradients_are_those_of_a_model_without_frozen_weights(text: Path, cache: Path) -> None:
    found = []
    for words in (LOWEST, ["model.tied_head=false"]):
        resolved = resolve(None, [f"data={text}", *SMALL, "model.dropout=0", "techniques.fused_blocks=off", *words])
        setup = build_setup(prepare(resolved, cache, lambda said: None))
        setup.batch_loss(setup.prepare(0)[0]).backward()         # type: ignore[no-untyped-call]
        found.append({name: weight.grad for name, weight in setup.model.named_parameters()})
    frozen, whole = found
    trained = [name for name, gradient in frozen.items() if gradient is not None]
    assert trained == [name for name in whole if not name.startswith(("embedding.", "position_embedding.", "blocks.0."))]
    for name in trained:
        torch.testing.assert_close(frozen[name], whole[name], rtol=1e-5, atol=1e-7)      # the same sums by other kernels


@pytest.mark.parametrize("words", [LOWEST, SLOWER, [*SLOWER, "techniques.flat_parameters=on"]],
                         ids=["frozen", "slower", "flat"])
def test_a_run_that_is_killed_goes_on_with_the_same_bytes(cli: Cli, text: Path, tmp_path: Path, words: list[str]) -> None:
    command = ["train", f"data={text}", *SMALL, *words]
    assert cli(*command, "--output", "whole")[0] == 0
    assert cli(*command, "--output", "run", fault=("step", 7))[0] == -9
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    ours, theirs = ([(newest_checkpoint(tmp_path / name / "checkpoints")[0] / file).read_bytes() for file in FILES[:2]]    # type: ignore[operator]
                    + [(tmp_path / name / "model" / "model.safetensors").read_bytes()] for name in ("run", "whole"))
    assert ours == theirs


def test_adapters_learn_at_their_own_rates() -> None:
    model = with_adapter(make_base("llama", vocabulary=330, context=96))
    names = {weight: name for name, weight in model.named_parameters()}
    groups = Optimizer(ROWS[0], 0.01, selection=Selection(learning_rates={"*.B": 16.0})).groups(model, 0.0)
    assert {names[weight][-2:]: group["lr_factor"] for group in groups for weight in group["params"]} == {".A": 1.0, ".B": 16.0}
    assert {name for group in groups for name in (names[weight] for weight in group["params"])} == {
        name for name in names.values() if ".adapters." in name}


def test_frozen_weights_beside_adapters_are_refused() -> None:
    recipe = resolve(None, ["model.path=base", "method=lora", "weights.freeze=[embedding.*]"]).recipe
    with pytest.raises(WrongUse, match=r"method=lora leaves all of the model's own weights as they are"):
        selection_of(recipe)


@pytest.mark.parametrize("words", [[*LOWEST, "techniques.sharding=on"], [*SLOWER, "techniques.sharding=on"],
                                   [*LOWEST, "techniques.data_parallel=on"]], ids=["frozen", "slower", "data_parallel"])
def test_processes_that_share_a_run_learn_what_one_learns(cache: Path, text: Path, tmp_path: Path, train: Train,
                                                          words: list[str]) -> None:
    same = ["model.dropout=0", "techniques.bf16=off"]
    alone = train("alone", *same, *[word for word in words if not word.startswith("techniques.")])
    ended = run_ranks(["train", f"data={text}", *SMALL, *same, *words, "--output", str(tmp_path / "shared")], cache, tmp_path,
                      [None, None])
    assert [code for code, _ in ended] == [0, 0], ended
    theirs = weights_of(alone)
    for name, weight in weights_of(tmp_path / "shared").items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=1e-4)     # the same terms in another order


@pytest.mark.parametrize("technique", ["tensor_parallel", "pipeline_parallel"])
def test_what_divides_blocks_is_refused_with_frozen_weights(text: Path, cache: Path, technique: str) -> None:
    with pytest.raises(WrongUse, match=r"weights\.freeze leaves [0-9]+ weights as they are"):
        prepare(resolve(None, [f"data={text}", *SMALL, *LOWEST, f"techniques.{technique}=on"]), cache, lambda said: None,
                processes=2)


@pytest.mark.parametrize("words", [LOWEST, ["weights.freeze=['*.qkv.weight', blocks.1.mlp_in.*]"],
                                   ["weights.freeze=[embedding.*]"]],
                         ids=["lowest", "inside", "embedding"])
def test_the_prediction_is_what_a_step_takes(train: Train, words: list[str]) -> None:
    path = train("run", "max_steps=20", "train_batch_size=8", "techniques.bf16=off", *words)
    (found,) = (event for event in read_events(path / "events.jsonl") if isinstance(event, Memory))
    assert sum(found.predicted.values()) == pytest.approx(found.allocated_bytes, rel=0.02)


def test_the_plan_shows_what_is_frozen_and_how_fast_the_rest_learns(cli: Cli, text: Path) -> None:
    code, out, err = cli("plan", f"data={text}", *SMALL, *LOWEST, "weights.learning_rates={head.*: 0.1}", "ema.decay=0.99",
                         "early_stopping_patience=2", "load_best_model_at_end=true")
    assert code == 0, err
    for words in ("Frozen", "14 weights (embedding.*, position_embedding.*, blocks.0.*)", "x 0.1 for", "over about 100 steps",
                  "after 2 evaluations in a row", "the checkpoint with the lowest held-out loss"):
        assert words in out.replace("\n", " "), out
    code, _, err = cli("plan", f"data={text}", *SMALL, "weights.freeze=[embeddings]")
    assert code == 2
    assert "their names are" in err
    assert "Traceback" not in err
