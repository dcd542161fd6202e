"""The house's walls: who may import whom, and what `import everyrank` costs nobody."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import everyrank

SOURCE = Path(everyrank.__file__).parent

#: Rooms of the host half: after the border no file knows what a tensor is.
HOST_HALF = (
    "records",
    "columns",
    "tables",
    "moment",
    "series",
    "jsonlines",
    "replay",
    "rundir",
    "runfiles",
    "backends",
    "report",
)
#: Rooms of the device half may not open files.
DEVICE_HALF = (
    "stage",
    "arrays",
    "operators",
    "metrics",
    "handed",
    "window",
    "reductions",
    "ranks",
    "jax",
)
FRAMEWORKS = {"torch", "jax", "jaxlib"}


def modules(room: str) -> list[Path]:
    path = SOURCE / room
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imports(path: Path) -> set[str]:
    """Give every module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("room", HOST_HALF)
def test_the_host_half_knows_no_framework(room):
    """Neither does it import the rooms of the device half."""
    device = ("stage", "arrays", "operators", "metrics", "handed", "window", "ranks", "intake")
    rooms = {f"everyrank.{name}" for name in (*device, "reductions")}
    for path in modules(room):
        for name in imports(path):
            assert name.split(".")[0] not in FRAMEWORKS, path
            assert not any(name == r or name.startswith(f"{r}.") for r in rooms), path


@pytest.mark.parametrize("room", DEVICE_HALF)
def test_the_device_half_opens_no_file(room):
    """A store of notes for finding each other is the one exception."""
    rooms = {f"everyrank.{n}" for n in ("backends", "columns", "report", "rundir", "jsonlines")}
    for path in modules(room):
        assert not rooms & {".".join(name.split(".")[:2]) for name in imports(path)}, path
        names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        assert "open" not in names or path.name == "store.py", path


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_framework_is_imported_in_rooms_of_its_name_only(framework):
    """Deleting a framework is deleting its own room, and one file in each other that has one."""
    allowed = {"stage", "ranks", "arrays"}
    for path in SOURCE.rglob("*.py"):
        top = {
            alias.name.split(".")[0]
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in getattr(node, "names", [])
            if isinstance(node, ast.Import)
        }
        if framework in top and framework not in path.relative_to(SOURCE).parts:
            assert path.parent.name in allowed, path
            assert path.stem in (framework, "device"), path


def test_the_whole_library_imports_with_torch_and_jax_blocked(tmp_path):
    """A plain Python program needs numpy and nothing else."""
    run(
        "import sys\n"
        "for name in ('torch', 'jax', 'orjson', 'pandas', 'xarray', 'wandb'):\n"
        "    sys.modules[name] = None\n"
        "import everyrank\n"
        f"with everyrank.History(outdir={str(tmp_path)!r}) as history:\n"
        "    history.update({'loss': 0.5, 'nan': float('nan')})\n"
        "    assert list(history['loss']) == [0.5]\n"
        "import everyrank.testing, everyrank.backends.console, everyrank.report.frames\n"
    )


def test_a_history_of_floats_imports_no_framework(tmp_path):
    """The value that is handed over says which runtime is needed, and a float needs none."""
    out = run(
        "import sys, everyrank\n"
        f"with everyrank.History(outdir={str(tmp_path)!r}) as history:\n"
        "    history.update({'loss': 0.5})\n"
        "print({'torch', 'jax', 'matplotlib', 'wandb', 'pandas', 'xarray'} & set(sys.modules))\n"
    )
    assert out.strip() == "set()"


def test_importing_the_package_imports_nearly_nothing():
    """Names are looked up when they are used."""
    out = run("import sys, everyrank\nprint([m for m in sys.modules if m.startswith('everyrank')])")
    assert out.strip() == "['everyrank']"


def test_importing_starts_nothing():
    """No thread, no handler, no directory."""
    run(
        "import threading, signal, everyrank\n"
        "before = signal.getsignal(signal.SIGTERM)\n"
        "import everyrank.history, everyrank.testing\n"
        "assert threading.active_count() == 1\n"
        "assert signal.getsignal(signal.SIGTERM) is before\n"
    )


def rooms_in_order() -> list[str]:
    """Give the rooms as the architecture lists them, from the front door down."""
    text = (Path(__file__).parents[1] / "ARCHITECTURE.md").read_text()
    table = text[text.index("## The rooms") : text.index("## Ranks")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [
        name.removesuffix(".py").rstrip("/") for row in rows for name in re.findall("`(.*?)`", row)
    ]


def imported_rooms(path: Path) -> set[str]:
    """Give the rooms that a file imports when it runs, wherever in it."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("everyrank."):
            found.add(str(node.module).split(".")[1])
        nodes += ast.iter_child_nodes(node)
    return found


def test_the_import_arrows_point_one_way():
    """A room imports only what stands below it in the architecture's table, which has them all."""
    order = rooms_in_order()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room != "__init__":
            for other in imported_rooms(path) - {room}:
                assert order.index(room) < order.index(other), f"{path.name} imports {other}"
