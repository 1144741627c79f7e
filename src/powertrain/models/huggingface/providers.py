"""Who computes a pretrained model: our decoder, transformers or unsloth; for which task; and why the others do not.

Everything is read off `config.json`. Loads no torch until transformers is asked which models it knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.models.config import FAMILIES
from powertrain.models.huggingface.families import from_hf_config, is_classifier
from powertrain.models.huggingface.hub import CONFIG, GENERATION, read_model_json
from powertrain.records import Software, WrongUse

Json = Mapping[str, Any]

CAUSAL, SEQ2SEQ, SPAN, REWARD = "causal", "seq2seq", "span", "reward"
DESCRIPTIONS = {CAUSAL: "predicting the next token", SEQ2SEQ: "an encoder reading a source and a decoder writing its target",
                SPAN: "pointing at an answer in a context", REWARD: "scoring a whole text"}
AUTO_CLASSES = {CAUSAL: "AutoModelForCausalLM", SEQ2SEQ: "AutoModelForSeq2SeqLM", SPAN: "AutoModelForQuestionAnswering",
                REWARD: "AutoModelForSequenceClassification"}
MODEL_TYPES = {CAUSAL: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", SEQ2SEQ: "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
               SPAN: "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"}       # that transformers has a class for

# Encoder-decoders whose target starts with the padding token where config.json does not say; transformers' T5 does so.
START_AT_PADDING = ("t5", "mt5", "umt5", "longt5", "switch_transformers")


@dataclass(frozen=True)
class Choice:
    provider: str                            # "native", "transformers" or "unsloth"
    task: str                                # "causal", "seq2seq", "span" or "reward"
    because: str


def find_task(config: Json) -> str:
    """Return the task that the model of this `config.json` is made for. An encoder that has no head for spans gets one.

    Raises WrongUse for a model that does none of the tasks.
    """
    names = config.get("architectures") or []
    if any("ForQuestionAnswering" in name for name in names):
        return SPAN
    if is_classifier(config) and config.get("model_type") in FAMILIES:
        return REWARD
    able = next((task for task in (SEQ2SEQ, CAUSAL, SPAN) if why_not_task(config, task) is None), None)
    if able is None:
        raise WrongUse(f"config.json describes {_described(config)}, which can be trained for none of the tasks "
                       f"{', '.join(DESCRIPTIONS)}; choose a decoder, an encoder-decoder or an encoder of text")
    return able


def why_not_task(config: Json, task: str) -> str | None:
    """Return why the model of this `config.json` cannot be trained for `task`; None if it can."""
    kind, both = config.get("model_type"), bool(config.get("is_encoder_decoder"))
    if task == CAUSAL and both:
        return f"config.json describes {_described(config)}, an encoder-decoder, which reads a source before it writes"
    if task == SEQ2SEQ and not both:
        return f"config.json describes {_described(config)}, which is no encoder-decoder"
    if task == REWARD:
        return None if kind in FAMILIES else f"config.json describes {_described(config)}, and rewards are learned by " \
            f"{', '.join(FAMILIES)}"
    if task == CAUSAL and kind in FAMILIES and is_classifier(config):
        return f"config.json describes {_described(config)}, whose head scores texts and predicts no tokens"
    if task == CAUSAL and kind in FAMILIES:
        return None                          # transformers has them all, and to ask it takes a second
    from transformers.models.auto import modeling_auto

    known = kind in getattr(modeling_auto, MODEL_TYPES[task]) or AUTO_CLASSES[task] in (config.get("auto_map") or {})
    # models that transformers also trains on masked words are encoders, unless they say that they are not
    is_encoder = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder")
    if task == CAUSAL and known and is_encoder:
        return f"config.json describes {_described(config)}, an encoder, which would see the tokens that it is to predict"
    return None if known else f"transformers has no {AUTO_CLASSES[task]} for {_described(config)}"


def _described(config: Json) -> str:
    names = config.get("architectures") or []
    return f"{config.get('model_type')!r}" + (f" ({names[0]})" if names else "")


# ------------------------------------------------------------------------------------------------ providers


def availability(config: Json, task: str, software: Software) -> dict[str, str | None]:
    """Return provider -> why it cannot compute this model here, or None if it can."""
    may = why_not_task(config, task)
    native = unsloth = None
    if task not in (CAUSAL, REWARD):
        native, unsloth = (f"{what} is for {DESCRIPTIONS[CAUSAL]}, and the task is {task}"
                           for what in ("the native decoder", "unsloth's FastLanguageModel"))
    else:
        try:
            from_hf_config(dict(config))
        except WrongUse as refused:
            native = refused.reason
    if "unsloth" not in software.versions:
        unsloth = f"unsloth {software.missing.get('unsloth', 'is not installed (pip install unsloth)')}"
    if task == REWARD:
        may = may or "rewards are learned by the native decoder only"
        return {"native": native or why_not_task(config, task), "transformers": may, "unsloth": may}
    return {"native": native, "transformers": software.missing.get("transformers") or may, "unsloth": unsloth or may}


def choose_provider(config: Json, wanted: str | None, task: str | None, software: Software) -> Choice:
    """Return the `wanted` provider, else native where it can, else transformers. `task` None: what the model is made for.

    Raises WrongUse, with the reason, for a task or a provider that cannot be.
    """
    if task is not None and (reason := why_not_task(config, task)):
        raise WrongUse(f"model.task={task} was asked for ({DESCRIPTIONS[task]}), and {reason}; leave model.task out, or "
                       "choose another model")
    task = task or find_task(config)
    reasons = availability(config, task, software)
    if wanted is not None and reasons[wanted] is not None:
        others = [name for name in ("native", "transformers") if reasons[name] is None]
        cure = f"leave model.provider out, or use model.provider={others[0]}" if others else "choose another model"
        raise WrongUse(f"model.provider={wanted} was asked for, and {reasons[wanted]}; {cure}")
    if wanted is not None:
        return Choice(wanted, task, f"computed by {wanted}, as model.provider says")
    if reasons["native"] is None:
        return Choice("native", task, f"computed by the built-in decoder, which supports {config['model_type']}")
    if reasons["transformers"] is None:
        return Choice("transformers", task, f"computed by transformers: {reasons['native']}")
    raise WrongUse(f"nothing here computes this model: {reasons['native']}; {reasons['transformers']}")


def decoder_start(folder: Path) -> int:
    """Return the token that targets start with, for a Hugging Face folder; see `decoder_start_in`."""
    generation = read_model_json(folder / GENERATION) if (folder / GENERATION).exists() else {}
    return decoder_start_in(read_model_json(folder / CONFIG), generation, str(folder))


def decoder_start_in(config: Mapping[str, Any], generation: Mapping[str, Any], name: str) -> int:
    """Return the token that an encoder-decoder's target starts with: the one that `generation` names, else that of `config`.

    Raises WrongUse where neither names one and the model type does not say it.
    """
    for given in (generation, config):
        if isinstance(start := given.get("decoder_start_token_id"), int):
            return start
    if config.get("model_type") in START_AT_PADDING:
        return int(config.get("pad_token_id") or 0)
    raise WrongUse(f"{name}/config.json names no decoder_start_token_id, the token that targets start with; add it there "
                   "(a model of several languages takes the token of the language to be written)")
