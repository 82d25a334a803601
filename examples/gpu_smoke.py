"""For those who have a GPU: small checks on it, each compared with the CPU. Its authors never ran it on a GPU.

    python examples/gpu_smoke.py                   # cuda or mps, whichever there is; says so and ends if there is none
    python examples/gpu_smoke.py --device cpu      # the same checks without a GPU: tests this program, not a device
    python examples/gpu_smoke.py --skip tf32       # leave out checks by name

Each check takes three steps. The largest curvature seen in the first one, of GaussNewtonFlow the loss after it, must
agree closely; the loss in the end only roughly in float32, where a search amplifies rounding: weights changed by 2e-7
change it by up to a tenth on a CPU.
Prints a table; the exit status is 1 if a check failed. Please report what it says on your device.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import io
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, GaussNewtonFlow, Growing, Storage, Subsets

Device = torch.device
Result = tuple[float, float]  # the largest Ritz value of the first step or the loss after it, the loss after the last
STEPS, LOSS = 3, 0.5  # and the largest relative difference of that loss, in float32


class Skipped(Exception):  # noqa: N818 — no error
    """The device cannot do this."""


def perceptron(device: Device, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, inputs and targets, made on the CPU, so that they are the same everywhere."""
    torch.manual_seed(0)
    x = torch.randn(600, 4)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return model.to(device, dtype), x.to(device, dtype), torch.sin(x[:, :2] * x[:, 2:]).to(device, dtype)


def trained(
    model: nn.Module, closure: Callable[..., Any], sets: Subsets | None = None, method: type = KSD, **options: Any
) -> Result:
    """What some steps see and reach."""
    run = method(model.parameters(), **options).run(closure, sets, max_steps=STEPS)
    reports = list(run)
    if not run.loss < 0.9 * reports[0].loss:
        raise AssertionError(f"the loss went from {reports[0].loss:.4g} to {run.loss:.4g} in {STEPS} steps")
    first = reports[0]
    return first.ritz_values[-1] if first.ritz_values else first.search_loss_after, run.loss


def regression(device: Device, dtype: torch.dtype = torch.float32, **options: Any) -> Result:
    """Full batch."""
    model, x, y = perceptron(device, dtype)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - y
        return r.square().mean(), r

    return trained(model, closure, **options)


def float64(device: Device) -> Result:
    """Full batch in float64."""
    if device.type == "mps":
        raise Skipped("mps has no float64")
    return regression(device, torch.float64)


def sample_sets(device: Device) -> Result:
    """Three sets a step, drawn on the CPU and moved."""
    model, x, y = perceptron(device)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    sets = Subsets((x.cpu(), y.cpu()), batch_size=100, fraction=0.25, device=device, seed=0)
    return trained(model, closure, sets)


def deep(device: Device) -> Result:
    """Sets that grow, and the preconditioner that sees layers."""
    model, x, y = perceptron(device)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    return trained(model, closure, Growing((x.cpu(), y.cpu()), batch_size=600, device=device, seed=0), **DEEP)


def autocast(device: Device) -> Result:
    """bfloat16 inside the closure; parameters, sums and the search stay in float32."""
    model, x, y = perceptron(device)

    def closure() -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            z = model(x)
        r = z.float() - y
        return r.square().mean(), r

    return trained(model, closure, preconditioner=None)


def physics(device: Device) -> Result:
    """A closure that differentiates inside."""
    model, x, _ = perceptron(device)
    x = x.clone().requires_grad_()

    def closure() -> tuple[Tensor, Tensor]:
        u = model(x).sum(1)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        r = slope.sum(1) + u - torch.cos(x[:, 0].detach())
        return r.square().mean(), r

    return trained(model, closure)


def layers(device: Device, make: Callable[[], nn.Module], features: int, *shape: int) -> Result:
    """A network of other layers, [n, *shape] → [n, features], and a linear one, trained with random labels."""
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Flatten(), nn.Linear(features, 2)).to(device)
    x, labels = torch.randn(300, *shape).to(device), torch.randint(2, (300,)).to(device)

    def closure() -> tuple[Tensor, Tensor]:
        logits = model(x)
        return nn.functional.cross_entropy(logits, labels), logits

    return trained(model, closure)


def convolution(device: Device) -> Result:
    """Convolutions have a backward pass of KSD's own."""
    return layers(device, lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2)), 36, 1, 8, 8)


def attention(device: Device) -> Result:
    """Fused attention kernels cannot be differentiated twice; KSD takes the plain one for products."""
    return layers(device, lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 48, 6, 8)


class LastState(nn.Module):
    """An LSTM's last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, 3] → [n, 8]."""
        last: Tensor = self.lstm(x)[0][:, -1]
        return last


def recurrent(device: Device) -> Result:
    """cuDNN's LSTM cannot be differentiated twice: it is switched off, as users must."""
    with torch.backends.cudnn.flags(enabled=False):
        return layers(device, LastState, 8, 5, 3)


def resumed(device: Device) -> Result:
    """Stopped, saved, loaded and continued: the same as not stopped."""
    model, x, y = perceptron(device)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - y
        return r.square().mean(), r

    optimizer = KSD(model.parameters())
    for _ in range(STEPS):
        optimizer.step(closure)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    unstopped = [optimizer.step(closure) for _ in range(STEPS)]
    weights, state = torch.load(file, map_location=device, weights_only=True)
    model, x, y = perceptron(device)
    model.load_state_dict(weights)
    optimizer = KSD(model.parameters())
    optimizer.load_state_dict(state)
    continued = [optimizer.step(closure) for _ in range(STEPS)]
    if not math.isclose(continued[-1].loss, unstopped[-1].loss, rel_tol=1e-5):
        raise AssertionError(f"resumed: {continued[-1].loss!r}, not stopped: {unstopped[-1].loss!r}")
    return trained(model, closure)


def tf32(device: Device) -> Result:
    """Matrix products in TF32, which has 10 bits: for information, since it is not advised."""
    if device.type != "cuda":
        raise Skipped("cuda only")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return regression(device)
    finally:
        torch.set_float32_matmul_precision(before)


#: By name: what to run, and the largest relative differences of curvature and loss from those on the CPU.
CHECKS: dict[str, tuple[Callable[[Device], Result], float, float]] = {
    "full-batch": (regression, 1e-4, LOSS),
    "float64": (float64, 1e-10, 1e-6),
    "sets": (sample_sets, 1e-4, LOSS),
    "basis-on-cpu": (lambda device: regression(device, storage=Storage(device="cpu")), 1e-4, LOSS),
    "basis-bfloat16": (lambda device: regression(device, storage=Storage(dtype=torch.bfloat16)), 1e-2, LOSS),
    "hessian": (lambda device: regression(device, curvature="hessian"), 1e-4, LOSS),
    "flow": (lambda device: regression(device, method=GaussNewtonFlow), 1e-3, LOSS),
    "deep": (deep, 1e-2, LOSS),
    "autocast": (autocast, 2e-2, LOSS),
    "physics": (physics, 1e-4, LOSS),
    "convolution": (convolution, 1e-4, LOSS),
    "attention": (attention, 1e-4, LOSS),
    "lstm": (recurrent, 1e-4, LOSS),
    "resume": (resumed, math.inf, LOSS),
    "tf32": (tf32, math.inf, math.inf),
}


def main() -> int:
    """Run the checks; 1 if one failed."""
    parser = argparse.ArgumentParser(description="Small checks of KSD on a GPU, each compared with the CPU.")
    parser.add_argument("--device", help="cuda, cuda:1, mps or cpu; default: the GPU that there is")
    parser.add_argument("--skip", nargs="*", default=[], choices=list(CHECKS), help="checks to leave out")
    given = parser.parse_args()
    found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else None
    if given.device is None and found is None:
        print("gpu smoke: there is no GPU that torch can use; nothing was checked. --device cpu runs the checks there.")
        return 0
    device = torch.device(given.device or found or "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(f"torch {torch.__version__} on {name}; float32 products: {torch.get_float32_matmul_precision()!r}")
    print(f"{'check':<16}{'curvature':>11}{'CPU':>11}{'differs':>9}{'loss':>12}{'CPU':>12}{'differs':>9}{'seconds':>9}")
    failed = []
    for check, (run, *allowed) in CHECKS.items():
        if check in given.skip:
            continue
        begin = time.perf_counter()
        try:
            there = run(device)
            seconds = time.perf_counter() - begin
            here = (regression if check == "tf32" else run)(torch.device("cpu"))
        except Skipped as why:
            print(f"{check:<16}skipped: {why}")
            continue
        except Exception as error:  # one check must not keep the others from running
            failed.append(check)
            print(f"{check:<16}FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        differ = [abs(a - b) / abs(b) for a, b in zip(there, here, strict=True)]
        passed = all(d <= most for d, most in zip(differ, allowed, strict=True))
        columns = (f"{a:>{n}.5g}{b:>{n}.5g}{d:>9.0e}" for n, a, b, d in zip((11, 12), there, here, differ, strict=True))
        print(f"{check:<16}{''.join(columns)}{seconds:>9.2f}{'' if passed else '  FAILED'}", flush=True)
        if not passed:
            failed.append(check)
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        print("Advice: torch.set_float32_matmul_precision('highest'), the default. TF32 rounds curvature products.")
    print(f"gpu smoke on {device}: {'FAILED: ' + ', '.join(failed) if failed else 'all checks passed'}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
