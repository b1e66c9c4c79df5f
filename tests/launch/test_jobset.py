"""What becomes of a JobSet whose roles end by one code or another: the rules of its Jobs, with stand-ins for the roles.

tests/whole_runs/test_pods.py has the roles themselves.
"""

import os
import re

import pytest

from tests.support import kustomize, manifests, pods

# A role in a pod: notes its life, and ends as the file of its flags and life says; without one it waits until the run is done.
ROLE = """#!/usr/bin/env bash
name=pod; for flag; do case $flag in --role=*|--process=*) name+=-${flag#*=} ;; esac; done
echo "$*" >> "$WORKDIR/$name.lives"
[[ -e $WORKDIR/config.json || -n ${NO_RUN-} ]] || echo '{}' > "$WORKDIR/config.json"
code=$(cat "$WORKDIR/$name.$(wc -l < "$WORKDIR/$name.lives")" 2>/dev/null || cat "$WORKDIR/$name.always" 2>/dev/null)
while [[ -z $code ]]; do [[ ! -e $WORKDIR/finished.json ]] || exit 0; sleep 0.05; done
exit "$code"
"""


@pytest.fixture
def cluster(tmp_path):
    """The base with two searchers and a trainer of two pods, whose roles are stand-ins; .workdir is the run's folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(ROLE)
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / "run").mkdir()
    made = kustomize.build(pods.ROOT / "launch/kubernetes/base")
    for one in made:
        if one["kind"] == "JobSet":
            for name in ("trainer", "searchers"):
                manifests.jobs(one)[name] |= {"completions": 2, "parallelism": 2}
        elif one["kind"] == "ConfigMap":
            one["data"] |= {"WORKDIR": "/runs/run", "TRAINER_HOSTS": "2"}
    assert not manifests.problems(made)
    environment = {"FIRST_PAUSE": "0", "FINISH_SECONDS": "1", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    found = pods.Cluster(made, tmp_path, environment=environment, pause_seconds=0.01)
    found.workdir = tmp_path / "run"
    try:
        yield found
    finally:
        found.close()


def tell(cluster: pods.Cluster, name: str, **codes: int) -> None:
    """The exit codes of a role's lives: first=6, always=1."""
    for life, code in codes.items():
        number = {"first": 1, "second": 2, "third": 3}.get(life, life)
        (cluster.workdir / f"pod-{name}.{number}").write_text(str(code))


def lives(cluster: pods.Cluster, name: str) -> list[str]:
    path = cluster.workdir / f"pod-{name}.lives"
    return path.read_text().splitlines() if path.exists() else []


def test_each_process_of_the_trainer_gets_its_number(cluster):
    cluster.run_until(lambda: lives(cluster, "trainer-1") and lives(cluster, "trainer-0"), "both processes", seconds=30)
    for index in (0, 1):
        (words,) = lives(cluster, f"trainer-{index}")
        assert re.search(rf"--role=trainer --coordinator=127\.0\.0\.1:\d+ --processes=2 --process={index} ", words), words


def test_a_lost_process_starts_both_again_and_the_surviving_pod_stays(cluster):
    """Process 0 dies of itself, process 1 ends by that."""
    tell(cluster, "trainer-0", first=1)
    tell(cluster, "trainer-1", first=6)
    cluster.run_until(
        lambda: len(lives(cluster, "trainer-0")) == len(lives(cluster, "trainer-1")) == 2, "a second life of both", seconds=30
    )
    assert cluster.jobs["trainer"].lives == {0: 2, 1: 1} and cluster.jobs["trainer"].failures == 1
    (cluster.workdir / "finished.json").touch()
    cluster.run_until(lambda: cluster.is_done, "the end of the JobSet", seconds=30)
    assert cluster.jobs["searchers"].lives == {0: 1, 1: 1} and cluster.jobs["evaluator"].lives == {0: 1}


@pytest.mark.parametrize(
    ("name", "codes", "expected"),
    [
        ("trainer-1", {"first": 4}, "trainer-1 ended with code 4"),
        ("trainer-0", {"first": 3, "second": 6, "third": 4}, "trainer-0 ended with code 4"),
        ("trainer-0", {"always": 1}, "trainer has failed 21 times"),
        ("trainer-0", {"always": 2}, "trainer has failed 21 times"),  # of a run that exists
    ],
    ids=str,
)
def test_a_trainer_fails_the_jobset(cluster, name, codes, expected):
    tell(cluster, name, **codes)
    with pytest.raises(AssertionError, match=expected):
        cluster.run_until(lambda: cluster.is_done, "the end of the JobSet", seconds=60)
    assert cluster.failed.startswith(expected)


def test_bad_input_of_a_new_run_fails_the_jobset_at_once(cluster):
    tell(cluster, "trainer-0", always=2)
    cluster.environment["NO_RUN"] = "1"
    with pytest.raises(AssertionError, match="trainer-0 ended with code 2"):
        cluster.run_until(lambda: cluster.is_done, "the end of the JobSet", seconds=60)
    assert len(lives(cluster, "trainer-0")) == 1


@pytest.mark.parametrize(("code", "starts"), [(1, 30), (2, 30), (4, 30), (5, 1)], ids=str)
def test_a_searcher_never_fails_the_jobset(cluster, code, starts):
    """Both die again and again; without rewards (5) both rest."""
    tell(cluster, "searcher", always=code)
    cluster.run_until(lambda: len(lives(cluster, "searcher")) >= 2 * starts, "the deaths", seconds=60)
    (cluster.workdir / "finished.json").touch()
    cluster.run_until(lambda: cluster.is_done, "the end of the JobSet", seconds=30)
    assert code != 5 or cluster.jobs["searchers"].lives == {0: 1, 1: 1}
    assert cluster.jobs["trainer"].lives == {0: 1, 1: 1}


def test_an_evicted_trainer_is_no_failure(cluster):
    cluster.run_until(lambda: lives(cluster, "trainer-1"), "process 1", seconds=30)
    for _ in range(3):
        before = len(lives(cluster, "trainer-1"))
        cluster.evict("trainer", 1)
        cluster.run_until(lambda before=before: len(lives(cluster, "trainer-1")) > before, "another process 1", seconds=30)
        cluster.lose("trainer", 1)
        cluster.run_until(lambda before=before: len(lives(cluster, "trainer-1")) > before + 1, "another process 1", seconds=30)
    assert cluster.jobs["trainer"].failures == 0 and cluster.jobs["trainer"].lives == {0: 1, 1: 7}
