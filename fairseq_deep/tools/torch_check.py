"""Comparison of exported programs with their model: log-probabilities and translations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.search import BeamSearch, SearchOptions
from fairseq_deep.runtime.verification import Report, batches, padded
from fairseq_deep.tools import UsageError

PAD, EOS = 1, 2
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

    def __call__(
        self, prev_output_tokens: Tensor, encoder_out: dict, incremental_state: dict
    ) -> tuple[Tensor, dict]:
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
    search, other = settings["search"], ProgramModel(*programs, settings)
    difference, equal, order = 0.0, 0, sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    for numbers in batches(order):
        source = padded([rows[number] for number in numbers])
        longest = min(int(search["max_len_a"] * source.size(1) + search["max_len_b"]), settings["capacity"] - 1)
        limits = {"max_len_a": 0, "max_len_b": longest}
        options = SearchOptions(**{**search, **limits})
        own, found = (
            [hypotheses[0]["tokens"].tolist() for hypotheses in BeamSearch([each], options)(source)]
            for each in (model, other)
        )
        equal += sum(map(list.__eq__, own, found))
        difference = max(difference, compare(programs, model, source, own, search["beam"]))
    precise = model.decoder.embed_tokens.weight.dtype == torch.float32
    report = Report("log-probabilities", len(rows), difference, equal)
    differing = report.differing(SHARE) if precise else ""
    if differing:
        raise UsageError(f"the programs' translations differ for {differing}")
    return report


@torch.no_grad()
def compare(
    programs: tuple[Callable, Callable], model: Any, source: Tensor, targets: list[list[int]], beam: int
) -> float:
    """Return the maximum difference of log-probabilities over all tokens, given the *targets*.

    Args:
        source: B x S
        targets: tokens of the target sentences
        beam: beam width of the programs

    Raises:
        UsageError: the difference is larger than rounding
    """
    encode, step = programs
    inputs = padded([[EOS, *target[:-1]] for target in targets])
    expected = model(source, None, inputs)[0]
    tolerance, expected = TOLERANCES[expected.dtype], expected.float().log_softmax(-1)
    tensors, caches = encode(source)
    order, steps = torch.zeros(len(source), beam, dtype=torch.long), []
    for position, words in enumerate(inputs.t()):
        words = words.unsqueeze(1).repeat(1, beam)
        scores, caches = step(words, order, torch.tensor([position]), tensors, caches)
        steps.append(scores[:, -1].float().log_softmax(-1))
    words = inputs.ne(PAD)
    expected, found = expected[words], torch.stack(steps, 1)[words]
    difference, scale = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= tolerance * max(1.0, scale):
        raise UsageError(f"the programs' log-probabilities differ (by {difference:.1e})")
    return difference
