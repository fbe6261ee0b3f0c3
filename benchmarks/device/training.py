"""A training step as fairseq makes it: forward, label-smoothed cross-entropy, backward."""

import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

from .count import Counter


def make_batch(dictionary, tokens, length):
    """Random sentence pairs, *tokens* target words with padding: the source's on the left, the target's on the right."""
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


def loss_of(model, source, lengths, previous, target, padding):
    """fairseq's criterion, with its label smoothing of 0.1."""
    output = model(source, lengths, previous)
    scores = model.get_normalized_probs(output, log_probs=True)
    scores = scores.view(-1, scores.size(-1))
    return label_smoothed_nll_loss(scores, target.view(-1), 0.1, ignore_index=padding)[0]


def count_step(model, dictionary, tokens=4096, length=256, call=None):
    """Counts of a training step.

    Args:
        model: on the meta device
        dictionary: of both languages
        tokens, length: target words of the batch, and of a sentence
        call: what is called in place of *model*, e.g. the compiled model

    Returns:
        the :class:`Counter`; its phases are "forward", "loss" and "backward"
    """
    model.train()
    counter = Counter()
    with counter:
        source, previous, target = (counter.tensor(part) for part in make_batch(dictionary, tokens, length))
        lengths = source.ne(dictionary.pad()).sum(1)
        for counts in (False, True):  # fairseq makes masks and positions once
            counter.counts = False
            model.zero_grad(set_to_none=True)
            counter.counts, counter.phase = counts, "forward"
            output = (call or model)(source, lengths, previous)
            counter.phase = "loss"
            scores = model.get_normalized_probs(output, log_probs=True)
            scores = scores.view(-1, scores.size(-1))
            loss, _ = label_smoothed_nll_loss(scores, target.view(-1), 0.1, ignore_index=dictionary.pad())
            counter.phase = "backward"
            if counts:
                loss.backward()
    return counter
