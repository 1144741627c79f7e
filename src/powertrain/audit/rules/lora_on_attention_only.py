"""Adapters on attention, and none on the MLPs, where most weights are."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

KEY = "lora.target_modules"
ALL = {"trl": 'target_modules="all-linear"', "axolotl": "lora_target_linear: true", "llama-factory": "lora_target: all"}
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv",
                       "query", "key", "value", "q", "k", "v", "o"})


class LoraOnAttentionOnly(Rule):
    name = "lora_on_attention_only"
    rests_on = ("documentation: QLoRA (Dettmers et al. 2023, section 4) and TRL's LoRA Without Regret: adapters on all linear "
                "layers")

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        found = subject.value(KEY)
        names = [found] if isinstance(found, str) else found
        if isinstance(names, (list, tuple, set)) and names and {str(name) for name in names} <= ATTENTION:
            yield cls.found("low", "adapters on attention only", f"{', '.join(map(str, names))}: the MLPs, with most of the "
                            "weights, stay as they are, and a higher rank does not make up for it; on all linear layers "
                            "adapters learn like full tuning, at the price of more products",
                            subject.settings[KEY], expected=NO_SPEED,
                            cure=Cure(f"Use {ALL.get(subject.framework, ALL['trl'])}", set_to(subject, KEY, "all-linear"),
                                      ("lora.target_modules=all-linear",)))
