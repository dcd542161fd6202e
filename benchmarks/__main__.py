"""Run the benchmarks: `python -m benchmarks [name ...] [--quick] [--write]`."""

from __future__ import annotations

import argparse
import time
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import Table, machine, machine_word, verdict

#: In the order in which a reader would ask.
NAMES = (
    "update_cost",
    "paced",
    "tensors",
    "ranks",
    "lag",
    "memory",
    "imports",
    "jax_reduce",
    "metrics",
    "jax_metrics",
)

_RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    """Ask the questions that were named, or all, and print what they came to."""
    options = _options()
    if options.list:
        for name in NAMES:
            print(f"{name:12} {_module(name).__doc__.partition(chr(10))[0]}")
        return
    facts = machine()
    for name, fact in facts.items():
        print(f"{name:10} {fact}")
    began = time.monotonic()
    found = {name: _ask(name, quick=options.quick) for name in options.names or NAMES}
    tables = [table for asked in found.values() for table in asked]
    print(f"\n{verdict(tables)}\n{time.monotonic() - began:.0f} s")
    if options.write:
        print(f"written to {_write(facts, found, quick=options.quick)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--list", action="store_true", help="name the questions, and stop")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs")
    parser.add_argument("--write", action="store_true", help="keep the tables in results/")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}. There are {', '.join(NAMES)}.")
    return options


def _module(name: str) -> Any:
    return import_module(f"benchmarks.{name}")


def _ask(name: str, *, quick: bool) -> list[Table]:
    began = time.monotonic()
    tables: list[Table] = _module(name).run(quick=quick)
    for table in tables:
        print(f"\n{table.text()}", flush=True)
    print(f"  ({name}: {time.monotonic() - began:.0f} s)", flush=True)
    return tables


def _write(facts: dict[str, str], found: dict[str, list[Table]], *, quick: bool) -> Path:
    _RESULTS.mkdir(exist_ok=True)
    path = _RESULTS / f"{date.today()}-{machine_word()}.md"
    parts = [f"# Measured on {date.today()}{', quickly: figures are rough' if quick else ''}"]
    parts.append("\n".join(f"- {name}: {fact}" for name, fact in facts.items()))
    parts.append("Ratios are medians over rounds, [lowest..highest]; each is formed in one round.")
    parts.append(verdict(table for tables in found.values() for table in tables))
    for name, tables in found.items():
        parts.append(f"## {name}\n\n{_module(name).__doc__.strip()}")
        parts += [table.markdown() for table in tables]
    path.write_text("\n\n".join(parts) + "\n")
    return path


if __name__ == "__main__":
    main()
