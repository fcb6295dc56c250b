"""Names of images: their parts, the image of a project, and the second image of an instance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import Invalid
from aenv.project.images import Reference, architecture, image_of, is_dual, is_path, second_of

DIGEST = "sha256:" + "0123456789abcdef" * 4
OTHER = "sha256:" + "f" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ubuntu", ("", "ubuntu", "", "")),
        ("ubuntu:22.04", ("", "ubuntu", "22.04", "")),
        ("swebench/sweb.eval.x86_64.django_1776_django-5771:latest", None),
        ("docker.io/library/ubuntu", ("docker.io", "library/ubuntu", "", "")),
        ("localhost/x", ("localhost", "x", "", "")),
        ("localhost:5000/a/b:C_d.e-f", ("localhost:5000", "a/b", "C_d.e-f", "")),
        ("127.0.0.1:5055/x:1", ("127.0.0.1:5055", "x", "1", "")),
        ("[::1]:5055/x:1", ("[::1]:5055", "x", "1", "")),
        ("Reg.Example.com/x", ("Reg.Example.com", "x", "", "")),
        (f"reg.example.com/x@{DIGEST}", ("reg.example.com", "x", "", DIGEST)),
        (f"reg.example.com/x:1@{DIGEST}", ("reg.example.com", "x", "1", DIGEST)),
        (f"a@{DIGEST}", ("", "a", "", DIGEST)),
        ("a/b__c/d---e/f.g", None),
        ("registry:5000", ("", "registry", "5000", "")),
        (f"x:{'t' * 128}", None),
        ("a" * 255, None),
    ],
)
def test_a_name_has_parts(text, parts):
    found = Reference.parse(text)
    assert str(found) == text
    assert parts is None or found == parts


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it has no name"),
        (":1", "it has no name"),
        (f"@{DIGEST}", "it has no name"),
        ("reg.example.com/", "it has no name"),
        (" ", "no path"),
        ("a b", "no path"),
        (" ubuntu", "no path"),
        ("ubuntu\n", "no path"),
        ("ubuntu:1\n", "no tag"),
        ("..", "no path"),
        ("a/../b", "no path"),
        ("a//b", "no path"),
        ("/a", "no path"),
        ("a/", "no path"),
        ("a.", "no path"),
        ("-a", "no path"),
        ("a___b", "no path"),
        ("Ubuntu", "upper-case"),
        ("reg.example.com/Team/x", "upper-case"),
        ("ünix", "no path"),
        ("a:", "its tag is empty"),
        ("a:b:c", "no tag"),
        ("a:.b", "no tag"),
        (f"x:{'t' * 129}", "no tag"),
        ("a" * 256, "255"),
        (f"reg.example.com/{'a' * 240}", "255"),
        ("a@", "no digest"),
        ("a@sha256:", "no digest"),
        ("a@sha256:12", "no digest"),
        (f"a@{DIGEST.upper()}", "no digest"),
        (f"a@md5:{'0' * 32}", "no digest"),
        ("reg.example.com:port/x", "no registry"),
        ("reg_.example.com/x", "no registry"),
        ("reg..example.com/x", "no registry"),
        ("http://reg.example.com/x", "no registry"),
    ],
)
def test_what_is_not_a_name_is_refused_with_the_reason(text, why):
    with pytest.raises(Invalid, match="is not the name of an image") as caught:
        Reference.parse(text)
    assert why in caught.value.message
    assert caught.value.hint


@given(st.text(max_size=40))
def test_what_is_a_name_is_the_same_name_again(text):
    try:
        found = Reference.parse(text)
    except Invalid:
        return
    assert Reference.parse(str(found)) == found
    assert str(found) == text


@pytest.mark.parametrize(
    ("prefix", "datasource", "image"),
    [
        # Without a prefix, the datasource is the image.
        ("", "ubuntu", "ubuntu"),
        ("", "swebench/sweb.eval.x86_64.django_1776_p5.js-5771:latest", None),
        ("", "localhost:5000/x:1", None),
        ("", f"reg.example.com/x@{DIGEST}", None),
        # With one, both.
        ("registry.example.com/envs", "task-1", "registry.example.com/envs:task-1"),
        ("registry.example.com/envs", ":task-1", "registry.example.com/envs:task-1"),
        ("registry.example.com/envs", "-more:1", "registry.example.com/envs-more:1"),
        ("registry.example.com/envs", f"@{DIGEST}", f"registry.example.com/envs@{DIGEST}"),
        ("registry.example.com:5000/envs", "Task_1", "registry.example.com:5000/envs:Task_1"),
        ("localhost:5000/", "x", "localhost:5000/x"),
        ("localhost:5000/", "x:1", "localhost:5000/x:1"),
        ("custom_registry/swebench/common_name:", "{}", "custom_registry/swebench/common_name:django-1"),
        (
            "swebench/sweb.eval.x86_64.",
            "django_1776_django-1:latest",
            "swebench/sweb.eval.x86_64.django_1776_django-1:latest",
        ),
        ("registry.example.com/envs/", "task", "registry.example.com/envs/task"),
        ("registry.example.com/envs/", "group/task:1", "registry.example.com/envs/group/task:1"),
        ("registry.example.com/envs:swe-", "1", "registry.example.com/envs:swe-1"),
        ("ubuntu", "22.04", "ubuntu:22.04"),
        ("ubuntu:", "22.04", "ubuntu:22.04"),
        # The whole name, below the prefix.
        ("registry.example.com/envs", "registry.example.com/envs:1", "registry.example.com/envs:1"),
        ("registry.example.com/envs/", "registry.example.com/envs/x:1", "registry.example.com/envs/x:1"),
        ("swebench/", "swebench/x:1", "swebench/x:1"),
        # A prefix that is a whole name needs nothing more.
        ("registry.example.com/envs:1", "", "registry.example.com/envs:1"),
        ("ubuntu", "", "ubuntu"),
    ],
)
def test_the_second_image(prefix, datasource, image):
    datasource = datasource.replace("{}", "django-1")
    found = second_of(prefix, datasource)
    assert (found.image, found.directory) == (image or datasource, "")


@pytest.mark.parametrize(
    ("prefix", "datasource", "why"),
    [
        ("", "", "has no image"),
        ("", " ", "no path"),
        ("", "a b", "no path"),
        ("", "../x", "no registry"),
        ("", "/data/x", "no path"),
        ("", "Ubuntu", "upper-case"),
        ("", "x@sha256:12", "no digest"),
        ("", "a" * 300, "255"),
        ("", "http://example.com/x", "no registry"),
        ("registry.example.com/envs/", "", "it has no name|no path"),
        ("registry.example.com/envs:", "", "its tag is empty"),
        ("registry.example.com/envs", " ", "no tag"),
        ("registry.example.com/envs", "..", "no tag"),
        ("registry.example.com/envs/", "..", "no path"),
        ("registry.example.com/envs/", "../other:1", "no path|outside"),
        ("registry.example.com/envs/", "a/../../other:1", "no path"),
        ("registry.example.com/envs", "t" * 300, "no tag"),
        ("registry.example.com/envs/", "Task", "upper-case"),
        ("registry.example.com/envs", "@sha256:", "no digest"),
        ("registry.example.com/envs", "a\nb", "no tag"),
        # A path that leads elsewhere.
        ("registry.example.com/envs", "docker.io/evil/x:1", "outside"),
        ("registry.example.com/envs", "swebench/x:latest", "outside"),
        ("registry.example.com/envs", "/x:1", "outside"),
        ("registry.example.com/envs", "registry.example.com/env:1", "outside"),
        ("registry.example.com/envs/", "docker.io/evil/x:1", "outside"),
        ("registry.example.com/envs/", "localhost/x:1", "outside"),
        ("registry.example.com/envs/", "evil:5000/x", "outside"),
        ("registry.example.com", ".evil.com/x:1", "outside"),
        ("registry", ":5000/x:1", "outside"),
        ("custom_registry/common_name:", "swebench/x:latest", "outside"),
        # A prefix that is none.
        (" ", "x", "no path"),
        ("Registry/X", "1", "upper-case"),
        ("swebench/sweb.eval.x86_64.", "django-1", "no path"),
        ("a:b:", "c", "no tag"),
    ],
)
def test_what_makes_no_second_image_is_refused(prefix, datasource, why):
    with pytest.raises(Invalid, match=why) as caught:
        second_of(prefix, datasource)
    assert caught.value.hint
    assert len(caught.value.message) < 1000


@given(st.text(alphabet="ab./:@-_ A", max_size=12), st.text(alphabet="ab./:@-_ A", max_size=12))
def test_the_second_image_is_below_its_prefix_and_from_its_registry(prefix, datasource):
    try:
        found = second_of(prefix, datasource)
    except Invalid:
        return
    assert found.image.startswith(prefix)
    if "/" in prefix:
        assert Reference.parse(found.image).registry in ("", prefix.partition("/")[0])
    elif prefix:
        assert not Reference.parse(found.image).registry


def image(content, id="", **more):
    return {"id": id, "type": "image", "content": content, **more}


@pytest.mark.parametrize(
    ("artifacts", "found"),
    [
        ([], ""),
        ([image("")], ""),
        ([{"id": DIGEST, "type": "archive", "content": "x"}], ""),
        (["x", 1, None, {}], ""),
        ([image("x:1")], "x:1"),
        ([{"type": "Image", "content": "x:1"}], "x:1"),
        ([image("reg.example.com/x:1")], "reg.example.com/x:1"),
        ([image("reg.example.com/x:1", DIGEST)], f"reg.example.com/x@{DIGEST}"),
        ([image("localhost:5000/x", DIGEST)], f"localhost:5000/x@{DIGEST}"),
        ([image("team/x:1", DIGEST)], "team/x:1"),  # it is in this daemon only, as far as is known
        ([image("reg.example.com/x:1", "12ab")], "reg.example.com/x:1"),
        ([image(f"reg.example.com/x:1@{OTHER}", DIGEST)], f"reg.example.com/x@{DIGEST}"),
        ([image("Not A Name", DIGEST)], "Not A Name"),
        ([image("x:1"), image("x:2")], "x:2"),
        ([image("x:arm", platform="linux/arm64"), image("x:amd", platform="linux/amd64")], "x:amd"),
        ([image("x:amd", platform="linux/amd64"), image("x:arm", platform="linux/arm64/v8")], "x:amd"),
        ([image("x:amd", platform="linux/amd64"), image("x:any")], "x:amd"),
        ([image("x:any"), image("x:arm", platform="linux/arm64")], "x:any"),
        ([image("x:arm", platform="linux/arm64")], "x:arm"),  # whoever runs it says why that does not go
    ],
)
def test_the_image_of_a_project(artifacts, found):
    assert image_of(artifacts, "x86_64") == found


def test_processors_have_other_names_in_images():
    assert [architecture(machine) for machine in ("x86_64", "AMD64", "aarch64", "arm64", "riscv64", "")] == [
        *("amd64", "amd64", "arm64", "arm64", "riscv64", "")
    ]


def test_what_a_template_means():
    assert all(map(is_dual, ("DualContainer", "dualcontainer", "DUALCONTAINER", " DualContainer ")))
    assert not any(map(is_dual, ("", "Default", "singleContainer", "SINGLECONTAINER", "dual", "our-own")))


def test_what_is_a_path():
    assert all(map(is_path, ("/data", "./data", "../data", "~/data", "~", ".", "..")))
    assert not any(map(is_path, ("", "data", "data/x:1", "reg.example.com/x", ":1", "@sha256:12", "...x")))
