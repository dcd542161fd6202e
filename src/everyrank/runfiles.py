"""Where a run is kept: its directory, its log, its facts; opened on the one rank that writes.

    outputs/2026-11-19-062700-ab12/       the default: a directory for each run
    ├── 2026-11-19-062700-ab12.jsonl      a line for each step
    ├── run.json                          what is known of the run
    └── ranks/rank-00003.jsonl            a rank's own values, with per_rank=True

`outdir` names the directory of one run: opened again, the run in it goes on. `report_dir` and
`jsonl_path` name places that many runs may share: there a new run begins unless `run_id` says
which one goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everyrank import jsonlines, replay
from everyrank.backends.jsonl import Jsonl
from everyrank.columns import Columns
from everyrank.errors import OptionError, RunDirectoryError
from everyrank.messages import log
from everyrank.rundir import RunDirectory, mint_run_id, surroundings

PathLike = str | os.PathLike[str]

#: Where runs are kept that were given no place.
OUTPUTS = "outputs"


class RunFiles:
    """The files of one run, while it is written."""

    def __init__(
        self,
        *,
        outdir: PathLike | None = None,
        report_dir: PathLike | None = None,
        jsonl_path: PathLike | None = None,
        jsonl_overwrite: bool = False,
        run_id: str | None = None,
        part: str | None = None,
    ) -> None:
        """Open the run; `part` names a sub-directory, for a group of ranks that writes beside."""
        run_id = _checked(run_id)
        directory, shared = _place(outdir, report_dir, jsonl_path)
        if directory is None:
            run_id = run_id or mint_run_id()
            directory = Path(OUTPUTS) / run_id
        # As it is now: the program may well change to another directory later.
        directory = (directory / part if part else directory).absolute()
        self.run = RunDirectory.open(directory, run_id, fresh=shared)
        path = Path(jsonl_path).absolute() if jsonl_path else directory / f"{self.run.run_id}.jsonl"
        # Where runs share a place, rows that are there are ours only if the run was named.
        ours = not jsonl_overwrite and (run_id is not None or not shared)
        self.goes_on = ours and _has_rows(path)
        last = None if jsonl_overwrite else _last_generation(path)
        # Opened before anything is written: it is the lock that tells a second writer.
        self.log = Jsonl(path, overwrite=jsonl_overwrite)
        while last is not None and self.run.generation <= last:
            self.run.begin_generation()

    @property
    def directory(self) -> Path:
        """Give the run directory."""
        return self.run.path

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write what is known at the start."""
        self.run.update(**surroundings(), **facts)
        self.run.update(log=os.path.relpath(self.log.path, self.run.path))
        self.run.write()
        if self.goes_on:
            log.info(
                "%s: run %s goes on as generation %d.",
                self.run.path,
                self.run.run_id,
                self.run.generation,
            )

    def replay(self, columns: Columns) -> None:
        """Bring what earlier lives of the run recorded back into the columns."""
        if self.goes_on:
            replay.fill(columns, self.log.path, generations=self.run.facts["generations"])

    def note(self, **facts: Any) -> None:
        """Write down facts; a disk that is full costs these, and not the run."""
        self.run.update(**facts)
        try:
            self.run.write()
        except RunDirectoryError as error:
            log.warning("the facts of the run were not written: %s", error)

    def copy_to(self, outdir: PathLike) -> None:
        """Put the log and the facts of a finished run into another directory, too."""
        target = Path(outdir)
        with contextlib.suppress(FileNotFoundError):
            if target.samefile(self.run.path):
                return
        try:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.log.path, target / f"{self.run.run_id}.jsonl")
            shutil.copyfile(self.run.path / "run.json", target / "run.json")
        except shutil.SameFileError:
            pass  # the log was there from the start, by way of jsonl_path
        except OSError as error:
            raise RunDirectoryError(
                f"`{target}` cannot be written: {error.strerror or error}. The run is complete in "
                f"`{self.run.path}`; choose another outdir=."
            ) from error


def _place(
    outdir: PathLike | None,
    report_dir: PathLike | None,
    jsonl_path: PathLike | None,
) -> tuple[Path | None, bool]:
    """Give the directory asked for, and whether other runs may be in it."""
    if outdir is not None:
        return Path(outdir), False
    if report_dir is not None:
        return Path(report_dir), True
    if jsonl_path is not None:
        return Path(jsonl_path).parent, True
    return None, False


def _checked(run_id: str | None) -> str | None:
    if run_id is not None and (not run_id or Path(run_id).name != run_id or run_id in (".", "..")):
        raise OptionError(
            f"run_id={run_id!r} becomes the name of a file, so it must be a plain name without "
            "'/', for example 'baseline-2'."
        )
    return run_id


def _has_rows(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _last_generation(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        row = jsonlines.last(path)
        return None if row is None else row.generation
    return None
