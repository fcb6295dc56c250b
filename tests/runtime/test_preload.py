"""What the watch over an import sees, what it lets pass, and that it leaves nothing behind."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from aenv import project
from aenv.runtime.preload import Verdict
from tests.support import FIXTURES

ROOT = FIXTURES.parent.parent
IMPORT = """
import json, os, sys, threading, time
from aenv import project
from aenv.runtime import loader
from aenv.runtime.preload import watch

found = project.read(sys.argv[1], config_required=False)
sys.argv = argv = ["demo", *sys.argv[2:]]


def state():
    environ = type(os.environ)
    return [sys.getprofile(), threading.getprofile(), os.environ, environ, vars(environ).copy(), time.time]


before = state()
with watch(found.source) as watched:
    try:
        loader.load(found)
    except Exception as exc:
        if "nothing is registered" not in str(exc):
            raise
after = state()
verdict = watched.verdict()
said = {"reasons": verdict.reasons, "variables": verdict.variables, "changes": verdict.changes}
said["restored"] = before == after and sys.argv is argv
with os.fdopen(os.dup(int(os.environ["ANSWER"])), "w") as answer:
    json.dump(said, answer)
sys.stdout.flush()
os._exit(0)
"""


class Seen(NamedTuple):
    reasons: list[str]
    variables: list[str]
    changes: dict[str, str | None]
    restored: bool


def watched(root: Path, *arguments: str, **variables: str) -> Seen:
    """What a fresh process sees of a project's import."""
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", IMPORT, str(root), *arguments],
            env={**os.environ, "ANSWER": str(writing), "PYTHONPATH": str(root / "site-packages"), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[writing],
            start_new_session=True,
        )
        os.close(writing)
        with os.fdopen(os.dup(reading)) as answer:
            text = answer.read()
        said = process.communicate()[0]
    finally:
        os.close(reading)
    assert text, said
    return Seen(**json.loads(text))


@pytest.fixture
def see(tmp_path):
    """Write a project, and what libraries it has, and watch its import."""

    def see(source: str, *arguments: str, files: dict[str, str] | None = None, **variables: str) -> Seen:
        for name, text in {"src/custom_env.py": source, **(files or {})}.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        (tmp_path / "site-packages").mkdir(exist_ok=True)
        seen = watched(tmp_path, *arguments, **variables)
        assert seen.restored
        return seen

    return see


# What may be forked

INNOCENT = {
    "the usual modules": """
        import asyncio, collections, contextlib, dataclasses, datetime, enum, functools, json, logging, math, os, random
        import re, secrets, signal, socket, sqlite3, string, subprocess, sys, tempfile, threading, time, typing, uuid
        """,
    "constants and compiled patterns": """
        import re
        from pathlib import Path
        HERE = Path(__file__).parent
        THERE = Path(__file__).resolve().parent
        PATTERN = re.compile("a+")
        """,
    "its own files": """
        import json
        from pathlib import Path
        DATA = json.loads((Path(__file__).parent / "data.json").read_text())
        with open(Path(__file__).parent / "data.json") as file:
            AGAIN = json.load(file)
        """,
    "loggers, also when they say something": """
        import logging
        logging.basicConfig()
        log = logging.getLogger(__name__)
        log.warning("loading %s", __name__)
        """,
    "functions that would": """
        import datetime, os, random, sys, threading, time, uuid
        def f(a=random.random, b=time.time):
            return os.environ["HOME"], time.time(), random.random(), uuid.uuid4(), sys.argv, datetime.datetime.now()
        lazily = lambda: time.time()
        now = time.time
        """,
    "default factories that are not called": """
        import time
        from dataclasses import dataclass, field
        from datetime import datetime
        from pydantic import BaseModel, Field
        @dataclass
        class A:
            made: float = field(default_factory=time.time)
        class B(BaseModel):
            made: datetime = Field(default_factory=datetime.now)
        """,
    "enums, dataclasses and models": """
        import enum
        from dataclasses import dataclass
        from pydantic import BaseModel
        class Colour(enum.Enum):
            RED = 1
        @dataclass(frozen=True)
        class Point:
            x: int
        class Query(BaseModel):
            text: str
        ORIGIN, ALL = Point(0), Query(text="all")
        """,
    "a generator with a seed": """
        import random
        import numpy
        generator = random.Random(7)
        FIRST = [generator.random(), generator.randint(1, 6)]
        GRID = numpy.random.default_rng(7).random(3)
        """,
    "numpy": """
        import numpy as np
        TABLE = np.arange(100).reshape(10, 10) @ np.ones((10, 10))
        """,
    "gymnasium": """
        import gymnasium
        from gymnasium import spaces
        gymnasium.register("Mine-v0", entry_point="custom_env:Mine")
        SPACE = spaces.Discrete(4)
        """,
    "locks, queues and executors that run nothing": """
        import queue, threading
        from concurrent.futures import ThreadPoolExecutor
        lock, condition, todo, pool = threading.Lock(), threading.Condition(), queue.Queue(), ThreadPoolExecutor(4)
        """,
    "a thread that has ended": """
        import threading
        thread = threading.Thread(target=print)
        thread.start()
        thread.join()
        """,
    "parsers that parse nothing": """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--size", type=int)
        """,
    "a database in memory": """
        import sqlite3
        connection = sqlite3.connect(":memory:")
        connection.execute("create table notes (title text)")
        """,
    "code for another way to start it": """
        import sys, time
        if __name__ == "__main__":
            print(time.time(), sys.argv)
        """,
    "its own packages": """
        from parts.pieces import PIECE
        """,
}


@pytest.mark.parametrize("source", INNOCENT.values(), ids=INNOCENT)
def test_innocent_imports_are_clean(see, source):
    files = {"src/data.json": "[1]", "src/parts/__init__.py": "", "src/parts/pieces.py": "PIECE = 1"}
    assert see(source, "--size", "3", files=files).reasons == []


@pytest.mark.parametrize(
    ("root", "reasons"),
    [
        *((name, []) for name in ("default", "gymnasium", "terminal")),
        # The library makes a key for its server, which all forks would have in common.
        ("mcp", ["draws randomness (os.urandom) at src/custom_env.py:16"]),
        (FIXTURES / "lab", []),
        (ROOT / "tests/seeds/guide", []),
        (ROOT / "envs/mini-terminal", []),
        (ROOT / "examples/01-hello", []),
    ],
    ids=str,
)
def test_verdicts_on_our_own_projects(tmp_path, root, reasons):
    if isinstance(root, str):
        project.scaffold("demo", tmp_path, template=root)
        root = tmp_path / "demo"
    seen = watched(root)
    assert seen.reasons == reasons
    assert seen.restored


# What may not

HERE = "src/custom_env.py:3"
READING = {
    "import os\n\nos.environ['HOME']": "reads the variable HOME",
    "import os\n\nos.getenv('MODE', 'fast')": "reads the variable MODE",
    "from os import environ\n\nenviron.get('MODE')": "reads the variable MODE",
    "import os\n\n'MODE' in os.environ": "reads the variable MODE",
    "import os\n\nos.environb.get(b'MODE')": "reads the variable MODE",
    "import os\n\nos.environ.pop('MODE', None)": "reads the variable MODE",
    "from pathlib import Path\n\nPath.home()": "reads the variable HOME",
    "import os\n\nos.path.expandvars('$MODE')": "reads the variable MODE",
    "import os\n\nos.environ.copy()": "reads the whole environment",
    "import os\n\n{name: os.environ[name] for name in os.environ}": "reads the whole environment",
    "import os\n\n{**os.environ}": "reads the whole environment",
    "import os\n\nstr(os.environ)": "reads the whole environment",
    "import os\n\nos.putenv('MODE', 'fast')": "changes the environment past os.environ (os.putenv)",
    "import time\n\ntime.time()": "reads the clock (time.time)",
    "from time import monotonic\n\nmonotonic()": "reads the clock (time.monotonic)",
    "import time\n\ntime.strftime('%Y')": "reads the clock (time.strftime)",
    "import datetime\n\ndatetime.datetime.now()": "reads the clock (datetime.now)",
    "from datetime import datetime, UTC\n\ndatetime.now(UTC)": "reads the clock (datetime.now)",
    "import datetime\n\ndatetime.date.today()": "reads the clock (date.today)",
    "from email.utils import formatdate\n\nformatdate()": "reads the clock (time.time)",
    "import random\n\nrandom.random()": "draws randomness (random)",
    "import random\n\nrandom.choice('abc')": "draws randomness (random)",
    "from random import shuffle\n\nshuffle([1, 2, 3])": "draws randomness (random)",
    "import random\n\nrandom.seed(7)": "draws randomness (random)",
    "import random\n\nrandom.Random()": "draws randomness (random.Random)",
    "import random\n\nrandom.SystemRandom().random()": "draws randomness (os.urandom)",
    "import secrets\n\nsecrets.token_hex()": "draws randomness (os.urandom)",
    "import uuid\n\nuuid.uuid4()": "draws randomness (os.urandom)",
    "import numpy\n\nnumpy.random.default_rng()": "draws randomness (os.urandom)",
    "import os\n\nos.urandom(8)": "draws randomness (os.urandom)",
    "\n\nopen('/dev/urandom', 'rb').close()": "draws randomness (/dev/urandom)",
    "\n\nopen('/proc/self/environ', 'rb').close()": "reads /proc/PID/environ",
    "import sys\n\nsys.argv[1:]": "reads the arguments (sys.argv)",
    "from sys import argv\n\nlen(argv)": "reads the arguments (sys.argv)",
    "import sys\n\n'--fast' in sys.argv": "reads the arguments (sys.argv)",
    "import sys\n\n['x'] + sys.argv": "reads the arguments (sys.argv)",
    "import sys\n\n' '.join(sys.argv)": "reads the arguments (sys.argv)",
    "import sys\n\nname, *rest = sys.argv": "reads the arguments (sys.argv)",
    "import sys\n\nsys.argv[0]": "reads the arguments (sys.argv)",
    "import argparse\n\nargparse.ArgumentParser().parse_args()": "reads the arguments (sys.argv)",
    "import os\n\nos.getpid()": "asks where or as whom it runs (os.getpid)",
    "from pathlib import Path\n\nPath.cwd()": "asks where or as whom it runs (os.getcwd)",
    "import os\n\nos.path.abspath('data')": "asks where or as whom it runs (os.getcwd)",
    "import socket\n\nsocket.gethostname()": "asks where or as whom it runs (socket.gethostname)",
    "import platform\n\nplatform.node()": "asks where or as whom it runs (platform.node)",
    "import os\n\nos.system('true')": "starts a process (os.system)",
    "import subprocess\n\nsubprocess.run(['true'])": "starts a process (subprocess.fork_exec)",
    "import os\n\nos.waitpid(os.fork() or os._exit(0), 0)": "starts a process (os.fork)",
    "import socket\n\nsocket.getaddrinfo('127.0.0.1', 1)": "uses the network (socket.getaddrinfo)",
    "import socket\n\nsocket.socket().bind(('127.0.0.1', 0))": "uses the network (bind)",
    "import socket\n\nsocket.socket().connect_ex(('127.0.0.1', 1))": "uses the network (connect_ex)",
    "import signal\n\nsignal.alarm(0)": "sets a timer (signal.alarm)",
    "import os\n\nos.mkdir('made')": "makes or changes files (os.mkdir)",
    "from pathlib import Path\n\nPath('made').write_text('x')": "writes ROOT/made",
    "\n\nopen('made', 'a').close()": "writes ROOT/made",
    "import asyncio\n\nasyncio.new_event_loop().close()": "makes an event loop",
    "import _thread\n\n_thread.start_new_thread(print, ())": "starts a thread (_thread)",
}


@pytest.mark.parametrize("source", READING)
def test_what_an_import_does_is_named_with_its_place(see, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = see(source)
    plain = [re.sub(r"/proc/\d+/", "/proc/PID/", reason) for reason in seen.reasons]
    assert f"{READING[source]} at {HERE}".replace("ROOT", str(tmp_path)) in plain


LEFT = {
    "import threading\n\nthreading.Thread(target=threading.Event().wait, name='idle', daemon=True).start()": (
        "leaves the thread 'idle' running, from HERE"
    ),
    "import socket\n\nkept = socket.socketpair()": "leaves a socket open",
    "import os\n\nkept = os.pipe()": "leaves a pipe open",
    "\n\nkept = open(__file__)": "leaves ROOT/src/custom_env.py open, from HERE",
    "import logging\n\nlogging.basicConfig(filename='made')": "leaves ROOT/made open, from HERE",
    "import sqlite3\n\nkept = sqlite3.connect('made'); kept.execute('create table a (b)')": "leaves ROOT/made open",
    "import asyncio\n\nkept = asyncio.new_event_loop()": "leaves an event queue open",
    "import uvloop\n\nkept = uvloop.new_event_loop()": "leaves an event queue open",
    "import mmap\n\nkept = mmap.mmap(-1, 4096)": "leaves memory that forks would share: /dev/zero",
    "import multiprocessing\n\nkept = multiprocessing.Lock()": "leaves memory that forks would share",
    "import multiprocessing\n\nkept = multiprocessing.Value('i')": "leaves memory that forks would share",
    "import signal\n\nsignal.signal(signal.SIGUSR1, print)": "sets a handler of SIGUSR1, from HERE",
    "import os\n\nos.chdir('/')": "changes the working directory, from HERE",
    "import faulthandler\n\nfaulthandler.dump_traceback_later(600)": (
        "leaves threads running that Python does not know: 1"
    ),
    "import sys\n\nkept = sys.argv": "keeps sys.argv",
    "import sys\n\nsys.argv = ['mine']": "replaces sys.argv",
    "import sys\n\nsys.setprofile(None)": "sets a profile function, so that not everything was seen",
    "import numpy\n\nnumpy.random.rand()": "draws randomness (numpy.random)",
    "import numpy\n\nnumpy.random.seed(7)": "draws randomness (numpy.random)",
}


@pytest.mark.parametrize("source", LEFT)
def test_what_an_import_leaves_behind_is_named(see, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = LEFT[source].replace("HERE", HERE).replace("ROOT", str(tmp_path))
    reasons = see(source).reasons
    assert any(reason == expected or reason.startswith(f"{expected}: ") for reason in reasons), reasons


@pytest.mark.parametrize(
    "source",
    [
        "import time\nfrom functools import partial\nnow = partial(time.time)",
        "from collections import defaultdict\nfrom time import monotonic\nseen = defaultdict(monotonic)",
        "import random\n\nrolls = iter(random.random, 2)",
        "from datetime import datetime\nimport msgspec\nkept = msgspec.field(default_factory=datetime.now)",
    ],
)
def test_a_function_that_may_be_called_unseen_counts_where_it_is_handed_on(see, source):
    (reason,) = {reason for reason in see(source).reasons if reason.startswith("hands ")}
    assert reason.endswith(f"which may call it, at {HERE}")


def test_a_model_whose_factory_was_called_unseen(see):
    model = """
        import time
        from pydantic import BaseModel, Field

        class Note(BaseModel):
            made: float = Field(default_factory=time.time)
        """
    assert see(model).reasons == []
    reason = "hands time.time to Field, which may call it, at src/custom_env.py:6"
    assert see(model + "\n        first = Note()").reasons == [reason]


# Where, and whose


def test_the_place_is_the_innermost_of_the_project(see):
    seen = see(
        "from helpers.clock import now\nSTARTED = now()\n",
        files={
            "src/helpers/__init__.py": "",
            "src/helpers/clock.py": "import time\n\ndef now():\n    return time.time()\n",
        },
    )
    assert seen.reasons == ["reads the clock (time.time) at src/helpers/clock.py:4"]


def test_each_reason_is_told_once_and_in_order(see):
    seen = see(
        """
        import os, random, time
        for number in range(5000):
            random.random()
        A, B = time.time(), os.getenv("A")
        C = os.getenv("A"), os.getenv("C")
        """
    )
    assert seen.reasons == [
        "draws randomness (random) at src/custom_env.py:4",
        "reads the clock (time.time) at src/custom_env.py:5",
        "reads the variable A at src/custom_env.py:5",
        "reads the variable A at src/custom_env.py:6",
        "reads the variable C at src/custom_env.py:6",
    ]


def test_a_threads_reads_count_though_it_has_ended(see):
    seen = see(
        """
        import os, threading
        def read():
            os.environ.get("MODE")
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        """
    )
    assert seen.reasons == ["reads the variable MODE at src/custom_env.py:4"]


def test_files_called_like_those_of_the_standard_library_are_the_authors(see):
    seen = see(
        "from mine import platform, shutil\n",
        files={
            "src/mine/__init__.py": "",
            "src/mine/platform.py": "import os\nPID = os.getpid()\n",
            "src/mine/shutil.py": "import os\nMODE = os.environ.get('MODE')\n",
        },
    )
    assert seen.reasons == [
        "asks where or as whom it runs (os.getpid) at src/mine/platform.py:2",
        "reads the variable MODE at src/mine/shutil.py:2",
    ]


def test_a_project_without_a_source_folder(tmp_path):
    (tmp_path / "custom_env.py").write_text("import time\nNOW = time.time()\n")
    assert watched(tmp_path).reasons == ["reads the clock (time.time) at custom_env.py:2"]


def test_a_project_that_is_shipped_among_libraries(tmp_path):
    root = tmp_path / "site-packages" / "envs" / "demo"
    (root / "src").mkdir(parents=True)
    (root / "src" / "custom_env.py").write_text("import time\nNOW = time.time()\n")
    assert watched(root).reasons == ["reads the clock (time.time) at src/custom_env.py:2"]


LIBRARY = "import library\n\nlibrary.work()\n"


def library(at_import: str, when_called: str = "pass") -> dict[str, str]:
    return {
        "site-packages/library.py": f"import os, random, socket, subprocess, sys, threading, time, uuid\n"
        f"{at_import}\n\ndef work():\n    return {when_called}\n".replace("return pass", "pass")
    }


def test_what_libraries_read_of_the_environment_is_a_list_of_variables(see):
    seen = see(LIBRARY, files=library("A = os.environ.get('LIBRARY_MODE')", "os.getenv('LIBRARY_LEVEL')"))
    assert seen.reasons == []
    assert {"LIBRARY_MODE", "LIBRARY_LEVEL"} <= set(seen.variables)
    assert "*" not in seen.variables
    seen = see(LIBRARY, files=library("A = [name for name in os.environ if name.startswith('LIBRARY_')]"))
    assert (seen.reasons, seen.variables) == ([], ["*"])


def test_what_the_standard_library_reads_as_it_is_imported_is_a_variable(see):
    seen = see("import pydoc\n")
    assert seen.reasons == []
    assert "PYTHONDOCS" in seen.variables


@pytest.mark.parametrize(
    "source",
    [
        *("A = time.time()", "A = random.random()", "A = os.urandom(8)", "A = uuid.uuid4()", "A = os.getpid()"),
        *("A = os.getcwd()", "A = socket.gethostname()", "A = sys.argv[0]", "A = threading.Lock()"),
        "A = socket.socket(); A.bind(('127.0.0.1', 0)); A.close()",
        "os.putenv('A', 'b')",
    ],
)
def test_what_a_library_does_for_itself_as_it_is_imported_is_let_pass(see, source):
    assert see(LIBRARY, files=library(source)).reasons == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("subprocess.run(['true'])", "starts a process (subprocess.fork_exec) at PLACE"),
        ("A = random.Random()", "draws randomness (random.Random) at PLACE"),
        ("A = sys.argv[1:]", "reads the arguments (sys.argv) at PLACE"),
        ("open('made', 'w').close()", "writes ROOT/made at PLACE"),
        ("os.mkdir('made')", "makes or changes files (os.mkdir) at PLACE"),
        ("A = open(__file__)", "leaves ROOT/site-packages/library.py open, from PLACE"),
        ("threading.Timer(600, print).start()", "leaves the thread 'Thread-1' running, from PLACE"),
    ],
)
def test_what_a_library_may_not_do_either(see, source, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = "library.py:2, imported at src/custom_env.py:1"
    assert see(LIBRARY, files=library(source)).reasons == [
        reason.replace("PLACE", place).replace("ROOT", str(tmp_path))
    ]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("time.time()", "reads the clock (time.time)"),
        ("random.random()", "draws randomness (random)"),
        ("os.urandom(8)", "draws randomness (os.urandom)"),
        ("os.getpid()", "asks where or as whom it runs (os.getpid)"),
    ],
)
def test_what_a_library_does_for_the_project_is_the_projects(see, call, reason):
    assert see(LIBRARY, files=library("", call)).reasons == [f"{reason} at {HERE}"]


def test_a_folder_that_is_there_already_is_not_made(see, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert see("from pathlib import Path\nPath('src').mkdir(exist_ok=True)\n").reasons == []


def test_torch_that_was_seeded(see):
    torch = {"site-packages/torch.py": "seed = [67280421310721]\n\ndef initial_seed():\n    return seed[0]\n"}
    assert see("import torch\n", files=torch).reasons == []
    assert see("import torch\ntorch.seed[0] = 7\n", files=torch).reasons == ["draws randomness (torch)"]


# The environment


def test_what_the_import_sets_in_the_environment_is_told(see):
    seen = see(
        """
        import os
        os.environ["SET"] = "1"
        os.environ.setdefault("CHOSEN", "2")
        os.environ.setdefault("GIVEN", "3")
        del os.environ["GONE"]
        os.environ["BRIEFLY"] = "4"
        del os.environ["BRIEFLY"]
        """,
        GIVEN="mine",
        GONE="x",
    )
    assert seen.reasons == []
    assert seen.changes == {"SET": "1", "CHOSEN": "2", "GONE": None}
    assert {"SET", "CHOSEN", "GIVEN", "GONE"} <= set(seen.variables)


def test_compiled_libraries_read_variables_that_nobody_sees(see):
    assert "OMP_*" not in see("import json\n").variables
    assert {"OMP_*", "OPENBLAS_*"} <= set(see("import numpy\n").variables)


def test_reasons_alone_speak_against_sharing():
    assert Verdict(variables=("MODE", "OMP_*")).clean
    assert not Verdict(reasons=("reads the clock",)).clean


# The watch itself


def test_an_import_that_fails_is_not_clean_and_leaves_nothing(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "custom_env.py").write_text("raise RuntimeError('no')\n")
    script = """
import sys, threading
from pathlib import Path
from aenv import project
from aenv.runtime import loader
from aenv.runtime.preload import watch

found = project.read(sys.argv[1], config_required=False)
argv = sys.argv
try:
    with watch(found.source) as watched:
        loader.load(found)
except Exception as exc:
    print(type(exc).__name__, *watched.verdict().reasons, sep="|")
print(sys.getprofile(), threading.getprofile(), sys.argv is argv, sep="|")
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["StartFailed|fails with StartFailed", "None|None|True"]


def test_a_profile_function_that_was_there_is_put_back(tmp_path):
    (tmp_path / "src").mkdir()
    script = """
import sys, threading
from pathlib import Path
from aenv.runtime.preload import watch

def mine(*event): pass
sys.setprofile(mine)
threading.setprofile(mine)
with watch(Path(sys.argv[1])):
    seen = sys.getprofile() is not mine
print(seen, sys.getprofile() is mine, threading.getprofile() is mine)
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]


def test_what_an_author_keeps_is_the_real_thing(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "custom_env.py").write_text(
        "import os, random, sys\nfrom os import environ, urandom\nfrom random import random as draw\n"
        "from time import time\nfrom aenv import register_tool\n\n@register_tool\ndef f() -> int: return 1\n"
    )
    script = """
import os, pickle, random, sys, time
from aenv import project
from aenv.runtime import loader
from aenv.runtime.preload import watch

found = project.read(sys.argv[1], config_required=False)
with watch(found.source) as watched:
    loader.load(found)
import custom_env as mine
assert watched.verdict().clean
assert mine.time is time.time and mine.draw is random.random and mine.urandom is os.urandom
assert mine.environ is os.environ and type(mine.sys.argv) is list
assert pickle.loads(pickle.dumps(mine.time)) is time.time
print("real")
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout == "real\n", done.stderr
