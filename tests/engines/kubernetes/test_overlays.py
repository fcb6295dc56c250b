"""Pod templates of a site: how they are read, and how they are laid over pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aenv.engines.kubernetes.overlays import lay_over, merge, read
from aenv.errors import InvalidConfig, NotFound

POD: dict[str, Any] = {
    "metadata": {"name": "one", "labels": {"a": "1"}},
    "spec": {
        "restartPolicy": "Never",
        "containers": [
            {"name": "main", "image": "i", "args": ["x"], "ports": [{"containerPort": 1, "protocol": "TCP"}]},
            {"name": "second", "image": "j"},
        ],
        "volumes": [{"name": "work", "emptyDir": {}}],
    },
}


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"a": {"b": 1}}, {"a": None}, {}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
        ({}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
        ({"a": "text"}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": "text"}, {"a": "text"}),
        ({"args": ["x", "y"]}, {"args": ["z"]}, {"args": ["z"]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, {"tolerations": [{"key": "b"}]}),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
        ),
        (
            {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]},
            {"volumes": [{"name": "a", "$patch": "delete"}]},
            {"volumes": [{"name": "b", "emptyDir": {}}]},
        ),
        (
            {"volumeMounts": [{"name": "a", "mountPath": "/a"}]},
            {"volumeMounts": [{"name": "b", "mountPath": "/a"}, {"name": "a", "mountPath": "/b"}]},
            {"volumeMounts": [{"name": "b", "mountPath": "/a"}, {"name": "a", "mountPath": "/b"}]},
        ),
        (
            {"ports": [{"containerPort": 53, "protocol": "TCP"}]},
            {"ports": [{"containerPort": 53, "protocol": "UDP"}]},
            {"ports": [{"containerPort": 53, "protocol": "TCP"}, {"containerPort": 53, "protocol": "UDP"}]},
        ),
    ],
)
def test_objects_by_field_and_lists_by_name(base: Any, over: Any, expected: Any) -> None:
    assert merge(base, over) == expected


def test_a_container_is_changed_by_its_name_and_the_others_stay() -> None:
    over = {"spec": {"containers": [{"name": "main", "image": None, "resources": {"limits": {"cpu": "1"}}}]}}
    made = merge(POD, over)
    main, second = made["spec"]["containers"]
    assert main == {
        "name": "main",
        "args": ["x"],
        "ports": [{"containerPort": 1, "protocol": "TCP"}],
        "resources": {"limits": {"cpu": "1"}},
    }
    assert second == POD["spec"]["containers"][1]


def test_what_is_laid_over_is_not_changed() -> None:
    before = repr(POD)
    merge(POD, {"spec": {"volumes": [{"name": "more", "emptyDir": {}}], "containers": [{"name": "main", "tty": True}]}})
    assert repr(POD) == before


def test_a_template_comes_after_what_is_for_every_pod() -> None:
    templates = {
        "default": {"spec": {"nodeSelector": {"a": "1"}, "priorityClassName": "low"}},
        "big": {"spec": {"priorityClassName": "high"}},
    }
    assert lay_over(POD, templates, "BIG")["spec"].items() >= {"priorityClassName": "high"}.items()
    assert lay_over(POD, templates, "")["spec"]["priorityClassName"] == "low"
    assert lay_over(POD, templates, "big")["spec"]["nodeSelector"] == {"a": "1"}


@pytest.mark.parametrize("name", ["singleContainer", "DualContainer", "default", ""])
def test_names_that_every_site_knows(name: str) -> None:
    assert lay_over(POD, {}, name) == POD


def test_a_name_that_a_site_does_not_know_is_answered_with_one_that_it_does() -> None:
    with pytest.raises(NotFound, match="no pod template 'gpus'") as caught:
        lay_over(POD, {"gpu": {}}, "gpus")
    assert "gpu" in str(caught.value.hint)


def test_files_of_templates(tmp_path: Path) -> None:
    (tmp_path / "GPU.yaml").write_text("spec:\n  nodeSelector: {a: b}\n")
    (tmp_path / "small.json").write_text('{"metadata": {"labels": {"size": "small"}}}')
    (tmp_path / "README.md").write_text("not one")
    assert read(str(tmp_path)) == {
        "gpu": {"spec": {"nodeSelector": {"a": "b"}}},
        "small": {"metadata": {"labels": {"size": "small"}}},
    }
    assert read("") == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "spec: ["),
        ("a.json", "{"),
        ("a.yaml", "- spec"),
        ("a.yaml", ""),
        ("a.yaml", "kind: Pod\nspec: {}"),
        ("a.json", '"spec"'),
        ("a.yaml", "\x00"),
    ],
)
def test_files_that_are_no_templates_are_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidConfig, match=f"{tmp_path / name}"):
        read(str(tmp_path))


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read(str(tmp_path))


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="none cannot be read") as caught:
        read(str(tmp_path / "none"))
    assert "AENV_POD_TEMPLATES" in str(caught.value.hint)
