"""Rules on checkpoints: what they hold, who reads them, and how many are kept."""

from __future__ import annotations

import ast

from powertrain.audit.edits import set_to, with_argument
from powertrain.audit.rules.base import Findings, code_rule, found, rule
from powertrain.audit.script import Loop, Script, argument
from powertrain.audit.steps import outermost
from powertrain.audit.subject import Circumstances, Subject

WHOLE = (".save_state", ".save_checkpoint", "torch.distributed.checkpoint.save")     # these save everything, or more
PARTS = {"the schedule": ("sched",), "the scaler": ("scaler",), "the place in the run": ("epoch", "step", "iter")}
LIMIT = "training.save_total_limit"
SAFE_SINCE = (2, 6)          # torch: weights_only became the default


@code_rule("documentation: torch tutorial \"saving a general checkpoint for resuming\"; features: 5.3 (work lost by the five "
           "systems)")
def checkpoint_cannot_resume(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Checkpoints lack the optimizer, the schedule or the place in the run."""
    if not script.training_loops or script.has_call(*WHOLE) or script.says("save_checkpoint", "save_state"):
        return
    saves = [call for loop in script.training_loops for call in _saves(script, outermost(script, loop))]
    saved = " ".join(_contents(script, call) for call in saves).lower()
    if saves and "optim" not in saved:
        yield found("moderate", *(script.evidence(call) for call in saves[:3]), case="weights")
        return
    used = " ".join(name.lower() for name in script.kinds)
    missing = [what for what, words in PARTS.items() if not any(word in saved for word in words)
               and (what == "the place in the run" or any(word in used for word in words))]
    if saves and missing:
        yield found("low", *(script.evidence(call) for call in saves[:2]), missing=", ".join(missing))


def _saves(script: Script, loop: Loop) -> list[ast.Call]:
    return [node for node in script.reached_from(loop.body) if isinstance(node, ast.Call)
            and (script.name(node.func) in ("torch.save", "safetensors.torch.save_file") or _saves_a_model(script, node))]


def _saves_a_model(script: Script, call: ast.Call) -> bool:
    """Whether a call is `model.save_pretrained(folder)`, and not a tokenizer's."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "save_pretrained":
        return False
    return not any(word in script.words(call.func.value).lower() for word in ("tok", "processor", "config"))


def _contents(script: Script, call: ast.Call) -> str:
    """Return the words of what is saved, of a variable those of what it was given."""
    first = call.args[0] if call.args else call
    return " ".join(script.words(node) for node in (first, *script.assigned(first)))


@code_rule("features: 5.3 (document 003's checkpoints); documentation: torch.compile (state_dict of an OptimizedModule)")
def compiled_names_saved(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Weights are saved under the names of the compiled model."""
    for call in script.calls(".state_dict") if not script.says("_orig_mod") else ():
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call
        if isinstance(owner, (ast.Name, ast.Attribute)) and script.is_made_by(owner, "torch.compile"):
            yield found("low", script.evidence(call))
            return


@rule("fact: a checkpoint that was being written when the machine stopped cannot be resumed from")
def one_checkpoint_kept(subject: Subject, where: Circumstances) -> Findings:
    """Only the newest checkpoint is kept."""
    if subject.value(LIMIT) == 1 and not subject.on("training.save_only_model"):
        yield found("low", subject.settings[LIMIT], edits=set_to(subject, LIMIT, 2),
                    best=subject.on("training.load_best_model_at_end"))


@code_rule("documentation: torch.load (\"weights_only=False will execute arbitrary code\")")
def pickle_loaded(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """torch.load opens a file in a way that runs the code in it."""
    for call in script.calls("torch.load"):
        given, is_safe = argument(call, "weights_only"), (where.version("torch") or (0,)) >= SAFE_SINCE
        asked = isinstance(given, ast.Constant) and given.value is False
        if asked or (given is None and not is_safe):
            yield found("moderate" if asked else "low", script.evidence(call), old=not asked,
                        edits=with_argument(script, call, "weights_only", "True"))
            return
