"""Comparison of exported programs with their model: log-probabilities and translations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.search import BeamSearch, SearchOptions
from fairseq_deep.runtime.verification import Limits, Report, Side, compare, logits_of, padded, shifted

PAD = 1
TOLERANCES = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Maximum difference of log-probabilities by the type of the weights, relative to the largest one if that is above 1;
in half precision, eight units in the last place."""
SHARE = 0.995
"""Share of translations that must be equal in fp32."""


class ProgramModel:
    """Adapter of two programs to the model interface of `BeamSearch`.

    Args:
        encode, step: the programs
        settings: their description (`torch_format.describe`)
    """

    def __init__(self, encode: Callable, step: Callable, settings: dict[str, Any]):
        self._encode, self._step, self.decoder = encode, step, self
        self.beam, self.capacity = settings["search"]["beam"], settings["capacity"]
        # the dimension of sentences in each cache
        self._dims = {
            entry["name"].partition(".")[2]: entry["shape"].index("sentences")
            for entry in settings["programs"]["step"]["inputs"]
            if entry["name"].startswith("caches.")
        }

    def encoder(self, src_tokens: Tensor) -> dict[str, Any]:
        """Encode a batch (B x S)."""
        source, caches = self._encode(src_tokens)
        return {"encoder_out": [source["padding"]], "source": source, "caches": caches}

    def max_positions(self) -> int:
        """Return the number of positions in the caches."""
        return self.capacity

    def __call__(self, prev_output_tokens: Tensor, encoder_out: dict, incremental_state: dict) -> tuple[Tensor, dict]:
        """Return scores (rows x 1 x V) for the next token; the first step has a row per sentence."""
        state, words = incremental_state, prev_output_tokens[:, -1:]
        if "caches" not in state:
            first = torch.zeros(len(words), self.beam, dtype=torch.long, device=words.device)
            state.update(source=encoder_out["source"], caches=encoder_out["caches"], order=first, position=0, rows=1)
            words = words.expand(-1, self.beam)
        words = words.reshape(-1, self.beam).contiguous()
        position = torch.tensor([state["position"]], device=words.device)
        scores, state["caches"] = self._step(words, state["order"], position, state["source"], state["caches"])
        scores = scores[:, :1] if len(scores) == len(prev_output_tokens) else scores
        state["position"] += 1
        return scores.flatten(0, 1).unsqueeze(1), {"attn": [None]}

    def reorder_incremental_state_scripting(self, incremental_state: dict, new_order: Tensor) -> None:
        """Reorder the caches to the hypotheses *new_order*, which are grouped by sentence."""
        state = incremental_state
        order, rows = new_order.view(-1, self.beam), state["rows"]
        sentences = order[:, 0] // rows
        state["order"], state["rows"] = order % rows, self.beam
        state["source"] = {name: x.index_select(0, sentences) for name, x in state["source"].items()}
        state["caches"] = {name: x.index_select(self._dims[name], sentences) for name, x in state["caches"].items()}


def check_programs(
    programs: tuple[Callable, Callable], settings: dict[str, Any], model: Any, rows: Sequence[list[int]]
) -> Report:
    """Compare *programs* with their *model*.

    Args:
        settings: description of the programs
        rows: tokens of the sentences

    Raises:
        UsageError: the results differ by more than rounding
    """
    search = settings["search"]

    def searching(system: Any) -> Callable:
        def translate(batch: Sequence[list[int]]) -> list[list[int]]:
            longest = int(search["max_len_a"] * max(map(len, batch)) + search["max_len_b"])
            limits = {"max_len_a": 0, "max_len_b": min(longest, settings["capacity"] - 1)}
            found = BeamSearch([system], SearchOptions(**{**search, **limits}))(padded(batch))
            return [hypotheses[0]["tokens"].tolist() for hypotheses in found]

        return translate

    def score(batch: Sequence[list[int]], targets: list[list[int]]) -> Tensor:
        return logits_of(model, padded(batch), targets).log_softmax(-1)

    def other_score(batch: Sequence[list[int]], targets: list[list[int]]) -> Tensor:
        return log_probabilities(programs, padded(batch), targets, search["beam"])

    dtype = model.decoder.embed_tokens.weight.dtype
    sides = Side(searching(model), score), Side(searching(ProgramModel(*programs, settings)), other_score)
    limits = Limits(TOLERANCES[dtype], share=SHARE if dtype == torch.float32 else None)
    return compare("torch.export", "log-probabilities", *sides, rows, limits)


def log_probabilities(
    programs: tuple[Callable, Callable], source: Tensor, targets: list[list[int]], beam: int
) -> Tensor:
    """Return the log-probabilities of *programs* for the tokens of *targets*, tokens x V.

    Args:
        source: B x S
        beam: beam width of the programs
    """
    encode, step = programs
    inputs = shifted(targets)
    tensors, caches = encode(source)
    order, steps = torch.zeros(len(source), beam, dtype=torch.long), []
    for position, words in enumerate(inputs.t()):
        words = words.unsqueeze(1).repeat(1, beam)
        scores, caches = step(words, order, torch.tensor([position]), tensors, caches)
        steps.append(scores[:, -1].float().log_softmax(-1))
    return torch.stack(steps, 1)[inputs.ne(PAD)]
