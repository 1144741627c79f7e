"""What fine-tuning adds to the plan changes no gradient by more than rounding, against plain padded training in fp32."""

from __future__ import annotations

import pytest
import torch
from kinds_of_runs import LORA, make_ragged

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.techniques import Technique
from powertrain.techniques.activation_checkpointing import ActivationCheckpointing
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.techniques.frozen_backward import FrozenBackward
from powertrain.techniques.length_grouping import LengthGrouping
from powertrain.techniques.packing import Packing
from powertrain.training.loop import backward, new_state
from powertrain.training.setup import Setup

TOLERANCE = 1e-5                             # |difference| / |gradient| of each weight: fp32 sums in another order
PLANS: dict[str, tuple[Technique, ...]] = {
    "packing": (Packing(100),), "packing in one pass": (Packing(4096),), "loss": (ChunkedCrossEntropy(16),),
    "checkpointing": (ActivationCheckpointing(),), "kernel": (AttentionKernel("bmm"),), "ragged": (AttentionKernel("ragged"),),
    "grouping": (LengthGrouping(),),
    "all": (AttentionKernel("bmm"), ChunkedCrossEntropy(16), Packing(100), FrozenBackward(), ActivationCheckpointing())}
ADAPTERS = {"full": None, "lora": LORA, "dora": AdapterConfig(r=4, use_dora=True), "lslora": AdapterConfig(kind="lslora", r=4)}


def gradients_of(setup: Setup) -> dict[str, torch.Tensor]:
    passes = setup.prepare(0)
    backward(setup, new_state(setup, 0.0).scaler, passes, sum(batch.trained_tokens for batch in passes))
    return {name: p.grad for name, p in setup.model.named_parameters() if p.requires_grad and p.grad is not None}


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("plan", PLANS)
def test_no_gradient_moves_by_more_than_rounding(plan: str, adapters: str) -> None:
    if adapters == "full" and plan == "all":
        techniques = tuple(t for t in PLANS[plan] if not isinstance(t, FrozenBackward))
    else:
        techniques = PLANS[plan]
    changed = make_ragged(ADAPTERS[adapters])
    for technique in techniques:
        changed = technique.apply(changed)
    for technique in techniques:
        technique.confirm(changed)
    expected, found = gradients_of(make_ragged(ADAPTERS[adapters])), gradients_of(changed)
    assert expected.keys() == found.keys()
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert float(gradient.norm()) > 0, name
        # LS-LoRA's scalars are sums over all tokens that nearly cancel: rounding shows there against the whole gradient
        scale = whole if gradient.numel() < 5 else gradient.norm()
        assert float((found[name] - gradient).norm() / scale) < TOLERANCE, name
