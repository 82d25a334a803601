"""Measure both optimizers against the bare engine and against others: `python -m benchmarks [section ...]`.

Every figure is a ratio of times taken in turn within one run: medians, and quartiles in brackets. Sections: products,
fisher, kronecker, step, memory, growth, flow, ranks, least_squares; without a name, all of them (about three quarters
of an hour on two cores; --quick: a quarter). A section's results are added to the JSON file as soon as they are known.

`python -m benchmarks picture` draws speed.png and scale.png from results/benchmarks.json, and measures nothing.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from experiments.supervised.curves import curves
from experiments.supervised.networks import autoencoder

from benchmarks import fisher, flow, growth, kronecker, least_squares, memory, pictures, problems, products, ranks, step
from benchmarks.problems import Problem
from benchmarks.timing import Ratio

RECORDED = Path("results/benchmarks.json")  # the pages of results are drawn from it
# glibc gives large blocks back to the system and takes them anew, page by page, for every temporary: which candidate
# pays for it is chance. A process that keeps its memory has none of that noise, and is faster.
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 33), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}


def dense_problems(n: int) -> list[Problem]:
    """The two dense networks of the paper."""
    return [problems.autoencoder("MNIST autoencoder", problems.AUTOENCODER, n), problems.classifier(n)]


def run_products(quick: bool) -> dict[str, Any]:
    """Our product ÷ that of each other."""
    rounds = 7 if quick else 31
    others = [problems.convolutional(512), problems.lstm(256), problems.transformer(16)]
    return {p.name: products.measure(p, rounds) for p in (*dense_problems(3000), *others)}


def run_fisher(quick: bool) -> dict[str, Any]:
    """Passes with the Fisher diagonal ÷ passes for the gradient."""
    rounds = 7 if quick else 31
    return {p.name: fisher.measure(p, rounds) for p in (*dense_problems(6000), problems.convolutional(1536))}


def run_kronecker(quick: bool) -> dict[str, Any]:
    """Kronecker factors ÷ the gradient on the same batch."""
    found: dict[str, Any] = {}
    for n in (128, 512):
        problem = problems.autoencoder(f"CURVES autoencoder, {n} samples", problems.CURVES, n)
        found[problem.name] = kronecker.measure(problem, 7 if quick else 31)
    conv = problems.convolutional(128)
    return found | {f"{conv.name}, 128 samples": kronecker.measure(conv, 7 if quick else 31)}


def trainable(name: str, widths: tuple[int, ...], samples: int) -> Problem:
    """An autoencoder on curves, sparsely initialised: one on which steps are as in training."""
    images = curves(2000, seed=0).repeat(samples // 2000, 1)
    model = autoencoder(widths[: len(widths) // 2 + 1], seed=0)
    return Problem(name, model, torch.nn.BCEWithLogitsLoss(), images, images)


def run_step(quick: bool) -> dict[str, Any]:
    """Whole steps ÷ bare passes, at the sizes of the paper."""
    found = {}
    for name, widths, samples, rounds in (
        ("CURVES autoencoder", problems.CURVES, 20_000, 5 if quick else 21),
        ("MNIST autoencoder", problems.AUTOENCODER, 10_000, 1 if quick else 7),
        ("MNIST autoencoder", problems.AUTOENCODER, 60_000, 1 if quick else 7),
    ):
        problem = trainable(name, widths, samples)
        found[f"{name}, N = {samples:,}"] = step.measure(problem, batch_size=1000, krylov_dim=20, rounds=rounds)
    return found


def run_memory(quick: bool) -> dict[str, Any]:
    """What a smaller memory costs."""
    problem = trainable("CURVES autoencoder", problems.CURVES, 20_000)
    double = dataclasses.replace(problem, model=copy.deepcopy(problem.model).double())
    double = dataclasses.replace(double, x=problem.x[:10_000].double(), y=problem.y[:10_000].double())
    rounds = 3 if quick else 11
    return {
        "float32 parameters": memory.measure(problem, batch_size=1000, rounds=rounds),
        "float64 parameters": memory.measure(double, batch_size=1000, rounds=rounds),
    }


def run_growth(quick: bool) -> dict[str, Any]:
    """Exponents over P, K and N, and memory."""
    return growth.measure(quick=quick)


def run_flow(quick: bool) -> dict[str, Any]:
    """A step of GaussNewtonFlow: seconds by part over n and m, and memory."""
    return flow.measure(quick=quick)


def run_ranks(quick: bool) -> dict[str, Any]:
    """Memory, bytes and seconds on 1, 2 and 4 ranks."""
    return ranks.measure(quick)


def run_least_squares(quick: bool) -> dict[str, Any]:
    """Calls of the residuals by least_squares and by SciPy's."""
    return least_squares.measure(quick=quick)


SECTIONS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "products": run_products,
    "fisher": run_fisher,
    "kronecker": run_kronecker,
    "step": run_step,
    "memory": run_memory,
    "growth": run_growth,
    "flow": run_flow,
    "ranks": run_ranks,
    "least_squares": run_least_squares,
}


def show(found: Any, indent: int = 0) -> None:
    """Print results as an indented list."""
    for name, value in found.items():
        if isinstance(value, dict):
            sys.stdout.write(f"{'  ' * indent}{name}\n")
            show(value, indent + 1)
        elif isinstance(value, list):
            for entry in value:
                sys.stdout.write(f"{'  ' * indent}{name}: {json.dumps(entry)}\n")
        else:
            text = f"{value:.3g}" if isinstance(value, float) else str(value)
            sys.stdout.write(f"{'  ' * indent}{name}: {text}\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """Results as JSON takes them."""
    if isinstance(value, Ratio):
        return dataclasses.asdict(value)
    return {str(k): plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = [*SECTIONS, "picture"]
    parser.add_argument("sections", nargs="*", choices=[*named, []], metavar="section", help=", ".join(named))
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes")
    parser.add_argument("--json", type=Path, help="results are added to this file (benchmarks.json); picture reads it")
    parser.add_argument("--figures", type=Path, default=Path("figures"), help="picture: where to (%(default)s)")
    parser.add_argument("--allocator", choices=("keeping", "default"), default="keeping", help="of glibc")
    arguments = parser.parse_args()
    if "picture" in arguments.sections:
        recorded = json.loads((arguments.json or RECORDED).read_text())
        sys.stdout.writelines(f"{path}\n" for path in pictures.draw(recorded, arguments.figures))
        return
    arguments.json = arguments.json or Path("benchmarks.json")
    if arguments.allocator == "keeping" and any(os.environ.get(k) != v for k, v in KEEPING.items()):
        # The allocator reads its settings when a process starts.
        os.execvpe(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], {**os.environ, **KEEPING})
    for name in arguments.sections or SECTIONS:
        torch.manual_seed(0)
        found = SECTIONS[name](arguments.quick)
        sys.stdout.write(f"\n{name}\n")
        show(found, 1)
        results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        results[name] = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "allocator": arguments.allocator,
            "quick": arguments.quick,
            "results": plain(found),
        }
        arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
