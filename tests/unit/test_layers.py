"""Arrows point down only: imports between the packages, includes between the files of the core.

The two tables are the order; ARCHITECTURE.md draws it. Whatever is not in a table fails.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest first. A layer imports from earlier rows only; names in one row do not import each other.
PYTHON_LAYERS = (
    ("_core", "aside", "errors", "outside", "tracebacks", "phase"),
    ("phases_of_modes",),
    ("phases_of_launcher",),
    ("transitions",),
    ("failpoints",),
    ("command",),
    ("memory",),
    ("placement",),
    ("jobs",),
    ("durability",),
    ("membership",),
    ("edges", "parameters"),
    ("torch", "rpc", "files"),
    ("launch",),
    ("bench",),
    ("doctor", "rpctrace"),
    ("cli",),
    ("__main__",),
)
# Beside the layers and in no wheel: it may import what is below the command, and is imported by
# nobody. One file knows its name.
BENCHMARKS, ITS_DOOR = "tensorwire_benchmarks", "bench/checkout.py"
# Beside the layers: shipped for users' tests, so it stands on the public memory API alone.
TESTING_IMPORTS = {"_core", "errors", "memory"}
# `import tensorwire` re-exports these, and nothing inside imports the names that it re-exports.
ROOT_IMPORTS = {"errors", "memory"}

# Folders of the core, lowest first, by the same rule; files of one folder include no circle.
CPP_LAYERS = (
    ("base",),
    ("gpu", "fuse"),
    ("memory",),
    ("loop",),
    ("wire",),
    ("transports",),
    ("node",),
    ("bench", "rpc"),
    ("bindings",),
)
# A library's headers are seen by these files alone.
CPP_LIBRARIES: dict[str, set[str]] = {
    r"nanobind/|Python\.h": {"bindings/*.h", "bindings/*.cc"},
    r"ucp/|uct/|ucs/": {"ucx_test.cc"},  # ucx.h declares what is used of it
    r"infiniband/|rdma/": set(),
    r"cuda\.h>|cuda_runtime": {"cuda_driver_test.cc"},  # cuda_driver.h declares what is used of it
}
# A product file that would be longer has two responsibilities.
MOST_LINES = 600


def ranks(layers: Iterable[tuple[str, ...]]) -> dict[str, int]:
    return {name: rank for rank, row in enumerate(layers) for name in row}


@functools.cache
def imported_modules(source: str, package: tuple[str, ...]) -> tuple[str, ...]:
    """Dotted names that a module of `package` imports, wherever in the module the import stands."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            stem = ".".join([*base, *filter(None, [node.module])])
            found += (f"{stem}.{alias.name}" for alias in node.names)
    return tuple(found)


def layer_imports(source_root: Path) -> Iterator[tuple[Path, str, str]]:
    """(file, its layer, imported layer); the layer of tensorwire/__init__.py is ""."""
    for path in sorted(source_root.rglob("*.py")):
        parts = ["tensorwire", *path.relative_to(source_root).with_suffix("").parts]
        package, layer = tuple(parts[:-1]), parts[1] if parts[1] != "__init__" else ""
        for name in imported_modules(path.read_text(), package):
            top, _, rest = name.partition(".")
            if top == "tensorwire":
                yield path, layer, rest.partition(".")[0]


def benchmarks_violations(source_root: Path, benchmarks: Path) -> list[str]:
    found = [
        f"{path.relative_to(source_root)} knows {BENCHMARKS}"
        for path in sorted(source_root.rglob("*.py"))
        if BENCHMARKS in path.read_text() and not path.match(ITS_DOOR)
    ]
    for path in sorted(benchmarks.rglob("*.py")):
        package = path.relative_to(benchmarks).parent.parts
        for name in imported_modules(path.read_text(), package):
            top, _, rest = name.partition(".")
            layer = rest.partition(".")[0]
            if top == "tensorwire" and layer not in set(ranks(PYTHON_LAYERS)) - {"cli"}:
                found.append(f"{path.relative_to(benchmarks)} imports {layer}")
    return found


def python_violations(source_root: Path) -> list[str]:
    rank = ranks(PYTHON_LAYERS)
    found = []
    for path, layer, target in layer_imports(source_root):
        where = f"{path.relative_to(source_root)} imports {target}"
        if target == layer:
            continue
        if layer == "":
            allowed = target in ROOT_IMPORTS
        elif layer == "testing":
            allowed = target in TESTING_IMPORTS
        elif layer not in rank:
            found.append(f"{layer} has no place in PYTHON_LAYERS")
            continue
        else:
            allowed = target in rank and rank[target] < rank[layer]
        if not allowed:
            found.append(where)
    return found


def imports_of_files(source_root: Path) -> dict[str, set[str]]:
    """For each module of the package the modules of it that it imports, for types alone too."""
    modules = {}
    for path in sorted(source_root.rglob("*.py")):
        parts = ["tensorwire", *path.relative_to(source_root).with_suffix("").parts]
        package = tuple(parts[:-1])
        modules[".".join(package if parts[-1] == "__init__" else parts)] = path, package
    found: dict[str, set[str]] = {}
    for name, (path, package) in modules.items():
        imported = imported_modules(path.read_text(), package)
        # The name of a thing in a module is no module.
        targets = {each if each in modules else each.rpartition(".")[0] for each in imported}
        found[name] = (targets & modules.keys()) - {name, "tensorwire"}
    return found


def rooms_of(imports: dict[str, set[str]]) -> Iterator[dict[str, set[str]]]:
    """Yields for each package what its modules and folders import of one another."""
    packages = {name.rsplit(".", up)[0] for name in imports for up in range(1, name.count(".") + 1)}
    for package in sorted(packages):
        depth = package.count(".") + 2
        rooms: dict[str, set[str]] = {}
        for name, targets in imports.items():
            if name.startswith(package + "."):
                room = ".".join(name.split(".")[:depth])
                seen = {".".join(target.split(".")[:depth]) for target in targets}
                found = rooms.setdefault(room, set())
                found |= {other for other in seen - {room} if other.startswith(package + ".")}
        yield {room: targets & rooms.keys() for room, targets in rooms.items()}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, by way of others too; each circle once."""
    reach = {name: set(targets) for name, targets in imports.items()}
    for middle in reach:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    found = {tuple(sorted(o for o in reach[n] if n in reach[o])) for n in reach if n in reach[n]}
    return sorted(map(list, found))


def cpp_violations(folder: Path) -> list[str]:
    rank = ranks(CPP_LAYERS)
    found = []
    includes: dict[str, set[str]] = {}
    for path in sorted([*folder.glob("*/*.h"), *folder.glob("*/*.cc")]):
        room, own = path.parent.name, f"{path.parent.name}/{path.stem}"
        if room in ("tests", "fuzz"):
            continue
        if room not in rank:
            found.append(f"{room} has no place in CPP_LAYERS")
            continue
        headers = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)
        targets = includes.setdefault(own, set())
        targets |= {header.removesuffix(".h") for header in headers} - {own}
        for header in headers:
            target = header.rpartition("/")[0]
            if target != room and rank.get(target, len(CPP_LAYERS)) >= rank[room]:
                found.append(f"{room}/{path.name} includes {header}")
    known = {name: targets & includes.keys() for name, targets in includes.items()}
    return found + [f"{' and '.join(each)} include each other" for each in circles(known)]


def library_violations(folder: Path) -> list[str]:
    found = []
    for path in sorted([*folder.rglob("*.h"), *folder.rglob("*.cc")]):
        for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE):
            for library, users in CPP_LIBRARIES.items():
                if re.match(library, header) and not any(map(path.match, users)):
                    found.append(f"{path.name} includes {header}")
    return found


def long_files(folder: Path, *patterns: str) -> list[str]:
    """The files of a folder that match a pattern and have more than MOST_LINES lines."""
    lengths = {
        path.relative_to(folder): path.read_text().count("\n")
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
    }
    return [f"{path} has {lines} lines" for path, lines in lengths.items() if lines > MOST_LINES]


TENSORS = {"_version", "_values", "_indices"}  # of torch's tensors, which have no other names


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in TENSORS


def reaches(package: Path) -> list[str]:
    """Uses of attributes that are private to objects of another folder of the package."""
    defined: dict[str, set[Path]] = {}
    used: list[tuple[Path, int, str]] = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(ast.Name("self" | "cls"), name) | ast.FunctionDef(name=name):
                    defined.setdefault(name, set()).add(path.parent)
                case ast.AnnAssign(ast.Name(name)):  # a field of a dataclass
                    defined.setdefault(name, set()).add(path.parent)
                case ast.Attribute(_, name) if _private(name):
                    used.append((path, node.lineno, name))
    return [
        f"{path.relative_to(package)}:{line} uses {name}"
        for path, line, name in used
        if name in defined and path.parent not in defined[name]
    ]


def shared_names(folders: Iterable[Path]) -> list[str]:
    """Classes of one name in several files; a `Driver` is what a pair looks for in its module."""
    places: dict[str, list[str]] = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name != "Driver":
                places.setdefault(node.name, []).append(path.name)
    return [f"{name}: {', '.join(files)}" for name, files in places.items() if len(files) > 1]


def write_all(folder: Path, texts: Mapping[str, str]) -> None:
    """Makes a package of these files."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_two_classes_never_share_a_name() -> None:
    assert shared_names([ROOT / "src/tensorwire", ROOT / "benchmarks"]) == []


def test_a_shared_name_is_found(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("class Twice:\n    pass\nclass Driver:\n    pass\n")
    assert shared_names([tmp_path]) == ["Twice: one.py, two.py"]


def test_what_is_private_stays_in_its_folder() -> None:
    assert reaches(ROOT / "src/tensorwire") == []


def test_a_reach_into_another_folder_is_found(tmp_path: Path) -> None:
    texts = {
        "a/one.py": "class One:\n    _field: int\n    def __init__(self):\n        self._x = 1\n",
        "a/two.py": "def f(one):\n    return one._x + one._field\n",
        "b/three.py": "def f(one, torch):\n    torch._C\n    return one._x + one._field\n",
    }
    write_all(tmp_path, texts)
    assert sorted(reaches(tmp_path)) == ["b/three.py:3 uses _field", "b/three.py:3 uses _x"]


def test_imports_point_down() -> None:
    assert python_violations(ROOT / "src/tensorwire") == []


def test_no_file_imports_in_a_circle() -> None:
    assert circles(imports_of_files(ROOT / "src/tensorwire")) == []


def test_no_folder_imports_in_a_circle() -> None:
    rooms = list(rooms_of(imports_of_files(ROOT / "src/tensorwire")))
    assert [circle for each in rooms for circle in circles(each)] == []


def test_no_file_of_the_product_is_long() -> None:
    for folder in ("src/tensorwire", "benchmarks"):
        assert long_files(ROOT / folder, "**/*.py") == []


def test_benchmarks_stand_beside_the_wheel() -> None:
    assert benchmarks_violations(ROOT / "src/tensorwire", ROOT / "benchmarks") == []


def test_includes_point_down() -> None:
    assert cpp_violations(ROOT / "cpp") == []


def test_libraries_stay_behind_their_file() -> None:
    assert library_violations(ROOT / "cpp") == []


def test_no_file_of_the_core_is_long() -> None:
    assert long_files(ROOT / "cpp", "*/*.h", "*/*.cc") == []


def test_a_long_file_is_found(tmp_path: Path) -> None:
    for name, lines in {
        "long.cc": 601,
        "just.cc": 600,
        "long.md": 601,
        "tests/long.cc": 601,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n" * lines)
    assert long_files(tmp_path, "*.h", "*.cc") == ["long.cc has 601 lines"]


@pytest.mark.cold
def test_import_needs_numpy_only() -> None:
    """Whatever else is installed, `import tensorwire` does not load it."""
    command = [sys.executable, "-c", "import sys, tensorwire; print(*sys.modules)"]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "tensorwire" in loaded
    assert not {"torch", "click", "rich", "grpc", "matplotlib", "nixl"} & set(loaded)


@pytest.mark.parametrize(
    ("file", "source", "violation"),
    [
        ("memory/node.py", "from tensorwire.errors import ClosedError", None),
        ("memory/node.py", "from ..errors import ClosedError", None),
        ("memory/node.py", "from .region import Region", None),
        ("cli/info.py", "from tensorwire import memory", None),
        ("testing/pair.py", "import tensorwire.memory.node", None),
        ("memory/node.py", "def f():\n    from tensorwire.rpc import call", "imports rpc"),
        ("memory/node.py", "from .. import bench", "imports bench"),
        ("memory/node.py", "from tensorwire import Node", "imports Node"),
        ("rpc/call.py", "import tensorwire.files", "imports files"),
        ("testing/pair.py", "from ..bench import rows", "imports bench"),
        ("bench/rows.py", "from tensorwire.testing import pair", "imports testing"),
        ("doctor/measure.py", "from tensorwire.bench import rows", None),
        ("bench/memory.py", "from tensorwire.doctor import facts", "imports doctor"),
        ("__init__.py", "from .torch import Job", "imports torch"),
        ("memori/node.py", "import tensorwire.errors", "no place"),
    ],
)
def test_the_rule_itself(tmp_path: Path, file: str, source: str, violation: str | None) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    found = python_violations(tmp_path)
    assert bool(found) == (violation is not None)
    assert violation is None or violation in found[0]


def test_a_circle_is_found(tmp_path: Path) -> None:
    sources = {
        "memory/__init__.py": "from .node import Node\n",
        "memory/node.py": "def f():\n    from . import peer\n",
        "memory/peer.py": "if TYPE_CHECKING:\n    from .region import Region\n",
        "memory/region.py": "from tensorwire.memory.node import Node\n",
        "memory/word.py": "from .region import Region\n",
    }
    write_all(tmp_path, sources)
    (found,) = circles(imports_of_files(tmp_path))
    assert found == [f"tensorwire.memory.{name}" for name in ("node", "peer", "region")]


def test_a_circle_of_folders_is_found() -> None:
    imports = {
        "tensorwire.rpc.threads.channel": {"tensorwire.rpc.payload.lease"},
        "tensorwire.rpc.payload.lease": set(),
        "tensorwire.rpc.payload.window": {"tensorwire.rpc.threads.pool"},
        "tensorwire.rpc.threads.pool": set(),
    }
    assert circles(imports) == []
    found = [circle for each in rooms_of(imports) for circle in circles(each)]
    assert found == [["tensorwire.rpc.payload", "tensorwire.rpc.threads"]]


@pytest.mark.parametrize(
    ("texts", "violation"),
    [
        ({"base/word.h": "", "node/peer.cc": '#include "base/word.h"\n'}, None),
        ({"base/word.h": '#include "node/peer.h"\n'}, "base/word.h includes node/peer.h"),
        ({"base/word.h": '#include "peer.h"\n'}, "base/word.h includes peer.h"),
        ({"fuse/fuse.h": '#include "gpu/gpu.h"\n'}, "fuse/fuse.h includes gpu/gpu.h"),
        ({"besides/word.h": ""}, "besides has no place in CPP_LAYERS"),
        (
            {"node/a.h": '#include "node/b.h"\n', "node/b.cc": '#include "node/a.h"\n'},
            "node/a and node/b include each other",
        ),
    ],
)
def test_the_rule_of_the_core(
    tmp_path: Path, texts: Mapping[str, str], violation: str | None
) -> None:
    write_all(tmp_path, texts)
    assert cpp_violations(tmp_path) == ([] if violation is None else [violation])
