"""Networks that foretell the next character: an LSTM and a small transformer, with torch's usual initial weights.

Both are written out, and not nn.LSTM and scaled_dot_product_attention, so that they can be differentiated twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CharLSTM(nn.Module):
    """One layer; the four gates of a time step are one nn.Linear of the character's embedding beside the state."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gates = nn.Linear(width + hidden, 4 * hidden)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """[n, T] → [n, T, vocabulary]."""
        x = self.embedding(characters).unbind(1)
        h = c = x[0].new_zeros(len(x[0]), self.output.in_features)
        states = []
        for u in x:
            sigmoids, candidate = self.gates(torch.cat([u, h], 1)).tensor_split([3 * h.shape[1]], 1)
            i, f, o = torch.sigmoid(sigmoids).chunk(3, 1)
            c = f * c + i * torch.tanh(candidate)
            h = o * torch.tanh(c)
            states.append(h)
        z: Tensor = self.output(torch.stack(states, 1))
        return z


class Block(nn.Module):
    """Causal attention, then two layers with GELU between them; each after a LayerNorm, each beside the identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_layers = nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, width] → the same."""
        x = x + self.attended(self._attention(self.before_attention(x)))
        z: Tensor = x + self.layers(self.before_layers(x))
        return z

    def _attention(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.queries_keys_values(x).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)  # [n, heads, T, width / heads] each
        no_future = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
        scores = (q * q.shape[3] ** -0.5) @ k.transpose(2, 3) + no_future
        attended: Tensor = scores.softmax(3) @ v
        return attended.transpose(1, 2).reshape(n, length, width)


class CharTransformer(nn.Module):
    """Two blocks of four heads."""

    BLOCKS, HEADS = 2, 4

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, self.HEADS) for _ in range(self.BLOCKS)))
        self.before_output = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """[n, T] → [n, T, vocabulary]."""
        # Row by row, so that what a sample adds to the gradient can be told from what others add.
        places = torch.arange(characters.shape[1]).expand_as(characters)
        x = self.embedding(characters) + self.positions(places)
        z: Tensor = self.output(self.before_output(self.blocks(x)))
        return z
