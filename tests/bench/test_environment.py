"""What a record says of the checkout that it was measured with."""

import pytest

from bench import environment as described
from bench.report import commit_of

HEAD, OTHER = "a" * 40, "b" * 40


@pytest.fixture(params=["", " M bench/moe.py"], ids=["clean", "changed"])
def status(request):
    """What git says has changed since HEAD."""
    return request.param


def environment(status: str):
    answers = {"rev-parse": HEAD, "status": status}
    return described.environment(lambda command, *_: answers[command])


@pytest.mark.parametrize("told", [None, HEAD])
def test_a_checkout_says_its_commit_and_whether_it_was_changed(told, status, monkeypatch):
    monkeypatch.delenv("CUTE_KERNELS_COMMIT", raising=False)
    if told:
        monkeypatch.setenv("CUTE_KERNELS_COMMIT", told)
    found = environment(status)
    assert (found["commit"], found["dirty"]) == (HEAD, bool(status))


def test_files_of_another_commit_than_the_history_ends_with_are_not_called_changed_or_clean(status, monkeypatch):
    """That machine cannot know."""
    monkeypatch.setenv("CUTE_KERNELS_COMMIT", OTHER)
    found = environment(status)
    assert (found["commit"], found["dirty"]) == (OTHER, None)


@pytest.mark.parametrize(
    "dirty, said", [(False, "b" * 10), (True, "b" * 10 + " (dirty)"), (None, "b" * 10 + " (local changes not known)")]
)
def test_reports_say_what_is_known_of_changes(dirty, said):
    assert commit_of({"commit": OTHER, "dirty": dirty}) == said
