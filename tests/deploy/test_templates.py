"""What our chart's templates are written in means the same here as in Helm, and what is not in it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aenv.deploy import documents
from aenv.deploy.chart import Chart
from aenv.deploy.rendering import Renderer
from aenv.errors import Invalid
from tests.deploy.support import by_helm, needs_helm, rendered, write

VALUES: dict[str, Any] = {
    "text": "hello",
    "empty": "",
    "quoted": 'say "hi"\nand \\ go',
    "number": 8080,
    "zero": 0,
    "large": 1234567,
    "million": 1000000,
    "part": 0.25,
    "tiny": 0.00001,
    "yes": True,
    "no": False,
    "items": ["b", "a", 3],
    "none": [],
    "map": {"b": 1, "a": {"c": "x"}},
    "like": {"true": "true", "number": "1e3", "octal": "0777", "date": "2024-01-01", "time": "12:30", "null": "null"},
    "odd": {"colon": "a: b", "hash": "a #b", "star": "*x", "lines": "one\ntwo\n", "spaces": " x ", "dash": "- x"},
    "rows": [{"name": "x", "list": [1, {"y": [2]}]}, {}],
}
SNIPPETS = {
    "values": "{{ .Values.text }} {{ .Values.number }} {{ .Values.yes }} {{ .Values.part }}",
    "numbers": "{{ .Values.large }} {{ .Values.million }} {{ int .Values.large }} {{ .Values.zero }}",
    "small": "{{ .Values.tiny }} {{ .Values.part }}",
    "missing": "[{{ .Values.nothing }}] [{{ .Values.map.nothing }}]",
    "trim": "a\n  {{- .Values.text }}\n  b {{ .Values.text -}}\n\n  c\n{{- /* gone */ -}}\n d {{/* also */}} e",
    "trim both": "x  {{- 3 -}}  y",
    "negative": "{{ -3 }} {{-3 }}x",
    "if": "{{ if .Values.empty }}1{{ else if .Values.zero }}2{{ else if .Values.none }}3{{ else }}4{{ end }}",
    "if no else": "[{{ if .Values.no }}x{{ end }}]",
    "truth": "{{ if .Values.map }}m{{ end }}{{ if .Values.items }}l{{ end }}{{ if .Values.nothing }}n{{ end }}",
    "with": "{{ with .Values.map }}{{ .b }}{{ else }}none{{ end }}{{ with .Values.none }}x{{ else }}none{{ end }}",
    "with variable": "{{ with $m := .Values.map }}{{ $m.b }}{{ .b }}{{ end }}",
    "range": "{{ range .Values.items }}<{{ . }}>{{ end }}{{ range .Values.none }}x{{ else }}none{{ end }}",
    "range index": "{{ range $i, $v := .Values.items }}{{ $i }}={{ $v }};{{ end }}",
    "range map": "{{ range $k, $v := .Values.odd }}{{ $k }}={{ $v }};{{ end }}",
    "range one": "{{ range $v := .Values.items }}{{ $v }}{{ end }}",
    "root": "{{ range .Values.items }}{{ $.Values.text }}{{ end }}",
    "variables": '{{ $x := 1 }}{{ if .Values.yes }}{{ $x = 2 }}{{ $y := 3 }}{{ end }}{{ $x }}{{ $z := "s" }}{{ $z }}',
    "and or": "{{ and .Values.yes .Values.text }} {{ or .Values.empty .Values.zero .Values.text }} {{ and 1 0 2 }}",
    "lazy": '{{ or .Values.text (fail "not reached") }}{{ and .Values.no (fail "nor this") }}',
    "not": "{{ not .Values.empty }} {{ not .Values.text }} {{ not 0 }}",
    "eq": '{{ eq .Values.text "hello" }} {{ eq .Values.text "a" "hello" }} {{ ne (int .Values.number) 8080 }}',
    "order": '{{ lt 1 2 }} {{ le 2 2 }} {{ gt (int .Values.number) 80 }} {{ ge 1 2 }} {{ lt "a" "b" }}',
    "quote": "{{ .Values.text | quote }} {{ quote .Values.quoted }} {{ quote .Values.number .Values.yes }}",
    "quote nothing": "[{{ quote .Values.nothing }}] {{ squote .Values.text }}",
    "default": '{{ default "x" .Values.empty }} {{ .Values.text | default "x" }} {{ default 3 .Values.nothing }}',
    "printf": '{{ printf "%s-%d %v%% %q" .Values.text (int .Values.number) .Values.yes "a\\"b" }}',
    "toYaml": "m: {{- toYaml .Values.map | nindent 2 }}",
    "toYaml kinds": "m: {{- toYaml .Values.like | nindent 2 }}",
    "toYaml odd": "m: {{- toYaml .Values.odd | nindent 2 }}",
    "toYaml rows": "m:\n{{ toYaml .Values.rows | indent 2 }}\nn: {{ toYaml .Values.none }}",
    "toYaml number": "n: {{ toYaml .Values.large }}",
    "toJson": "{{ toJson .Values.rows }} {{ toJson .Values.odd }} {{ toJson .Values.million }}",
    "include": '{{ include "t.one" .Values.map | quote }} {{ template "t.one" .Values.map }}',
    "include dot": '{{ include "t.two" (dict "a" 1 "root" .) }}',
    "parentheses": '{{ (index .Values.items 0) }} {{ (dict "a" (list 1 2)).a | len }} {{ index .Values.map "a" "c" }}',
    "strings": '{{ `raw {{ "x" }}` }} {{ "a\\tb" | quote }} {{ "}}" }}',
    "text": '{{ trunc 3 .Values.text }} {{ trimSuffix "lo" .Values.text }} {{ contains "ell" .Values.text }}',
    "encode": "{{ b64enc .Values.text }} {{ b64enc .Values.text | b64dec }} {{ sha256sum .Values.text }}",
    "lists": '{{ join "," .Values.items }} {{ list 1 "a" | toJson }}',
    "maps": '{{ hasKey .Values.map "a" }} {{ hasKey .Values.map "x" }} {{ len .Values.map }}',
    "arithmetic": "{{ add 1 2 3 }} {{ add .Values.number 1 }} {{ int .Values.part }} {{ int .Values.nothing }}",
    "ternary": '{{ ternary "a" "b" .Values.yes }} {{ ternary "a" "b" (empty .Values.text) }}',
    "capabilities": '{{ .Capabilities.APIVersions.Has "apps/v1" }} {{ .Capabilities.APIVersions.Has "no/v1" }}',
    "release": "{{ .Release.Name }} {{ .Release.Namespace }} {{ .Chart.Name }} {{ .Chart.AppVersion }}",
    "required": '{{ required "it is needed" .Values.text }}',
    "lookup": '[{{ if lookup "v1" "Secret" "aenv" "x" }}there{{ end }}]',
}
HELPERS = """
{{- define "t.one" -}}
{{ .b }}:{{ range $k, $v := . }}{{ $k }}{{ end }}
{{- end -}}
{{- define "t.two" -}}
{{ .a }}{{ .root.Values.text }}{{ $.a }}
{{- end -}}
"""


def _chart(folder: Path, templates: dict[str, str]) -> Chart:
    """A chart of these templates."""
    directory = folder / "chart"
    (directory / "templates").mkdir(parents=True)
    (directory / "Chart.yaml").write_text("apiVersion: v2\nname: small\nversion: 1.2.3\nappVersion: '4'\n")
    (directory / "values.yaml").write_text(documents.dump(VALUES))
    (directory / "values.schema.json").write_text("{}")
    for name, text in {"_helpers.tpl": HELPERS, "NOTES.txt": "", **templates}.items():
        (directory / "templates" / name).write_text(text)
    return Chart(directory)


@needs_helm
def test_each_construct_means_what_helm_means_by_it(tmp_path: Path) -> None:
    # What the snippets print is several lines at their own indentation: a function of ours quotes them.
    helper = "".join(f'{{{{- define "s{number}" -}}}}\n{snippet}\n{{{{- end -}}}}\n' for number, snippet in _numbered())
    every = "".join(
        f"---\nkind: ConfigMap\nmetadata: {{name: s{number:03}}}\n"
        f'data: {{text: {{{{ include "s{number}" . | quote }}}}}}\n'
        for number, _ in _numbered()
    )
    small = _chart(tmp_path, {"_snippets.tpl": helper, "all.yaml": every})
    theirs = documents.load_all(by_helm({}, tmp_path, directory=small.directory), "helm")
    ours = rendered({}, tmp_path, of=small).objects
    told = {found["metadata"]["name"]: found["data"]["text"] for found in theirs}
    for (name, snippet), our in zip(SNIPPETS.items(), ours, strict=True):
        both = our.content["data"]["text"], told[our.name]
        if name.startswith("toYaml"):  # which of the two quotation marks it uses is nobody's business
            both = documents.load(both[0], name), documents.load(both[1], name)
        assert both[0] == both[1], f"{name}: {snippet}"


def _numbered() -> list[tuple[int, str]]:
    return list(enumerate(SNIPPETS.values()))


def _render(text: str) -> str:
    return Renderer({"t": text}, lambda *asked: {}).render("t", {"Values": documents.load(documents.dump(VALUES), "v")})


@needs_helm
@pytest.mark.parametrize(
    ("snippet", "why"),
    [
        ("{{ .Values.nothing.more }}", "'.more' is asked of nothing"),
        ("{{ eq .Values.number 8080 }}", "different kinds"),
        ('{{ required "it is needed" .Values.empty }}', "it is needed"),
        ('{{ fail "stop" }}', "stop"),
        ("{{ unknown 1 }}", "there is no function 'unknown'"),
        ("{{ if .Values.yes }}", "an 'end' is missing"),
        ("{{ .Values.text ", "an action does not end"),
        ("{{ $x }}", "there is no variable \\$x"),
        ('{{ include "t.none" . }}', "there is no template 't.none'"),
        ("{{ .Values.text.more }}", "has no fields"),
        ("{{ (1 }}", r"a '\)' is missing"),
        ("{{ }}", "an action is empty"),
        ("{{ else }}", "else"),
    ],
)
def test_what_helm_refuses_is_refused(snippet: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=why):
        _render(snippet)
    small = _chart(tmp_path, {"all.yaml": f"kind: ConfigMap\nmetadata: {{name: x}}\ndata: {{text: {snippet}}}\n"})
    with pytest.raises(AssertionError):
        by_helm({}, tmp_path, directory=small.directory)


@pytest.mark.parametrize("snippet", ["{{ break }}", '{{ block "x" . }}{{ end }}', "{{ 1.5 }}", "{{ .Values.map }}"])
def test_what_is_not_in_our_part_of_the_language_is_refused(snippet: str) -> None:
    with pytest.raises(Invalid):
        _render(snippet)


def test_an_error_names_its_line() -> None:
    with pytest.raises(Invalid, match="t: line 3: '.b' is asked of nothing"):
        _render("a\n{{ if .Values.yes }}\n  {{ .Values.a.b }}\n{{ end }}")


@needs_helm
@pytest.mark.parametrize(
    "settings",
    [
        ["text=x"],
        ["map.a.c=new,number=7"],
        ["map.new.deep=1", "map.b=null"],
        ["items={x,y}", "none[1]=z"],
        ["yes=false,text=true"],
        ["text=a\\,b", "odd.a\\.b=c"],
        ["rows[0].name=other"],
        ["text=", "zero=-5", "part=007"],
        ["items=null"],
    ],
)
def test_values_are_put_together_as_helm_does(settings: list[str], tmp_path: Path) -> None:
    small = _chart(
        tmp_path, {"all.yaml": "kind: ConfigMap\nmetadata: {name: x}\ndata: {{- toYaml .Values | nindent 2 }}\n"}
    )
    over = {"map": {"added": 1}, "items": ["only"], "odd": {"hash": None}}
    options = [option for setting in settings for option in ("--set", setting)]
    [theirs] = documents.load_all(by_helm(over, tmp_path, *options, directory=small.directory), "helm")
    assert small.effective([write(over, tmp_path)], settings) == theirs["data"]


@pytest.mark.parametrize("setting", ["text", "=x", "a[x]=1", "a[99999]=1"])
def test_a_setting_that_is_none_is_refused(setting: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="--set"):
        _chart(tmp_path, {}).effective([], [setting])


def test_yaml_is_read_as_kubernetes_reads_it() -> None:
    text = "a: 1e3\nb: 12:30\nc: 2024-01-01\nd: 0x1f\ne: 0777\nf: on\ng: 1_000\nh: .5\ni: '1e3'\nj: 0o17\nk: ~"
    assert documents.plain(documents.load(text, "it")) == {
        "a": 1000,
        "b": "12:30",
        "c": "2024-01-01",
        "d": 31,
        "e": 511,
        "f": True,
        "g": 1000,
        "h": 0.5,
        "i": "1e3",
        "j": 15,
        "k": None,
    }
    for value in ("1e3", "12:30", "2024-01-01", "0x1f", "on", "null", "", "a: b", "1_000", "0o17", "y", "N"):
        assert documents.load(documents.dump({"x": value}), "it") == {"x": value}
