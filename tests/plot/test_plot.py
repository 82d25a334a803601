"""Pictures: what their artists hold is what the reports say."""

from __future__ import annotations

import copy
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("matplotlib")

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch

from krylov_descent import KSD, CheckReport, GaussNewtonFlow, plot
from krylov_descent.checking.finding import TrialRow
from krylov_descent.writers import JSONLWriter

Closure = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_windows() -> Iterator[None]:
    plt.switch_backend("Agg")
    yield
    plt.close("all")


def record(i: int, **changes: Any) -> dict[str, Any]:
    """A step that nobody took: a tenth of the loss each time, two Krylov vectors and the previous step."""
    return {
        "iteration": i,
        "loss": 10.0**-i,
        "search_loss_before": 2 * 10.0**-i,
        "search_loss_after": 0.5 * 10.0**-i,
        "grad_norm": 1.0,
        "krylov_dim": 2,
        "ritz_values": [0.01, 1.0, 100.0],
        "accepted": True,
        "seconds": {"gradient": 1.0, "basis": 2.0, "search": 1.0},
        "sample_gradients": 50.0,
        "set_sizes": {"A": 100, "B": 10, "C": 10},
        "coefficients": [3.0, -0.3, 0.03],
        **changes,
    }


def line_of(ax: Axes, label: str) -> Line2D:
    (found,) = [line for line in ax.get_lines() if line.get_label() == label]
    return found


def xy(line: Line2D) -> tuple[list[float], list[float]]:
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


def drawn(ax: Axes) -> Figure:
    """What only fails when a picture is rendered fails here."""
    figure = ax.figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    return figure


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


# Reading


def test_read_gives_back_what_the_writer_wrote(tmp_path: Path) -> None:
    optimizer, closure, _ = regression()
    reports = [optimizer.step(closure) for _ in range(3)]
    with JSONLWriter(tmp_path / "log.jsonl") as write:
        for report in reports:
            write(report)
    assert plot.read(tmp_path / "log.jsonl") == [report.as_dict() for report in reports]


def test_a_cut_last_line_is_skipped_with_a_warning(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(record(0)) + "\n\n" + json.dumps(record(1))[:40])
    with pytest.warns(UserWarning, match=r"log\.jsonl, line 3: the last line was cut off"):
        found = plot.read(log)
    assert found == [record(0)]


@pytest.mark.parametrize("line", ['{"iteration": 1, "lo{"iteration": 1}', "[1, 2]", '{"kind": "run"}'])
def test_a_broken_line_inside_is_named(tmp_path: Path, line: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join([json.dumps(record(0)), line, json.dumps(record(2))]))
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2: this is no report of a step: .*Remove the line"):
        plot.read(log)


def test_no_reports_are_refused() -> None:
    for draw in (plot.convergence, plot.phases, plot.ritz, plot.coefficients, plot.overview):
        with pytest.raises(ValueError, match="There are no reports to draw"):
            draw([])


# The loss


@pytest.mark.parametrize(
    ("by", "places", "words"),
    [
        ("step", [0, 1, 2], "step"),
        ("seconds", [0, 4, 8], "seconds in steps"),
        ("gradients", [0, 50, 100], "gradients of one sample"),
    ],
)
def test_convergence_shows_the_loss_before_each_step(by: Any, places: list[float], words: str) -> None:
    ax = plot.convergence([record(i) for i in range(3)], by=by, label="a run")
    assert xy(line_of(ax, "a run")) == (places, [1.0, 0.1, 0.01])
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == (words, "loss on A", "log")
    assert ax.get_title() == "Loss on A before each step: 1 → 0.01"


def test_each_search_is_a_line_of_its_own_if_it_has_a_set_of_its_own() -> None:
    words = "search: loss on C, before → after"
    ax = plot.convergence([record(i) for i in range(2)], by="seconds")
    xs, ys = xy(line_of(ax, words))
    assert np.array_equal(xs, [0, 4, math.nan, 4, 8, math.nan], equal_nan=True)
    assert np.array_equal(ys, [2, 0.5, math.nan, 0.2, 0.05, math.nan], equal_nan=True)
    for sizes in ({}, {"A": 5, "B": 5, "C": 5}, {"A": 100}):
        ax = plot.convergence([record(i, set_sizes=sizes) for i in range(2)])
        assert ax.get_legend_handles_labels()[1] == []
    assert plot.convergence([record(0, set_sizes={})]).get_ylabel() == "loss"


def test_steps_that_undid_the_one_before_are_marked() -> None:
    reports = [record(i, accepted=i not in (1, 3)) for i in range(5)]
    ax = plot.convergence(reports)
    assert xy(line_of(ax, "previous step undone")) == ([1, 3], [1e-1, 1e-3])
    many = plot.convergence([record(i, loss=1.0, accepted=i % 2 == 0) for i in range(200)])
    xs, ys = xy(line_of(many, "previous step undone"))
    assert xs == list(range(1, 200, 2))
    assert set(ys) == {0.02}  # of the height of the picture, beside the curve


def test_losses_that_are_not_finite_leave_a_gap_and_a_mark() -> None:
    reports = [record(0), record(1, loss=None), record(2, loss=math.inf), record(3)]
    ax = plot.convergence(reports, label="run")
    assert xy(line_of(ax, "not finite"))[0] == [1, 2]
    assert np.array_equal(xy(line_of(ax, "run"))[1], [1, math.nan, math.inf, 1e-3], equal_nan=True)
    assert ax.get_yscale() == "log"
    drawn(ax)
    lost = plot.convergence([record(0, loss=None)])
    assert xy(line_of(lost, "not finite"))[0] == [0]


def test_a_loss_that_is_not_positive_has_a_linear_axis() -> None:
    assert plot.convergence([record(0, loss=1.0), record(1, loss=-1.0)]).get_yscale() == "linear"
    assert plot.convergence([record(0, loss=0.0)]).get_yscale() == "linear"


def test_runs_on_the_same_axes_differ_in_colour_and_share_a_legend() -> None:
    reports = [record(i, accepted=i != 1) for i in range(3)]
    ax = plot.convergence(reports, label="first")
    assert plot.convergence(reports[1:], ax, label="second") is ax
    assert line_of(ax, "first").get_color() != line_of(ax, "second").get_color()
    labels = ax.get_legend_handles_labels()[1]
    assert sorted(labels) == sorted({"first", "second", "previous step undone", "search: loss on C, before → after"})
    assert ax.get_title() == "Loss on A before each step"  # of which run would numbers be?
    plot.convergence([record(0, loss=-1.0)], ax)
    assert ax.get_yscale() == "linear"


def test_reports_of_two_optimizers_in_a_row_are_counted_through() -> None:
    reports = [record(0), record(1), record(0), record(1)]
    assert xy(line_of(plot.convergence(reports, label="run"), "run"))[0] == [0, 1, 2, 3]
    later = [record(10), record(20)]
    assert xy(line_of(plot.convergence(later, label="run"), "run"))[0] == [10, 20]


def test_another_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="by='epoch': must be one of step, seconds, gradients"):
        plot.convergence([record(0)], by="epoch")  # type: ignore[arg-type]


# Phases


def test_phases_are_stacked() -> None:
    reports = [record(0), record(1, seconds={"gradient": 0.0, "basis": 4.0, "cg": 3.0}), record(2, seconds={})]
    ax = plot.phases(reports)
    steps = [patch for patch in ax.patches if isinstance(patch, StepPatch)]
    data = [patch.get_data() for patch in steps]
    assert [np.asarray(top).tolist() for top, _, _ in data] == [[1, 0, 0], [3, 4, 0], [4, 4, 0], [4, 7, 0]]
    assert np.asarray(data[1][2]).tolist() == [1, 0, 0]  # on top of the phase before
    assert np.asarray(data[0][1]).tolist() == [-0.5, 0.5, 1.5, 2.5]
    assert [patch.get_label() for patch in steps] == ["gradient 9 %", "basis 55 %", "search 9 %", "cg 27 %"]
    assert ax.get_title() == "Time of each step by phase: 11 s in all"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "seconds")


def test_reports_without_times_say_so() -> None:
    assert texts(plot.phases([record(0, seconds={"basis": None})])) == ["these reports have no times"]
    assert xy(line_of(plot.convergence([record(0, seconds=None)], by="seconds", label="x"), "x"))[0] == [0]


# Ritz values


def test_ritz_values_are_dots_and_negative_ones_are_marked() -> None:
    reports = [record(0, ritz_values=[-2.0, -1e-13, 0.0, 5.0]), record(1, ritz_values=[None, math.inf, 3.0])]
    ax = plot.ritz(reports)
    assert xy(line_of(ax, "positive")) == ([0, 1], [5.0, 3.0])
    assert xy(line_of(ax, "negative: its size")) == ([0], [2.0])
    assert line_of(ax, "positive").get_linestyle() == "None"
    assert ax.get_yscale() == "log"
    assert ax.get_legend() is not None
    assert plot.ritz([record(0)]).get_legend() is None  # nothing to tell apart


def test_the_words_say_that_ritz_values_are_not_the_spectrum() -> None:
    ax = plot.ritz([record(0)])
    assert "Krylov space" in ax.get_title()
    assert "gradient-weighted" in ax.get_ylabel()
    assert "not the whole spectrum" in ax.get_ylabel()


def test_reports_without_ritz_values_or_coefficients_say_so() -> None:
    bare = [record(0, ritz_values=[], coefficients=[], krylov_dim=0)]
    assert texts(plot.ritz(bare)) == ["these reports have no Ritz values"]
    assert texts(plot.coefficients(bare)) == ["these reports have no coefficients"]
    old = {key: value for key, value in record(0).items() if key != "coefficients"}  # of an older version
    assert texts(plot.coefficients([old])) == ["these reports have no coefficients"]


# Coefficients


def test_coefficients_are_placed_by_vector_whatever_a_step_had() -> None:
    reports = [
        record(0, krylov_dim=3, coefficients=[1.0, -2.0, 4.0]),  # no previous step
        record(1, krylov_dim=1, coefficients=[8.0, -0.5]),
        record(2, krylov_dim=0, coefficients=[]),
        record(3, krylov_dim=3, coefficients=[0.0, None, 1.0, 2.0]),
    ]
    ax = plot.coefficients(reports)
    (mesh,) = [artist for artist in ax.collections if isinstance(artist, QuadMesh)]
    nan = math.nan
    array: Any = mesh.get_array()
    shown = np.ma.filled(array, nan)
    expected = [[1, 8, nan, nan], [2, nan, nan, nan], [4, nan, nan, 1], [nan, 0.5, nan, 2]]
    assert np.array_equal(shown.reshape(4, 4), expected, equal_nan=True)
    assert isinstance(mesh.norm, LogNorm)
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0.5, 8.0)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "2", "3", "previous"]
    bottom, top = ax.get_ylim()
    assert bottom > top  # the first vector is on top


def test_several_previous_steps_have_rows_of_their_own() -> None:
    ax = plot.coefficients(
        [record(0, krylov_dim=1, coefficients=[1.0, 2.0]), record(1, krylov_dim=1, coefficients=[1.0, 2.0, 3.0, 4.0])]
    )
    names = ["1", "previous", "… 1 before", "… 2 before"]
    assert [label.get_text() for label in ax.get_yticklabels()] == names
    (mesh,) = [artist for artist in ax.collections if isinstance(artist, QuadMesh)]
    array: Any = mesh.get_array()
    shown = np.ma.filled(array, math.nan).reshape(4, 2)
    expected = [[1.0, 1.0], [2.0, 2.0], [math.nan, 3.0], [math.nan, 4.0]]
    assert np.array_equal(shown, expected, equal_nan=True)


def test_the_colours_of_coefficients_span_six_decades_at_most() -> None:
    ax = plot.coefficients([record(0, coefficients=[1.0, 1e-3, 1e-30])])
    (mesh,) = [artist for artist in ax.collections if isinstance(artist, QuadMesh)]
    assert mesh.norm.vmin == pytest.approx(1e-6)
    same = plot.coefficients([record(0, coefficients=[2.0, -2.0, 2.0])])
    drawn(same)  # a scale without length cannot be drawn
    (mesh,) = [artist for artist in same.collections if isinstance(artist, QuadMesh)]
    assert mesh.norm.vmax == 2.0


def test_many_vectors_have_ticks_at_round_numbers() -> None:
    ax = plot.coefficients([record(0, krylov_dim=20, coefficients=[1.0] * 21)])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "5", "10", "15", "20", "previous"]


# All of them


@pytest.mark.parametrize("count", [1, 5, 500])
def test_overview_of_any_length(count: int) -> None:
    reports = [record(i, loss=1 / (i + 1), accepted=i % 7 != 3) for i in range(count)]
    figure = plot.overview(reports)
    figure.draw_without_rendering()
    titles = [ax.get_title().partition(":")[0] for ax in figure.axes[:4]]
    assert titles == [
        "Loss on A before each step",
        "Time of each step by phase",
        "Ritz values",
        "Step along each basis vector",
    ]
    words = figure.get_suptitle().split(" · ")
    assert words[:3] == [
        f"{count} step{'s' if count > 1 else ''}",
        f"{4 * count:.3g} s",
        f"{50 * count:,} gradients of one sample",
    ]
    undone = sum(i % 7 == 3 for i in range(count))
    assert words[3:] == ([f"{undone} undone"] if undone else [])


def flow_record(i: int, fraction: float | None) -> dict[str, Any]:
    details = {"fraction": fraction, "damping": 10.0 ** -(i + 1), "rows": 20.0 + 10 * i}
    return record(i, krylov_dim=0, ritz_values=[], coefficients=[], details=details)


def test_overview_of_a_flow_shows_what_it_did() -> None:
    figure = plot.overview([flow_record(i, fraction) for i, fraction in enumerate([0.5, 0.0, None, 0.01])])
    figure.draw_without_rendering()
    assert not any(texts(ax) for ax in figure.axes)  # nothing is empty
    fraction, damping, rows = figure.axes[2:]
    titles = ["Step fraction η: 0 at the marks", "Damping λ", "Rows of the sketch"]
    assert [ax.get_title() for ax in (fraction, damping, rows)] == titles
    assert [ax.get_yscale() for ax in (fraction, damping, rows)] == ["log", "log", "linear"]
    assert xy(fraction.get_lines()[0]) == ([0, 3], [0.5, 0.01])
    assert xy(fraction.get_lines()[1])[0] == [1]
    assert xy(damping.get_lines()[0])[1] == [1e-1, 1e-2, 1e-3, 1e-4]
    assert xy(rows.get_lines()[0]) == ([0, 1, 2, 3], [20, 30, 40, 50])
    assert rows.get_ylim()[0] == 0


def test_overview_of_a_flow_that_never_moved_and_of_one_without_numbers() -> None:
    still = plot.overview([flow_record(i, 0.0) for i in range(3)])
    assert texts(still.axes[2]) == ["no step has a fraction above 0"]
    old = plot.overview([record(0, krylov_dim=0, ritz_values=[], coefficients=[])])  # of an older version
    assert texts(old.axes[2]) == ["these reports have no Ritz values"]


def test_a_log_of_a_real_flow_is_read_and_drawn(tmp_path: Path) -> None:
    _, closure, model = regression()
    optimizer = GaussNewtonFlow(model.parameters())
    with JSONLWriter(tmp_path / "log.jsonl") as write:
        for _ in range(3):
            write(optimizer.step(closure))
    reports = plot.read(tmp_path / "log.jsonl")
    names = {"fraction", "damping", "rows", "removed", "reach", "confirmed"}
    assert [set(report["details"]) for report in reports] == [names] * 3
    figure = plot.overview(reports)
    assert len(figure.axes) == 5
    assert xy(figure.axes[4].get_lines()[0])[1] == [20.0] * 3  # one row for each residual
    (tmp_path / "bad.jsonl").write_text(json.dumps({**reports[0], "details": {"rows": "many"}}))
    with pytest.raises(ValueError, match=r"no report of a step \(details ="):
        plot.read(tmp_path / "bad.jsonl")


def test_reports_and_their_dicts_give_the_same_picture() -> None:
    optimizer, closure, _ = regression()
    reports = [optimizer.step(closure) for _ in range(4)]
    pictures = []
    for given in (iter(reports), [json.loads(json.dumps(report.as_dict())) for report in reports]):
        figure = plot.overview(given)
        figure.canvas.draw()
        pictures.append(np.asarray(figure.canvas.buffer_rgba()).copy())  # type: ignore[attr-defined]
    assert np.array_equal(pictures[0], pictures[1])


def test_global_state_stays_and_given_axes_need_no_pyplot() -> None:
    before = copy.deepcopy(dict(mpl.rcParams))
    optimizer, closure, _ = regression()
    report = optimizer.step(closure)
    figure = Figure()
    axes = figure.subplots(4)
    for draw, ax in zip((plot.convergence, plot.phases, plot.ritz, plot.coefficients), axes, strict=True):
        assert draw([report], ax) is ax
    assert plt.get_fignums() == []
    plot.overview([report])
    assert len(plt.get_fignums()) == 1
    assert dict(mpl.rcParams) == before


def test_matplotlib_is_imported_when_something_is_drawn() -> None:
    code = "import sys, krylov_descent.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (plot.convergence, plot.overview, plot.coefficients):
        with pytest.raises(ImportError, match=r"pip install 'krylov-descent\[plot\]'"):
            draw([record(0)])


def regression(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[KSD, Closure, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)
    x = torch.linspace(-1, 1, 20, dtype=dtype)[:, None]

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - torch.sin(4 * x)
        return r.square().mean(), r

    return KSD(model.parameters(), krylov_dim=5, **settings), closure, model


def row(name: str, line: str, end: float) -> TrialRow:
    return TrialRow(name, line, 8.0, 80, 1.0, end, ((0.0, 1.0), (2.0, 0.5), (8.0, end)))


def test_a_trial_has_a_curve_and_a_label_for_each_method_that_ended() -> None:
    ours, rivals = "from krylov_descent import KSD", "import torch"
    rows = (
        row("KSD", ours, 1e-3),
        row("Adam, lr 0.001", rivals, 1e-2),
        row("Adam, lr 0.01", rivals, 1.01e-2),
        row("Adam, lr 0.0001", rivals, math.nan),
    )
    ax = plot.trial(CheckReport((), ours, rows))
    lines = ax.get_lines()
    assert np.asarray(lines[0].get_xydata()).tolist() == [[2.0, 0.5], [8.0, 1e-3]]
    assert len(lines) == 3
    labels = {text.get_text(): text for text in ax.texts}
    assert list(labels) == ["KSD", "Adam, lr 0.001", "Adam, lr 0.01"]
    assert labels["KSD"].get_color() == lines[0].get_color() != labels["Adam, lr 0.01"].get_color()
    assert labels["Adam, lr 0.01"].get_color() == labels["Adam, lr 0.001"].get_color()
    drawn(ax)
    boxes = sorted((text.get_window_extent().intervaly for text in labels.values()), key=min)
    assert all(max(below) <= min(above) for below, above in itertools.pairwise(boxes))  # none over another
    assert ax.get_yscale() == "log"
    assert plot.trial(CheckReport((), ours, (row("KSD", ours, -1.0),))).get_yscale() == "linear"
    with pytest.raises(ValueError, match="try_seconds"):
        plot.trial(CheckReport((), ours))


def test_on_a_dark_background_text_is_light_and_curves_are_brighter() -> None:
    def brightness(colour: Any) -> float:
        return sum(mpl.colors.to_rgb(colour))

    light = plot.convergence([record(0, accepted=False)], label="run")
    dark: list[Any] = [{"figure.facecolor": "#131416"}, mpl.style.library["dark_background"]]
    for settings in dark:
        with mpl.rc_context(settings):
            ax = plot.convergence([record(0, accepted=False)], label="run")
        legend = ax.get_legend()
        assert legend is not None
        shown = [ax.title, ax.xaxis.label, *ax.get_xticklabels(), *legend.get_texts()]
        assert all(brightness(text.get_color()) > 2 for text in shown)
        assert brightness(ax.get_facecolor()) < 1
        for name in ("run", "previous step undone"):
            assert brightness(line_of(ax, name).get_color()) > brightness(line_of(light, name).get_color())
    assert brightness(light.title.get_color()) < 1


def test_text_is_large_enough() -> None:
    figure = plot.overview([record(i) for i in range(3)])
    sizes = [float(text.get_fontsize()) for text in figure.findobj(mpl.text.Text) if text.get_text()]
    assert min(sizes) >= 10
