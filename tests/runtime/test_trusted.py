"""Late imports of the runtime: what a tool writes into the project's source is not taken for a library."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv.project import Project
from aenv.runtime import trusted
from aenv.runtime.loader import load, unload
from tests.test_exports import python

TOOL = "from aenv import register_tool\n@register_tool\ndef double(number: int):\n    return 2 * number\n"
LIBRARIES = (
    *("pydantic", "pydantic_core", "typing_extensions", "annotated_types", "fractions", "zipfile", "calendar"),
    *("tempfile", "termios"),
)
NOTE = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A place at the front of the search path, which late imports leave out."""
    sys.path.insert(0, str(tmp_path))
    trusted.leave_out(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    trusted.take_back(tmp_path)
    sys.path.remove(str(tmp_path))
    for name in ("colorsys", "planted"):
        sys.modules.pop(name, None)


LOAD = """
import sys, warnings
import aenv.runtime.__main__
from pathlib import Path
from aenv import project
from aenv.runtime import loader
found = project.read(Path(sys.argv[1]), config_required=False)
loaded = loader.load(found)
(found.source / "planted-1.0.dist-info").mkdir()
for name, text in {planted!r}.items():
    (found.source / name).write_text(text)
"""


def after_load(root: Path, code: str) -> str:
    """What is printed by what runs once a project is loaded and a tool has written libraries into its source."""
    planted = {f"{name}.py": NOTE for name in (*LIBRARIES, "plugin")}
    planted["planted-1.0.dist-info/METADATA"] = "Name: planted\n"
    planted["planted-1.0.dist-info/entry_points.txt"] = "[pydantic]\nx = plugin:x\n"
    return python(f"import sys\nsys.argv.append({str(root)!r})\n{LOAD.format(planted=planted)}{code}")


@pytest.mark.parametrize("folder", ["src", "."])
def test_an_argument_is_converted_by_pydantic_whatever_a_tool_wrote(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "light.py").write_text(TOOL)
    code = (
        "assert not {'pydantic', 'fractions', 'zipfile'} & set(sys.modules)\n"
        "warnings.simplefilter('ignore')\n"  # of the plugin, which is not found
        """print(loaded.tools["double"].decode(b'{"number": "5"}'))\n"""
    )
    assert after_load(tmp_path, code) == "{'number': 5}\n"
    assert list(tmp_path.rglob("*.ran")) == []


def test_commands_and_shells_bring_nothing_of_what_a_tool_wrote(tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text(TOOL)
    code = (
        "import asyncio\nfrom aenv.runtime.access import Guard\nfrom aenv.runtime.app import App\n"
        "from aenv.runtime.commands import Command, run\nfrom aenv.runtime.context import Instance\n"
        "from aenv.runtime.service import Service\nfrom aenv.runtime.tokens import Gate\n"
        "sys.modules.pop('tempfile', None)\n"  # as where no other library has imported it
        "print(asyncio.run(run(Command('cat', stdin='text'), Path('/'))).stdout)\n"
        "service = Service(found, Instance(working_directory=Path('/')), loaded)\n"
        "assert 'termios' not in sys.modules\n"
        "App(service, Guard(Gate(None), loopback=True), max_body=1000).shells\n"
    )
    assert after_load(tmp_path, code) == "text\n"
    assert list(tmp_path.rglob("*.ran")) == []


def test_a_block_finds_what_is_elsewhere_and_nothing_there(source: Path) -> None:
    (source / "colorsys.py").write_text("planted = True\n")
    (source / "planted.py").write_text("")
    with trusted.imports():
        module = importlib.import_module("colorsys")
        with pytest.raises(ModuleNotFoundError, match="^No module named 'planted'$"):
            importlib.import_module("planted")
    assert not hasattr(module, "planted")
    importlib.import_module("planted")


def test_other_threads_find_what_is_there(source: Path) -> None:
    (source / "planted.py").write_text("")
    with trusted.imports():
        importing = threading.Thread(target=importlib.import_module, args=("planted",))
        importing.start()
        importing.join()
    assert Path(sys.modules["planted"].__file__ or "").parent == source


def test_a_project_that_is_unloaded_is_left_out_no_longer(source: Path) -> None:
    (source / "planted.py").write_text(TOOL)
    project = Project(source, "light", "1.0.0", {})
    load(project)
    unload(project)
    sys.path.insert(0, str(source))
    with trusted.imports():
        importlib.import_module("planted")
