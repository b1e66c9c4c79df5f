"""log Z from the rows of a run: its numbers, the run that is given them, and what is refused."""

import json

import numpy as np
import pytest

from tba_jax.commands import log_z
from tba_jax.experiment import training
from tba_jax.replay import journal
from tba_jax.replay.log_z import FrozenLogZ
from tests.support import frozen_runs

pytestmark = pytest.mark.usefixtures("one_device_throughout")
BETA = 0.4
CONSTANT = {"learner__beta_start": BETA, "learner__beta_end": BETA, "learner__beta_steps": 0}


@pytest.fixture
def s(frozen, tmp_path):
    """A run with rows of every query, most of several."""
    return frozen(tmp_path / "source", batches=12)


def write(s, output, **changes):
    return log_z.log_z(s.run.root, output, **{"beta": BETA, "min_effective": 1.0} | changes)


def following(s, tmp_path, output, **changes):
    """A run on the same rows that is given log Z, see frozen_runs.offline."""
    given = {"learner__objective": "frozen_log_z", "learner__log_z_path": str(output), "learner__steps": 4} | CONSTANT
    return frozen_runs.offline(tmp_path / "run", s.run.root, **given | changes)


def test_log_z_of_a_query_is_the_log_mean_of_its_rows_weights(s, tmp_path):
    frozen_runs.append_changed(s, "truncated", top_p=(slice(None), 0.9))
    frozen_runs.append_changed(s, "other", reference_id=(slice(None), 5))
    told = write(s, tmp_path / "z.json")
    found = FrozenLogZ.read(str(tmp_path / "z.json"))
    assert found.coefficients == {"beta": BETA, "ref_temperature": 1.0, "reward_temperature": 1.0}
    rows = next(of for writer, of in frozen_runs.rows(s).items() if writer.startswith("frozen-"))
    weights: dict[int, list[float]] = {}
    for i, query in enumerate(rows["query_id"].tolist()):
        ratio = np.float64(rows["ref_logprobs"][i]).sum() - np.float64(rows["behavior_logprobs"][i]).sum()
        weights.setdefault(query, []).append(np.exp(ratio + float(rows["reward"][i]) / BETA))
    assert (
        found.log_z.keys() == weights.keys()
        and "4 rows are truncated or greedy; 4 rows have log-probs of another reference" in told
    )
    for query, each in weights.items():
        assert found.log_z[query] == pytest.approx(np.log(np.mean(each)), rel=1e-9)
    stored = json.loads((tmp_path / "z.json").read_text())["queries"]
    query, each = max(weights.items(), key=lambda item: np.std(item[1]))
    assert stored[f"{query:016x}"]["rows"] == len(each)
    assert stored[f"{query:016x}"]["effective"] == pytest.approx(np.sum(each) ** 2 / np.sum(np.square(each)))


def test_a_run_trains_with_it_and_resumes_with_no_other(s, tmp_path):
    output = tmp_path / "z.json"
    write(s, output)
    run = following(s, tmp_path, output)
    training.reference(run)()
    with frozen_runs.trainer(run, polls=True, shared=False) as trainer:
        told = trainer.step()
        line = next(iter(journal.read_lineage(run.run.journal)))
        drawn = trainer.buffer.reader.read_ids(journal.line_ids(line))["query_id"]
        assert float(told["frozen_log_z"]) == pytest.approx(FrozenLogZ.read(str(output)).of(drawn).mean(), rel=1e-5)
        while not trainer.is_done:
            trainer.step()
        trainer.finish()
    changed = json.loads(output.read_text())
    next(iter(changed["queries"].values()))["log_z"] += 1.0
    output.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="is not what it was when the run began"):
        training.make_trainer(following(s, tmp_path, output, learner__steps=6), publish_every_steps=2)


def test_a_file_of_another_target_or_of_fewer_queries_is_refused(s, tmp_path):
    output = tmp_path / "z.json"
    write(s, output)
    whole = json.loads(output.read_text())
    few = {**whole, "queries": dict([*whole["queries"].items()][:-2])}
    cases = {
        "is for learner.beta=0.4, and this run has 0.5": (whole, {"learner__beta_start": 0.5, "learner__beta_end": 0.5}),
        "and this run has 0.5 to 0.4": (whole, {"learner__beta_start": 0.5, "learner__beta_steps": 5}),
        "has no log Z for 2 of the train queries": (few, {}),
        "of another contract; .*reward_version: 7 there": ({**whole, "contract": {**whole["contract"], "reward_version": 7}}, {}),
        "is no file of python -m tba_jax log_z": ({"queries": 3}, {}),
    }
    for sentence, (content, changes) in cases.items():
        output.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=sentence):
            training.trainer(following(s, tmp_path, output, **changes))
    output.write_text(json.dumps({**whole, "reference": 16 * "3"}))
    run = following(s, tmp_path, output)
    training.reference(run)()
    with pytest.raises(ValueError, match="is of rows of reference 3333333333333333, and this run has"):
        training.make_trainer(run, publish_every_steps=2)
    output.unlink()
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        training.trainer(run)


def test_rows_that_give_none_are_told(s, tmp_path):
    with pytest.raises(ValueError, match=r"no query of .* has --min_effective=1000 effective rows"):
        write(s, tmp_path / "z.json", min_effective=1000.0)
    with pytest.raises(ValueError, match=r"β=0 must be above 0 \(--beta\)"):
        write(s, tmp_path / "z.json", beta=0.0)
    with pytest.raises(ValueError, match="holds no run"):
        log_z.log_z(tmp_path / "nothing", tmp_path / "z.json", beta=BETA, min_effective=1.0)
    assert not (tmp_path / "z.json").exists()
