"""The run directory: the facts of a run in `run.json`, beside its log.

    run = RunDirectory.open("runs/seven")       # made, or re-opened as the next generation
    run.update(world_size=8, config=config)
    run.write()

`run.json` is written whole or not at all, so every reader at every moment finds valid JSON in it.
Nothing in it is a secret: values under names such as `api_key` or `password` are written as "***".

A directory may also be a place that many runs share, one after another or at the same time. Then
`run.json` is that of the run which began last, and each other one has `<run id>.run.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from everyrank import jsonlines
from everyrank.errors import RunDirectoryError
from everyrank.messages import log

_FACTS = "run.json"
_HIDDEN = "***"
_DEEPEST = 12
_LONGEST_REPR = 500
_GIT_PATIENCE = 2.0  # seconds; a checkout on a slow disk must not hold up training


def mint_run_id() -> str:
    """Make an id that sorts by time and differs from any other: 2026-11-19-062700-ab12cd34."""
    # A job array begins hundreds of runs in one second: two bytes would make some of them meet.
    return f"{datetime.now().astimezone():%Y-%m-%d-%H%M%S}-{os.urandom(4).hex()}"


class RunDirectory:
    """One run on disk: its id, which life of it this is, and its facts.

    `generation` is 0 in a new directory and one more than any before at each re-opening and each
    step back. `facts` holds what `write` puts into `run.json`.
    """

    def __init__(self, path: Path, facts: dict[str, Any], *, shared: bool = False) -> None:
        self.path = path
        self.facts = facts
        self._shared = shared
        self._begun = False  # whether run.json was ours once
        # Training notes that it goes back while the background writes; it must not wait for a disk.
        # Of the thread: a signal's handler may close the run in the middle of either.
        self._changing = threading.RLock()
        self._writing = threading.RLock()

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], run_id: str | None = None, fresh: bool = False
    ) -> RunDirectory:
        """Make the directory or re-open it; call on one rank.

        With `fresh`, the directory may hold many runs: one that is found there goes on only if
        `run_id` names it. Otherwise a new one begins, and its first `write` keeps the facts of the
        run that was there as `<run id>.run.json`.

        Nothing is written yet, so an open log of another process can still refuse us first.
        """
        path = Path(path)
        _prove_writable(path)
        facts = _earlier_facts(path / _FACTS)
        if fresh and (run_id is None or facts.get("run_id") != run_id):
            facts = {} if run_id is None else _earlier_facts(path / f"{run_id}.{_FACTS}")
        _check_run_id(path, facts.get("run_id"), run_id)
        known = facts.get("run_id", run_id)
        # Rows may be newer than the facts of a killed run.
        logged = -1 if fresh and known is None else _last_logged(path, known)
        now = _now()
        run = cls(
            path,
            {
                "run_id": run_id or mint_run_id(),
                "created": now,
                "updated": now,
                **facts,
                "status": "running",
            },
            shared=fresh,
        )
        run.facts.setdefault("generations", [])
        run._begin(logged, None)
        return run

    @property
    def run_id(self) -> str:
        """Give the name of the run, the same in all its lives."""
        return str(self.facts["run_id"])

    @property
    def generation(self) -> int:
        """Give the number that rows written now are marked with."""
        return int(self.facts["generations"][-1]["generation"])

    def begin_generation(self, after_step: int | None = None) -> int:
        """Start the next generation: its rows supersede the earlier ones after `after_step`."""
        return self._begin(-1, after_step)

    def resumed(self, after_step: int) -> None:
        """Note the step of the checkpoint from which the current generation goes on."""
        with self._changing:
            self.facts["generations"][-1]["after_step"] = after_step

    def update(self, **facts: Any) -> None:
        """Replace facts by name, as JSON data, `config` without its secrets; `write` saves them."""
        for name, fact in facts.items():
            # Metrics may well be called `token` or `key`, so only a config hides what looks secret.
            data = plain(fact, hide=name == "config")
            with self._changing:
                self.facts[name] = data

    def write(self) -> None:
        """Put the facts on disk, whole or not at all."""
        with self._writing:
            with self._changing:
                self.facts["updated"] = _now()
                text = json.dumps(self.facts, indent=2, allow_nan=False) + "\n"
            if self._shared:
                self._write_beside_others(text.encode("ascii"))
            else:
                self._put(_FACTS, text.encode("ascii"))

    def _write_beside_others(self, facts: bytes) -> None:
        ours = f"{self.run_id}.{_FACTS}"
        content, other = self._found()
        if other is not None and self._begun:  # a run that began later: run.json is its own now
            self._put(ours, facts)
            return
        if other is not None:
            self._put(f"{other}.{_FACTS}", content)
        self._put(_FACTS, facts)
        self._begun = True
        with contextlib.suppress(OSError):  # from the time when another run's stood in run.json
            (self.path / ours).unlink()

    def _found(self) -> tuple[bytes, str | None]:
        """Give what is in run.json, and whose it is if it belongs to another run."""
        try:
            content = (self.path / _FACTS).read_bytes()
            run_id = json.loads(content)["run_id"]
        except (OSError, ValueError, KeyError, TypeError):
            return b"", None
        other = isinstance(run_id, str) and run_id != self.run_id and _is_file_name(run_id)
        return content, run_id if other else None

    def _put(self, name: str, content: bytes) -> None:
        """Write one file whole or not at all."""
        draft = self.path / f".{name}.{os.getpid()}-{os.urandom(4).hex()}"
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a power cut could leave the name without the text
            draft.replace(self.path / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise _unusable(self.path, error) from error

    def _begin(self, at_least_after: int, after_step: int | None) -> int:
        with self._changing:
            generations = self.facts["generations"]
            earlier = [int(entry["generation"]) for entry in generations]
            generation = max([at_least_after, *earlier]) + 1
            generations.append({"generation": generation, "after_step": after_step, "time": _now()})
            return generation


def _prove_writable(path: Path) -> None:
    probe = path / f".writable.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()  # permission bits do not tell the truth for root and on network disks
        probe.unlink()
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> RunDirectoryError:
    # A directory that is there is no error, so what is there is none.
    reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or error
    return RunDirectoryError(
        f"The run directory `{path}` cannot be written: {reason}. Make it writable, or choose "
        "another one with outdir=."
    )


def _check_run_id(path: Path, found: str | None, wanted: str | None) -> None:
    if found is not None and wanted is not None and found != wanted:
        raise RunDirectoryError(
            f"The run directory `{path}` holds the run {found!r}, not {wanted!r}. Choose another "
            f"outdir=, or leave run_id= out to go on with {found!r}."
        )


def _earlier_facts(file: Path) -> dict[str, Any]:
    """Read the facts of the earlier lives; a broken file is set aside, for its run must go on."""
    try:
        facts = json.loads(file.read_bytes(), parse_constant=str)  # NaN could not be written again
        if not (_is_file_name(facts["run_id"]) and facts["generations"]):
            raise ValueError("no run_id or generations")
        for entry in facts["generations"]:
            int(entry["generation"])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unusable(file.parent, error) from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        aside = file.with_name(f"{file.name}.broken-{os.urandom(2).hex()}")
        file.replace(aside)
        log.warning("%s cannot be read (%r); it is kept as %s, and begun anew.", file, error, aside)
        return {}
    return dict(facts)


def _is_file_name(run_id: Any) -> bool:
    if not isinstance(run_id, str) or run_id in ("", ".", "..") or "\0" in run_id:
        return False
    return Path(run_id).name == run_id


def _last_logged(path: Path, run_id: str | None) -> int:
    """Give the last generation in the logs beside run.json, -1 if none: they outlive its loss.

    Where the run is known, logs of other runs that share the directory are none of its own.
    """
    patterns = ["*.jsonl"]
    if run_id is not None:
        patterns = [f"{glob.escape(run_id)}{end}" for end in (".jsonl", ".*.jsonl")]
    found = -1
    for file in (file for pattern in patterns for file in path.glob(pattern)):
        with contextlib.suppress(OSError):  # whoever opens that log will say what is wrong with it
            row = jsonlines.last(file)
            found = max(found, row.generation if row is not None else -1)
    return found


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


# ------------------------------------------------------------------------------------------ facts


def surroundings() -> dict[str, Any]:
    """Tell where this process runs: host, platform, versions, git. Imports nothing; never fails."""
    return {
        "hosts": [socket.gethostname()],
        "pid": os.getpid(),
        "platform": platform.platform(),
        "versions": versions(),
        "git": git_state(),
    }


def versions() -> dict[str, str]:
    """Tell the versions of Python and of the packages in play, without importing one."""
    found = {"python": platform.python_version()}
    for name in ("everyrank", "numpy", "torch", "jax"):
        version = getattr(sys.modules.get(name), "__version__", None) or _installed(name)
        if version is not None:
            found[name] = str(version)
    return found


def _installed(name: str) -> str | None:
    from importlib import metadata  # 10 ms that only a new run pays

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def git_state(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Tell commit, branch, and whether tracked files were changed; {} if git cannot say."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        answer = subprocess.run(  # noqa: S603 - fixed words
            command,
            cwd=directory,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_PATIENCE,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # do not get in the user's way
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    head = dict(re.findall(r"^# branch\.(oid|head) (.+)$", answer, re.MULTILINE))
    dirty = any(not line.startswith("#") for line in answer.splitlines())
    return {"commit": head.get("oid"), "branch": head.get("head"), "dirty": dirty}


# --------------------------------------------------------------------------------- plain and safe

#: Names that hide everything under them.
_SECRET = re.compile(
    r"password|passwd|passphrase|secret|credential|authorization"
    r"|(api|access|private|auth|ssh|bearer|refresh)_?(key|token)s?(_|$)"
)
#: Names that hide texts only: `eos_token_id` and `num_key_value_heads` are numbers.
_SECRET_TEXT = re.compile(r"(^|_)(key|token)(_|$)")
_IN_REPR = re.compile(
    r"""(\b\w*(?:key|token|password|passwd|passphrase|secret|credential)\w*['"]?\s*[=:]\s*)"""
    r"""('[^']*(?:'|\Z)|"[^"]*(?:"|\Z))""",
    re.IGNORECASE,
)


def plain(value: Any, *, hide: bool = True, within: tuple[int, ...] = ()) -> Any:
    """Give any object as JSON data: secrets as "***", what JSON does not know as its repr.

    `within` identifies the containers around it: one that holds itself is not opened again.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return _plain_scalar(value)
    if isinstance(value, np.generic):
        return _plain_scalar(value.item()) if value.dtype.kind in "iufbU" else _repr(value)
    if len(within) >= _DEEPEST or id(value) in within:
        return _repr(value)
    within = (*within, id(value))
    fields = _fields(value)
    if fields is not None:
        return {
            str(name): _HIDDEN
            if hide and _is_secret(str(name), item)
            else plain(item, hide=hide, within=within)
            for name, item in fields.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, hide=hide, within=within) for item in value]
    if isinstance(value, os.PathLike):
        return str(value)
    return _repr(value)


def _plain_scalar(value: bool | float | str | None) -> Any:
    if isinstance(value, str):
        return str(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, int) and value.bit_length() > 64:
        return hex(value)  # readers stop at 64 bits, and Python at 4,300 decimal digits
    return value


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Give what a config holds by name: a mapping, a dataclass, or argparse's namespace."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    if type(value).__name__ == "Namespace":
        return dict(vars(value))
    return None


def _is_secret(name: str, value: Any) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
    if value is None:
        return False
    if _SECRET.search(words):
        return True
    return isinstance(value, str | bytes | list | tuple) and bool(_SECRET_TEXT.search(words))


def _repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - the border: a user's __repr__ may do anything
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    # Cut before it is searched, or a word of a million letters would take minutes.
    text = _IN_REPR.sub(rf"\1'{_HIDDEN}'", text[: 4 * _LONGEST_REPR])
    return text if len(text) <= _LONGEST_REPR else text[: _LONGEST_REPR - 3] + "..."
