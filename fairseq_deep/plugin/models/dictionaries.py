"""Which dictionaries a model was trained with: a sum over their words, in the checkpoint's state of the task.

Weights of another dictionary of the same size fit, and every word then has the vector of another one.
"""

from typing import Any

from fairseq.tasks.fairseq_task import StatefulContainer

from fairseq_deep.runtime.dictionary import check_hashes, hash_symbols

KEY = "dictionaries"
FIX = (
    "binarise with its own (fairseq-preprocess --srcdict, --tgtdict), or use another --save-dir; "
    "--allow-other-dictionary takes it as it is (translating: "
    "--model-overrides \"{'allow_other_dictionary': True}\")"
)


class DictionaryState(StatefulContainer):
    """The state of a task and, in checkpoints, its dictionaries, which those of a checkpoint have to equal.

    Args:
        own: of the task's dictionaries, as :func:`sums` gives them
        allow: whether others are allowed
    """

    def __init__(self, own: dict[str, str], allow: bool):
        super().__init__()
        self.own, self.allow = own, allow

    @property
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**self._state, KEY: self.own}

    def merge_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what a checkpoint has kept.

        Raises:
            UsageError: it was of another dictionary
        """
        rest = dict(state_dict)
        saved = rest.pop(KEY, None)
        check_hashes(self.own, None if self.allow else saved, FIX)
        super().merge_state_dict(rest)


def remember(task: Any, allow: bool) -> None:
    """Have *task* keep its dictionaries in checkpoints, and refuse a checkpoint of others.

    fairseq loads the state of a checkpoint into the task before it builds the model where it translates, and after it
    where it trains.

    Args:
        allow: take a checkpoint of other dictionaries

    Raises:
        UsageError: the task has the state of a checkpoint of others
    """
    before = getattr(task, "state", None)
    if not isinstance(before, StatefulContainer):  # of a task that was made by hand
        return
    state = DictionaryState(sums(task), allow)
    state._factories = before._factories
    state.merge_state_dict(before._state)
    task.state = state


def sums(task: Any) -> dict[str, str]:
    """{side: size of its dictionary, and a sum over its words in their order}."""
    found = {}
    for side in ("source", "target"):
        symbols = getattr(getattr(task, f"{side}_dictionary", None), "symbols", None)
        if symbols:
            found[side] = hash_symbols(symbols)
    return found
