"""Hashes of a model's dictionaries and its languages in the checkpoint's task state.

The weights also fit another dictionary of equal size, but then each token has the embedding of a different token. With
one dictionary for both languages, they also fit the data in the opposite direction.
"""

from typing import Any

from fairseq.tasks.fairseq_task import StatefulContainer

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.dictionary import check_hashes, hash_symbols

KEY, LANGUAGES = "dictionaries", "languages"
OVERRIDE = (
    "--allow-other-dictionary accepts it (when translating: "
    "--model-overrides \"{'allow_other_dictionary': True}\")"
)
FIX = f"binarise with its own (fairseq-preprocess --srcdict, --tgtdict), or use another --save-dir; {OVERRIDE}"


class DictionaryState(StatefulContainer):
    """State of a task with its languages and hashes of its dictionaries, which are checked when a checkpoint is loaded.

    Args:
        own: hashes of the task's dictionaries, from :func:`sums`
        languages: source and target language
        allow: whether a checkpoint may have other dictionaries or the opposite direction
    """

    turns = False  # whether a model of the opposite direction is only the start of a new run

    def __init__(self, own: dict[str, str], languages: list[str | None], allow: bool):
        super().__init__()
        self.own, self.languages, self.allow = own, languages, allow

    @property
    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint stores."""
        return {**self._state, KEY: self.own, LANGUAGES: self.languages}

    def merge_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint.

        Raises:
            UsageError: the checkpoint has another dictionary, or the opposite direction
        """
        rest = dict(state_dict)
        saved, languages = rest.pop(KEY, None), rest.pop(LANGUAGES, None)
        check_hashes(self.own, None if self.allow else saved, FIX)
        source, target = self.languages
        if languages == [target, source] and source != target and not (self.allow or self.turns):
            raise UsageError(
                f"the checkpoint translates {target} to {source}, not {source} to {target}: correct -s and -t, or use "
                f"another --save-dir; {OVERRIDE}"
            )
        super().merge_state_dict(rest)


def remember(task: Any, allow: bool) -> None:
    """Have *task* store its languages and hashes of its dictionaries in checkpoints, and reject those of others.

    fairseq loads the task state of a checkpoint before it builds the model in translation, and after it in training.

    Args:
        allow: accept a checkpoint of other dictionaries or of the opposite direction

    Raises:
        UsageError: the task has the state of a checkpoint of other dictionaries or of the opposite direction
    """
    before = getattr(task, "state", None)
    if not isinstance(before, StatefulContainer):  # not a task of fairseq
        return
    settings = getattr(task, "cfg", None) or getattr(task, "args", None)
    languages = [getattr(settings, name, None) for name in ("source_lang", "target_lang")]
    state = DictionaryState(sums(task), languages, allow)
    state._factories = before._factories
    state.merge_state_dict(before._state)
    task.state = state


def sums(task: Any) -> dict[str, str]:
    """Return {side: size of its dictionary, and a hash of its words in order}."""
    found = {}
    for side in ("source", "target"):
        symbols = getattr(getattr(task, f"{side}_dictionary", None), "symbols", None)
        if symbols:
            found[side] = hash_symbols(symbols)
    return found
