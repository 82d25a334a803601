"""A small character-level transformer, trained with KSD on text that comes with Python, against tuned Adam. Adam wins.

    python examples/character_transformer.py       # about four minutes on one core; writes transformer.png

It is here to show that attention works as it is (nn.TransformerEncoder, a causal mask, a mean over tokens; dropout must
be 0, since losses within a step must compare), and what to expect: on one core, Adam takes thousands of steps on small
batches of such data while KSD takes some twenty on all of it, and ends ahead: 1.5 against 2.1 nats a character.

The text is Python's own help (``pydoc_data.topics``), so it differs a little between versions of Python. Every run gets
the same CPU seconds of this process (race.py); Adam, on mini-batches of 16 sequences, runs with each of three learning
rates, decayed to 0, and the best of them counts.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import copy
import math
from pydoc_data.topics import topics
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Subsets
from race import RATES, Curve, Stopwatch, minibatches, tuned_adam

CONTEXT, HELD_OUT = 64, 300


class Transformer(nn.Module):
    """Characters → logits of the next ones."""

    def __init__(self, characters: int, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """[n, T] → [n, T, characters]."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.layers(self.embedding(x) + self.position[: x.shape[1]], mask=mask, is_causal=True)
        logits: Tensor = self.output(h)
        return logits


@torch.no_grad()
def continued(model: Transformer, start: Tensor, length: int) -> Tensor:
    """[T] and ``length`` characters drawn after it, a little colder than the model believes."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(length):
        logits = model(start[None, -CONTEXT:])[0, -1] / 0.8
        start = torch.cat([start, torch.multinomial(logits.softmax(0), 1, generator=generator)])
    return start


def main() -> None:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(description="A character-level transformer: KSD against Adam.")
    parser.add_argument("--seconds", type=float, default=60, help="CPU seconds for each of four runs (%(default)s)")
    parser.add_argument("--max-steps", type=int, help="end KSD after so many steps; Adam gets the seconds it took")
    parser.add_argument("--sequences", type=int, default=1500, help=f"of {CONTEXT}, to train with (%(default)s)")
    parser.add_argument("--out", default="transformer.png")
    given = parser.parse_args()

    text = "".join(c for c in "\n".join(topics.values()) if c == "\n" or " " <= c <= "~")
    text = text[: (given.sequences + HELD_OUT) * (CONTEXT + 1)]
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(c) for c in text]).view(-1, CONTEXT + 1)
    codes = codes[torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))]
    held_out, train = codes[:HELD_OUT], codes[HELD_OUT:]

    torch.manual_seed(0)
    model = Transformer(len(alphabet))
    start = copy.deepcopy(model.state_dict())

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        (sequences,) = batch
        logits = model(sequences[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
        return loss, logits  # a mean over tokens, and the model outputs; dimension 0 is the sequence

    @torch.no_grad()
    def held_out_loss() -> float:
        return closure((held_out,))[0].item()

    @torch.no_grad()
    def by_position() -> Tensor:
        logits, targets = model(held_out[:, :-1]), held_out[:, 1:]
        losses = nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        return losses.mean(0).view(-1, 4).mean(1)  # four positions together, against the noise

    optimizer = KSD(model.parameters())
    sets = Subsets((train,), batch_size=250, seed=0)
    ksd = Stopwatch(held_out_loss)
    for report in optimizer.run(closure, sets, max_steps=given.max_steps):
        print(report, flush=True)
        if ksd.mark() >= given.seconds:
            break
    ksd.mark()
    positions = {"KSD": by_position()}
    samples = {"KSD": continued(model, held_out[0, :20], 200)}

    model.load_state_dict(start)
    stream = minibatches((train,), 16)
    rate, adam = tuned_adam(model, lambda: closure(next(stream))[0], held_out_loss, ksd.seconds)
    positions["Adam"], samples["Adam"] = by_position(), continued(model, held_out[0, :20], 200)

    for name, sample in samples.items():
        print(f"--- {name}\n{''.join(alphabet[i] for i in sample.tolist())}")
    frequencies = torch.bincount(train.flatten(), minlength=len(alphabet)).clamp(min=1).double()
    letters = float(-(frequencies / frequencies.sum()).log()[held_out].mean())
    draw(given.out, {"KSD": ksd.curve, f"Adam, learning rate {rate:g}": adam.curve}, positions, letters)
    print(
        f"character transformer: held-out loss {ksd.last:.2f} nats a character with KSD, {adam.last:.2f} with Adam "
        f"(learning rate {rate:g}, the best of {len(RATES)}), after {ksd.seconds:.0f} CPU seconds each."
    )


def draw(out: str, curves: dict[str, Curve], positions: dict[str, Tensor], letters: float) -> None:
    """Held-out loss over time, and at the end by the number of characters seen."""
    figure, (over_time, by_position) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    looks = ({"color": "#0072B2"}, {"color": "#D55E00", "linestyle": "--"})
    for (name, curve), look in zip(curves.items(), looks, strict=True):
        over_time.plot(*zip(*curve, strict=True), label=name, **look)
    for losses, look in zip(positions.values(), looks, strict=True):
        by_position.plot(range(2, CONTEXT, 4), losses, marker="o", markersize=3, **look)
    for axis in (over_time, by_position):
        axis.axhline(letters, color="0.6", linestyle=":", label="frequency of characters alone")
        axis.spines[["top", "right"]].set_visible(False)
    over_time.set(title="held-out loss [nats a character]", xlabel="CPU seconds", ylim=(1, math.ceil(letters + 1)))
    over_time.legend(frameon=False)
    by_position.set(title="the same at the end, by characters seen", xlabel="characters seen")
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
