"""The methods of this package in plain PyTorch: two encoders whose layers DLCL and the depth-wise LSTM connect.

An aggregator is built for a `Stack`. It acts between the layers of a loop, so the layers themselves are yours:

- DLCL combines the outputs of whole layers, such as PyTorch's own.
- The depth-wise LSTM replaces residual connections and feed-forward sub-layers, so its layers are attentions.

Run it with ``python examples/plain_pytorch.py``.
"""

import torch
from torch import Tensor, nn

from fairseq_deep.core.aggregators import Aggregator, DepthwiseLstm, Dlcl
from fairseq_deep.core.stack import Stack


class SelfAttention(nn.Module):
    """Multi-head self-attention without residual connection or feed-forward sub-layer."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Encoder(nn.Module):
    """Layers that an aggregator connects; input and output are time x batch x features."""

    def __init__(self, layers: nn.ModuleList, aggregator: Aggregator):
        super().__init__()
        self.layers, self.aggregator = layers, aggregator

    def forward(self, x: Tensor) -> Tensor:
        state = self.aggregator.start(x)
        for number, layer in enumerate(self.layers):
            x = self.aggregator.read(state, number)
            state = self.aggregator.write(state, number, layer(x))
        return self.aggregator.finish(state)


def dlcl_encoder(stack: Stack) -> Encoder:
    """Return an encoder of PyTorch's pre-norm layers, connected by DLCL."""
    layers = [nn.TransformerEncoderLayer(stack.dim, stack.heads, stack.ffn_dim, norm_first=True)
              for _ in range(stack.layers)]  # fmt: skip
    return Encoder(nn.ModuleList(layers), Dlcl(stack, weight_type="vector"))


def lstm_encoder(stack: Stack) -> Encoder:
    """Return an encoder of attentions, connected by the depth-wise LSTM."""
    layers = [SelfAttention(stack.dim, stack.heads) for _ in range(stack.layers)]
    return Encoder(nn.ModuleList(layers), DepthwiseLstm(stack))


def main() -> None:
    """Train each encoder for a few steps to reverse a sequence of vectors."""
    for build in (dlcl_encoder, lstm_encoder):
        torch.manual_seed(1)
        model = build(Stack(layers=6, dim=32, ffn_dim=64, heads=4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        x = torch.randn(5, 8, 32)
        for _ in range(20):
            loss = nn.functional.mse_loss(model(x), x.flip(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{build.__name__}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
