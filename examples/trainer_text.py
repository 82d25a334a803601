"""Tell what a column of a table holds from the first six letters of one entry, with Hugging Face's Trainer.

    python examples/trainer_text.py --out fields.png

A BERT of one layer, made here from its configuration (nothing is downloaded), learns dates, times, prices, phone
numbers, addresses of mail, web and network, and names from 1,200 made-up entries. The Trainer evaluates after each
step, stops early and loads the best checkpoint, as with any optimizer. The picture shows the loss, the held-out
accuracy, and which kinds are taken for which.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import random
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from torch import Tensor

from krylov_descent import KSD, StepReport, plot
from krylov_descent.integrations.transformers import KSDTrainer

LETTERS = string.ascii_letters + string.digits + " .,:;@/-+()€$'"
NAMES = ("ada", "alan", "barbara", "claude", "donald", "edsger", "frances", "grace", "hedy", "ken", "linus", "margaret")
ENDS = ("com", "org", "eu")
LONGEST = 6


def word(r: random.Random) -> str:
    """One that can be spoken."""
    return "".join(r.choice("bdfgklmnprst") + r.choice("aeiou") for _ in range(r.randint(2, 3)))


def price(r: random.Random) -> str:
    """In one of two currencies."""
    amount = f"{r.randint(0, 2999):,}.{r.randint(0, 99):02}"
    return r.choice([f"${amount}", f"{amount} €", amount])


KINDS: dict[str, Callable[[random.Random], str]] = {
    "date": lambda r: r.choice(["{0}-{1:02}-{2:02}", "{2}.{1}.{0}", "{1}/{2}/{0}"]).format(
        r.randint(1950, 2030), r.randint(1, 12), r.randint(1, 28)
    ),
    "time": lambda r: f"{r.randint(0, 23)}:{r.randint(0, 59):02}" + r.choice(["", f":{r.randint(0, 59):02}", " pm"]),
    "price": price,
    "phone": lambda r: r.choice(["+{0} {1} {2}", "({1}) {2}", "{1}-{2}"]).format(
        r.randint(1, 99), r.randint(100, 999), r.randint(10**5, 10**7)
    ),
    "mail": lambda r: f"{r.choice(NAMES)}{r.choice(['', '.', '-'])}{word(r)}@{word(r)}.{r.choice(ENDS)}",
    "web": lambda r: f"{r.choice(['www.', 'https://', ''])}{word(r)}.{r.choice(ENDS)}/{word(r)}",
    "network": lambda r: ".".join(str(r.randint(0, 255)) for _ in range(4)),
    "name": lambda r: f"{r.choice(NAMES)} {word(r)}".title(),
}


def entries(n: int, seed: int) -> list[dict[str, Any]]:
    """Samples as the Trainer wants them, with a label each."""
    r = random.Random(seed)
    found = []
    for i in range(n):
        label = i % len(KINDS)
        text = list(KINDS.values())[label](r)[:LONGEST]
        found.append({"input_ids": [1 + LETTERS.index(c) for c in text], "labels": label})
    return found


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of entries of different lengths."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.tensor([sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples])
    return {
        "input_ids": ids,
        "attention_mask": ids.ne(0).long(),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def accuracy(prediction: Any) -> dict[str, float]:
    """The share that is right."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer(directory: str, steps: int, reports: list[StepReport]) -> KSDTrainer:
    """All as for any Trainer, but for the optimizer's arguments and the fraction of samples in B and C."""
    torch.manual_seed(0)
    bert: Any = transformers  # its models are not typed
    config = bert.BertConfig(
        vocab_size=1 + len(LETTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        num_labels=len(KINDS),
    )
    arguments = transformers.TrainingArguments(
        directory,
        max_steps=steps,
        per_device_train_batch_size=300,
        per_device_eval_batch_size=400,
        weight_decay=1e-4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        logging_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return KSDTrainer(
        bert.BertForSequenceClassification(config),
        arguments,
        train_dataset=entries(1200, seed=0),
        eval_dataset=entries(400, seed=1),
        data_collator=padded,
        compute_metrics=accuracy,
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=4)],
        optimizer_cls_and_kwargs=(KSD, {"krylov_dim": 10}),
        fraction=0.2,
        on_report=reports.append,
    )


def draw(reports: list[StepReport], history: list[dict[str, Any]], taken: Any, out: Path) -> None:
    """Loss, accuracy, and kinds taken for others."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    plot.convergence(reports, left)
    held_out = [row for row in history if "eval_accuracy" in row and row["step"] <= len(reports)]
    right_share = [100 * row["eval_accuracy"] for row in held_out]
    middle.plot([row["step"] for row in held_out], right_share, "o-", color="#009E73")
    middle.set_title("Held-out accuracy after each step, %", fontsize=10.5)
    middle.set_xlabel("step")
    middle.grid(alpha=0.2)
    image = np.zeros((len(KINDS), len(KINDS)), int)
    np.add.at(image, (taken.label_ids, taken.predictions.argmax(-1)), 1)
    right.imshow(image, cmap="Blues")
    right.set_xticks(range(len(KINDS)), list(KINDS), rotation=45)
    right.set_yticks(range(len(KINDS)), list(KINDS))
    for (i, j), count in np.ndenumerate(image):
        if count:
            right.text(j, i, str(count), ha="center", va="center", color="white" if i == j else "black")
    right.set_title("Held-out entries", fontsize=10.5)
    right.set_ylabel("what it is")
    right.set_xlabel("what it is taken for")
    figure.savefig(out, dpi=150)


def main() -> None:
    """Train and draw."""
    parser = argparse.ArgumentParser(description="Tell what a column of a table holds, with Hugging Face's Trainer.")
    parser.add_argument("--out", type=Path, default=Path("trainer_text.png"))
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()

    reports: list[StepReport] = []
    with tempfile.TemporaryDirectory() as directory:
        made = trainer(directory, given.steps, reports)
        output = made.train()
    taken: Any = made.predict(made.eval_dataset)  # type: ignore[arg-type]
    right = f"held-out accuracy {taken.metrics['test_accuracy']:.1%}"
    print(f"{len(reports)} steps, loss {output.metrics['settled_loss']:.3g}, {right}")
    draw(reports, made.state.log_history, taken, given.out)
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
