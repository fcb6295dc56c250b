"""The benchmark of the guide and that of the examples are one, and small."""

from tests.docs.doc_pages import ROOT, blocks

EXAMPLE = ROOT / "examples" / "02-coins"


def test_the_guide_shows_the_example_in_under_sixty_lines() -> None:
    guide = ROOT / "docs" / "guides" / "bring-your-own-benchmark.md"
    (shown,) = [block.text for block in blocks(guide) if block.comment == "file: src/custom_env.py"]
    assert shown == (EXAMPLE / "src" / "custom_env.py").read_text()
    assert len(shown.splitlines()) < 60
