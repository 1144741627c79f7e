"""Errors that a user can mend. Each is one sentence for people, and typed fields for code.

Code never reads the sentence. An error that another part must recognise is a subclass with its own fields, and makes its
sentence from them; `kind` is then the name of that class in snake case.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

NAMED = 8                                    # examples, in a sentence
LOWER = ("Start a new run with a lower learning_rate, or with max_grad_norm=1; or resume with on_nan=skip, which "
         "leaves such an update out")
DONE, STOPPED_AND_SAVED = 0, 75              # exit codes of a command that no error ends


class UserError(ValueError):
    """Something the user can mend. The message says what was asked, the numbers, and the cure; no traceback.

    `advice` is the end of the sentence that names the cure, where another message may need what is before it: `reason`.
    `keys` are the recipe keys it is about, `cure` the recipe words that would mend it ("techniques.packing=off").
    """

    exit_code: ClassVar[int] = 2             # of the command that ends by it

    def __init__(self, reason: str, *, advice: str = "", keys: tuple[str, ...] = (), cure: tuple[str, ...] = ()):
        super().__init__(f"{reason}; {advice}" if advice else reason)
        self._reason, self.keys, self.cure = reason, keys, cure

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def kind(self) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    def fields(self) -> dict[str, Any]:
        """Return what `--json` and the `end` event of a run carry beside the sentence."""
        return {"kind": self.kind, **{name: value for name, value in vars(self).items() if not name.startswith("_") and value}}


class WrongUse(UserError):
    """The command, the recipe or the data cannot be used as given; nothing was started."""


class RunFailed(UserError):
    """The run had begun and cannot go on (disk, memory, loss not finite)."""

    exit_code = 1


class NotApplied(RunFailed):
    """A technique was asked for and is not in force. `technique` is its name, set where techniques are confirmed."""

    def __init__(self, message: str):
        super().__init__(message)
        self.technique = ""

    def confirming(self, technique: str) -> Self:
        """Return this error with the technique's name, and the words that turn the technique off."""
        self.technique, self.cure = technique, (f"techniques.{technique}=off",)
        return self


class LostPeer(RunFailed):
    """Another process of the run did not answer: it has ended, or hangs."""

    exit_code = 76

    def __init__(self, why: str):
        super().__init__(f"another process of this run does not answer ({why}); --resume continues from the newest checkpoint")


class NotDurable(RunFailed):
    """The model is trained to the end, and something that was promised is not on the disk."""

    exit_code = 3


class LossNotFinite(RunFailed):
    """The loss of step `step`, or the held-out one after it, is `loss`: "nan", "inf" or "-inf", for JSON has no such numbers.

    Where only some passes of the step have such a loss, `examples` are the numbers (from 0) of the training examples in them,
    in the first process that has one: `process`, None in a run of one process.
    """

    def __init__(self, step: int, loss: float, *, process: int | None = None, examples: tuple[int, ...] = (),
                 held_out: bool = False):
        what = f"held-out loss after step {step:,}" if held_out else f"loss of step {step:,}"
        by = "" if process is None else f" of process {process}"
        where = f"; it comes from a pass{by} with the training examples {named(examples)}" if examples else ""
        super().__init__(f"the {what} is not finite ({loss}){where}; the checkpoints before it are untouched. "
                         f"{LOWER}", keys=("learning_rate", "max_grad_norm"))
        self.step, self.loss, self.process, self.examples = step, str(loss), process, examples


class GradientNotFinite(RunFailed):
    """The gradient norm of step `step` is `norm`, as text, and the loss is finite. `examples`: the numbers of the step's."""

    def __init__(self, step: int, norm: float, examples: tuple[int, ...]):
        super().__init__(f"the gradient norm of step {step:,} is not finite ({norm}), with the training examples "
                         f"{named(examples)}; the checkpoints before it are untouched. {LOWER}",
                         keys=("learning_rate", "max_grad_norm"))
        self.step, self.norm, self.examples = step, str(norm), examples


class TooManyBadSteps(RunFailed):
    """The updates of `in_row` steps, up to step `step`, were not made, and the run may not go on. `why` says so."""

    def __init__(self, step: int, in_row: int, why: str, examples: tuple[int, ...]):
        super().__init__(f"the updates of {in_row} steps in a row, up to step {step:,}, were not made, because a loss or "
                         f"gradient norm is not finite or a spike, and {why}; the checkpoints before them are whole. Look at "
                         f"the training examples {named(examples)} of the last step, or start a new run with a lower "
                         "learning_rate", keys=("learning_rate", "max_skipped_steps", "max_rewinds"))
        self.step, self.in_row, self.examples = step, in_row, examples


class WeightsNotFinite(RunFailed):
    """After step `step`, `weights` weight tensors hold NaN or infinity; `first` is the name of one of them."""

    def __init__(self, step: int, weights: int, first: str):
        super().__init__(f"after step {step:,}, {weights} weight tensors are not finite, the first is {first}; nothing was "
                         "saved, and the checkpoints before it are whole. Resume from the last checkpoint with a lower "
                         "learning_rate, or with max_grad_norm=1",
                         keys=("learning_rate", "max_grad_norm"))
        self.step, self.weights, self.first = step, weights, first


class DoesNotFit(RunFailed):
    """Step `step` ran out of memory, and smaller passes are not possible.

    `pass_tokens` are those of its largest pass; `updating` where the optimizer's update had begun, which cannot be repeated.
    """

    def __init__(self, step: int, said: str, pass_tokens: int, cures: str, *, updating: bool = False):
        why = (f"the optimizer's update of step {step:,} ran out of memory ({said}), and half an update cannot be repeated. Go "
               "on from the last checkpoint with more memory free, or start again" if updating else
               f"step {step:,} does not fit the memory ({said}), and its largest pass, of {pass_tokens:,} tokens, cannot be "
               "halved")
        super().__init__(f"{why}; {cures}")
        self.step, self.said, self.pass_tokens, self.updating = step, said, pass_tokens, updating


def told_elsewhere(fields: Mapping[str, Any]) -> UserError:
    """Return the error that another process has told: `fields` are those of `--json`, with message and exit code.

    Its class is the one that `kind` names, where that is known here, else that of the exit code.
    """
    classes: dict[str, type[UserError]] = {
        "not_applied": NotApplied, "not_durable": NotDurable, "loss_not_finite": LossNotFinite, "does_not_fit": DoesNotFit,
        "gradient_not_finite": GradientNotFinite, "too_many_bad_steps": TooManyBadSteps, "weights_not_finite": WeightsNotFinite}
    cls = classes.get(str(fields.get("kind")), WrongUse if fields.get("exit_code") == WrongUse.exit_code else RunFailed)
    error = cls.__new__(cls)                 # without its sentence, which is told
    UserError.__init__(error, str(fields.get("message", "")))
    vars(error).update({name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
                        if name not in ("event", "message", "kind", "exit_code")})
    return error


class UnknownFact(LookupError):
    """A fact that the arithmetic needs is not known for this machine."""


def named(examples: Sequence[int]) -> str:
    """Return the numbers of examples, the first ones of many."""
    return ", ".join(map(str, examples[:NAMED])) + (f" and {len(examples) - NAMED} more" if len(examples) > NAMED else "")


def first_line(error: Exception) -> str:
    """Return the beginning of a library's message, which may go on over many lines; else the name of the error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def did_you_mean(word: str, known: Iterable[str], *, key: str = "", otherwise: str = "", likeness: float = 0.6) -> str:
    """Return the end of a message: "; did you mean NAME?" with the known name most like `word`, else `otherwise`.

    With `key`, the name is shown as its value: "did you mean data.split=train?". Names below `likeness` (0..1) are not
    proposed.
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    cure = f"did you mean {f'{key}=' if key else ''}{near[0]}?" if near else otherwise
    return f"; {cure}" if cure else ""
