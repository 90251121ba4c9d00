"""The demo's results: table, picture and file."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

from rich.table import Table

from dmuond.demo.runs import Run

PHASES = ("collect", "decide", "update", "publish", "quiet")


def table(muon: Run, adamw: Run) -> Table:
    result = Table(title="One model, one text, the same batches")
    result.add_column("")
    result.add_column(f"Muon by dmuond, {muon.trainers} trainer{'s' * (muon.trainers > 1)}")
    result.add_column("AdamW by torch, 1 process")

    def row(name: str, left: str, right: str = "") -> None:
        result.add_row(name, left, right)

    row("validation loss, nats per byte", f"{muon.final_loss:.4f}", f"{adamw.final_loss:.4f}")
    row(
        "steps per second",
        f"{_steps_per_second(muon):.2f}",
        f"{_steps_per_second(adamw):.2f}",
    )
    row("forward and backward", _ms(muon, "forward_backward_us"), _ms(adamw, "forward_backward_us"))
    row("optimizer step", _ms(muon, "step_us"), _ms(adamw, "step_us"))
    for phase in PHASES:
        row(f"    {phase}", _ms(muon, "phases_us", phase))
    registered = muon.registered
    row(
        "owner balance (slowest over mean)",
        f"{registered['imbalance']:.3f} on {registered['lanes']} lane(s)",
    )
    row("matrices orthogonalised per step", str(muon.steps[-1]["matrices"]))
    for incident in muon.incidents:
        row(f"killed after step {incident['step']}: a {incident['victim']}", _outcome(incident))
    return result


def _outcome(incident: dict[str, Any]) -> str:
    if "seconds" not in incident:
        return "not seen to go on"
    lost = incident["steps_lost"]
    steps = "no step lost" if lost == 0 else f"back to step {incident['back_to']}"
    return f"{steps}, went on after {incident['seconds']:.1f} s"


def _steps_per_second(run: Run) -> float:
    """Without the time that deaths took."""
    steps = len(run.steps)
    lost_s = sum(incident.get("seconds", 0.0) for incident in run.incidents)
    return steps / (steps / run.end["steps_per_second"] - lost_s)


def _ms(run: Run, key: str, inner: str | None = None) -> str:
    mean_us = run.mean(key, inner)
    return "" if mean_us is None else f"{mean_us / 1e3:.2f} ms"


def save_picture(muon: Run, adamw: Run, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for run, name, color in ((muon, "Muon by dmuond", "C0"), (adamw, "AdamW by torch", "C1")):
        axes.plot(
            [step["step"] for step in run.steps],
            [step["loss"] for step in run.steps],
            color=color,
            alpha=0.3,
            linewidth=1,
        )
        axes.plot(*zip(*run.validation, strict=True), color=color, marker="o", label=name)
    for incident in muon.incidents:
        axes.axvline(incident["step"], color="C3", linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{incident['victim']} killed",
            (incident["step"], 1),
            xycoords=("data", "axes fraction"),
            xytext=(-9, -4),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=8,
            color="C3",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("Byte-level transformer on Python's standard library")
    axes.text(0.99, 0.6, "thin: training, dots: validation", transform=axes.transAxes, ha="right")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def save_json(muon: Run, adamw: Run, options: dict[str, Any], path: Path) -> None:
    def content(run: Run) -> dict[str, Any]:
        return {
            "trainers": run.trainers,
            "model": run.model,
            "registered": run.registered,
            "validation_loss": run.final_loss,
            "steps_per_second": _steps_per_second(run),
            "steps": run.steps,
            "incidents": run.incidents,
        }

    machine = {"machine": platform.machine(), "python": platform.python_version()}
    document = {
        "options": options,
        "machine": machine,
        "muon": content(muon),
        "adamw": content(adamw),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
