"""Every report of a run: results.json and what is rendered from it. Knows renderers; must not know the run itself."""

from __future__ import annotations

from pathlib import Path

from harness.report import words
from harness.report.junit import junit_xml
from harness.report.markdown import stage_page, summary_page
from harness.report.results import Results, write_results


def render(results: Results, out_dir: Path) -> list[Path]:
    """Write results.json, summary, one page per stage and JUnit XML; remove pages of stages that are not in it.

    Returns: the files written, results.json first.
    """
    truth = write_results(results, out_dir)
    pages = {"summary.md": summary_page(results)}
    pages |= {words.FILES[s.name]: stage_page(results, s) for s in results.stages if s.name in words.FILES}
    pages["junit.xml"] = junit_xml(results)
    for stale in set(words.FILES.values()) - set(pages):
        (out_dir / stale).unlink(missing_ok=True)
    for name, text in pages.items():
        (out_dir / name).write_text(text, encoding="utf-8")
    return [truth, *(out_dir / name for name in pages)]
