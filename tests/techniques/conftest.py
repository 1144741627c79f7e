"""The kinds of runs that a technique may meet, as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from kinds_of_runs import LORA, Case, compared_facts, in_passes_of_4, lora_by_hand, make_compared, make_ragged, ragged_facts

from powertrain.recipe import Recipe
from powertrain.records import Facts
from powertrain.training.setup import Setup


@pytest.fixture(scope="session")
def lora_facts(facts: Facts) -> Facts:
    return ragged_facts(facts, LORA)


@pytest.fixture
def cases(facts: Facts, make_setup: Callable[..., Setup]) -> Mapping[str, Case]:
    """In the order in which a technique is looked for: the first in which it can be is where it is tried."""
    here = facts.hardware
    bf16 = replace(facts.hardware, device="cpu", instructions=("avx512_bf16", "avx512_vnni"),
                   peak_flops_per_s={"fp32": 1e11, "bf16": 4e11})
    facts = replace(facts, hardware=replace(bf16, instructions=()))
    lora, full = ragged_facts(facts, LORA), ragged_facts(facts, None)
    quantised = ragged_facts(facts, LORA, method="qlora", frozen_dtype="nf4")
    unpacked = Recipe.model_validate({"techniques": {"packing": "off", "micro_batch": {"examples": 4}}})
    padded = partial(in_passes_of_4, LORA)
    found = (
        Case("blocks", replace(facts, hardware=here), make_setup),
        Case("examples", full, make_ragged),
        Case("lora", lora, partial(make_ragged, LORA)),
        Case("lora in bf16", replace(lora, hardware=bf16), partial(make_ragged, LORA, precision=torch.bfloat16)),
        Case("qlora", quantised, partial(make_ragged, LORA, four_bit=True), make_without=partial(make_ragged, LORA)),
        Case("padded", lora, padded, unpacked),
        Case("pairs", compared_facts(facts), make_compared, Recipe.model_validate({"objective": {"name": "dpo"}})),
        Case("by hand", lora, lora_by_hand, Recipe.model_validate({"techniques": {"fused_blocks": "on"}})))
    return {case.name: case for case in found}


@pytest.fixture
def restored_process() -> Iterator[None]:
    """Techniques may set what belongs to the whole process."""
    threads, tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision
    yield
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.fp32_precision = tf32
    torch._dynamo.reset()
