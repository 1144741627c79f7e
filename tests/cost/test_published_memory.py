"""Memory that other trainers publish, beside the prediction with the same settings, and docs/gpu.md, which shows both.

What is published is what the allocator reserved; the prediction is what tensors take. Sources: docs/gpu.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import HOPPER_WORKSPACE, Workload
from powertrain.facts.clusters import machine_of
from powertrain.facts.model import model_facts
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.planner import make_plan
from powertrain.recipe import Recipe
from powertrain.records import DataFacts, Facts, ModelFacts, Software
from powertrain.training.optimizers import OPTIMIZERS

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
SHAPES = {
    "Llama 3.1 8B": ("llama", {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336,
                               "vocabulary": 128256, "context": 131072}),
    "Qwen3 8B": ("qwen3", {"layers": 36, "width": 4096, "heads": 32, "kv_heads": 8, "head_width": 128, "mlp_width": 12288,
                           "vocabulary": 151936, "context": 40960}),
    "Qwen3 32B": ("qwen3", {"layers": 64, "width": 5120, "heads": 64, "kv_heads": 8, "head_width": 128, "mlp_width": 25600,
                            "vocabulary": 151936, "context": 40960}),
}
BILLIONS = {"Llama 3.1 8B": 8.03, "Qwen3 8B": 8.19, "Qwen3 32B": 32.76}


@dataclass(frozen=True)
class Step:
    """A step of one of several GPUs that divide the weights as FSDP does, or of one that holds them all (`gpus` 1)."""

    model: str
    gpus: int
    examples: int                            # of a pass, of one GPU
    tokens: int                              # of an example
    recomputed: bool                         # every block, attention too
    chunk_rows: int | None = None            # of the loss
    method: str = "full"
    keeps_attention: bool = False            # where the rest of every block is recomputed

    @property
    def facts(self) -> ModelFacts:
        family, sizes = SHAPES[self.model]
        config = make_config(family, tied_head=False, dropout=0.0, **sizes)[0]
        if self.method == "full":
            return model_facts(config)
        return model_facts(config, method="lora", path="here", adapters=AdapterConfig(r=16), frozen_dtype="bf16")

    @property
    def gib(self) -> float:
        workload = Workload(
            self.examples, self.tokens, self.examples, dtype="bf16", checkpoint_every=int(self.recomputed),
            checkpoint_keeps_attention=self.keeps_attention, kernel="sdpa", attention_saves_scores=False,
            loss_chunk_rows=self.chunk_rows, optimizer=OPTIMIZERS.named("adamw").facts_on("cuda"),
            fused_optimizer=True, device="cuda", library_workspace_bytes=HOPPER_WORKSPACE, shards=self.gpus,
            sharded_stage=3 if self.gpus > 1 else 0, documents=((self.tokens,) * self.examples,))
        return sum(peak_memory(self.facts, workload).values()) / 2**30


SAME_SETTINGS = {                            # with what is published, in GiB
    "81.85 GiB": Step("Qwen3 32B", 8, 2, 4096, recomputed=True),
    "83.9 GiB": Step("Llama 3.1 8B", 8, 1, 32768, recomputed=True),
}
BETWEEN = {                                  # of blocks of which operators are recomputed, which Powertrain has not
    "82.4 GiB": ("Llama 3.1 8B", 8, 2, 8192, None), "112.88 GiB": ("Qwen3 8B", 4, 16, 2048, 4096)}
PLANS = {
    "LoRA": Step("Qwen3 8B", 1, 2, 4096, recomputed=False, chunk_rows=441, method="lora"),
    "LoRA, blocks recomputed": Step("Qwen3 8B", 1, 2, 4096, recomputed=True, chunk_rows=441, method="lora"),
    "LoRA, blocks recomputed but attention": Step("Qwen3 8B", 1, 2, 4096, recomputed=True, chunk_rows=441, method="lora",
                                                  keeps_attention=True),
    "full, sharded": Step("Qwen3 8B", 8, 2, 4096, recomputed=False, chunk_rows=441),
    "full, sharded, blocks recomputed": Step("Qwen3 8B", 8, 2, 4096, recomputed=True, chunk_rows=441),
    "full, sharded, blocks recomputed but attention": Step("Qwen3 8B", 8, 2, 4096, recomputed=True, chunk_rows=441,
                                                           keeps_attention=True),
}


def planned_gib(step: Step, folder: Path) -> float:
    """Return what `powertrain plan --machine 8xh100-80gb` says, where the recipe pins the step's settings."""
    hardware = machine_of("8xh100-80gb" if step.gpus > 1 else "h100-80gb", folder)
    data = DataFacts("text", "", 64, 1, 1, "bpe", step.facts.vocabulary, 64 * step.tokens, 8 * step.tokens, 8, step.tokens,
                     step.tokens, 64, step.examples * step.gpus)
    pins = {"activation_checkpointing": {"every": 1, "keep_attention": step.keeps_attention} if step.recomputed else "off",
            "chunked_cross_entropy": {"rows": step.chunk_rows} if step.chunk_rows else "off",
            "micro_batch": {"examples": step.examples}, "attention_kernel": {"kernel": "sdpa"},
            **dict.fromkeys(("fused_blocks", "cuda_graph", "torch_compile"), "off")}
    facts = Facts(data=data, model=step.facts, hardware=hardware, software=Software({"torch": "2.13.0+cu130"}, {}))
    plan = make_plan(facts, Recipe.model_validate({"techniques": pins}), 100)
    assert plan.estimate is not None
    return plan.estimate.total_memory_bytes / 2**30


def row_with(text: str) -> str:
    return next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|") and text in line)


@pytest.mark.parametrize("model", SHAPES)
def test_the_shapes_are_those_of_the_models(model: str) -> None:
    assert Step(model, 1, 1, 1, recomputed=False).facts.parameters / 1e9 == pytest.approx(BILLIONS[model], abs=0.005)


@pytest.mark.parametrize("published", SAME_SETTINGS)
def test_a_prediction_with_published_settings_is_within_5_percent_and_on_the_page(published: str) -> None:
    gib, measured = SAME_SETTINGS[published].gib, float(published.split()[0])
    assert gib == pytest.approx(measured, rel=0.05)
    assert f"{gib:.1f} GiB, {abs(1 - gib / measured):.1%} less" in row_with(published)


@pytest.mark.parametrize("published", SAME_SETTINGS)
def test_the_plan_for_that_machine_is_within_5_percent_too(published: str, tmp_path: Path) -> None:
    assert planned_gib(SAME_SETTINGS[published], tmp_path) == pytest.approx(float(published.split()[0]), rel=0.05)


@pytest.mark.parametrize("published", BETWEEN)
def test_where_some_operators_are_recomputed_the_published_figure_lies_between_all_and_none(published: str) -> None:
    model, gpus, examples, tokens, rows = BETWEEN[published]
    every, none = (Step(model, gpus, examples, tokens, recomputed, rows).gib for recomputed in (True, False))
    assert every < float(published.split()[0]) < none
    assert f"{every:.1f} GiB with every block recomputed, {none:.1f} GiB with none" in row_with(published)


@pytest.mark.parametrize("name", PLANS)
def test_the_page_shows_what_a_qwen3_of_8_b_takes(name: str) -> None:
    assert f"{PLANS[name].gib:.1f} GiB" in row_with(f"| {name} |")


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_for_a_qwen3_of_8_b_says_what_the_page_shows(name: str, tmp_path: Path) -> None:
    assert planned_gib(PLANS[name], tmp_path) == pytest.approx(PLANS[name].gib, rel=0.01)
