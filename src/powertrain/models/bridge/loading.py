"""The bridge: models that the native decoder does not have, loaded with transformers, peft and bitsandbytes.

What is trained is fp32, and so is what is frozen beside adapters, unless it is in 4 bits: many of these models cast their
activations to a weight's dtype. Nothing is fetched: a model comes from a folder (models/huggingface/hub.py finds or makes it).
What may run, what is filled in, and what is wrong with a model is said before training.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.bridge.adapters import continue_adapter, head_names, is_linear, put_adapters, wrap_saved
from powertrain.models.bridge.model import BridgedModel, position_reach, quietly
from powertrain.models.huggingface.hub import CONFIG, read_model_json, weight_files
from powertrain.models.huggingface.providers import AUTO_CLASSES
from powertrain.models.kernels.quantised import load_bitsandbytes, load_library
from powertrain.models.selection import ALIKE, Selection, selected
from powertrain.records import ModelFacts, WrongUse
from powertrain.records.errors import first_line
from powertrain.shapes import QUANTISED_BLOCK

NF4 = ("nf4", True)                          # 4-bit type, and whether its scales are quantised too
COMMIT = re.compile(r"[0-9a-f]{40}")         # a full hash names one content for ever; a branch or a tag may be moved
DROPOUT_FIELD = re.compile(r"dropout|layerdrop|pdrop$|_drop$|drop_rate$")
PROBED_TOKENS = 6

# What models call the same thing in config.json, the most common name first.
WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "encoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HEAD_WIDTH = ("head_dim", "d_kv")
MLP_WIDTH = ("intermediate_size", "d_ff", "ffn_dim", "decoder_ffn_dim", "n_inner", "hidden_dim", "d_inner", "dff")
CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")


def load_bridged(folder: Path, *, task: str, method: str, adapters: AdapterConfig | None = None,
                 quantisation: tuple[str, bool] | None = None, dropout: float = 0.0, adapter_folder: Path | None = None,
                 trust_remote_code: bool = False, revision: str | None = None, provider: str = "transformers",
                 base: str | None = None, max_length: int = 2048) -> BridgedModel:
    """Return the model of a Hugging Face folder for `task`, to be trained by `method` ("full", "lora" or "qlora").

    `adapters` are new ones; `adapter_folder` holds some to go on with. `quantisation` is (type, double). `base` is what an
    adapter writes down as its base, by default the folder. A head that the folder lacks (spans) and new adapters are drawn
    with torch's global generator: seed it first. `max_length` is for unsloth.
    Raises WrongUse for what cannot be loaded or trained so, with the reason.
    """
    code = check_folder(folder, method, trust_remote_code, revision)
    if provider == "unsloth":
        library = load_unsloth(folder, method=method, adapters=adapters, quantisation=quantisation, dropout=dropout,
                               adapter_folder=adapter_folder, max_length=max_length, code=code)
        return BridgedModel(library, task=task, base=base or str(folder))
    network: nn.Module = open_network(folder, task, dropout, (quantisation or NF4) if method == "qlora" else None, code)
    if task == "causal":
        refuse_looking_ahead(network, folder)
    if method != "full":
        network.requires_grad_(False)
        if adapter_folder is not None:
            network = continue_adapter(network, adapter_folder, task)
        elif adapters is not None:
            network = put_adapters(network, adapters, task)
    return BridgedModel(network, task=task, base=base or str(folder))


def bridged_facts(folder: Path, *, task: str, method: str, adapters: AdapterConfig | None = None,
                  provider: str = "transformers", quantisation: tuple[str, bool] | None = None,
                  adapter_folder: Path | None = None, dropout: float = 0.0, trust_remote_code: bool = False,
                  revision: str | None = None, path: str | None = None, selection: Selection = ALIKE) -> ModelFacts:
    """Return the facts of the model that `load_bridged` would load, counted on torch's meta device without its weights.

    `path` is what the facts say of where it is, by default the folder.
    """
    code = check_folder(folder, method, trust_remote_code, revision)
    with torch.device("meta"), quietly(), library_errors(folder):
        kind, settings = _class_and_settings(folder, task, dropout, code)
        bare = kind.from_config(settings, trust_remote_code=code["trust_remote_code"])
    network: nn.Module = bare
    blocks = find_blocks(bare)               # encoder and decoder, in order
    sizes, plain = count_model(bare, task, blocks), sum(p.numel() for p in bare.parameters())    # before adapters wrap modules
    if method != "full":
        bare.requires_grad_(False)
        with torch.device("meta"):
            if adapter_folder is not None:
                network = wrap_saved(bare, adapter_folder, task)
            elif adapters is not None:
                network = put_adapters(bare, adapters, task)
    trainable = {name: p.numel() for name, p in network.named_parameters() if p.requires_grad}
    frozen, rates = selected(selection, trainable, dict.fromkeys(trainable, ()), layers=0)
    trainable = {name: count for name, count in trainable.items() if name not in frozen}
    total = sum(p.numel() for p in network.parameters())
    adapted = {index for index, block in enumerate(blocks) for name in trainable if f".{block}." in f".{name}"}
    return ModelFacts(**sizes, dropout=dropout, parameters=total, trainable=sum(trainable.values()), provider=provider,
                      path=path or str(folder), method=method, adapter_parameters=total - plain,
                      adapted_layers=tuple(sorted(adapted)) if total > plain else (), frozen=frozen, rates=rates,
                      frozen_dtype=(quantisation or NF4)[0] if method == "qlora" else "fp32")


def check_folder(folder: Path, method: str, trusted: bool, revision: str | None) -> dict[str, Any]:
    """Return what is handed to transformers about Python that comes with a model.

    Raises WrongUse for a quantised base that is to be trained in full, or to be quantised once more; where the model needs
    such code and nobody allowed it; and where the code is allowed without being pinned.
    """
    config = read_model_json(folder / CONFIG)
    stored = config.get("quantization_config")
    if stored and method in ("full", "qlora"):
        kind = stored.get("quant_method", "some way") if isinstance(stored, Mapping) else stored
        cure = "use method=lora, which trains adapters beside it" if method == "qlora" else \
            "use method=lora, or the unquantised model that it was made from"
        raise WrongUse(f"method={method} was asked for, and the weights in {folder} are quantised already ({kind}); {cure}")
    named = {str(value) for value in (config.get("auto_map") or {}).values() if isinstance(value, str)}
    if not trusted:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if named and config.get("model_type") not in CONFIG_MAPPING:
            raise WrongUse(f"transformers has no model of type {config.get('model_type')!r}, and {folder} would have it run "
                           f"its own Python ({', '.join(sorted(named))}); read that code, then allow it with "
                           "model.trust_remote_code=true model.revision=<the 40 digits of its commit>")
        return {"trust_remote_code": False}
    if revision is None or not COMMIT.fullmatch(revision):
        raise WrongUse(f"model.trust_remote_code=true runs Python that comes with {folder} "
                       f"({', '.join(sorted(named)) or 'none is named'}), and model.revision={revision} may stand for other "
                       "code tomorrow; name the commit by all its 40 hexadecimal digits")
    if elsewhere := sorted(name for name in named if "--" in name):
        raise WrongUse(f"{folder} runs Python of another repository ({', '.join(elsewhere)}), which model.revision={revision} "
                       "does not pin; put that code beside the weights and name it without the repository in config.json")
    return {"trust_remote_code": trusted, "code_revision": revision}


# ------------------------------------------------------------------------------------------------ opening


def open_network(folder: Path, task: str, dropout: float, four_bits: tuple[str, bool] | None, code: Mapping[str, Any]) -> Any:
    """Return transformers' model with weights in fp32; with `four_bits` (type, double) those of its blocks are in 4 bits.

    Raises WrongUse for files that are missing, damaged or pickled, and for weights that are missing, left over or of
    another shape; only a head for spans may be new, and then it is drawn with torch's global generator.
    """
    for file in weight_files(folder):
        if not file.exists():
            raise WrongUse(f"there is no {file}, which the folder's index names; the download may be incomplete")
    with quietly(), library_errors(folder):
        kind, settings = _class_and_settings(folder, task, dropout, code)
        more = {} if four_bits is None else {"quantization_config": _four_bits(*four_bits)}
        network, notes = kind.from_pretrained(
            folder, config=settings, dtype=torch.float32, local_files_only=True, use_safetensors=True,
            ignore_mismatched_sizes=True, output_loading_info=True, **more, **code)
    refuse_other_weights(network, notes, folder, task)
    for module in network.modules():
        if dropout == 0 and isinstance(module, nn.Dropout):
            module.p = 0.0                   # also what a model drops without asking its config
    if four_bits is not None:
        _settle_four_bits(network, folder)
    return network.train()


def _class_and_settings(folder: Path, task: str, dropout: float, code: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return transformers' class, and the folder's config with the recipe's dropout and, for spans, two scores a token."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **code)
    set_dropout(config, dropout)
    if task == "span":
        config.num_labels = 2
    return getattr(transformers, AUTO_CLASSES[task]), config


def set_dropout(config: Any, dropout: float) -> None:
    """Set every dropout share of the config, and of its parts' own configs, to `dropout`; no whole layers are dropped."""
    for name, value in list(vars(config).items()):
        if DROPOUT_FIELD.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, name, 0.0 if "layerdrop" in name else dropout)
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            set_dropout(part, dropout)


@contextmanager
def library_errors(folder: Path) -> Iterator[None]:
    """Raise WrongUse, in one sentence, for the errors that transformers raises for a folder that it cannot load."""
    try:
        yield
    except WrongUse:
        raise
    except SafetensorError as error:
        raise WrongUse(f"the weights in {folder} are damaged ({error}); copy or download them again") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ArithmeticError, ImportError, RuntimeError,
            StrictDataclassError) as error:
        raise WrongUse(f"transformers cannot load the model in {folder} ({type(error).__name__}: {first_line(error)}); check "
                       "that its files come from one model, and what else it needs installed") from error


def refuse_other_weights(network: Any, notes: Mapping[str, Any], folder: Path, task: str) -> None:
    """Raise WrongUse for weights that are missing, left over or of another shape. A span head may be new, others dropped."""
    if mismatched := sorted(notes["mismatched_keys"]):
        name, theirs, ours = mismatched[0]
        raise WrongUse(f"{name} is {tuple(theirs)} in {folder}, and its config.json makes it {tuple(ours)}; check that both "
                       "come from the same model")
    heads = tuple(f"{name}." for name in head_names(network)) if task == "span" else ()
    missing = sorted(name for name in notes["missing_keys"] if not name.startswith(heads))
    if missing:
        raise WrongUse(f"{folder} lacks {len(missing)} weights of {type(network).__name__}, {missing[0]} the first; it may be "
                       "incomplete, or hold a model for another task")
    if task != "span" and (left := sorted(notes["unexpected_keys"])):
        raise WrongUse(f"{type(network).__name__} has no place for {len(left)} weights of {folder}, {left[0]} the first; check "
                       "that config.json and weights come from the same model")


@torch.no_grad()
def refuse_looking_ahead(network: Any, folder: Path) -> None:
    """Raise WrongUse for a model whose score of a token depends on later tokens: it would read what it is to predict.

    Tried, because config.json need not say it: an encoder loaded as a decoder trains without a complaint.
    """
    vocabulary = network.get_input_embeddings().num_embeddings
    tokens = torch.arange(1, PROBED_TOKENS + 1, device=network.device)[None] % vocabulary
    changed = tokens.clone()
    changed[0, -1] = 0
    network.eval()
    first, second = (network(input_ids=ids).logits[0, :-1].float() for ids in (tokens, changed))
    network.train()
    if not torch.allclose(first, second, atol=1e-4, rtol=1e-4):
        raise WrongUse(f"{type(network).__name__} in {folder} sees the tokens that it is to predict, so it would learn "
                       "nothing; use a decoder, or train this one for model.task=span")


def _four_bits(kind: str, double: bool) -> Any:
    """Return bitsandbytes' settings; its products are computed in the best type of the device (fp32 on a CPU)."""
    load_bitsandbytes()
    from transformers import BitsAndBytesConfig

    dtype = torch.float32
    if torch.cuda.is_available():
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(0) >= (8, 0) else torch.float16
    make: Any = BitsAndBytesConfig
    return make(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=dtype)


def _settle_four_bits(network: Any, folder: Path) -> None:
    """Keep the 4-bit linears' products as asked: bitsandbytes changes their dtype at the first pass, and on some CPUs
    repacks the weights for bf16 at the first evaluation, after which training goes on in bf16 as well.

    Raises WrongUse on a CPU for widths that its kernel unpacks wrongly (bitsandbytes 0.50: it looks for scales row by row).
    """
    from bitsandbytes.nn.modules import Linear4bit

    linears = {name: module for name, module in network.named_modules() if isinstance(module, Linear4bit)}
    if not linears:
        raise WrongUse(f"bitsandbytes found no linear to quantise in {folder}; use method=lora")
    for name, module in linears.items():
        module.compute_type_is_set, module.support_avx512bf16_for_cpu = True, False
        if not torch.cuda.is_available() and module.in_features % QUANTISED_BLOCK:
            raise WrongUse(f"{name} in {folder} is {module.in_features} wide, which bitsandbytes unpacks wrongly on a CPU "
                           f"unless it is a multiple of {QUANTISED_BLOCK}; use method=lora, or a CUDA GPU")


# ------------------------------------------------------------------------------------------------ facts


def count_model(network: Any, task: str, blocks: Sequence[str]) -> dict[str, Any]:
    """Return sizes of a model without adapters, by field of ModelFacts; 0 where neither its config nor its weights tell one."""
    config, embedding, output = network.config, network.get_input_embeddings(), network.get_output_embeddings()
    width, heads = _read(config, WIDTH), _read(config, HEADS)
    linears = {name: module for name, module in network.named_modules() if is_linear(module) and _inside(name, blocks)}
    return {
        "family": str(config.model_type), "task": task, "layers": max(1, len(blocks)), "width": width, "heads": heads,
        "kv_heads": _read(config, KV_HEADS) or heads,
        "head_width": _read(config, HEAD_WIDTH) or (width // heads if heads else 0),
        "mlp_width": _read(config, MLP_WIDTH) or 4 * width,
        "gated_mlp": bool(getattr(config, "is_gated_act", False)) or any("gate_proj" in name for name in linears),
        "vocabulary": embedding.num_embeddings,
        "context": position_reach(network, lambda name: True) or _read(config, CONTEXT),
        "tied_head": output is not None and output.weight is embedding.weight,
        "matmul_parameters": sum(linear.weight.numel() for linear in linears.values()),
        "head_parameters": 2 * width if task == "span" else embedding.num_embeddings * embedding.embedding_dim,
        "shapes": {name: tuple(parameter.shape) for name, parameter in network.named_parameters()
                   if not _inside(name, blocks) or _inside(name, blocks[-1:])},
    }


def _inside(name: str, blocks: Sequence[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def find_blocks(network: nn.Module) -> list[str]:
    """Return the names of the layers: the members of the outermost lists of modules."""
    lists = [name for name, module in network.named_modules() if isinstance(module, nn.ModuleList)
             and any(is_linear(part) for part in module.modules())]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists if other != name)]
    return [f"{name}.{index}" for name in outermost for index, _ in network.get_submodule(name).named_children()]


def _read(config: Any, names: tuple[str, ...]) -> int:
    """Return the first of these fields that is a number above 0, of the model or of its part for text; 0 without one."""
    for holder in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
        for name in names:
            if isinstance(value := getattr(holder, name, None), int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


# ------------------------------------------------------------------------------------------------ unsloth

# What unsloth has kernels for; its "all-linear".
UNSLOTH_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UNSLOTH_CHECKPOINTING = "unsloth"            # activations to the host's memory: its default


def load_unsloth(folder: Path, *, method: str, adapters: AdapterConfig | None, quantisation: tuple[str, bool] | None,
                 dropout: float, adapter_folder: Path | None, max_length: int, code: Mapping[str, Any],
                 fast: Any = None) -> nn.Module:
    """Return unsloth's model on the GPU, with new adapters or those of `adapter_folder`. `fast` replaces FastLanguageModel.

    It needs a CUDA GPU and could not be run where this was written: the calls follow its documentation, and tests check the
    arguments only. Its models give scores as long as no labels are handed in, and none are. It decides on the dtype of what
    is frozen (bf16 or fp16) and on activation checkpointing, so no technique of ours takes part in that.
    Raises WrongUse if it is not installed, and for settings that it would pass over.
    """
    cure = "use model.provider=transformers for it"
    if adapters is not None and adapters.kind != "lora":
        raise WrongUse(f"lora.kind={adapters.kind} was asked for, which only the native decoder computes; leave model.provider "
                       "out, or use lora.kind=lora")
    if adapters is not None and adapters.use_dora:
        raise WrongUse(f"lora.use_dora=true was asked for, and unsloth's kernels compute LoRA and rsLoRA; {cure}")
    if method == "qlora" and quantisation not in (None, NF4):
        raise WrongUse(f"quantisation {quantisation} was asked for, and unsloth quantises to nf4 with double scales; {cure}")
    if dropout:
        raise WrongUse(f"model.dropout={dropout:g} was asked for, and unsloth's kernels drop nothing; use model.dropout=0, or "
                       "model.provider=transformers")
    fast = fast or load_library("unsloth", "model.provider=unsloth needs", "pip install unsloth beside a CUDA GPU, or leave "
                                "model.provider out").FastLanguageModel
    opened = adapter_folder if method != "full" and adapter_folder is not None else folder
    model, _ = fast.from_pretrained(
        model_name=str(opened), max_seq_length=max_length, dtype=None, load_in_4bit=method == "qlora",
        full_finetuning=method == "full", use_gradient_checkpointing=UNSLOTH_CHECKPOINTING, local_files_only=True,
        trust_remote_code=code["trust_remote_code"])
    if method != "full" and adapter_folder is None and adapters is not None:
        targets = adapters.target_modules
        named = [targets] if isinstance(targets, str) else list(targets)
        model = fast.get_peft_model(
            model, r=adapters.r, lora_alpha=adapters.alpha, lora_dropout=adapters.dropout, bias="none",
            target_modules=UNSLOTH_LINEARS if targets == "all-linear" else named,
            use_rslora=adapters.use_rslora, use_gradient_checkpointing=UNSLOTH_CHECKPOINTING,
            random_state=int(torch.randint(2**31, ())))          # it seeds anew: from the recipe's seed, not its own
    return model  # type: ignore[no-any-return]
