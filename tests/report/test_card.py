"""The model card of a run: what it says, and what of this machine it does not."""

from __future__ import annotations

from dataclasses import replace

import yaml
from made_runs import FACTS, whole_run
from made_runs import files as run_files

from powertrain.records.origins import COMMAND_LINE, DEFAULT
from powertrain.report.card import model_card, without_folders


def card(**changed: object) -> str:
    sources = ["/home/someone/secret plans/rows.jsonl", "org/rows"]
    recipe = {"model.layers": (2, COMMAND_LINE), "data.source": (sources, COMMAND_LINE), "seed": (0, DEFAULT)}
    files = replace(run_files(whole_run()), recipe=recipe, **changed)
    return model_card("me/tuned", files, version="1.2.3")


def test_it_has_results_data_recipe_and_plan() -> None:
    text = card()
    for said in ("# tuned", "Trained with powertrain 1.2.3.", "powertrain chat me/tuned", "loss 3.7000 nats a token",
                 "`d461d7f0056031ba`", "model.layers: 2", "| bf16 | {} | the CPU has avx512_bf16 |", "| Machine | AMD EPYC |"):
        assert said in text, said
    assert "seed" not in text                # a default


def test_its_head_is_yaml_that_the_hub_reads() -> None:
    head = yaml.safe_load(card().split("---")[1])
    assert head == {"pipeline_tag": "text-generation", "tags": ["powertrain", "scratch"]}


def test_the_same_run_gives_the_same_card() -> None:
    assert card() == card()


def test_folders_of_this_machine_are_left_out() -> None:
    text = card(facts=FACTS | {"data": FACTS["data"] | {"source": "/home/someone/rows.jsonl"}})
    assert "/home" not in text
    assert "rows.jsonl" in text
    assert "org/rows" in text
    assert without_folders("see https://host/a/b and C:\\Users\\me\\x.txt, ~/y/z.txt; a/b/c 1/2") == \
        "see https://host/a/b and x.txt, z.txt; a/b/c 1/2"


def test_an_adapter_is_put_on_its_base() -> None:
    text = model_card("me/tuned", run_files(whole_run()), base="org/base", opens_in="peft", version="1")
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "org/base"
    assert 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("org/base"), "me/tuned")' in text
