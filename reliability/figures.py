"""The memory of long runs over their steps, from recorded trials, as PNG. Nothing here trains."""

from __future__ import annotations

from pathlib import Path

from reliability.records import Record, read

# Okabe & Ito's colours, which people with colour-blindness can tell apart; dashes tell them apart without colour.
_LOOKS = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"))
_MANY = 1000  # steps: more are those of the small problem


def figure(results: Path, out: Path) -> list[Path]:
    """Draw ``reliability-memory.png``; returns the files.

    Raises:
        ValueError: no long run was recorded.
    """
    import matplotlib as mpl
    from experiments.common.figures import save
    from experiments.common.style import RC, WIDTH
    from matplotlib.figure import Figure

    records = read(results / "soak.jsonl")
    if not records:
        raise ValueError(f"There are no long runs in {results}: make them with `python -m reliability soak`.")
    out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(RC):
        drawn = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        axes = drawn.subplots(1, 2, sharey=True)
        for axis, small in zip(axes, (True, False), strict=True):
            own = [record for record in records if (record["steps"] > _MANY) is small]
            for record, (colour, dashes) in zip(own, _LOOKS, strict=False):
                label = f"{record['case'].partition(', ')[2]}, P = {record['parameters']:,}"
                axis.plot(record["at"], _change(record), color=colour, linestyle=dashes, label=label)
            axis.set(xlabel="step", title="small problem" if small else "middle problem", xlim=(0, None))
            axis.legend(frameon=False, loc="upper right")
        axes[0].set_ylabel("resident memory beside that\nafter a tenth of the steps, MiB")
        changes = [change for record in records for change in _change(record)]
        axes[0].set_ylim(min(-10.0, 1.1 * min(changes)), max(10.0, 1.1 * max(changes)))
        return save(drawn, out / "reliability-memory")


def _change(record: Record) -> list[float]:
    warm = record["resident"][len(record["resident"]) // 10]
    return [(value - warm) / 2**20 for value in record["resident"]]
