"""``aenv hub``: from a hub that was served to a file, and from there to another one."""

from aenv import project
from tests.platform.support import platform


def ok(answer):
    assert answer.code == 0, answer.err
    return answer


def refused(answer, said):
    assert (answer.code, answer.out) == (1, ""), answer
    assert said in answer.err


def test_a_hub_in_one_file(aenv, here, home, tmp_path, monkeypatch):
    refused(aenv("hub", "export", "hub.tar"), "there is no hub in")
    assert not home.exists()
    with platform() as served:
        monkeypatch.setenv("AENV_HOME", str(served.home))
        project.scaffold("moving", here)
        ok(aenv("push", "moving", "--system-url", served.control))
        refused(aenv("hub", "export", "hub.tar"), "stop the server")
        assert served.stop() == 0
        moved = ok(aenv("hub", "export", "hub.tar", "-o", "json")).data
        assert min(moved["names"], moved["versions"], moved["packages"]) >= 1
    refused(aenv("hub", "export", "hub.tar", "--store", f"sqlite:{tmp_path}/x.db"), "hub.tar is there already")
    there = ("--store", f"sqlite:{tmp_path}/there.db", "--blobs", f"file:{tmp_path}/blobs")
    assert ok(aenv("hub", "import", "hub.tar", *there, "-o", "json")).data == moved
    assert ok(aenv("hub", "import", "hub.tar", *there, "-o", "json")).data["versions"] == 0
    again = ok(aenv("hub", "export", "again.tar", *there)).out
    assert ["versions", str(moved["versions"])] in [row.split() for row in again.splitlines()]
    (here / "junk.tar").write_bytes(b"no hub")
    refused(aenv("hub", "import", "junk.tar", *there), "is not the file of a hub")
    refused(aenv("hub", "export", "x.tar", "--store", "mongo:x"), "there is no store 'mongo'")
    assert aenv("hub", "import", "missing.tar", *there).code == 2
