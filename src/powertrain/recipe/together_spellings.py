"""Spellings that mean something only together: a micro-batch and its accumulation, an adapter and its 4 bits.

Each function takes what was said, as it was spelled, and whether a pretrained model is trained; it gives the recipe's own
keys and a note, and raises ValueError for what contradicts itself or has no counterpart here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from powertrain.recipe.spelling_tables import PREFERENCE, TOGETHER

Renamed = dict[str, Any]                         # our dotted key -> value
Answer = tuple[Renamed, str]


def shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in values.items()) or "nothing (it is the default)"


def _written(said: Mapping[str, Any], renamed: Renamed) -> Answer:
    return renamed, f"{shown(said)} is written {shown(renamed)} here"


def _agreed(said: Mapping[str, Any]) -> Any:
    """The one value that is said, None where nothing is set."""
    values = {key: value for key, value in said.items() if value is not None}
    if len(set(values.values())) > 1:
        raise ValueError(f"{shown(values)} are the same setting with different values; keep one of them")
    return next(iter(values.values()), None)


def batch(said: Mapping[str, Any], tunes: bool) -> Answer:
    """Micro-batch x accumulation steps is the batch; how it is split again is the planner's business."""
    if left_open := [key for key, value in said.items() if value == "auto"]:
        raise ValueError(f"{left_open[0]}=auto leaves the batch open; write train_batch_size, the examples per optimizer step")
    micro = _agreed({key: value for key, value in said.items() if key != "gradient_accumulation_steps"})
    steps = said.get("gradient_accumulation_steps")
    if set(said) == {"batch_size"}:
        return {"train_batch_size": micro}, "batch_size is called train_batch_size here"
    if micro is None:
        raise ValueError(f"gradient_accumulation_steps={steps} says how a batch is split, and there is no "
                         "per_device_train_batch_size to multiply; write train_batch_size, the examples per optimizer step")
    spelled = next(key for key in said if key != "gradient_accumulation_steps")
    size = micro * (1 if steps is None else steps)
    product = f"{spelled} = {micro}" if steps is None else f"{spelled} x gradient_accumulation_steps = {micro} x {steps}"
    return {"train_batch_size": size}, f"{product} is train_batch_size: {size} here; the plan splits it"


def length(said: Mapping[str, Any], tunes: bool) -> Answer:
    """Tokens of an example of a pretrained model, or of a block of text to train on from scratch."""
    ours, tokens = "data.max_length" if tunes else "data.block", _agreed(said)
    if tokens is None:
        return {}, f"{shown(said)} has no effect here: without a number, {ours} has its default"
    return {ours: tokens}, f"{', '.join(said)} is called {ours} here"


def method(said: Mapping[str, Any], tunes: bool) -> Answer:
    """Adapters or full training, and whether the base has 4 bits."""
    kinds = {key: kind for key, value in said.items() if (kind := _kind(key, value))}
    four_bits = {key: bits for key, value in said.items() if (bits := _four_bits(key, value)) is not None}
    wanted = set(kinds.values())
    if "full" in wanted and (len(wanted) > 1 or any(four_bits.values())):
        reason = "4-bit weights cannot be trained in full" if len(wanted) == 1 else "these are different methods"
        raise ValueError(f"{shown(said)}: {reason}; write method: full, lora or qlora")
    if len(set(four_bits.values())) > 1 or ("qlora" in wanted and False in four_bits.values()):
        raise ValueError(f"{shown(said)}: these contradict each other about 4 bits; write method: lora or qlora")
    if any(four_bits.values()) or "qlora" in wanted:
        return _written(said, {"method": "qlora"})
    return _written(said, {"method": wanted.pop()} if wanted else {})


def _kind(key: str, value: Any) -> str | None:
    """full, lora or qlora, as far as this key says; None: nothing."""
    if key in ("use_peft", "use_lora", "use_qlora"):
        return None if value is None or (key == "use_qlora" and not value) else \
            "full" if not value else "qlora" if key == "use_qlora" else "lora"
    if key not in ("adapter", "finetuning_type", "training_type", "tuner_type", "train_type", "strategy"):
        return None
    word = str(value or "").lower()
    if key == "strategy" and word in ("dpo", "rlhf", "orpo", "ppo"):
        raise ValueError(f"strategy={value!r} cannot be had here: {PREFERENCE}")
    if word == "freeze":
        raise ValueError(f"{key}=freeze trains the last blocks and freezes the others, which is not available; "
                         "use method: lora, or full")
    known = {"lora": "lora", "qlora": "qlora", "full": "full", "lora/qlora": "lora", "sft": None,
             "": "full" if key == "adapter" else None}
    if word not in known:
        hint = "; an adapter to train further is named by model.adapter" if key == "adapter" else ""
        raise ValueError(f"{key}={value!r} is not available; write method: lora, qlora or full{hint}")
    return known[word]


def _four_bits(key: str, value: Any) -> bool | None:
    """Whether the base has 4 bits, as far as this key says."""
    if key in ("load_in_8bit", "use_8bit") or (key in ("quantization_bit", "quant_bits") and value not in (None, 0, 4)):
        if value:
            raise ValueError(f"{key}={value!r} is not available; use method: qlora for a base of 4 bits, or lora for one as "
                             "the files have it")
        return None
    if key in ("quantization_bit", "quant_bits"):
        return True if value else None
    return value if key in ("load_in_4bit", "use_4bit") else None


def masking(said: Mapping[str, Any], tunes: bool) -> Answer:
    """Whose words are learned."""
    answers = {key: value is not (key in ("train_on_inputs", "train_on_prompt")) for key, value in said.items()
               if value is not None}           # True: the assistant's alone
    either = ("completion_only_loss", "assistant_only_loss")     # TRL: for pairs, and for conversations
    if any(answers.get(key) for key in either):
        answers = {key: answer for key, answer in answers.items() if answer or key not in either}
    if len(set(answers.values())) > 1:
        raise ValueError(f"{shown(said)}: these contradict each other about whose words are learned; write data.train_on: "
                         "assistant or all")
    if not answers:
        return _written(said, {})
    return _written(said, {"data.train_on": "assistant" if any(answers.values()) else "all"})


def packing(said: Mapping[str, Any], tunes: bool) -> Answer:
    if not tunes:
        return {}, f"{', '.join(said)} has no effect here: text is cut into full blocks, and there is nothing to pack"
    if any(value is True for value in said.values()):
        return _written(said, {"techniques.packing": "on"})
    off = any(said.get(key) is False for key in ("packing", "sample_packing"))
    return _written(said, {"techniques.packing": "off"} if off else {})


def grouping(said: Mapping[str, Any], tunes: bool) -> Answer:
    if not tunes:
        return {}, f"{', '.join(said)} has no effect here: all blocks have the same length, so there is nothing to group"
    known = {True: True, False: False, "group_by_length": True, "random": False, None: None}
    for key, value in said.items():
        if value not in known:
            raise ValueError(f"{key}={value!r} is not available; use random or group_by_length")
    wanted = _agreed({key: known[value] for key, value in said.items()})
    return _written(said, {} if wanted is None else {"techniques.length_grouping": "on" if wanted else "off"})


def evaluation(said: Mapping[str, Any], tunes: bool) -> Answer:
    return _interval("eval_steps", "evals_per_epoch", said)


def saving(said: Mapping[str, Any], tunes: bool) -> Answer:
    return _interval("save_steps", "saves_per_epoch", said)


def _interval(ours: str, per_epoch: str, said: Mapping[str, Any]) -> Answer:
    """Hugging Face's strategies and Axolotl's times per epoch, as steps or epochs."""
    wanted: list[int | str] = []
    for key, value in said.items():
        if key == per_epoch:
            wanted += [] if value is None else [f"{1 / value:.6g} epochs" if value else 0]
        elif value in ("epoch", "no", False):
            wanted.append("1 epochs" if value == "epoch" else 0)
        elif value not in ("steps", None):
            raise ValueError(f"{key}={value!r} is not available; write {ours}: a number of steps, '2 epochs', or 0 for never")
    if len(set(wanted)) > 1:
        raise ValueError(f"{shown(said)} contradict each other; write {ours}: a number of steps, '2 epochs', or 0 for never")
    return _written(said, {ours: wanted[0]} if wanted else {})


MEANINGS: Mapping[str, Callable[[Mapping[str, Any], bool], Answer]] = {
    "batch": batch, "method": method, "length": length, "masking": masking, "packing": packing, "grouping": grouping,
    "evaluation": evaluation, "saving": saving,
}
assert set(MEANINGS) == set(TOGETHER)
