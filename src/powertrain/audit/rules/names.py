"""Rules on names that the installed libraries do not have: arguments, keys and imports."""

import ast
import sys
from collections.abc import Iterator, Mapping

from powertrain.audit.commands import project_files, text_of
from powertrain.audit.edits import BY_LENGTH, Edits, removed, renamed, set_to
from powertrain.audit.installed import LIBRARIES, defined, in_force, is_missing, is_module, is_not_in_star, lacks, members
from powertrain.audit.reading_calls import OF_THE_CONFIG
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, known, rule
from powertrain.audit.rules.elsewhere import gone as gone_elsewhere
from powertrain.audit.rules.elsewhere import is_other, is_pinned
from powertrain.audit.rules.memory import OFFLOAD
from powertrain.audit.scopes import is_tried
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Setting, Subject
from powertrain.audit.syntax import argument, every, hides_arguments, is_constant, last_name, owner_of
from powertrain.records.findings import Evidence, Severity

SINCE = (5,)                 # transformers; and TRL 1 with it
REPORTING, EVALUATING = "training.report_to", "training.eval_strategy"
REMOVED: Mapping[str, str] = known("removed_arguments")
GONE: Mapping[str, str] = known("gone_imports")
GONE_TRAINERS = ("trl.PPOTrainer", "trl.PPOv2Trainer")
OLD_SCORES = "return_all_scores"
GONE_TASKS = tuple(known("gone_tasks"))
UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
OF_UNSLOTH = ("tokenizer", "max_seq_length")          # which its trainers still take
CONVERTED = ("warmup_ratio", "max_prompt_length", "evaluation_strategy")         # by its versions of TRL's arguments
TELLING = (".md", ".sh")
ASKING = ("version", "TYPE_CHECKING", "available")             # in tests that say which release is there


def of_unsloth(script: Script) -> bool:
    """Return whether unsloth stands in for what the script has of TRL: it is used, and imported first."""
    first: dict[str, int] = {}
    imported = [(node.lineno, item.name) for node in every(ast.Import, script.tree) for item in node.names]
    imported += [(node.lineno, node.module or "") for node in every(ast.ImportFrom, script.tree)]
    for line, name in sorted(imported):
        first.setdefault(name.partition(".")[0], line)
    return script.says(*UNSLOTH) and first.get("unsloth", 0) <= first.get("trl", len(script.lines))


def since(where: Circumstances) -> Severity:
    """Return how bad a name is that transformers 5 does not have: critical only if version 5 is known to be installed."""
    version = where.version("transformers")
    return "moderate" if version is None else "critical" if version >= SINCE else "low"


@rule
def removed_names(subject: Subject, where: Circumstances) -> Findings:
    """Arguments have names that the trainer no longer has."""
    if subject.framework not in TRAINERS:
        return
    script = subject.script
    if subject.trainer in GONE_TRAINERS and in_force("trl", where):
        return                               # with its arguments, as removed_imports says
    everything = {**subject.settings, **subject.unread, **subject.unknown}
    made = script.sections.get("training") if script is not None else None
    of_trl = script is not None and made is not None and script.name(made).startswith("trl.")
    theirs = script is not None and of_unsloth(script)           # which patches the trainers of TRL
    if script is not None and script.says("return_remaining_strings"):          # so that a config's other keys are left out
        everything = {key: each for key, each in everything.items() if each.place.file.endswith(".py")}
    patched: tuple[str, ...] = CONVERTED if theirs and of_trl else ()
    patched += OF_UNSLOTH if theirs and not subject.trainer.startswith("transformers.") else ()
    passed = [item for section in ("training", "trainer") if script is not None and section in script.sections
              for item in script.sections[section].keywords if item.arg in REMOVED and item.arg not in patched]
    unsure = {name for each in subject.calls for name in each.perhaps}       # `**{... if key in what_it_takes}`
    names = {key: (setting, name) for key, setting in everything.items() if (name := setting.name) in REMOVED
             and name not in (*patched, *unsure) and key.startswith(("training.", "trainer.")) and _is_passed(
                 script, setting, name)}
    given = script.sections["trainer"].keywords if script is not None and subject.trainer == "trl.SFTTrainer" else []
    of_settings = {setting.place.line for setting, _ in names.values()}
    rest = [item for item in passed if script is not None and script.place(item).line not in of_settings]
    known = [name for _, name in names.values()]
    says = [f"{name} (now {REMOVED[name]})" if REMOVED[name] else f"{name} (gone)"
            for name in (*known, *(str(item.arg) for item in rest))]
    moved = rest + [item for item in given if item.arg in OF_THE_CONFIG and item.arg not in known and not patched]
    says += [f"{item.arg} (now of SFTConfig)" for item in moved if item not in rest]
    if says:
        edits = tuple(edit for key, (_, name) in names.items() for edit in _edits(subject, key, name))
        yield found(since(where), *(setting for setting, _ in names.values()), *moved, edits=edits if not moved else (),
                    names=", ".join(says))


def _is_passed(script: Script | None, setting: Setting, name: str) -> bool:
    """Return whether a name is an argument that is passed to a trainer.

    It may be a field that the script's own subclass adds, or an argument of Unsloth's from_pretrained, which has it still.
    """
    if script is None:
        return True
    fields = any(isinstance(node.target, ast.Name) and node.target.id == name and isinstance(script.parents[node], ast.ClassDef)
                 and node.lineno == setting.place.line for node in script.every(ast.AnnAssign))
    return not fields and not any(item.arg == name and script.place(item) == setting.place
                                  for call in script.calls(".from_pretrained") for item in call.keywords)


def _edits(subject: Subject, key: str, name: str) -> Edits:
    """Return a rename where the value means the same under the new name; a name that is gone is removed."""
    if name == "group_by_length":
        grouped = subject.value(key) == BY_LENGTH
        return renamed(subject, key, REMOVED[name], BY_LENGTH) if grouped else removed(subject, key)
    if not REMOVED[name]:
        return removed(subject, key)
    return () if name == "no_cuda" else renamed(subject, key, REMOVED[name])


@rule
def unknown_keys(subject: Subject, where: Circumstances) -> Findings:
    """The trainer does not have these keys, so they do nothing or end the run."""
    strict = subject.framework in (*TRAINERS, "powertrain")          # these trainers refuse what they do not know
    # a config of a Trainer may have keys for the script that reads it
    case = "" if not strict else "perhaps" if subject.script is None and subject.framework in TRAINERS else "raises"
    said_elsewhere = {OFFLOAD, *(REMOVED if subject.framework in TRAINERS else ())}
    texts = " ".join(str(setting.value) for setting in (*subject.settings.values(), *subject.unknown.values()))
    keys = {key: setting for key, setting in subject.unknown.items() if key.rpartition(".")[2] not in said_elsewhere
            and f"${{{key}" not in texts and not (setting.value is None and subject.script is None and not strict)}
    if keys:
        # plugins, recipes and a script may read keys of their own
        reads_others = subject.framework in ("axolotl", "torchtune") or case == "perhaps"
        yield found("critical" if case == "raises" else "low" if reads_others else "moderate", *keys.values(), case=case,
                    keys=", ".join(key.removeprefix("training.") for key in keys))


def is_guarded(script: Script, node: ast.AST) -> bool:
    """Return whether code asks for the release first, or is ready for an error."""
    return is_tried(script, node) or any(isinstance(around, ast.If | ast.IfExp) and (
        _looks_for_a_name(around.test, last_name(node)) or any(word in script.words(around.test) for word in ASKING))
        for around in script.ancestors(node))


def _looks_for_a_name(test: ast.expr, name: str) -> bool:
    """Return whether a test is `"name" in what_it_takes`, or `hasattr(it, "name")`."""
    asked = [call.args[-1] for call in every(ast.Call, test) if last_name(call.func) == "hasattr" and call.args]
    return any(isinstance(node.left, ast.Constant) and isinstance(node.ops[0], ast.In | ast.NotIn)
               for node in every(ast.Compare, test)) or any(getattr(each, "value", None) == name != "" for each in asked)


def _lacking(script: Script, where: Circumstances) -> Iterator[tuple[ast.AST, str]]:
    """Yield (code, dotted name) of what the script takes from a library whose release in force does not have it."""
    whole = {(script.place(node).file, node.module) for node in script.every(ast.ImportFrom) if node.names[0].name == "*"}
    for node in script.nodes:
        lost: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            own = is_own(script, node.module.partition(".")[0])
            lost = [_gone(node.module, item.name) for item in node.names if item.name != "*" and not own]
        elif isinstance(node, ast.Import):
            lost = [_gone(item.name, "") for item in node.names]
        elif isinstance(node, ast.Name) and whole and (owner := (script.origin(node) or "").rpartition(".")[0]) and (
                script.place(node).file, owner) in whole:
            lost = [f"{owner}.{node.id}" if is_not_in_star(owner, node.id) else _gone(owner, node.id)]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and (owner := _imported(script, node.value)):
            other = is_other(owner) and not gone_elsewhere(owner, "")        # else it is said of its owner
            lost = [_gone(owner, node.attr) if is_module(owner) or other else _gone_of_class(owner, node.attr)]
        for gone in filter(None, lost):
            library = gone.partition(".")[0]
            there = in_force(library, where) if library in LIBRARIES else since(where) == "critical" and not (
                is_own(script, library) or (is_taken_twice(script, node) if library in sys.stdlib_module_names
                                            else is_pinned(script, library)))
            generates = any("use_cache" in script.words(around.test) for around in script.conditions(node))
            if there and not generates and not is_guarded(script, node):
                yield node, gone


def is_taken_twice(script: Script, node: ast.AST) -> bool:
    """Return whether a file takes a name from several modules, as `if on_tpu: from a import F` and `else: from b import F`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    name, of_file = getattr(node, "id", ""), script.module(node)
    imports: list[ast.Import | ast.ImportFrom] = [*script.every(ast.Import), *script.every(ast.ImportFrom)]
    taken = {(getattr(each, "module", ""), item.name) for each in imports
             for item in each.names if (item.asname or item.name) == name and script.module(each) is of_file}
    return len(taken) > 1


def _imported(script: Script, node: ast.expr) -> str:
    """Return the dotted name of an imported module or what is in it: numpy for np, transformers.optimization; "" for others."""
    root = node
    while isinstance(root, ast.Attribute):
        root = root.value
    return script.name(node) if isinstance(root, ast.Name) and script.origin(root) is not None else ""


def is_own(script: Script, name: str) -> bool:
    """Return whether a module or package of this name stands beside the script or in the project's root, and comes first."""
    folders = {script.path.parent, script.root or script.path.parent}
    return any((folder / f"{name}.py").is_file() or (folder / name).is_dir() for folder in folders)


def _gone(module: str, name: str) -> str:
    """Return the dotted name of what a library surely lacks of these two, the module or its name; "" for neither."""
    if module.partition(".")[0] not in LIBRARIES:
        return gone_elsewhere(module, name)
    return module if is_missing(module) else f"{module}.{name}" if name and lacks(module, name) else ""


def _gone_of_class(dotted: str, name: str) -> str:
    """Return the dotted name of an attribute that a library's class surely lacks; "" where it may have it."""
    module, _, last = dotted.rpartition(".")
    has = members(defined(module, last)) if module.partition(".")[0] in LIBRARIES - {"torch"} else None
    return f"{dotted}.{name}" if has is not None and name not in has and not name.startswith("__") else ""


@code_rule
def removed_imports(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script imports names that the libraries no longer have."""
    gone: list[tuple[ast.AST, str]] = [
        (node, name) for node in script.every(ast.ImportFrom) if not is_guarded(script, node)
        for item in node.names if (name := f"{node.module}.{item.name}") in GONE or (name := str(node.module)) in GONE]
    gone += [(node, name) for node, name in _lacking(script, where) if name not in {known for _, known in gone}]
    if gone:
        says = ", ".join(dict.fromkeys(f"{name} (now {GONE[name]})" if name in GONE else f"{name} (gone)" for _, name in gone))
        yield found(since(where), *dict.fromkeys(node for node, _ in gone), names=says)


@code_rule
def task_gone(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A pipeline is asked for a task that transformers no longer has."""
    gone: list[tuple[ast.AST, str]] = []
    for call in script.calls("transformers.pipeline"):
        task = argument(call, "task", 0)
        said = str(task.value) if isinstance(task, ast.Constant) else ""
        if task is not None and (said in GONE_TASKS or said.startswith("translation_")) and not is_tried(script, call):
            gone.append((task, said))
    if gone:
        yield found(since(where), *(node for node, _ in gone), names=", ".join(dict.fromkeys(said for _, said in gone)))


@code_rule_once
def all_scores_gone(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A pipeline is asked for the scores of all labels by an argument that it no longer has."""
    asked = [node for node in script.nodes if (isinstance(node, ast.keyword) and node.arg == OLD_SCORES) or (
        isinstance(node, ast.Dict) and any(getattr(key, "value", "") == OLD_SCORES for key in node.keys))]
    if asked and script.has_call("transformers.pipeline"):
        yield found(since(where), *asked[:3])


@code_rule_once
def sentences_not_split(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """nltk splits texts by a file that nothing fetches, or that it has under another name now."""
    fetched = [call for call in script.calls("nltk.download") if call.args and getattr(call.args[0], "value", "") == "punkt"]
    splits = next(script.calls("nltk.sent_tokenize", "nltk.word_tokenize", "nltk.tokenize.sent_tokenize",
                               "nltk.tokenize.word_tokenize"), None)
    if fetched and splits is not None and "punkt_tab" not in script.text:
        yield found("critical", fetched[0], splits)
    elif splits is not None and script.module(splits) is None and not is_tried(script, splits) and not script.has_call(
            "nltk.download") and not script.says("punkt", "nltk_data") and not any(
            "nltk" in text_of(file) for file in project_files(script) if file.suffix in TELLING or "Docker" in file.name):
        yield found("critical", splits, case="never")


@code_rule_once
def wrong_arguments(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A call has an argument that its function does not take."""
    for call in script.calls("torch.cuda.amp.autocast"):
        wrong = next((item for item in call.keywords if item.arg == "device_type"), None)
        if wrong is not None:
            yield found("critical", wrong)


@code_rule
def evaluation_without_data(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trainer shall evaluate, but gets no evaluation data."""
    asked, trainer = subject.value(EVALUATING), script.sections.get("trainer")
    if trainer is None or subject.framework not in TRAINERS:
        return
    if hides_arguments(trainer) or argument(trainer, "eval_dataset", 4) is not None:
        return
    called = next((call for call in script.calls(".evaluate") if not call.args and not call.keywords
                   and (owner := owner_of(call)) is not None and last_name(owner) == "trainer"), None)
    if asked in (None, False, "no") and called is not None and not subject.is_unread(EVALUATING):
        yield found("critical", called, Evidence(script.words(trainer.func), script.place(trainer)), case="called", asked=asked)
    elif asked not in (None, False, "no"):
        yield found("critical", EVALUATING, Evidence(script.words(trainer.func), script.place(trainer)),
                    edits=set_to(subject, EVALUATING, "no"), asked=asked)


@code_rule
def reports_to_none(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trainer gets None where it looks for the names of trackers."""
    call = script.sections.get("training")
    given = argument(call, "report_to") if call is not None and subject.framework in TRAINERS else None
    if given is not None and is_constant(given, None) and since(where) != "low":
        yield found(since(where), given, edits=set_to(subject, REPORTING, "none"))


@rule
def reporting_everywhere(subject: Subject, where: Circumstances) -> Findings:
    """The run reports to every tracker that is installed."""
    if subject.value(REPORTING) in ("all", ["all"]):
        yield found("low", REPORTING, edits=set_to(subject, REPORTING, "none"))
