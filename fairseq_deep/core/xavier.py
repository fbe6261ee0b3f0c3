"""Initial values of linear layers outside attention."""

from torch import nn


def fill_xavier(*linears: nn.Linear) -> None:
    """Set the weights of *linears* to Xavier's (uniform), and their biases to 0."""
    for linear in linears:
        nn.init.xavier_uniform_(linear.weight)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
