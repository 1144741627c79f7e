"""What will not fit is refused before the run has a folder, with words that make it fit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain import planner
from powertrain.recipe import resolve
from powertrain.records import Reached, WrongUse
from powertrain.run import fits
from powertrain.run.fits import needed_bytes, refuse_what_does_not_fit, room_bytes, savings_of
from powertrain.run.prepare import Prepared, prepare

Cli = Callable[..., tuple[int, str, str]]
MiB = 1 << 20


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(4000)), encoding="utf-8")
    return path


def prepared_with(text: Path, cache: Path, free_bytes: int, *words: str) -> Prepared:
    """A run that is planned for a machine with so much memory free."""
    resolved = resolve(None, [f"data.source={text}", "data.tokenizer=char", "sample.prompt=", "max_steps=4", *words])
    prepared = prepare(resolved, cache, lambda said: None)
    facts = dataclasses.replace(prepared.facts, hardware=dataclasses.replace(
        prepared.facts.hardware, free_memory_bytes=free_bytes, peak_flops_per_s={"fp32": 1e11, "bf16": 2e11},
        bandwidth_bytes_per_s=1e10, instructions=("avx512_bf16",), speeds={"nothing like it": Reached(0.1, 0.2, 0.3, 1)}))
    plan = planner.make_plan(facts, prepared.recipe, prepared.total_steps)
    return dataclasses.replace(prepared, facts=facts, plan=plan)


WHOLE = ["techniques.micro_batch=off", "techniques.activation_checkpointing=off", "techniques.bf16=off", "train_batch_size=256"]


def test_each_saving_is_what_planning_with_its_words_saves(text: Path, cache: Path) -> None:
    """The words are given to a plan as a user would give them, and memory counted anew."""
    prepared = prepared_with(text, cache, 900 * MiB, *WHOLE)
    savings = savings_of(prepared)
    assert {"data.block=128", "model.layers=2"} <= {saving.words for saving in savings}
    assert any(saving.words.startswith("techniques.micro_batch.examples=") for saving in savings)
    assert [saving.bytes for saving in savings] == sorted((saving.bytes for saving in savings), reverse=True)
    for saving in savings:
        kept = [word for word in WHOLE if not saving.words.startswith(word.partition("=")[0])]
        again = prepared_with(text, cache, 900 * MiB, *kept, saving.words)
        left = needed_bytes(again.facts, again.plan)
        assert needed_bytes(prepared.facts, prepared.plan) - left == saving.bytes, saving.words
        assert saving.enough == (left <= room_bytes(again.facts))


@pytest.mark.parametrize("loss", ["techniques.chunked_cross_entropy=off", "techniques.chunked_cross_entropy=on"])
def test_label_smoothing_needs_two_more_tensors_of_the_logits_size_except_in_chunks(text: Path, cache: Path, loss: str) -> None:
    words = [*WHOLE, "model.layers=1", "model.width=32", "model.vocabulary=4000", "data.block=64", loss]
    plain, smooth = (prepared_with(text, cache, 900 * MiB, *words, f"objective.label_smoothing={share}") for share in (0, 0.1))
    more = needed_bytes(smooth.facts, smooth.plan) - needed_bytes(plain.facts, plain.plan)
    assert more == pytest.approx(0 if loss.endswith("on") else 2 * 4 * 256 * 64 * 4000, rel=0.001)


def test_a_saving_is_named_from_8_mib_on_and_from_2_percent_of_the_need_on(
        text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_with(text, cache, 900 * MiB, *WHOLE)
    for needed, least in ((100 * MiB, 8 * MiB), (1000 * MiB, 20 * MiB)):
        left = {"just enough": needed - least, "a byte too little": needed - least + 1, "much": 10 * MiB}
        monkeypatch.setattr(fits, "total_bytes", lambda model, workload, needed=needed: needed)
        monkeypatch.setattr(fits, "_changes", lambda prepared, workload, room, left=left: (
            (words, size, None) for words, size in left.items()))
        monkeypatch.setattr(fits, "needed_bytes", lambda size, plan: size)
        assert [saving.words for saving in savings_of(prepared)] == ["much", "just enough"]


def test_a_run_that_does_not_fit_is_refused_with_what_would_help_most(text: Path, cache: Path) -> None:
    prepared = prepared_with(text, cache, 700 * MiB, *WHOLE)
    with pytest.raises(WrongUse) as refused:
        refuse_what_does_not_fit(prepared)
    message = str(refused.value)
    first, second, third = savings_of(prepared)[:3]
    assert first.bytes >= second.bytes >= third.bytes
    assert message.index(first.words) < message.index(second.words) < message.index(third.words)
    assert "which is enough" in message
    assert "memory_check=off" in message


def test_what_fits_is_not_refused_nor_what_is_asked_for_all_the_same(text: Path, cache: Path) -> None:
    refuse_what_does_not_fit(prepared_with(text, cache, 64 << 30, *WHOLE))
    refuse_what_does_not_fit(prepared_with(text, cache, 700 * MiB, *WHOLE, "memory_check=off"))


def test_what_another_library_computes_is_not_refused_by_the_arithmetic_of_our_decoder(text: Path, cache: Path) -> None:
    prepared = prepared_with(text, cache, 700 * MiB, *WHOLE)
    bridged = dataclasses.replace(prepared.facts, model=dataclasses.replace(prepared.facts.model, provider="transformers"))
    refuse_what_does_not_fit(dataclasses.replace(prepared, facts=bridged))


def test_train_refuses_before_anything_is_written_and_plan_shows_it(cli: Cli, text: Path, tmp_path: Path) -> None:
    huge = [f"data.source={text}", "data.tokenizer=char", "sample.prompt=", "model.width=8192",
            "model.layers=32", "max_steps=2"]
    code, _, err = cli("train", *huge, "--output", "run")
    assert code == 2
    assert re.search(r"a step needs [\d,.]+ GiB of memory at its peak, and [\d,.]+ GiB are free", err)
    assert "what would help: model.width=" in err
    assert not (tmp_path / "run").exists()
    code, out, _ = cli("plan", *huge)
    assert code == 0
    assert "Too large" in out
    assert "Would help  model.width=" in out
    assert "one example does not fit" in out
    code, out, _ = cli("plan", *huge, "--json")
    found = json.loads(out.splitlines()[-1])["memory"]
    assert found["needed_bytes"] > found["room_bytes"]
    assert {"words", "bytes", "enough"} == set(found["savings"][0])
