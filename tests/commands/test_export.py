"""Exports of runs: the folder holds the snapshot's weights, and the rows are the log's."""

import json

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from tba_jax import trajectory
from tba_jax.commands import command_line, export
from tba_jax.models import parameters
from tba_jax.models.hugging_face import export as export_lib
from tba_jax.replay.reader import LogReader
from tba_jax.reporting import gathering
from tba_jax.storage import contract, layout, published, snapshots
from tba_jax.text.tokenizers import HuggingFaceTokenizer
from tests.commands.test_command_line import refusal
from tests.support import frozen_runs, random_checkpoints, tiny_checkpoints, tiny_run, tiny_snapshots

pytestmark = pytest.mark.usefixtures("one_device_throughout")

LORA = {"lora__rank": 2, "lora__targets": ("layers.attention.query", "layers.feed_forward.down"), "lora__alpha": 4.0}


def written_run(workdir, **changes):
    """What a run of random weights leaves, with adapters as after some steps."""
    s = tiny_run.settings(workdir, tiny_run.config(**LORA, **changes))
    contract.join(s.run, s.experiment.config, s.experiment.contract)
    policy = s.experiment.policy
    base = policy.base.init(jax.random.key(0))
    trained = policy.initial(base, jax.random.key(1))
    trained = jax.tree.map(lambda leaf: 0.1 * jax.random.normal(jax.random.key(2), leaf.shape, leaf.dtype), trained)
    tiny_snapshots.publish(s.run.policies, 0, trained)
    snapshots.write(s.run.reference("f00"), base, dtype="float32")
    snapshots.commit(s.run.reference("f00"))
    layout.write_json(s.run.initial_reference, {"id": "f00"})
    return s


def refused(capsys, run, output) -> str:
    return refusal(capsys, export, f"--workdir={run.root}", f"--output={output}")


def reference_of(s) -> parameters.Params:
    folder, policy = s.run.reference(layout.reference_id(s.run)), s.experiment.policy
    return snapshots.load(folder, policy.model_specs, policy.model_shardings(tiny_checkpoints.make_mesh((1, 1, 1))))


def weights_of_step(s, step: int) -> parameters.Params:
    return s.experiment.policy.for_sampling(frozen_runs.published(s, step), reference_of(s), "full")


def test_an_exported_step_is_the_snapshot(finished, tmp_path):
    s = finished
    with pytest.raises(ValueError, match=r"^--adapter: this run has no adapters \(lora\.rank=0\)"):
        export.export(s.run.root, tmp_path / "model", step=2, dtype=None, adapter=True)
    said = export.export(s.run.root, tmp_path / "model", step=2, dtype="float32")
    assert said == f"step 2 of {s.run.root} is in {tmp_path / 'model'} (llama, float32)"
    assert "| rows trained on | 24 |" in (tmp_path / "model" / "README.md").read_text()
    config, params = tiny_checkpoints.load(tmp_path / "model")
    assert config == s.experiment.policy.model
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, weights_of_step(s, 2))
    ours, theirs = s.experiment.tokenizer, HuggingFaceTokenizer(tmp_path / "model")
    assert theirs.encode("12+34=") == ours.encode("12+34=")


def test_adapters_are_merged_into_the_reference(tmp_path, capsys):
    run = (s := written_run(tmp_path / "run")).run
    export.export(run.root, tmp_path / "model", step=0, dtype=None)
    _, params = tiny_checkpoints.load(tmp_path / "model")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, weights_of_step(s, 0))
    before, after = parameters.flatten(reference_of(s)), parameters.flatten(params)
    changed = {name for name in after if not np.allclose(after[name], before[name], atol=1e-6)}
    assert changed == {"layers.attention.query.weight", "layers.feed_forward.down.weight"}
    with pytest.raises(ValueError, match=r"^--adapter: the adapters of this run .* not the checkpoint model.path=''"):
        export.export(run.root, tmp_path / "adapter", step=0, dtype=None, adapter=True)
    run.reference("f00").rename(tmp_path / "kept")
    assert f"is gone: {run.reference('f00')} holds no commit.json" in refused(capsys, run, tmp_path / "again")
    (tmp_path / "kept").rename(run.reference("f00"))
    run.initial_reference.unlink()
    assert f"{run.initial_reference} is gone" in refused(capsys, run, tmp_path / "again")
    assert "is in the run's folder" in refused(capsys, run, run.policies / "model")


def test_snapshots_that_the_run_removes_meanwhile_are_named(tmp_path, capsys, monkeypatch):
    run = written_run(tmp_path / "run").run
    whole, folder = snapshots.open_arrays, published.kept(run.policies)[0]

    def opened(*arguments):
        found = whole(*arguments)
        if published.kept(run.policies):
            tiny_snapshots.withdraw(run.policies, 0)
        return found

    monkeypatch.setattr(snapshots, "open_arrays", opened)
    assert f"snapshot 0 is gone: the run does not keep {folder}" in refused(capsys, run, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_adapters_alone_are_written_for_the_checkpoint_they_belong_to(tmp_path):
    model = random_checkpoints.write(tmp_path / "model", "qwen2.5-0.5b", random_checkpoints.byte_tokenizer(tmp_path / "tokens"))
    s = written_run(tmp_path / "run", model__path=str(model))
    run = s.run
    said = export.export(run.root, tmp_path / "adapter", step=0, dtype=None, adapter=True)
    assert said == f"the adapters of step 0 of {run.root} are in {tmp_path / 'adapter'}, for {model} (qwen2, float32)"
    values = json.loads((tmp_path / "adapter" / export_lib.ADAPTER_CONFIG).read_text())
    assert values["base_model_name_or_path"] == str(model) and values["target_modules"] == ["mlp.down_proj", "self_attn.q_proj"]
    found = load_file(tmp_path / "adapter" / export_lib.ADAPTER_WEIGHTS)
    trained = frozen_runs.published(s, 0)
    lora_a = trained["layers"]["feed_forward"]["down"]["lora_a"][1]
    np.testing.assert_array_equal(found["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"], lora_a.T)


@pytest.fixture(scope="module")
def rows_of(frozen, tmp_path_factory):
    """Three batches of a searcher, and a writer whose four rows have other rewards and steps."""
    s = frozen(tmp_path_factory.mktemp("exported") / "run", batches=3)
    frozen_runs.append_changed(s, "other", reward=(..., [-2.0, 5.0, np.nan, np.inf]), policy_step=((..., 0), 7))
    return s


def test_the_file_of_rows_is_the_log(rows_of, tmp_path, monkeypatch):
    monkeypatch.setattr(gathering, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(export, "_GROUP_BYTES", 1)
    run, tokenizer, output = rows_of.run, rows_of.experiment.tokenizer, tmp_path / "rows.parquet"
    assert command_line.execute(export, [f"--workdir={run.root}", f"--rows={output}"]) == 0
    rows, reader = pq.read_table(output).to_pylist(), LogReader(run.replay, rows_of.experiment.contract.row_shape())
    ids = [(row["writer"], row["row"]) for row in rows]
    assert ids == [(writer, row) for writer, head in sorted(reader.heads().items()) for row in range(head)]
    log = reader.read_ids(ids)
    for i, row in enumerate(rows):
        P, R = int(log["prompt_length"][i]), int(log["response_length"][i])
        prompt, response = log["tokens"][i, :P].tolist(), trajectory.response(log, i).tolist()
        assert row.pop("query") == tokenizer.decode(prompt)
        assert row.pop("response") == tokenizer.decode_continuation(prompt, response)
        assert row.pop("newest_step") == max(log["policy_step"][i]) and row.pop("oldest_step") == min(log["policy_step"][i, :R])
        assert [*row.pop("reward_parts").items()] == [*zip(reader.shape.reward_parts, log["reward_parts"][i], strict=True)]
        del row["writer"]
        assert row.keys() == log.keys() - {"reward_parts"}
        for name, value in row.items():
            used = {"tokens": P + R, "key": 2}.get(name, R)
            np.testing.assert_array_equal(value, log[name][i][:used] if isinstance(value, list) else log[name][i], err_msg=name)
    file = pq.ParquetFile(output)
    assert file.num_row_groups == len(ids) // 16 + 1 and file.schema_arrow.field("query_id").type == "uint64"
    assert file.schema_arrow.metadata[b"tba_jax.run"].decode() == layout.read_json(run.config)["id"]


def test_only_the_rows_that_match_are_written(rows_of, tmp_path):
    def chosen(*flags: str) -> list[tuple[str, int]]:
        file = tmp_path / f"{len([*tmp_path.iterdir()])}.parquet"
        assert command_line.execute(export, [f"--workdir={rows_of.run.root}", f"--rows={file}", *flags]) == 0
        return [(row["writer"], row["row"]) for row in pq.read_table(file).to_pylist()]

    others = [("other", i) for i in range(4)]
    assert chosen("--writer=other") == chosen("--min_step=7", "--max_step=7") == others
    assert chosen("--max_step=6") == [each for each in chosen() if each not in others]
    assert chosen("--max_reward=-1.5") == others[:1] and chosen("--min_reward=4") == [others[1], others[3]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rows=there.parquet"], "--rows={there} exists"),
        (["--rows=f.parquet", "--min_step=3", "--max_step=2"], "--min_step=3 is above --max_step=2"),
        (["--rows=f.parquet", "--max_reward=nan"], "no row of the"),
        (["--rows=f.parquet", "--dtype=float32"], "--dtype does not go with --rows"),
    ],
)
def test_a_mistake_about_rows_is_one_sentence_and_no_file(rows_of, tmp_path, monkeypatch, capsys, flags, words):
    (tmp_path / "there.parquet").write_text("mine")
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, export, f"--workdir={rows_of.run.root}", *flags)
    assert words.replace("{there}", str(tmp_path / "there.parquet")) in said
    assert [each.name for each in tmp_path.iterdir()] == ["there.parquet"]
