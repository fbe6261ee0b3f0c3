"""A training step as fairseq makes it: forward, label-smoothed cross-entropy, backward."""

import contextlib

import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

from . import compiling
from .count import Counter


def make_batch(dictionary, tokens, length):
    """Random sentence pairs of *tokens* target words with padding: of the source left, of the target right."""
    sentences = max(tokens // length, 1)
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(dictionary.nspecial, len(dictionary), (sentences, length), generator=generator)
    source[:, -1] = dictionary.eos()
    target = source.clone()
    for row in range(1, sentences):
        pad = min(row, length // 3)
        source[row, :pad], target[row, length - pad :] = dictionary.pad(), dictionary.pad()
        target[row, length - pad - 1] = dictionary.eos()
    previous = target.roll(1, dims=1)
    previous[:, 0] = dictionary.eos()
    return source, previous, target


def run_step(model, source, previous, target, padding, call=None, enter=lambda phase: None):
    """A step on a batch; *enter* is told what begins: "forward", "loss" or "backward"."""
    enter("forward")
    lengths = source.ne(padding).sum(1)
    output = (call or model)(source, lengths, previous)
    enter("loss")
    scores = model.get_normalized_probs(output, log_probs=True)
    scores = scores.view(-1, scores.size(-1))
    loss, _ = label_smoothed_nll_loss(scores, target.view(-1), 0.1, ignore_index=padding)
    enter("backward")
    del output, scores
    loss.backward()


def count_step(model, dictionary, tokens=4096, length=256, compiles=False, within=None):
    """Counts of a training step; not the first, in which fairseq makes masks and positions.

    Args:
        model: on the meta device
        dictionary: of both languages
        tokens, length: target words of the batch, and of a sentence
        compiles: count what ``torch.compile`` makes of the model, as its ``--compile`` says or else of the whole
        within: a context that the step runs in, inside of the counter

    Returns:
        the :class:`Counter`; its phases are "forward", "loss" and "backward"
    """
    model.train()
    counter = Counter()
    counter.counts = False
    with counter, compiling.counted(counter) if compiles else contextlib.nullcontext():
        batch = [counter.tensor(part) for part in make_batch(dictionary, tokens, length)]
        call = compiling.compile_model(model) if compiles else model
        run_step(model, *batch, dictionary.pad(), call)
        model.zero_grad(set_to_none=True)
        counter.counts = True
        with within or contextlib.nullcontext():
            run_step(model, *batch, dictionary.pad(), call, counter.enter)
    return counter
