"""What a person reads: the pages, the JUnit file, the CI summary, the terminal."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import jinja2
import pytest
from rich.console import Console
from synthetic import SKIPPED, criterion, passed, run, verdict

from harness.report import markdown, words
from harness.report.github import append_step_summary
from harness.report.junit import junit_xml
from harness.report.render import render
from harness.report.terminal import LiveDisplay, NullDisplay, PlainDisplay
from harness.types import Finding, StageResult, Status


def test_pages_are_written_and_stale_ones_go(tmp_path, refused):
    """Each stage has its numbered page; a page of a stage that these results do not have is removed."""
    (tmp_path / "06-long-context.md").write_text("of an earlier run")
    written = {p.name for p in render(refused, tmp_path)}
    pages = {"01-load.md", "02-startup.md", "03-text.md", "04-image.md", "05-multi-card.md"}
    assert written == pages | {"results.json", "summary.md", "junit.xml"}
    assert not (tmp_path / "06-long-context.md").exists()


def test_a_page_leads_with_the_verdict_and_the_first_wrong_place(refused):
    """The second line of a refused stage's page is the verdict as a sentence; the first divergent tap comes next."""
    page = markdown.stage_page(refused, refused.stage("text"))
    lines = [line for line in page.splitlines() if line]
    assert lines[0] == "# Text: FAILED"
    assert lines[1].startswith("**Text is refused: text.isolated, text.logits did not hold")
    assert "layers.2.attn.q" in lines[1]
    assert lines[2] == "## The first wrong place"
    assert "model.layers.2.self_attn.q_b_proj" in page


def test_a_page_shows_every_criterion_with_its_numbers(refused):
    """Each criterion's row has limit, worst value, place, margin and n; its reason stands below."""
    page = markdown.stage_page(refused, refused.stage("text"))
    row = next(line for line in page.splitlines() if line.startswith("| text.isolated |"))
    for part in ("FAILED", "6.02", "1.13 ratio", "-4.89", "layers.2.attn.q (head 3, token 17)", "1536", "3 / 40"):
        assert part in row, part
    assert "| text.cosine (reported only) |" in page
    assert "| nan |" in page
    assert "A wrong unit moves more than rounding" in page


def test_a_page_says_what_was_not_judged_and_how_to_see_it_again(refused):
    """Unjudged measurements, skipped criteria with their reason, the command, and the manual questions are there."""
    page = markdown.stage_page(refused, refused.stage("text"))
    assert "no criterion covers it: cosine of layers.0" in page
    assert "text.phases: the port has one phase only" in page
    assert "day0 verify --stage text --set accel.options.only=q" in page
    assert "- [ ] Does the answer to a question that you know read right?" in page


def test_the_summary_says_what_the_run_does_not_cover(accepted):
    """An accepted run names the stage outside its scope in its verdict, its scope, digests and unticked practices."""
    page = markdown.summary_page(accepted)
    assert page.startswith("# Accepted\n")
    assert "not checked: image" in page
    assert "- image: the checkpoint has no vision tower" in page
    assert "single, tp2" in page
    assert "- [ ] **A fallback is retained**" in page
    assert "not done" in page
    for digest in ("aa11", "bb22", "cc33"):
        assert digest in page


def test_tables_keep_their_shape(refused):
    """No text from outside adds a cell to a table: every row has as many as its heading."""
    pages = [markdown.summary_page(refused), *(markdown.stage_page(refused, s) for s in refused.stages)]
    for page in pages:
        width = 0
        for line in page.splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            assert cells == width or not cells or not width, line
            width = cells


def test_hostile_words_stay_text():
    """Markup and line breaks in a reason cannot start a tag, leave a cell, or end a code block."""
    bad = "<script>x</script> | a\nb"
    stage = StageResult(
        name="load", status=Status.ERROR, reason=bad, verdicts=(verdict("load.a", Status.ERROR, reason=bad),)
    )
    results = run([stage], partial_reason=bad, partial=True)
    page = markdown.summary_page(results) + markdown.stage_page(results, results.stages[0])
    assert "<script>" not in page
    assert markdown.code_span("a`b|c") == "`a'b\\|c`"


def test_templates_refuse_what_is_not_given():
    """A template that asks for a value it was not given fails instead of printing nothing."""
    with pytest.raises(jinja2.UndefinedError):
        markdown._render("summary.md.j2", sentence="x")


def test_junit_counts_what_it_holds(refused):
    """Suites are stages, tests are criteria; failed, skipped and blocked ones are told apart; reported ones pass."""
    root = ElementTree.fromstring(junit_xml(refused).split("\n", 1)[1])
    suites = {s.get("name"): s for s in root}
    text = suites["day0.text"]
    assert (text.get("tests"), text.get("failures"), text.get("skipped")) == ("4", "2", "1")
    kinds = {case.get("name"): [child.tag for child in case] for case in text}
    assert kinds["text.isolated"] == ["failure"]
    assert kinds["text.cosine"] == ["system-out"]
    assert kinds["text.phases"] == ["skipped"]
    assert suites["day0.multi_card"][0].get("name") == "stage"
    assert suites["day0.multi_card"].get("skipped") == "1"
    assert root.get("tests") == str(sum(len(s) for s in root))


def test_junit_shows_a_stage_that_could_not_be_measured():
    """A stage in ERROR whose criteria were never judged is one error, with control characters made legal."""
    results = run([StageResult(name="load", status=Status.ERROR, reason="measuring failed: \x00")])
    root = ElementTree.fromstring(junit_xml(results).split("\n", 1)[1])
    assert root.get("errors") == "1"


def test_step_summary_is_appended_only_where_a_file_is_named(tmp_path, refused):
    """The CI summary is added to the named file, after what is there; without the variable nothing is written."""
    file = tmp_path / "summary"
    file.write_text("before\n")
    assert append_step_summary(refused, {}) is None
    assert append_step_summary(refused, {"GITHUB_STEP_SUMMARY": str(file)}) == file
    text = file.read_text()
    assert text.startswith("before\n## day0: not accepted")
    assert "First divergent tap: `layers.2.attn.q`" in text


def terminal(display_type, results, *, tty: bool, **more) -> str:
    file = io.StringIO()
    console = Console(file=file, width=118, force_terminal=tty, no_color=not tty)
    display = display_type(console, **more)
    display.stage_started("load")
    display.run_started("accel", "load/weights", 1, 3)
    display.run_started("accel", "load/again", 2, 3)
    display.note("a [bold]note[/bold]")
    display.stage_done(passed("load"))
    display.close(results)
    return file.getvalue()


def test_without_a_terminal_plain_lines(tmp_path, refused):
    """A log gets a line per stage and role, the final table, the first divergent tap and the page, without escapes."""
    text = terminal(PlainDisplay, refused, tty=False, run_dir=tmp_path)
    assert "\x1b" not in text
    assert text.count("accel: 3 runs") == 1
    assert "a [bold]note[/bold]" in text
    assert "first divergent tap: layers.2.attn.q" in text
    assert "03-text.md" in text
    assert re.search(
        r"text\s+FAILED\s+text\.isolated\s+layers\.2\.attn\.q \(head 3, token 17\)\s+6\.02\s+<= 1\.13 ratio\s+4\.2 s",
        text,
    )


def test_on_a_terminal_a_table_that_follows(accepted):
    """A terminal shows the current run and ends with the same final table."""
    text = terminal(LiveDisplay, accepted, tty=True)
    assert "load/weights" in text or "load/again" in text
    assert "The port is accepted for what was claimed and exercised" in text


def test_no_display_takes_everything(accepted):
    """The silent display has every method of the protocol."""
    display = NullDisplay()
    display.stage_started("load")
    display.run_started("accel", "x", 1, 1)
    display.stage_done(passed("load"))
    display.note("x")
    display.close(accepted)


@pytest.mark.parametrize(
    ("status", "start"),
    [
        (Status.PASSED, "Load is accepted"),
        (Status.FAILED, "Load is refused"),
        (Status.ERROR, "Load is refused, because it could not be judged"),
        (Status.INCONCLUSIVE, "Load is not accepted, because the evidence does not decide it"),
        (Status.SKIPPED, "Load was not checked"),
        (Status.BLOCKED, "Load was not run"),
    ],
)
def test_every_status_has_its_sentence(status, start):
    """Each status is told in a sentence of its own that ends with one full stop."""
    results = run([StageResult(name="load", status=status, reason="a reason.")])
    sentence = words.stage_sentence(results.stages[0])
    assert sentence.startswith(start)
    assert sentence.endswith(".")
    assert not sentence.endswith("..")


def test_the_tightest_criterion_is_shown():
    """An accepted stage shows the criterion that used its limit most; at-least promises count the other way round."""
    least = verdict(
        "text.share", Status.PASSED, 0.6, criterion=criterion("text.share", op=">=", limit=0.59), limit=0.59
    )
    stage = StageResult(name="text", status=Status.PASSED, verdicts=(verdict("text.r", Status.PASSED, 0.2), least))
    assert words.worst_verdict(run([stage]).stages[0]).criterion.id == "text.share"
    assert words.worst_verdict(run([SKIPPED]).stages[0]) is None


@pytest.mark.parametrize(("metric", "shown"), [("op_error_ratio", "startup.alone"), ("other", "startup.endpoint")])
def test_a_refused_stage_shows_what_its_first_finding_speaks_of(metric, shown):
    """The criterion of the first finding stands in the table, also where its worst value is at another place."""
    alone = criterion("startup.alone", metric="op_error_ratio")
    count = criterion("startup.endpoint", metric="endpoint_errors", op="==", limit=0)
    verdicts = (
        verdict("startup.alone", Status.FAILED, 9.0, criterion=alone),
        verdict("startup.endpoint", Status.FAILED, 2.0, criterion=count, limit=0),
    )
    told = f"{metric} of operators.matmul is 8"
    finding = Finding(tap="operators.matmul", module="", op="matmul", cause="", message=told)
    stage = StageResult(name="startup", status=Status.FAILED, verdicts=verdicts, findings=(finding,))
    assert words.worst_verdict(run([stage]).stages[0]).criterion.id == shown


def test_a_run_that_broke_off_shows_its_stack_in_a_fence(refused):
    """A traceback keeps its lines, once for all the runs with the same message, and is no cell of a table."""
    failure = {"message": "ValueError: no", "stack": 'Traceback\n  File "port.py", line 3\n    ```x'}
    stage = refused.stage("text").model_copy(
        update={"facts": {"failures": [{**failure, "run": "a"}, {**failure, "run": "b"}], "wall": 1}}
    )
    page = markdown.stage_page(refused, stage)
    assert "ValueError: no (a, b)" in page
    assert "```\nTraceback\n  File \"port.py\", line 3\n    '''x\n```" in page
    assert "| failures" not in page
