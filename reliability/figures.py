"""The memory of long runs over their steps, from recorded trials, as PNG. Nothing here trains."""

from __future__ import annotations

from pathlib import Path

from reliability.records import Record, read

# Okabe & Ito's colours, which people with colour-blindness can tell apart; dashes tell them apart without colour.
_LOOKS = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"))


def figure(results: Path, out: Path) -> list[Path]:
    """Draw ``reliability-memory.png``; returns the files.

    Raises:
        ValueError: no long run was recorded.
    """
    import matplotlib as mpl
    from experiments.common.figures import save
    from experiments.common.style import RC, WIDTH
    from matplotlib.figure import Figure

    records = [record for record in read(results) if "resident" in record]
    if not records:
        raise ValueError(f"There are no long runs in {results}: make them with `python -m reliability`.")
    out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(RC):
        drawn = Figure(figsize=(WIDTH, 3.0), layout="constrained")
        axis = drawn.subplots()
        for record, (colour, dashes) in zip(records, _LOOKS, strict=False):
            axis.plot(record["at"], _change(record), color=colour, linestyle=dashes, label=record["method"])
        axis.set(xlabel="step", ylabel="resident memory beside that\nafter a tenth of the steps, MiB", xlim=(0, None))
        axis.legend(frameon=False, loc="upper right")
        changes = [change for record in records for change in _change(record)]
        axis.set_ylim(min(-10.0, 1.1 * min(changes)), max(10.0, 1.1 * max(changes)))
        return save(drawn, out / "reliability-memory")


def _change(record: Record) -> list[float]:
    warm = record["resident"][len(record["resident"]) // 10]
    return [(value - warm) / 2**20 for value in record["resident"]]
