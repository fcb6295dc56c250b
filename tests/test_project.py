"""A project on disk: what is read, what is refused and where, what is written."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv import project
from aenv.errors import Conflict, Invalid, InvalidConfig, NotFound
from aenv.project import fields
from aenv.project.scan import scan

MINIMAL = {"name": "demo", "version": "1.2.3", "buildConfig": {}, "deployConfig": {}}


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "demo"
    folder.mkdir()
    return folder


def put(root, config):
    text = config if isinstance(config, str) else json.dumps(config, indent=2)
    (root / "config.json").write_text(text, encoding="utf-8")
    return root


def deploy(**values):
    return {**MINIMAL, "deployConfig": values}


# Reading


def test_a_project_is_read_as_it_is_now_whatever_was_read_before(root):
    before = project.read(put(root, deploy(cpu="2", environmentVariables={"A": "1"})))
    before.config["deployConfig"]["environmentVariables"]["A"] = "changed by its reader"
    again = project.read(root)
    assert again.environment_variables == {"A": "1"}
    assert project.read(put(root, deploy(cpu="3"))).value("deployConfig.cpu") == "3"
    for _ in range(2):
        with pytest.raises(InvalidConfig):
            project.read(put(root, "{"))
    assert project.read(put(root, deploy(cpu="2"))).value("deployConfig.cpu") == "2"


def test_a_minimal_project_has_the_defaults(root):
    found = project.read(put(root, MINIMAL))
    assert (found.root, found.name, found.version, found.source) == (root, "demo", "1.2.3", root)
    assert (found.description, found.tags, found.ttl, found.environment_variables) == ("", (), None, {})
    assert found.timeouts == (None, None, None, None)
    assert (found.protocol, found.test_script, found.storage_name) == (None, "", "demo")
    assert found.dockerfile == root / "Dockerfile"
    assert found.value("deployConfig.cpu") == "1"
    assert found.value("deployConfig.service.port") == 8081
    assert found.warnings == ()


def test_what_is_set_is_read(root):
    config = deploy(
        ttl="1h30m",
        environmentVariables={"A": "1", "PORT": 80},
        timeouts={"startup": 90, "call": "2m", "suspend": "5s"},
        protocol="2025-11-25",
        podTemplate="dualcontainer",
        network={"allow": ["example.org:443", "*.example.org:80", "[::1]:22"]},
        secrets=["API_KEY"],
        preload="auto",
        pool={"min": 1, "max": 2},
        dependsOn={"shell": "mini-terminal@^1.0"},
        cpuRequest="500m",
        cpuLimit=2,
        service={"enableStorage": True, "storageSize": "10Gi", "storageName": "data"},
    )
    config |= {"description": "a demo", "tags": ["linux"], "testConfig": {"script": " make check "}}
    (root / "src").mkdir()
    found = project.read(put(root, config))
    assert found.source == root / "src"
    assert found.ttl == 5400
    assert found.timeouts == (90, 120, None, 5)
    assert found.environment_variables == {"A": "1", "PORT": "80"}
    assert (found.protocol, found.description, found.tags) == ("2025-11-25", "a demo", ("linux",))
    assert (found.test_script, found.storage_name, found.warnings) == ("make check", "data", ())


@pytest.mark.parametrize("given", [".", "src", "config.json"])
def test_the_root_is_found_from_inside(root, given):
    (root / "src").mkdir()
    put(root, MINIMAL)
    assert project.find(root / given) == root
    assert project.read(root / given).name == "demo"


def test_a_bare_folder_is_a_project_only_when_that_is_asked_for(tmp_path):
    folder = tmp_path / "My tools!"
    folder.mkdir()
    with pytest.raises(InvalidConfig, match=r"there is no config\.json in") as caught:
        project.read(folder)
    assert "aenv init" in caught.value.hint
    found = project.read(folder, config_required=False)
    assert (found.name, found.version, found.source, found.config) == ("My-tools", "0.0.0", folder, {})


def test_a_bare_folder_whose_config_is_wrong_is_still_refused(root):
    with pytest.raises(InvalidConfig):
        project.read(put(root, "{"), config_required=False)


def test_a_path_that_is_no_directory(tmp_path):
    with pytest.raises(NotFound, match="does not exist"):
        project.read(tmp_path / "none")
    (tmp_path / "file.py").write_text("")
    with pytest.raises(InvalidConfig, match="not a directory"):
        project.read(tmp_path / "file.py")


# What is refused, and where


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        ('{"name": "a",}', ":1:", "last comma"),
        ('{\n  "name": "a"\n  "version": "1.0.0"\n}', ":3:3:", "comma is missing"),
        ("{\n  'name': 1}", ":2:3:", "double quotes"),
        ('{"a" 1}', ":1:", "colon is missing"),
        ('{"a": }', ":1:", "value is missing"),
        ("{} {}", ":1:4:", "more than one value"),
        ("", ":1:1:", "value is missing"),
    ],
)
def test_invalid_json_is_shown_where_it_stands(root, monkeypatch, text, place, hint):
    monkeypatch.chdir(put(root, text))
    with pytest.raises(InvalidConfig) as caught:
        project.read(root)
    assert caught.value.message.startswith(f"config.json{place}")
    assert hint in caught.value.hint


@pytest.mark.parametrize("text", ['{"a": NaN}', "[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_json_that_python_alone_would_take_or_choke_on(root, text):
    with pytest.raises(InvalidConfig, match="not valid JSON"):
        project.read(put(root, text))


def test_not_text(root):
    (root / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(InvalidConfig, match="not UTF-8"):
        project.read(root)


def test_a_byte_order_mark_is_no_mistake(root):
    (root / "config.json").write_text(json.dumps(MINIMAL), encoding="utf-8-sig")
    assert project.read(root).name == "demo"


def test_a_wrong_type_names_field_and_line(root, monkeypatch):
    config = deploy(cpu="1", service={"port": 8081, "replicas": "three"})
    monkeypatch.chdir(put(root, config))
    line = json.dumps(config, indent=2)[: json.dumps(config, indent=2).index("replicas")].count("\n") + 1
    with pytest.raises(InvalidConfig) as caught:
        project.read(root)
    assert str(caught.value) == (f'config.json:{line}: deployConfig.service.replicas must be an integer, found "three"')


def test_every_mistake_is_named_at_once(root):
    with pytest.raises(InvalidConfig) as caught:
        project.read(put(root, {"name": "-", "version": "1", "tags": ["a", 1], "deployConfig": {"os": "windows"}}))
    lines = caught.value.message.splitlines()
    assert [line.split(": ", 1)[1].split()[0] for line in lines] == [
        "name",
        "version",
        "tags[1]",
        "deployConfig.os",
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "must hold one JSON object"),
        ({"version": "1.0.0"}, "name is missing"),
        ({"name": "a", "version": None}, "version is missing"),
        ({**MINIMAL, "name": "a/b"}, "name must be letters"),
        ({**MINIMAL, "version": "1.0"}, "version must be a semantic version"),
        ({**MINIMAL, "tags": "linux"}, "tags must be a list of strings"),
        ({**MINIMAL, "artifacts": ["x"]}, "artifacts[0] must be an object"),
        ({**MINIMAL, "artifacts": [{"content": 1}]}, "artifacts[0].content must be a string"),
        ({**MINIMAL, "deployConfig": []}, "deployConfig must be an object, found []"),
        (deploy(cpu="1Gi"), 'deployConfig.cpu must be a number of cores such as "1", "0.5" or "500m"'),
        (deploy(cpu=True), "deployConfig.cpu must"),
        (deploy(cpu="0"), "deployConfig.cpu must"),
        (deploy(memory="2GB"), 'deployConfig.memory must be a size such as "512Mi", "2Gi"'),
        (deploy(memory="100m"), "deployConfig.memory must be a size"),
        (deploy(ephemeralStorage="lots"), "deployConfig.ephemeralStorage must be a size"),
        (deploy(memoryRequest="4Gi", memoryLimit="2Gi"), "the request 4Gi is over the limit 2Gi"),
        (deploy(cpu="1", cpuLimit="500m"), "deployConfig.cpuLimit: the request 1 is over the limit 500m"),
        (deploy(os="windows"), 'deployConfig.os must be "linux"'),
        (deploy(ttl="soon"), "deployConfig.ttl must be a length of time"),
        (deploy(ttl=0), "deployConfig.ttl must be a length of time"),
        (deploy(ttl=True), "deployConfig.ttl must be a length of time"),
        (deploy(timeouts={"call": "never"}), "deployConfig.timeouts.call must be a length of time"),
        (deploy(protocol="mcp"), "deployConfig.protocol must be an MCP revision"),
        (deploy(podTemplate=""), "deployConfig.podTemplate must be a string that is not empty"),
        (deploy(network="some"), 'deployConfig.network must be "none", "full"'),
        (deploy(network={"deny": []}), 'deployConfig.network must be "none", "full"'),
        (deploy(network={"allow": ["example.org"]}), 'deployConfig.network.allow[0] must be "host:port"'),
        (deploy(network={"allow": ["a:70000"]}), 'deployConfig.network.allow[0] must be "host:port"'),
        (deploy(preload="yes"), 'deployConfig.preload must be true, false or "auto"'),
        (deploy(forkable="yes"), "deployConfig.forkable must be true or false"),
        (deploy(pool={"min": 2, "max": 1}), "deployConfig.pool.min must not be over pool.max"),
        (deploy(pool={"min": -1}), "deployConfig.pool.min must be 0 or more"),
        (deploy(dependsOn={"a": "b@@"}), 'deployConfig.dependsOn.a must be "name" or "name@range"'),
        (deploy(dependsOn={"a b": "c"}), "deployConfig.dependsOn.a b is not a usable name"),
        (deploy(service={"port": 0}), "deployConfig.service.port must be between 1 and 65535"),
        (deploy(service={"replicas": True}), "deployConfig.service.replicas must be an integer"),
        (deploy(service={"mountPath": "data"}), "deployConfig.service.mountPath must be an absolute path"),
        (
            deploy(service={"mountPath": "/a/../etc"}),
            "deployConfig.service.mountPath must be an absolute path",
        ),
        (
            deploy(service={"enableStorage": True, "storageSize": "1Gi", "replicas": 2}),
            "deployConfig.service.replicas must be 1 when enableStorage is true",
        ),
        (deploy(service={"enableStorage": True}), "deployConfig.service.storageSize is missing"),
    ],
)
def test_each_rule(root, config, message):
    with pytest.raises(InvalidConfig) as caught:
        project.read(put(root, config))
    assert message in str(caught.value)
    assert len(caught.value.message.splitlines()) == 1


@pytest.mark.parametrize(
    "config",
    [
        deploy(secrets={"API_KEY": "hunter2"}),
        deploy(secrets=["API_KEY=hunter2"]),
        deploy(environmentVariables={"A": ["hunter2"]}),
        deploy(environmentVariables=["A=hunter2"]),
    ],
)
def test_what_may_be_secret_is_not_repeated(root, config):
    with pytest.raises(InvalidConfig) as caught:
        project.read(put(root, config))
    assert "hunter2" not in str(caught.value)


def test_unknown_fields_are_warned_about(root, monkeypatch):
    config = {"name": "demo", "colour": "red", "version": "1.0.0", "deployConfig": {"podtemplate": "x"}}
    monkeypatch.chdir(put(root, config))
    assert project.read(root).warnings == (
        "config.json:3: colour is not a known field",
        "config.json:6: deployConfig.podtemplate is not a known field; did you mean 'podTemplate'?",
        "config.json:1: buildConfig is missing; the defaults are used",
    )


def test_a_key_given_twice_is_warned_about(root):
    text = '{"name": "a",\n "version": "1.0.0",\n "name": "b", "buildConfig": {}, "deployConfig": {}}'
    found = project.read(put(root, text))
    assert found.name == "b"
    assert [warning.split(":", 1)[1] for warning in found.warnings] == ["3: name is given twice; the last one counts"]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(value=_json, indent=st.sampled_from([None, 0, 2]))
def test_every_part_of_any_json_has_a_line(value, indent):
    text = json.dumps(value, indent=indent)
    scanned = scan(text, "x")
    assert scanned.value == value
    assert scanned.repeated == ()

    def parts(part, where=()):
        yield where
        if isinstance(part, (dict, list)):
            for step, inner in part.items() if isinstance(part, dict) else enumerate(part):
                yield from parts(inner, (*where, step))

    assert set(scanned.lines) == set(parts(value))
    assert all(1 <= line <= text.count("\n") + 1 for line in scanned.lines.values())


@given(value=_json)
def test_any_value_in_any_field_gives_an_answer(value):
    for field in fields.FIELDS:
        config = inner = {"name": "a", "version": "1.0.0"}
        *parents, last = field.path.split(".")
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = value
        assert all(isinstance(problem.message, str) for problem in fields.problems(config))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("500m", 0.5),
        ("2Gi", 2 * 1024**3),
        ("1.5k", 1500),
        ("1M", 1e6),
        (3, 3),
        ("1K", -1),
        ("", -1),
    ],
)
def test_quantities(text, number):
    assert fields.quantity(text) == number


# Writing


def test_a_rewrite_keeps_order_unknown_fields_indentation_and_mode(root):
    text = '{\n    "version": "1.0.0",\n    "mine": {"ü": [1]},\n    "name": "demo",\n    "artifacts": []\n}\n'
    file = put(root, text) / "config.json"
    file.chmod(0o640)
    changed = project.write(project.read(root), {"artifacts": [{"id": "x", "type": "image", "content": "a:b"}]})
    assert list(json.loads(file.read_text("utf-8"))) == ["version", "mine", "name", "artifacts"]
    assert '"ü"' in file.read_text("utf-8")
    assert '\n    "name"' in file.read_text("utf-8")
    assert file.stat().st_mode & 0o777 == 0o640
    assert changed.config == project.read(root).config
    assert os.listdir(root) == ["config.json"]


def test_changes_are_merged_into_objects_and_into_what_stands_there_now(root):
    found = project.read(put(root, deploy(cpu="2", service={"port": 1})))
    put(root, deploy(cpu="4", service={"port": 1}))
    changed = project.write(found, {"deployConfig": {"service": {"replicas": 3}}, "description": "new"})
    assert changed.config["deployConfig"] == {"cpu": "4", "service": {"port": 1, "replicas": 3}}
    assert changed.description == "new"


def test_an_invalid_change_is_not_written(root):
    found = project.read(put(root, MINIMAL))
    before = (root / "config.json").read_bytes()
    with pytest.raises(InvalidConfig, match=r"version must be a semantic version"):
        project.write(found, {"version": "next"})
    assert (root / "config.json").read_bytes() == before
    assert os.listdir(root) == ["config.json"]


def test_a_linked_config_stays_a_link(root, tmp_path):
    (tmp_path / "real.json").write_text(json.dumps(MINIMAL))
    (root / "config.json").symlink_to(tmp_path / "real.json")
    project.write(project.read(root), {"version": "2.0.0"})
    assert (root / "config.json").is_symlink()
    assert project.read(root).version == "2.0.0"


def test_half_a_surrogate_pair_survives(root):
    found = project.read(put(root, '{"name": "a", "version": "1.0.0", "x": "\\ud800"}'))
    assert project.write(found, {"version": "1.0.1"}).config["x"] == "\ud800"
    assert project.read(root).config["x"] == "\ud800"


# Scaffolding


@pytest.mark.parametrize("template", project.TEMPLATES)
def test_a_new_project_is_valid_and_complete(tmp_path, template):
    written = project.scaffold("my-env", tmp_path, template=template, version="2.0.0")
    root = tmp_path / "my-env"
    expected = {"config.json", "Dockerfile", "requirements.txt", "README.md", "src/custom_env.py"}
    names = {str(file.relative_to(root)) for file in written}
    assert names == expected | {"test/conftest.py", "test/test_custom_env.py"}
    found = project.read(root)
    assert (found.name, found.version, found.storage_name, found.warnings) == (
        "my-env",
        "2.0.0",
        "my-env",
        (),
    )
    assert not any("{{" in file.read_text("utf-8") for file in written)


def test_the_config_alone(tmp_path):
    assert project.scaffold("a", tmp_path, config_only=True) == [tmp_path / "a" / "config.json"]
    assert os.listdir(tmp_path / "a") == ["config.json"]


def test_a_full_directory_is_refused_and_force_keeps_what_is_the_users(tmp_path):
    mine = tmp_path / "a" / "src" / "mine.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("x = 1")
    with pytest.raises(Conflict, match="not empty"):
        project.scaffold("a", tmp_path)
    assert os.listdir(tmp_path / "a") == ["src"]
    project.scaffold("a", tmp_path, force=True)
    assert mine.read_text() == "x = 1"
    assert (mine.parent / "custom_env.py").is_file()


def test_an_empty_directory_is_used_and_a_file_is_not(tmp_path):
    (tmp_path / "a").mkdir()
    assert project.scaffold("a", tmp_path)
    (tmp_path / "b").write_text("")
    with pytest.raises(Conflict, match="not a directory"):
        project.scaffold("b", tmp_path, force=True)


@pytest.mark.parametrize("name", ["", "..", "a/b", "-a", "a b", "x" * 64, "/etc", 'a"b', "a\n"])
def test_a_bad_name_makes_nothing(tmp_path, name):
    with pytest.raises(Invalid, match="not a usable name"):
        project.scaffold(name, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_bad_version_or_template_makes_nothing(tmp_path):
    with pytest.raises(Invalid, match="semantic version"):
        project.scaffold("a", tmp_path, version="1")
    with pytest.raises(Invalid, match="no template") as caught:
        project.scaffold("a", tmp_path, template="terminl")
    assert caught.value.hint == "did you mean 'terminal'?"
    assert os.listdir(tmp_path) == []
