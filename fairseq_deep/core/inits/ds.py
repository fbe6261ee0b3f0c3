"""Depth-scaled initialisation (DS-Init).

Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention, Zhang et al., EMNLP 2019, Section 5:

    W ~ U(-gamma alpha / sqrt(l), gamma alpha / sqrt(l))      Eq. (15)

for every matrix of layer l (from 1, in each stack), with Xavier's gamma, alpha in [0, 1]; biases 0.

The authors' released code scales the *variance* by 1/sqrt(l): the bound is gamma alpha l^(-1/4). The variances and
gradients reported in the paper (Table 1, Figure 1) match the code, and not a bound with 1/sqrt(l). The paper's
introduction agrees with its code: the variance of layer l has a discount of 1/sqrt(l). Our default exponent is
therefore 0.25; ``--ds-init-exponent 0.5`` is Eq. (15) as printed.

The code has one matrix for queries, keys and values of a self-attention, with the bound for its fan_out of 3C. Eq. (1)
and (9) have three matrices with a bound that is sqrt(2) times as large: ``--ds-init-split-qkv``.
"""

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.stack import Stack

from .base import INITS, MatrixLocation
from .xavier import Xavier


@INITS.register("ds")
class DepthScaled(Xavier):
    """Xavier, with the bounds of layer l multiplied by alpha l^(-exponent).

    Args:
        stack: see :class:`Init`
        alpha: factor on all layers, in (0, 1]
        exponent: 0.25 (the released code), 0.5 (Eq. 15), or any value >= 0
        split_qkv: compute gamma for separate query, key and value matrices of a self-attention

    Raises:
        UsageError: a value is out of range
    """

    without_residual = False
    flag_prefix = "ds_init"
    paper = "Zhang 2019"
    shrinks_layers = True
    options = {
        "alpha": Option("factor on all layers", Range(0, 1, above=True)),
        "exponent": Option("layer l is scaled by l^-X; 0.25 in the paper's code, 0.5 in its Eq. 15", Range(0)),
        "split_qkv": Option("bounds for separate query, key and value matrices, as in Eq. 1 and 9"),
    }

    def __init__(self, stack: Stack, alpha: float = 1.0, exponent: float = 0.25, split_qkv: bool = False):
        super().__init__(stack)
        self.alpha = alpha
        self.exponent = exponent
        self.split_qkv = split_qkv

    def gain(self, place: MatrixLocation) -> float:
        gain = 1.0 if self.split_qkv else super().gain(place)
        return gain * self.alpha * place.layer**-self.exponent
