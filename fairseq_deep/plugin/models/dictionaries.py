"""Hashes of a model's dictionaries in the checkpoint's task state.

The weights also fit another dictionary of equal size, but then each token has the embedding of a different token.
"""

from typing import Any

from fairseq.tasks.fairseq_task import StatefulContainer

from fairseq_deep.runtime.dictionary import check_hashes, hash_symbols

KEY = "dictionaries"
FIX = (
    "binarise with its own (fairseq-preprocess --srcdict, --tgtdict), or use another --save-dir; "
    "--allow-other-dictionary accepts it (when translating: "
    "--model-overrides \"{'allow_other_dictionary': True}\")"
)


class DictionaryState(StatefulContainer):
    """State of a task with the hashes of its dictionaries, which are checked when a checkpoint is loaded.

    Args:
        own: hashes of the task's dictionaries, from :func:`sums`
        allow: whether a checkpoint may have other dictionaries
    """

    def __init__(self, own: dict[str, str], allow: bool):
        super().__init__()
        self.own, self.allow = own, allow

    @property
    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint stores."""
        return {**self._state, KEY: self.own}

    def merge_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint.

        Raises:
            UsageError: the checkpoint has another dictionary
        """
        rest = dict(state_dict)
        saved = rest.pop(KEY, None)
        check_hashes(self.own, None if self.allow else saved, FIX)
        super().merge_state_dict(rest)


def remember(task: Any, allow: bool) -> None:
    """Have *task* store the hashes of its dictionaries in checkpoints, and reject checkpoints of other dictionaries.

    fairseq loads the task state of a checkpoint before it builds the model in translation, and after it in training.

    Args:
        allow: accept a checkpoint of other dictionaries

    Raises:
        UsageError: the task has the state of a checkpoint of other dictionaries
    """
    before = getattr(task, "state", None)
    if not isinstance(before, StatefulContainer):  # not a task of fairseq
        return
    state = DictionaryState(sums(task), allow)
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
