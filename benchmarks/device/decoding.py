"""A step of beam search through fairseq's own generator, in the middle of a sentence, when no hypothesis ends."""

import torch
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from .count import Counter
from .training import make_batch

LENGTH = 26  # words of a source


class Done(Exception):
    """The step that was to be counted is over."""


def choose(counter, step):
    """*step* of a search with its outcome known: random words, none of them the end, and random hypotheses."""
    generator = torch.Generator().manual_seed(2)

    def choosing(number, scores, *args, **kwargs):
        values, words, ranks = step(number, scores, *args, **kwargs)
        beam = scores.size(1)
        best = torch.rand(values.shape, generator=generator).sort(dim=1, descending=True).values
        counter.values.put(values, best)
        counter.values.put(words, torch.randint(10, scores.size(2), words.shape, generator=generator))
        counter.values.put(ranks, torch.randint(0, beam, ranks.shape, generator=generator))
        return values, words, ranks

    return choosing


def watch(counter, generator, position):
    """Tell *counter* what runs: "reorder", "model" or "generator"; it counts at *position* alone."""
    ensemble, calls = generator.model, {"reorders": 0}

    def as_phase(name, function):
        def run(*args, **kwargs):
            counter.phase = name
            result = function(*args, **kwargs)
            counter.phase = "generator"
            return result

        return run

    reorder = as_phase("reorder", ensemble.reorder_incremental_state)

    def next_step(*args, **kwargs):
        calls["reorders"] += 1
        if calls["reorders"] > position:
            raise Done
        counter.counts = calls["reorders"] == position
        return reorder(*args, **kwargs)

    ensemble.reorder_incremental_state = next_step
    ensemble.reorder_encoder_out = as_phase("reorder", ensemble.reorder_encoder_out)
    ensemble.forward_decoder = as_phase("model", ensemble.forward_decoder)
    generator.search.step = choose(counter, generator.search.step)


def prepare_model(model, beam):
    """What ``fairseq-generate`` does with a model that it has loaded."""
    model.train()  # else fairseq's own encoder takes a path for CPUs and inference, which is not counted here
    model.eval()
    model.prepare_for_inference_(OmegaConf.create({"generation": {"beam": beam, "print_alignment": None}}))


def count_step(model, dictionary, sentences=32, beam=4, position=20, length=LENGTH, prepare=None):
    """Counts of one decoding step.

    Args:
        model: on the meta device
        dictionary: of both languages
        sentences, beam: hypotheses of the batch
        position: the step
        length: words of a source
        prepare: called with the generator before it runs, e.g. to compile its steps

    Returns:
        the :class:`Counter`; its phases are "reorder", "model" and "generator"
    """
    prepare_model(model, beam)
    generator = SequenceGenerator([model], dictionary, beam_size=beam, max_len_a=0, max_len_b=2 * position + 10)
    if prepare is not None:
        prepare(generator)
    counter = Counter()
    counter.counts, counter.phase = False, "generator"
    watch(counter, generator, position)
    with counter:
        source = counter.tensor(make_batch(dictionary, sentences * length, length)[0])
        lengths = source.ne(dictionary.pad()).sum(1)
        try:
            generator.generate([model], {"net_input": {"src_tokens": source, "src_lengths": lengths}})
        except Done:
            pass
    return counter
