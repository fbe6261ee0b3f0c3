"""How large the gradient of the DLCL weights is against that of all others: the reason why they stay in fp32.

A fresh base-width model, random tokens, the summed label-smoothed loss that fairseq differentiates; no loss scale.

    python benchmarks/dlcl_gradient.py
"""

import torch
from fairseq.data import Dictionary

from fairseq_deep.plugin.architectures import build_architecture

VOCAB, SENTENCES, LENGTH = 1000, 128, 25


def largest_gradients(name, dictionary):
    """(largest |gradient| in the history weights, largest in any other parameter), 0 where there is none."""
    torch.manual_seed(1)
    model = build_architecture(name, dictionary, share_all_embeddings=True)
    source, target = (torch.randint(5, VOCAB, (SENTENCES, LENGTH)) for _ in range(2))
    output = model(source, torch.full((SENTENCES,), LENGTH), target)[0]
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")
    loss(output.flatten(0, 1), target.roll(-1, 1).flatten()).backward()
    largest = {True: 0.0, False: 0.0}
    for key, parameter in model.named_parameters():
        weights = key.endswith("history.weight")
        largest[weights] = max(largest[weights], parameter.grad.abs().max().item())
    return largest[True], largest[False]


if __name__ == "__main__":
    dictionary = Dictionary()
    for index in range(VOCAB - len(dictionary)):
        dictionary.add_symbol(str(index))
    print(f"{'architecture':<26}{'history weights':>16}{'all others':>12}")
    for name in ("transformer_prenorm_30l", "transformer_dlcl_30l"):
        history, others = largest_gradients(name, dictionary)
        print(f"{name:<26}{history:>16.1f}{others:>12.1f}", flush=True)
