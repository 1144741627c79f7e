"""Which tensors of hand-written blocks are planned to be made again or to wait on the host, and what that is said to take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kinds_of_runs import ragged_facts

from powertrain import planner
from powertrain.cost.fitting import (
    Link,
    added_s,
    block_flops,
    hidden_bytes,
    kinds_by_worth,
    lightest_that_fits,
    link_of,
    sent_bytes,
)
from powertrain.cost.memory import peak_memory
from powertrain.cost.work import training_flops
from powertrain.cost.workload import Workload
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.planner import ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import Facts, Proposal, Refusal
from powertrain.records.plan import Why
from powertrain.techniques.saved_activations import KINDS, SavedActivations

PINNED = Recipe.model_validate({"max_steps": 1000, "techniques": {"fused_blocks": "on"}})


@pytest.fixture
def large(facts: Facts) -> Facts:
    found = ragged_facts(facts, None)
    sizes = {"layers": 12, "width": 512, "heads": 8, "kv_heads": 8, "head_width": 64, "mlp_width": 1376}
    from powertrain.facts.model import model_facts
    from powertrain.models.config import make_config

    config = make_config("llama", vocabulary=500, context=4096, **{k: v for k, v in sizes.items() if k != "head_width"})[0]
    return replace(found, model=model_facts(config), data=replace(found.data, max_length=4096, block=4096),
                   hardware=replace(found.hardware, device="cpu"), software=replace(found.software, missing={}))


def with_room(facts: Facts, share: float, device: str = "cpu", recipe: Recipe = PINNED) -> Facts:
    """Free memory for that share of what one example at a time needs where all is kept."""
    facts = on(facts, device)
    needed = sum(peak_memory(facts.model, as_asked(facts, recipe)).values())
    return replace(facts, hardware=replace(facts.hardware, free_memory_bytes=int(share * needed / 0.8)))


def on(facts: Facts, device: str) -> Facts:
    """Put the run on another device, with memory for anything."""
    capability = (9, 0) if device == "cuda" else None
    return replace(facts, hardware=replace(facts.hardware, device=device, free_memory_bytes=1 << 40,
                                           compute_capability=capability))


def as_asked(facts: Facts, recipe: Recipe) -> Workload:
    """Return the step that saved_activations is asked about."""
    return planner._before(SavedActivations.name, facts, recipe).one_example()


def workload(facts: Facts, device: str = "cpu") -> Workload:
    return Workload(facts.data.train_batch_size, 4096, micro_batch=1, attention_saves_scores=False, fused_blocks=True,
                    device=device)


def test_the_shortest_contraction_goes_first_and_attention_is_never_made_again(large: Facts) -> None:
    kinds = kinds_by_worth(large.model)
    assert [kind.name for kind in kinds][:2] == ["inner", "heads"]
    assert [kind.contraction for kind in kinds] == [512, 512, float("inf"), float("inf")]


# One token of a block of `large`, by hand. It keeps 2 x 1376 + 3 x 512 + 512 + 2 x 512 = 5824 numbers: 11,648 bytes in bf16.
# It computes 2 (512 x 1536 + 512 x 512 + 512 x 2752 + 1376 x 512) = 6,324,224 FLOPs in products and 4 x 2048.5 x 512 =
# 4,195,328 in attention forward, twice that backward. Its link is said in FLOPs of the device during one byte.
FORWARD, KEEPS, HEADS_AGAIN = 10_519_552, 11_648, 2 * 512 * 1536
EVERYTHING_OUT = dict.fromkeys(KINDS, "offload")


def linked(flops_a_byte: float) -> Link:
    return Link(bytes_per_s=1e13 / flops_a_byte, flops_per_s=1e13, room_bytes=1 << 40, item=2)


def test_what_the_block_hides_costs_nothing_and_the_rest_is_waited_for(large: Facts) -> None:
    flops = block_flops(large.model, [4096])
    assert flops == pytest.approx((4096 * FORWARD, 4096 * 2 * FORWARD))
    assert hidden_bytes(large.model, 4096, linked(900)) == pytest.approx(4096 * FORWARD / 900)
    assert sent_bytes(large.model, EVERYTHING_OUT, 4096, linked(900)) == 4096 * KEEPS
    assert added_s(large.model, EVERYTHING_OUT, 4096, linked(900)) == 0          # 10,483,200 of 10,519,552
    beyond = 4096 * (910 * KEEPS - FORWARD) / 1e13                               # on the way out; back there is more time
    assert added_s(large.model, EVERYTHING_OUT, 4096, linked(910)) == pytest.approx(beyond)
    both_ways = 4096 * (2 * 2000 * KEEPS - 3 * FORWARD) / 1e13
    assert added_s(large.model, EVERYTHING_OUT, 4096, linked(2000)) == pytest.approx(both_ways)
    assert added_s(large.model, {"heads": "recompute"}, 4096, linked(2000)) == pytest.approx(4096 * HEADS_AGAIN / 1e13)


def test_a_link_is_known_from_what_was_measured_and_takes_half_of_the_free_memory_of_the_host(large: Facts) -> None:
    known = replace(large.hardware, device="cuda", peak_flops_per_s={"bf16": 1e13}, datasheet_flops_per_s={"bf16": 2e13,
                    "fp16": 3e13, "fp32": 1e12}, host_link_bytes_per_s=2e10, host_free_memory_bytes=8 << 30)
    assert link_of(known, "bf16") == Link(2e10, 1e13, 4 << 30, 2)
    assert link_of(known, "fp16") == Link(2e10, 3e13, 4 << 30, 2)                # not measured: its datasheet's
    assert link_of(known, "fp32") == Link(2e10, 1e12, 4 << 30, 4)
    for lacks, words in (({"device": "cpu"}, "a cpu has no host beside it"),
                         ({"host_link_bytes_per_s": None}, "the copy speed between this GPU and its host is unknown"),
                         ({"host_free_memory_bytes": None}, "the copy speed between this GPU and its host is unknown"),
                         ({"datasheet_flops_per_s": {}, "peak_flops_per_s": {}}, "how fast this GPU computes in bf16 is not")):
        assert words in str(link_of(replace(known, **lacks), "bf16"))


def test_heads_of_any_width_and_blocks_without_a_backward_pass_are_counted_as_they_are(large: Facts) -> None:
    from powertrain.facts.model import model_facts
    from powertrain.models.config import make_config

    wide = replace(make_config("qwen3", vocabulary=500, layers=4, width=512, heads=4, context=4096)[0], head_width=256)
    assert sent_bytes(model_facts(wide), {"mixed": "offload"}, 10, linked(1)) == 10 * 2 * 4 * 256
    all_blocks, upper = (AdapterConfig(r=8, target_modules=targets) for targets in ("all-linear", r"model\.layers\.[23]\..*"))
    two, two_of_four = (block_flops(model_facts(replace(wide, layers=layers), method="lora", adapters=adapters), [4096])
                        for layers, adapters in ((2, all_blocks), (4, upper)))
    assert two_of_four[1] == pytest.approx(two[1], rel=1e-6)


@pytest.mark.parametrize(("flops_a_byte", "heads"), [(900, "offload"), (1030, "offload"), (1045, "recompute")])
def test_a_tensor_is_made_again_where_that_is_shorter_than_the_wait_for_its_copy(large: Facts, flops_a_byte: float,
                                                                                heads: str) -> None:
    """1030 x 11,648 - 10,519,552 = 1,477,888 FLOPs pass in the wait; 1,572,864 make the heads again; 1045: 1,652,608."""
    plain = workload(large, "cuda")
    room = sum(peak_memory(large.model, replace(plain, saved=EVERYTHING_OUT, saved_blocks=12)).values())
    found = lightest_that_fits(large.model, plain, room, linked(flops_a_byte))
    assert found is not None
    assert found.saved == EVERYTHING_OUT | {"heads": heads}


def test_nothing_is_made_again_as_long_as_the_link_hides_what_has_to_go(large: Facts) -> None:
    plain = workload(large, "cuda")
    room = int(0.9 * sum(peak_memory(large.model, plain).values()))
    fast = lightest_that_fits(large.model, plain, room, linked(100))
    assert fast is not None
    assert fast.saved == EVERYTHING_OUT                      # all of it is free, so in as few blocks as can be
    slow = lightest_that_fits(large.model, plain, room, linked(1e6))
    assert slow is not None
    assert set(slow.saved.values()) == {"recompute"}


def test_a_host_that_is_short_of_memory_takes_nothing(large: Facts) -> None:
    plain = workload(large, "cuda")
    room = int(0.9 * sum(peak_memory(large.model, plain).values()))
    for room_bytes in (1000, 4096 * KEEPS):                  # of one block there is room for all; more than one has to go
        found = lightest_that_fits(large.model, plain, room, replace(linked(100), room_bytes=room_bytes))
        assert found is not None
        assert found.saved_blocks > 1
        assert sent_bytes(large.model, found.saved, 4096, linked(100)) * found.saved_blocks <= room_bytes


def test_the_plan_says_how_much_hides_and_what_the_wait_costs(large: Facts) -> None:
    asked = Recipe.model_validate({"max_steps": 1000, "techniques": {"fused_blocks": "on", "bf16": "on"}})
    plain = as_asked(on(large, "cuda"), asked)
    all_out = sum(peak_memory(large.model, replace(plain, saved=EVERYTHING_OUT, saved_blocks=12)).values())
    tight = with_room(large, 1.001 * all_out / sum(peak_memory(large.model, plain).values()), "cuda", asked)
    link = linked(1000)                                      # hides 10,519,552 of 1000 x 11,648: 90 %
    found = ask_anew(SavedActivations.name, replace(tight, hardware=replace(
        tight.hardware, peak_flops_per_s={"bf16": link.flops_per_s}, host_link_bytes_per_s=link.bytes_per_s,
        host_free_memory_bytes=8 << 30)), asked)
    assert isinstance(found, Proposal)
    assert "90% of it hides" in found.because
    waited = found.technique.blocks * 4096 * (1000 * KEEPS - FORWARD) / training_flops(large.model, [4096])
    assert found.claim.step_time == (1.0, pytest.approx(1 + 1.2 * waited))


def test_the_plan_s_arithmetic_is_told_of_the_blocks(large: Facts) -> None:
    told = SavedActivations(blocks=3).reckon(workload(large))
    assert (told.saved, told.saved_blocks) == ({"inner": "recompute"}, 3)


def test_the_plan_says_what_hides_and_why_nothing_goes_to_a_host_it_does_not_know(large: Facts) -> None:
    asked = Recipe.model_validate({"max_steps": 1000, "techniques": {"fused_blocks": "on", "bf16": "on"}})
    tight = with_room(large, 0.9, "cuda", asked)

    def with_link(**known: Any) -> Facts:
        hardware = replace(tight.hardware, **({"peak_flops_per_s": {"bf16": 1e13}, "host_link_bytes_per_s": 2e10,
                                              "host_free_memory_bytes": 8 << 30} | known))
        return replace(tight, hardware=hardware)

    fast = ask_anew(SavedActivations.name, with_link(), asked)
    assert isinstance(fast, Proposal)
    assert set(fast.technique.actions.values()) == {"offload"}
    assert "offloaded to the host" in fast.because
    assert "20 GB/s, all of it hides behind the computation" in fast.because
    assert fast.claim.step_time == (1.0, 1.0)
    for lacks, words in (({"host_link_bytes_per_s": None}, "the copy speed between this GPU and its host is unknown"),
                         ({"peak_flops_per_s": {}, "datasheet_flops_per_s": {}}, "how fast this GPU computes in bf16")):
        blind = ask_anew(SavedActivations.name, with_link(**lacks), asked)
        assert isinstance(blind, Proposal)
        assert set(blind.technique.actions.values()) == {"recompute"}
        assert words in blind.because
    short = ask_anew(SavedActivations.name, with_link(host_free_memory_bytes=1 << 20), asked)
    assert isinstance(short, Proposal)
    assert set(short.technique.actions.values()) == {"recompute"}


def test_as_few_blocks_as_fit_are_light(large: Facts) -> None:
    plain = workload(large)
    needed = sum(peak_memory(large.model, plain).values())
    some = lightest_that_fits(large.model, plain, int(0.9 * needed))
    assert some is not None
    assert some.saved == {"inner": "recompute"}
    assert 0 < some.saved_blocks < 12
    assert sum(peak_memory(large.model, some).values()) <= 0.9 * needed
    fewer = replace(some, saved_blocks=some.saved_blocks - 1)
    assert sum(peak_memory(large.model, fewer).values()) > 0.9 * needed
    assert lightest_that_fits(large.model, plain, int(0.01 * needed), linked(1)) is None


def test_what_cannot_be_made_again_goes_to_the_host_of_a_gpu_only(large: Facts) -> None:
    plain = workload(large)
    everything = replace(plain, saved={"inner": "recompute", "heads": "recompute"}, saved_blocks=12)
    below = int(0.97 * sum(peak_memory(large.model, everything).values()))
    assert lightest_that_fits(large.model, plain, below) is None
    found = lightest_that_fits(large.model, plain, below, linked(1e6))
    assert found is not None
    assert "offload" in found.saved.values()


def test_it_proposes_only_where_the_run_does_not_fit_otherwise(large: Facts) -> None:
    roomy = ask_anew(SavedActivations.name, with_room(large, 1.1), PINNED)
    assert isinstance(roomy, Refusal)
    assert roomy.why is Why.NOT_NEEDED
    tight = ask_anew(SavedActivations.name, with_room(large, 0.9), PINNED)
    assert isinstance(tight, Proposal)
    assert tight.technique.actions == {"inner": "recompute"}
    assert tight.claim.peak_memory_bytes < 0
    alone = ask_anew(SavedActivations.name, with_room(large, 0.9), Recipe())
    assert isinstance(alone, Refusal)
    assert alone.cure == ("techniques.fused_blocks=on",)
    names = [step.technique.name for step in make_plan(with_room(large, 0.9), PINNED, 1000).steps]
    assert {"fused_blocks", "saved_activations"} <= set(names)
    assert "activation_checkpointing" not in names


def test_the_estimate_counts_what_is_made_again(large: Facts) -> None:
    from powertrain.cost.estimate import workload_work

    plain = workload(large)
    light = replace(plain, saved={"inner": "recompute"}, saved_blocks=12)
    again = workload_work(large.model, light).recompute_flops - workload_work(large.model, plain).recompute_flops
    assert again == 2 * 12 * (large.data.train_batch_size * 4096) * 512 * 2 * 1376


def test_the_estimate_waits_for_copies_that_the_computation_does_not_hide(large: Facts) -> None:
    """At 0.9 of the peak a link of 2000 FLOPs a byte copies while 1800 x 11,648 = 20,966,400 are computed: more than the first
    pass has, less than the second. At 0.4 they are 800 x 11,648 = 9,318,400, less than either."""
    from powertrain.cost.estimate import estimate, kind_of_work

    hardware = replace(large.hardware, device="cuda", peak_flops_per_s={"bf16": 1e13}, bandwidth_bytes_per_s=1e12,
                       host_link_bytes_per_s=1e13 / 2000, host_free_memory_bytes=1 << 40)
    light = replace(workload(large, "cuda"), dtype="bf16", saved=EVERYTHING_OUT, saved_blocks=5)

    def expected(light: Workload = light, **known: Any) -> Any:
        return estimate(large.model, light, replace(hardware, **known), 1)

    passes, unknown = large.data.train_batch_size, expected(host_link_bytes_per_s=None)
    wait_s = passes * 5 * 4096 * (1800 * KEEPS - FORWARD) / 9e12
    assert expected().step_s == pytest.approx((unknown.step_s[0] + wait_s, unknown.step_s[1]), rel=1e-9)
    everywhere = expected(replace(light, saved_blocks=1_000_000))            # as a pin says it that names no number
    assert everywhere.step_s[0] - unknown.step_s[0] == pytest.approx(12 / 5 * wait_s, rel=1e-6)
    assert "copies to the host: formula" in expected().basis
    assert "is not in it, because the copy speed between this GPU and its host is unknown" in unknown.basis
    assert expected().floor_s == unknown.floor_s
    assert "offloaded" in kind_of_work(large.model, light)
    kept = replace(light, saved={"inner": "recompute"})
    assert "host" not in expected(kept).basis
    assert "offloaded" not in kind_of_work(large.model, kept)
