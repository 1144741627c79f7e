"""Keys that mean something only together: a micro-batch and its accumulation, an adapter and its 4 bits.

Each function takes the keys of its group that were set, as they were spelled, and whether a pretrained model is trained. It
returns the recipe's keys and a note, and raises WrongUse for values that contradict each other or have no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from powertrain.recipe.conversions import Answer, NotSupported, Renamed
from powertrain.records import WrongUse

PREFERENCES = "training on preferences or rewards is not available; train on the chosen answers, or use another trainer"
Said = Mapping[str, Any]                         # the keys of one group that were set


def shown(values: Said) -> str:
    return ", ".join(f"{key}: {value}" for key, value in values.items()) or "nothing (it is the default)"


def _written(said: Said, renamed: Renamed) -> Answer:
    return renamed, f"{shown(said)} is written {shown(renamed)} here"


def _agreed(said: Said) -> Any:
    """Return the one value that is set, or None. Raises WrongUse if there are several."""
    values = [value for value in said.values() if value is not None]
    if any(value != values[0] for value in values):
        raise WrongUse(f"{shown(said)} are the same setting with different values; keep one of them", keys=tuple(said))
    return values[0] if values else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _batch(said: Said, tunes: bool) -> Answer:
    """Micro-batch times accumulation steps is the batch; the planner decides how it is split."""
    for key, value in said.items():
        if value == "auto":
            raise NotSupported(key, value, "it leaves the batch open; write train_batch_size, the examples of a step")
    micro = _agreed({key: value for key, value in said.items() if key != "gradient_accumulation_steps"})
    steps = said.get("gradient_accumulation_steps")
    if set(said) == {"batch_size"}:
        return {"train_batch_size": micro}, "batch_size is called train_batch_size here"
    if micro is None:
        raise WrongUse(f"gradient_accumulation_steps={steps} splits a batch, and no per_device_train_batch_size is set to "
                       "multiply; write train_batch_size, the examples of an optimizer step", keys=tuple(said))
    if not _is_count(micro) or not (steps is None or _is_count(steps)):
        raise WrongUse(f"{shown(said)}: these must be whole numbers of 1 or more; write train_batch_size, the examples of an "
                       "optimizer step", keys=tuple(said))
    spelled = next(key for key in said if key != "gradient_accumulation_steps")
    size = micro * (1 if steps is None else steps)
    product = f"{spelled} = {micro}" if steps is None else f"{spelled} x gradient_accumulation_steps = {micro} x {steps}"
    return {"train_batch_size": size}, f"{product} is train_batch_size: {size} here; the plan splits it"


def _length(said: Said, tunes: bool) -> Answer:
    """Tokens of an example of a pretrained model, or of a block of text to train on from scratch."""
    ours, tokens = "data.max_length" if tunes else "data.block", _agreed(said)
    if tokens is None:
        return {}, f"{shown(said)} has no effect here: without a number, {ours} has its default"
    return {ours: tokens}, f"{', '.join(said)} is called {ours} here"


def _method(said: Said, tunes: bool) -> Answer:
    """Adapters or full training, and whether the base has 4 bits."""
    kinds = {key: kind for key, value in said.items() if (kind := _kind(key, value))}
    four_bits = {key: bits for key, value in said.items() if (bits := _four_bits(key, value)) is not None}
    wanted = set(kinds.values())
    if "full" in wanted and (len(wanted) > 1 or any(four_bits.values())):
        reason = "4-bit weights cannot be trained in full" if len(wanted) == 1 else "these are different methods"
        raise WrongUse(f"{shown(said)}: {reason}; write method: full, lora or qlora", keys=tuple(said))
    if len(set(four_bits.values())) > 1 or ("qlora" in wanted and False in four_bits.values()):
        raise WrongUse(f"{shown(said)}: these contradict each other about 4 bits; write method: lora or qlora",
                       keys=tuple(said))
    if any(four_bits.values()) or "qlora" in wanted:
        return _written(said, {"method": "qlora"})
    return _written(said, {"method": wanted.pop()} if wanted else {})


def _kind(key: str, value: Any) -> str | None:
    """Return full, lora or qlora, if this key says so."""
    if key in ("use_peft", "use_lora", "use_qlora"):
        return None if value is None or (key == "use_qlora" and not value) else \
            "full" if not value else "qlora" if key == "use_qlora" else "lora"
    if key not in ("adapter", "finetuning_type", "training_type", "tuner_type", "train_type", "strategy"):
        return None
    word = str(value or "").lower()
    if key == "strategy" and word in ("dpo", "rlhf", "orpo", "ppo"):
        raise NotSupported(key, value, PREFERENCES)
    if word == "freeze":
        raise NotSupported(key, value, "training only the last blocks is not available; use method: lora, or full")
    known = {"lora": "lora", "qlora": "qlora", "full": "full", "lora/qlora": "lora", "sft": None,
             "": "full" if key == "adapter" else None}
    if word not in known:
        hint = "; an adapter to train further is named by model.adapter" if key == "adapter" else ""
        raise NotSupported(key, value, f"write method: lora, qlora or full{hint}")
    return known[word]


def _four_bits(key: str, value: Any) -> bool | None:
    """Return whether the base has 4 bits, if this key says so."""
    if key in ("load_in_8bit", "use_8bit") or (key in ("quantization_bit", "quant_bits") and value not in (None, 0, 4)):
        if value:
            raise NotSupported(key, value, "use method: qlora for a base of 4 bits, or lora for a base as its files have it")
        return None
    if key in ("quantization_bit", "quant_bits"):
        return True if value else None
    return bool(value) if key in ("load_in_4bit", "use_4bit") and value is not None else None


def _masking(said: Said, tunes: bool) -> Answer:
    """Whose words are learned."""
    answers = {key: value is not (key in ("train_on_inputs", "train_on_prompt")) for key, value in said.items()
               if value is not None}           # True: only the assistant's
    either = ("completion_only_loss", "assistant_only_loss")     # TRL: for pairs, and for conversations
    if any(answers.get(key) for key in either):
        answers = {key: answer for key, answer in answers.items() if answer or key not in either}
    if len(set(answers.values())) > 1:
        raise WrongUse(f"{shown(said)}: these contradict each other about whose words are learned; write data.train_on: "
                       "assistant or all", keys=tuple(said))
    if not answers:
        return _written(said, {})
    return _written(said, {"data.train_on": "assistant" if any(answers.values()) else "all"})


def _packing(said: Said, tunes: bool) -> Answer:
    if not tunes:
        return {}, f"{', '.join(said)} has no effect here: text is cut into full blocks, so there is nothing to pack"
    if any(value is True for value in said.values()):
        return _written(said, {"techniques.packing": "on"})
    off = any(said.get(key) is False for key in ("packing", "sample_packing"))
    return _written(said, {"techniques.packing": "off"} if off else {})


def _grouping(said: Said, tunes: bool) -> Answer:
    if not tunes:
        return {}, f"{', '.join(said)} has no effect here: all blocks have the same length, so there is nothing to group"
    known = {"True": True, "False": False, "group_by_length": True, "random": False, "None": None}
    for key, value in said.items():
        if str(value) not in known:
            raise NotSupported(key, value, "use random or group_by_length")
    wanted = _agreed({key: known[str(value)] for key, value in said.items()})
    return _written(said, {} if wanted is None else {"techniques.length_grouping": "on" if wanted else "off"})


def _interval(ours: str, per_epoch: str) -> Callable[[Said, bool], Answer]:
    """Hugging Face's strategies and Axolotl's times per epoch, as steps or epochs."""
    def convert(said: Said, tunes: bool) -> Answer:
        wanted: list[int | str] = []
        for key, value in said.items():
            if key == per_epoch and isinstance(value, (int, float)):
                wanted.append(f"{1 / value:.6g} epochs" if value else 0)
            elif value in ("epoch", "no", False) and key != per_epoch:
                wanted.append("1 epochs" if value == "epoch" else 0)
            elif value is not None and (value != "steps" or key == per_epoch):
                raise NotSupported(key, value, f"write {ours}: a number of steps, '2 epochs', or 0 for never")
        if len(set(wanted)) > 1:
            raise WrongUse(f"{shown(said)} contradict each other; write {ours}: a number of steps, '2 epochs', or 0 for never",
                           keys=tuple(said))
        return _written(said, {ours: wanted[0]} if wanted else {})
    return convert


GROUPS: Mapping[str, Callable[[Said, bool], Answer]] = {
    "batch": _batch, "method": _method, "length": _length, "masking": _masking, "packing": _packing, "grouping": _grouping,
    "evaluation": _interval("eval_steps", "evals_per_epoch"), "saving": _interval("save_steps", "saves_per_epoch"),
}
