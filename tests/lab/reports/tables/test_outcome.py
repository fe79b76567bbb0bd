"""What came out of runs is made once, whoever asks for it."""

from collections import Counter

from record_helpers import pair

from mixnorm_lab import reports
from mixnorm_lab.reports.model import comparison, sentences
from mixnorm_lab.reports.tables import outcome
from mixnorm_lab.reports.tables.outcome import Outcome


def test_families_tables_and_answers_are_made_once(tmp_path, monkeypatch):
    calls = Counter()

    def counted(owner, name):
        function = getattr(owner, name)

        def count(*arguments):
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setattr(owner, name, count)

    for name in ("ends", "steps", "by_quarters"):
        counted(outcome, name)
    counted(sentences, "answers")
    counted(comparison, "comparisons")
    monkeypatch.setattr("mixnorm_lab.reports.plots.curves.draw", lambda *_: [])
    made = Outcome(pair())
    reports.write(tmp_path, made)
    assert len(made.tables) == 2
    assert len(made.answers) == 1
    assert made.answers[0] in (tmp_path / "report.md").read_text()
    assert calls == {"ends": 1, "steps": 1, "by_quarters": 1, "answers": 1, "comparisons": 1}
    assert made.classifiers is made.plain.families
