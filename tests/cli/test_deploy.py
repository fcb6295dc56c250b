"""``aenv deploy`` without a cluster; with one, see tests/deploy."""

import yaml


def test_the_objects_are_printed_as_yaml(aenv):
    answer = aenv("deploy", "--render", "-n", "site", "--release", "mine", "--set", "api.replicas=5")
    assert (answer.code, answer.err) == (0, "")
    objects = [found for found in yaml.safe_load_all(answer.out) if found]
    [api] = [found for found in objects if found["metadata"]["name"] == "mine-api" and found["kind"] == "Deployment"]
    assert (api["metadata"]["namespace"], api["spec"]["replicas"]) == ("site", 5)
    assert objects[0]["kind"] == "Namespace"


def test_or_as_json(aenv):
    data = aenv("deploy", "--render", "-o", "json").data
    assert (data["kind"], data["apiVersion"]) == ("List", "v1")
    assert {found["metadata"]["labels"]["app.kubernetes.io/managed-by"] for found in data["items"]} == {"aenv"}


def test_the_last_file_counts_and_settings_count_more(aenv, tmp_path):
    for name, text in (("a", "logFormat: text\ntraces: http://a:1"), ("b", "logFormat: json")):
        (tmp_path / name).write_text(text)
    files = ("-f", str(tmp_path / "a"), "-f", str(tmp_path / "b"))
    shown = aenv("deploy", "--render", *files, "--set", "traces=http://c:1").out
    assert "value: json" in shown
    assert 'value: "http://c:1"' in shown
    assert "http://a:1" not in shown


def test_the_version_of_kubernetes_chooses_apis(aenv):
    old = aenv("deploy", "--render", "--kube-version", "1.20").out
    assert "policy/v1beta1" in old
    both = aenv("deploy", "--render", "--kube-version", "v1.20.2", "--api-versions", "policy/v1").out
    assert "policy/v1beta1" not in both
    answer = aenv("deploy", "--render", "--kube-version", "two")
    assert (answer.code, answer.out) == (1, "")
    assert "'two' is no version of Kubernetes" in answer.err


def test_a_typo_is_named(aenv):
    answer = aenv("deploy", "--render", "--set", "api.replica=5")
    assert (answer.code, answer.out) == (1, "")
    assert "there is no value values.api.replica" in answer.err
    assert "did you mean 'replicas'?" in answer.err


def test_what_does_not_go_together_is_refused(aenv, tmp_path):
    for words in (("--render", "--delete"), ("--with-data",), ("--kube-version", "1.30")):
        assert aenv("deploy", *words).code == 2
    answer = aenv("deploy", "--render", "-f", str(tmp_path / "none.yaml"))
    assert "none.yaml cannot be read: No such file" in answer.err
    (tmp_path / "bad.yaml").write_text("a: [")
    assert "is not YAML" in aenv("deploy", "--render", "-f", str(tmp_path / "bad.yaml")).err
    assert "'Up' is not a release's name" in aenv("deploy", "--render", "--release", "Up").err


def test_no_cluster_is_an_error_with_a_hint(aenv, tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    answer = aenv("deploy", "--kubeconfig", str(tmp_path / "none"))
    assert (answer.code, answer.out) == (3, "")
    assert "there is no kubeconfig" in answer.err
    assert "KUBECONFIG" in answer.err
