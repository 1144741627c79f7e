"""`powertrain export`: a run or an adapter as files for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powertrain.cli import output as screen
from powertrain.cli.options import Base, Json, Model, Provider, cache_folder, say, tell
from powertrain.records import WrongUse, to_plain
from powertrain.report.words import memory

if TYPE_CHECKING:
    from powertrain.data.example import Example
    from powertrain.use.opening import OpenedModel

DTYPES = {"adapter": (), "merged": ("float32", "bfloat16", "float16"), "gguf": ("float32", "bfloat16", "float16", "q8_0"),
          "onnx": ("float32",)}
SPOKEN = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}

Row = tuple[str, str]


def export(model: Model,
           to: Annotated[str, typer.Option(help="Format: adapter (PEFT), merged (a Hugging Face folder), gguf (llama.cpp and "
                                         "Ollama) or onnx (ONNX Runtime).")],
           output: Annotated[Path, typer.Option(help="New folder for the files.")],
           dtype: Annotated[str | None, typer.Option(help="Number type: float32, bfloat16, float16, or for gguf q8_0 "
                                                     "(default: the dtype of the base).")] = None,
           base: Base = None, provider: Provider = None, as_json: Json = False) -> None:
    """Export a trained model for other programs.

    The files are checked against the model before they are kept.
    """
    from powertrain.data.publishing import check_output

    dtype = check_dtype(to, dtype)
    check_output(output)
    if to == "adapter":
        rows, report = _adapter(model, output, base)
    else:
        from powertrain.use.opening import open_model

        opened = open_model(model, base=base, provider=provider, say=say)
        if opened.task == "reward" and to != "merged":
            raise WrongUse(f"{model} is a reward model, whose head scores texts, and --to {to} has no place for such a head; "
                           "use --to merged or --to adapter")
        rows, report = _merged(opened, output, dtype) if to == "merged" else \
            _onnx(model, opened, output) if to == "onnx" else _gguf(model, opened, output, dtype)
    screen.tell({"event": "export", "to": to, "folder": str(output), **report}, [("Export", f"{to}: {output}"), *rows],
                as_json=as_json)


def check_dtype(to: str, dtype: str | None) -> str | None:
    """Return our name of the dtype. Raises WrongUse for an unknown format or dtype."""
    if to not in DTYPES:
        raise WrongUse(f"--to {to} is not a format; use {', '.join(DTYPES)}")
    spoken = None if dtype is None else SPOKEN.get(dtype, dtype)
    if spoken is not None and not DTYPES[to]:
        raise WrongUse("an adapter keeps the number type in which it was trained; leave --dtype out")
    if spoken is not None and spoken not in DTYPES[to]:
        raise WrongUse(f"--dtype {dtype} is not possible for {to}; use {', '.join(DTYPES[to])}")
    return spoken


def _adapter(path: str, folder: Path, base: str | None) -> tuple[list[Row], dict[str, Any]]:
    from powertrain.export.merged import export_adapter
    from powertrain.models.bridge.adapters import NATIVE_ONLY
    from powertrain.models.huggingface.hub import ADAPTER_CONFIG
    from powertrain.records.json_files import read_json
    from powertrain.use.opening import find_parts, open_tokenizer

    found = find_parts(path, base=base)
    if found.adapter is None:
        raise WrongUse(f"{path} has no adapter: the whole model was trained; use --to merged")
    tensors = export_adapter(found.adapter, folder, open_tokenizer(found.tokenizer_folder), base=found.base)
    ours = read_json(found.adapter / ADAPTER_CONFIG).get("peft_type") == NATIVE_ONLY
    opens = f"powertrain chat {folder}" if ours else f'peft.PeftModel.from_pretrained(base, "{folder}")'
    return [("Adapter", f"{tensors:,} tensors for {found.base}"), ("Opens", opens)], {"tensors": tensors, "base": found.base}


def _merged(opened: OpenedModel, folder: Path, dtype: str | None) -> tuple[list[Row], dict[str, Any]]:
    from powertrain.export.merged import export_merged
    from powertrain.models.huggingface.providers import AUTO_CLASSES

    stored, examples = opened.stored_dtype, _real_examples(opened)
    chosen = dtype or stored
    found = export_merged(opened.model, folder, opened.tokenizer, examples, dtype=chosen, base_dtype=stored)
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    rows = [("Weights", f"{found.dtype}, {memory(written)}"), *_agreement_rows(found.agreement, found.effect),
            ("Opens", f'transformers.{AUTO_CLASSES[opened.task]}.from_pretrained("{folder}")'),
            ("", f"powertrain evaluate {folder} --data PAIRS" if opened.task == "reward" else f"powertrain chat {folder}")]
    return rows, to_plain(found) | {"folder": str(folder)}


def _gguf(path: str, opened: OpenedModel, folder: Path, dtype: str | None) -> tuple[list[Row], dict[str, Any]]:
    from powertrain.export.gguf import export_gguf
    from powertrain.export.merged import merge_checked
    from powertrain.models.decoder import Decoder

    if not isinstance(opened.model, Decoder):
        raise WrongUse(f"{path} is computed by {opened.choice.provider}, and GGUF files can be made only from the native "
                       "decoder's families; use --to merged and llama.cpp's own converter")
    stored, examples = opened.stored_dtype, _real_examples(opened)
    chosen = dtype or ("float16" if stored == "float32" else stored)
    kept = "float32" if chosen == "q8_0" else chosen         # q8_0 rounds the merged weights: they are merged unrounded
    plain, agreement, effect = merge_checked(opened.model, examples, dtype=kept, base_dtype=stored)
    stops = opened.turn_stops if opened.has_template else opened.stops
    found = export_gguf(plain, folder, opened.tokenizer, name=folder.resolve().name, dtype=chosen, stops=stops,
                        chat_template=opened.template.text if opened.has_template else None, text=examples[0].inputs.tolist(),
                        render=partial(opened.template.render, add_generation_prompt=True) if opened.has_template else None)
    rows = [("File", f"{found.file}, {memory(found.file_bytes)}, {found.tensors} tensors, each read back and compared"),
            *_agreement_rows(agreement, effect), ("Checked", found.llama_cpp), *(("Note", note) for note in found.notes),
            ("Opens", f"llama-cli -m {found.file}"), ("", f"ollama create NAME -f {folder / 'Modelfile'}"),
            ("Modelfile", found.ollama)]
    return rows, to_plain(found) | {"file": str(found.file), "agreement": to_plain(agreement), "effect": effect}


def _onnx(path: str, opened: OpenedModel, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    from powertrain.export.merged import merge_checked
    from powertrain.export.onnx import export_onnx
    from powertrain.models.decoder import Decoder

    if not isinstance(opened.model, Decoder):
        raise WrongUse(f"{path} is computed by {opened.choice.provider}, and ONNX files can be made only from the native "
                       "decoder's families; use --to merged and Optimum's own exporter (optimum-cli export onnx)")
    examples = _real_examples(opened)
    plain, agreement, effect = merge_checked(opened.model, examples, dtype="float32", base_dtype=opened.stored_dtype)
    found = export_onnx(plain, folder, opened.tokenizer, examples)
    rows = [("File", f"{found.file}, {memory(found.file_bytes)}"), *_agreement_rows(agreement, effect),
            ("Checked", f"ONNX Runtime, against the model: {found.agreement}"),
            ("Opens", f'optimum.onnxruntime.ORTModelForCausalLM.from_pretrained("{folder}")')]
    return rows, to_plain(found) | {"file": str(found.file), "merged": to_plain(agreement), "effect": effect}


def _agreement_rows(agreement: Any, effect: float) -> list[Row]:
    if agreement is None:
        return [("Merged", "there was no adapter to merge: the weights are the model's own")]
    return [("Merged", f"against base + adapter {agreement}"),
            ("", f"the adapter itself moves the base's predictions by {effect:.1e} nats a token")]


def _real_examples(opened: OpenedModel) -> Sequence[Example]:
    """Return held-out examples of the run; without a run or its data, a built-in text."""
    from powertrain.use.scoring import real_examples

    examples, said = real_examples(opened, cache_folder(), tell)
    say(f"comparing on {said}")
    return examples
