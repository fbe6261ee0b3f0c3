"""Transparent attention: each decoder layer attends to its own weighted mean of the encoder's layers.

Training Deeper Neural Machine Translation Models with Transparent Attention, Bapna et al., EMNLP 2018:

    z_j = sum_{k=0..L} s_jk y_k,    s_j = softmax_k(dropout(W_j)),    j = 1 ... M

with y_0 the encoder's embedding output. W starts at 0; all means are then uniform. The paper's encoders are post-norm;
in a pre-norm encoder, we apply its final norm to each z_j.

Names here: ``weight[j - 1, k]`` is W_jk.
"""


import torch
from torch import Tensor, nn

from fairseq_deep.core.aggregators.weighted_sum import weighted_sums
from fairseq_deep.core.dropout import dropout_of
from fairseq_deep.core.fields import PROBABILITY, Option
from fairseq_deep.core.keep_fp32 import KeepFp32
from fairseq_deep.core.stack import Stack

from .base import MEMORIES, Memory


@MEMORIES.register("transparent")
class Transparent(KeepFp32, Memory):
    """Transparent attention.

    Args:
        encoder, decoder: see :class:`Memory`
        dropout: probability of dropout on the logits W

    Shapes:
        weight: M x (L+1)

    Raises:
        UsageError: the dropout is not a probability
    """

    paper = "Bapna 2018"
    options = {"dropout": Option("dropout on the logits of the means", PROBABILITY)}

    def __init__(self, encoder: Stack, decoder: Stack, dropout: float = 0.1):
        super().__init__(encoder, decoder)
        self.weight = nn.Parameter(torch.zeros(self.num_memories, self.num_layers + 1))
        self.dropout = dropout_of(self, dropout)

    def weights(self) -> Tensor:
        """Return the weights s of the means, M x (L+1), in fp32."""
        return torch.softmax(self.weight.detach().float(), dim=1)

    def forward(self, outputs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
        return weighted_sums(torch.softmax(self.dropout(self.weight), dim=1), outputs)
