"""The dry run that compiles: its figures against the programs of real roles, and for TPUs that are not here."""

import dataclasses
import importlib.util
import re
import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.experiment import compiling, composition, fitting, jobs, topologies, training
from tba_jax.models import scoring
from tba_jax.packing import row_packing
from tba_jax.programs import Program
from tba_jax.run import machine, processes
from tba_jax.storage import layout
from tba_jax.telemetry.record import TimeAccount
from tests.support import random_checkpoints, small_recipes, tiny_run

DEVICES = jax.devices()  # eight; the roles of the runs that are made here take one
RUN = layout.RunDir(Path("/nowhere"))
PROGRAMS = {
    "trainer": ["init", "update", "update in micro-batches", "log-prob gap", "publish", "checkpoint"],
    "searcher": [
        *("caches", "next policy from its snapshot", "a parameter of the next policy"),
        *("prefill", "decode", "scoring by the reference"),
    ],
}
PROGRAMS["evaluator"] = PROGRAMS["searcher"]


def on(count: int, limit: int | None = None) -> compiling.Devices:
    return compiling.Devices(devices=DEVICES[:count], limit=limit)


def measured(role: str, *names: str, devices: int = 1, **settings) -> dict[str, fitting.Fit]:
    """The figures of some programs of a role, the only ones that are compiled."""
    experiment = composition.build(tiny_run.config(**settings))
    made = compiling.programs(experiment, RUN, role=role, devices=DEVICES[:devices])
    measure = fitting.Measure()
    return {name: measure.fit(name, made[name]) for name in names}


def names_of(role: str, **settings) -> list[str]:
    return [*compiling.programs(composition.build(tiny_run.config(**settings)), RUN, role=role, devices=DEVICES[:1])]


def bytes_of(tree) -> int:
    """On the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def made(tmp_path_factory, one_device_throughout):
    """A real trainer that has begun, with its lease, and a real searcher with weights."""
    s = tiny_run.settings(tmp_path_factory.mktemp("made") / "run", tiny_run.config())
    compiling_of = {
        role: compiling.fit(s.experiment, s.run, role=role, on=compiling.Devices(devices=jax.devices()))
        for role in compiling.ROLES
    }
    jobs.join(s, may_change_schedule=True)
    trainer, lease = training.make_trainer(s, publish_every_steps=1)
    trainer.publish_unless_there()
    trainer.flush_snapshot()
    searcher = jobs.make_searcher(s, name="searcher", account=TimeAccount())
    searcher.refresh()
    searcher.search()
    yield trainer, searcher, compiling_of
    searcher.close()
    trainer.close()
    lease.release()


def fit_of(found: compiling.RoleFit, name: str) -> fitting.Fit:
    return next(fit for fit in found.fits if fit.name == name)


def test_every_program_of_a_role_has_figures(made):
    for role, found in made[2].items():
        assert [fit.name for fit in found.fits] == PROGRAMS[role]
        for fit in found.fits:
            assert fit.arguments + fit.outputs > 0 and fit.peak == sum(fit.parts().values()) and not fit.refused
            assert fit.peak >= fit.arguments + fit.temporaries
        assert found.takes == found.worst.peak == max(fit.peak for fit in found.fits) and found.limit == machine.memory()


def test_without_a_reference_a_searcher_scores_nothing_and_does_not_hold_its_weights(made):
    without = {"learner__reference__kind": "none"}
    assert names_of("searcher", **without) == [name for name in PROGRAMS["searcher"] if name != "scoring by the reference"]
    decoding, with_weights = measured("searcher", "decode", **without)["decode"], fit_of(made[2]["searcher"], "decode")
    assert "reference" not in decoding.beside and decoding.peak == with_weights.peak - with_weights.beside["reference"]
    assert names_of("evaluator", **without) == PROGRAMS["evaluator"]


@pytest.mark.parametrize(
    ("role", "program", "scopes"),
    [
        ("trainer", "update", ["update", "score"]),
        ("searcher", "decode", ["decode"]),
        ("searcher", "scoring by the reference", ["score"]),
    ],
)
def test_programs_name_their_parts_for_profilers(role, program, scopes, tmp_path, one_device):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config(publish__dtype="bfloat16"))
    found = compiling.programs(s.experiment, s.run, role=role, devices=jax.devices())[program]
    in_key = "jax_compilation_cache_include_metadata_in_key"  # a program from the cache has the names of when it was compiled
    jax.config.update(in_key, True)
    try:
        compiled = found.function.lower(*found.arguments, **found.options).compile().as_text()
    finally:
        jax.config.update(in_key, False)
    names = [name.partition("/")[2] for name in re.findall(r'op_name="([^"]*)"', compiled)]  # after jit(…)
    for scope in scopes:
        assert any(re.search(rf"\b{scope}\b", name) for name in names), names[:20]


def test_the_update_is_that_of_a_real_trainer(made):
    trainer, _, found = made
    fit, program = fit_of(found["trainer"], "update"), trainer.program
    batch = program._rescored(program.place(program._whole_rows(trainer._contract.row_shape())))
    largest = jax.device_put(
        row_packing.empty(program.config.limits, program.config.limits.sequences), scoring.packed_shardings(program.mesh)
    )
    real = program._update.lower(program.state, program.frozen, batch, largest, whole_groups=True).compile().memory_analysis()
    assert (fit.arguments, fit.temporaries) == (real.argument_size_in_bytes, real.temp_size_in_bytes)
    assert (fit.outputs, fit.aliased) == (real.output_size_in_bytes, real.alias_size_in_bytes)
    # Two snapshots and a checkpoint of the state.
    assert fit.beside["snapshots to be written"] == 2 * bytes_of(program.policy_params)
    assert fit.beside["checkpoint to be written"] == bytes_of(program.state)
    assert fit_of(found["trainer"], "publish").arguments == bytes_of(program.policy_params)


def test_decoding_and_scoring_are_those_of_a_real_searcher(made):
    _, searcher, found = made
    lane, reference = searcher._engine._lanes[0], searcher._reference
    c = lane._config
    call = (lane._weights, lane._prompts, lane._slots, lane._oldest_first())
    whole = dict(buffers=c.buffers, window=c.own_entries)
    decode = lane._decode[0].lower(*call, np.int32(0), np.int32(1), None, **whole).compile().memory_analysis()
    fit = fit_of(found["searcher"], "decode")
    assert fit.temporaries == decode.temp_size_in_bytes and fit.aliased == decode.alias_size_in_bytes
    assert fit.beside["reference"] == bytes_of(reference.params)
    scored = fit_of(found["searcher"], "scoring by the reference")
    assert scored.beside["policy in use"] == bytes_of(lane._weights)
    assert scored.beside["caches"] == bytes_of((lane._prompts, lane._slots))


def test_a_part_of_the_rings_is_counted_where_it_is_copied():
    """CPUs and GPUs copy it once a call."""
    names = ("decode", "decode, part of a ring")
    whole, part = measured("searcher", *names, task__response_length=128).values()
    assert part.temporaries > whole.temporaries and part.arguments == whole.arguments


def test_shapes_are_those_of_the_arrays(made):
    """Whatever a role holds has the shape, dtype and sharding that the dry run compiles for."""
    trainer, searcher, _ = made
    experiment = composition.build(tiny_run.config())
    of_trainer = compiling.programs(experiment, RUN, role="trainer", devices=jax.devices())
    of_searcher = compiling.programs(experiment, RUN, role="searcher", devices=jax.devices())
    lane = searcher._engine._lanes[0]
    pairs = {
        "state": (trainer.state, of_trainer["update"].arguments[0]),
        "weights": (lane._weights, of_searcher["decode"].arguments[0]),
        "caches": ((lane._prompts, lane._slots), of_searcher["decode"].arguments[1:3]),
        "reference": (searcher._reference.params, of_searcher["scoring by the reference"].arguments[0]),
    }
    for name, (arrays, shapes) in pairs.items():
        for x, shape in zip(jax.tree.leaves(arrays), jax.tree.leaves(shapes), strict=True):
            assert (x.shape, x.dtype) == (shape.shape, shape.dtype), name
            assert x.sharding.is_equivalent_to(shape.sharding, x.ndim), name


def test_a_moving_reference_and_adapters_have_their_programs():
    settings = dict(learner__objective="tba_prime", learner__reference__kind="reset", lora__rank=2)
    settings["learner__reference__reset_optimizer"] = True
    names = {"scoring by the moving reference", "copy to the moving reference", "restart of moments"}
    assert names <= set(names_of("trainer", **settings))
    beside = measured("trainer", "update", **settings)["update"].beside
    assert "moving reference" in beside and "frozen weights" not in beside


def test_meshes_divide_the_state(made):
    split, ways = {"learner__mesh__fsdp": 2, "learner__mesh__data": 2}, 2
    whole, parts = fit_of(made[2]["trainer"], "update"), measured("trainer", "update", devices=4, **split)["update"]
    names = ("snapshots to be written", "checkpoint to be written")
    whole_size, size = (sum(fit.beside[name] for name in names) for fit in (whole, parts))
    assert whole_size / ways <= size < 1.1 * whole_size / ways


@pytest.fixture(scope="module")
def summaries():
    """A run whose searcher has a reward model, and whose evaluator has a gold model as well."""
    c = small_recipes.config("tldr_pythia:small")
    c.task.prompt_length = 128
    return composition.build(c)


def with_settings(experiment: composition.Experiment, **settings) -> composition.Experiment:
    config = experiment.config.copy_and_resolve_references()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in settings.items()})
    return dataclasses.replace(experiment, config=config)


@pytest.fixture(scope="module")
def with_models(summaries):
    """Role -> its programs, of a role whose devices have the models of the task as well."""
    return {role: compiling.fit(summaries, RUN, role=role, on=on(1)) for role in ("searcher", "evaluator")}


def test_models_of_the_task_lie_beside_all_programs_of_their_devices(summaries, with_models):
    found = with_models
    assert [fit.name for fit in found["searcher"].fits] == [*PROGRAMS["searcher"], "pass of the reward model"]
    assert [fit.name for fit in found["evaluator"].fits][-2:] == ["pass of the reward model", "pass of the gold model"]
    weights = Path(summaries.config.task.tldr.reward_path, "model.safetensors").stat().st_size
    for role, models in {"searcher": {"reward model"}, "evaluator": {"reward model", "gold model"}}.items():
        assert not found[role].unchecked
        for fit in found[role].fits:
            own = {fit.name.removeprefix("pass of the ")}
            assert models - own <= set(fit.beside) and not own & set(fit.beside)
            assert all(0.9 * weights < fit.beside[name] < 4 * weights for name in models - own)  # float16 in the file
    rewarded = fit_of(found["searcher"], "pass of the reward model")
    assert {"reference", "caches", "policy in use", "next policy"} == set(rewarded.beside)


def test_models_on_devices_of_their_own_are_a_group_of_their_own(summaries, with_models):
    apart, shared = with_settings(summaries, searchers__task_devices=2), with_models["searcher"]
    alone = compiling.programs(apart, RUN, role="searcher", devices=DEVICES[:3])
    assert [*alone] == PROGRAMS["searcher"] and not any("reward model" in program.beside for program in alone.values())
    task = compiling.fit_task(apart, role="searcher", on=on(3))
    assert task.on_host == 2 and task.role == "searcher, task"
    (fit,) = task.fits
    together = fit_of(shared, "pass of the reward model")
    assert not fit.beside and fit.arguments == together.arguments and task.where.endswith("searchers.task_devices=2")
    # Each device has a whole copy.
    assert fit.peak == task.worst.peak == together.peak - sum(together.beside.values())
    said = compiling.describe([shared, task], config=apart.config)
    assert "\nsearcher, task  fits: " in said and "searcher, task on 2 × cpu" in said
    assert compiling.fit_task(summaries, role="searcher", on=on(1)) is None
    assert compiling.fit_task(apart, role="trainer", on=on(1)) is None


def test_models_that_do_not_fit_name_their_settings(summaries):
    apart = with_settings(summaries, searchers__task_devices=1)
    task = compiling.fit_task(apart, role="searcher", on=on(2, 1 << 20))
    said = compiling.describe([dataclasses.replace(task, on_host=0)], config=apart.config)
    assert "does not fit" in said and "change task.tldr.batch_rows=" in said


def test_a_victim_whose_slots_do_not_divide_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: DEVICES[:2])
    flags = ["--role=searcher", "--dry_run", "--compile", "--config.task.red_team.victim_concurrency=3"]
    small = tiny_run.command(tmp_path / "run", *flags, recipe="configs/red_team_gpt2.py:small", tiny=False)[3:]
    said = refusal(small, capsys)
    assert "task.red_team.victim_path=" in said and "slots=3 cannot be divided by the 2 ways" in said


def test_a_warm_start_is_compiled_where_there_is_one(tmp_path):
    experiment = composition.build(tiny_run.config(warm_start__steps=2, warm_start__batch_size=4))
    run = layout.RunDir(tmp_path)
    names = [*compiling.programs(experiment, run, role="trainer", devices=DEVICES[:1])]
    assert names == ["init of the warm start", "update of the warm start", *PROGRAMS["trainer"]]
    run.initial_reference.parent.mkdir(parents=True, exist_ok=True)
    run.initial_reference.write_text("{}")
    assert not [name for name in compiling.programs(experiment, run, role="trainer", devices=DEVICES[:1]) if "warm" in name]


def test_one_role_may_decode_in_lanes_with_rounded_weights():
    """The data ways of a mesh are lanes on devices of their own; only the first of them is described."""
    found = measured("searcher", "decode", devices=2, searchers__weights="int8", searchers__mesh__data=2)
    assert found["decode"].beside["next policy"] > 0


def test_a_policy_that_is_taken_up_in_place_needs_no_second_memory(made):
    names = ("decode", "scoring by the reference", "a parameter of the next policy")
    beside, in_place = fit_of(made[2]["searcher"], "decode"), measured("searcher", *names, searchers__swap_memory="in_place")
    weights = beside.beside["next policy"]
    policy = bytes_of(made[1]._engine._lanes[0]._weights)
    assert policy < weights < 1.5 * policy, "one set of weights, and one parameter more"
    decode, scoring, swap = in_place.values()
    assert beside.peak - decode.peak == weights and "next policy" not in scoring.beside
    assert swap.arguments + swap.outputs + swap.beside["policy in use"] < 1.6 * policy
    assert swap.beside["reference"] == decode.beside["reference"]
    assert "next policy from its snapshot" not in names_of("searcher", searchers__swap_memory="in_place")


def test_a_role_that_does_not_fit_is_told_what_to_change():
    fit = fitting.Fit(
        name="update",
        program=Program(function=print, arguments=(), room={"temporaries": ("learner.micro_batch_tokens", "task.custom.judge")}),
        arguments=1 << 30,
        temporaries=20 << 30,
        outputs=1 << 30,
        aliased=1 << 30,
        beside={"snapshots": 1 << 30},
        refused=True,
    )
    found = compiling.RoleFit(role="trainer", where="a TPU", limit=16 << 30, fits=[fit], unchecked=["the warm start"])
    said = compiling.describe([found], config=tiny_run.config())
    assert said.startswith(
        "trainer    does not fit: 22.00 GiB of 16.00 GiB (update); most of it: temporaries, 20.00 GiB; change "
    )
    assert "; change learner.micro_batch_tokens=0, task.custom.judge; not" in said and "refused by the compiler" in said
    assert "not checked: the warm start" in said
    on_host = dataclasses.replace(found, on_host=1)
    said = compiling.describe(
        [on_host, dataclasses.replace(on_host, role="searcher")], config=tiny_run.config(searchers__count=2)
    )
    assert "together   may not fit: up to 66.00 GiB of 16.00 GiB; all roles share this machine's memory" in said


@pytest.mark.parametrize(
    "message, sizes",
    [
        ("required for HLO temporaries (32.50G) exceeds available HBM (15.75G). HLO", [int(32.5 * 2**30), int(15.75 * 2**30)]),
        ("Used 2.00T of 95.73G hbm. Exceeded", [2 << 40, int(95.73 * 2**30)]),
        ("error E1000 in module jit_update", []),
    ],
)
def test_sizes_in_what_the_compiler_says(message, sizes):
    assert fitting.sizes_in(message) == sizes


def refusal(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        command_line.execute(main, arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out and said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    return said.err


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--dry_run", "--topology=nobody=v5p:2x2x1"], ["'nobody'", "trainer, searcher, evaluator"]),
        (["--dry_run", "--topology=X100x8"], ["the memory of X100 is not known: say it as X100x8@GIB"]),
        (["--dry_run", "--topology=v5p:0x1x1"], ["is no topology"]),
        (["--dry_run", "--topology=trainer=v5p:2x2x1,trainer=v5e:2x2"], ["names the trainer twice"]),
        (["--compile"], ["--compile needs --dry_run"]),
        (["--dry_run", "--compile", "--topology=v5p:2x2x1"], ["one of the two"]),
        (["--dry_run", "--topology=trainer=v5p:2x2x1", "--role=searcher"], ["--role=searcher"]),
        (["--dry_run", "--compile", "--config.model.attention=splash"], ["model.attention=splash needs a TPU", "cpu"]),
        (["--config.model.attention=cudnn", "--config.model.compute_dtype=bfloat16"], ["needs an NVIDIA GPU", "cpu"]),
    ],
)
def test_bad_input_is_one_sentence(flags, words, tmp_path, capsys, one_device):
    said = refusal(tiny_run.command(tmp_path / "run", *flags)[3:], capsys)
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists()


def test_a_role_without_a_topology_and_a_wrong_mount_are_told_together(tmp_path, capsys, one_device):
    flags = ["--dry_run", "--topology=trainer=v5p:2x2x1", "--role=searcher", "--config.replay.mount=('/nowhere',)"]
    with pytest.raises(SystemExit):
        command_line.execute(main, tiny_run.command(tmp_path / "run", *flags)[3:])
    said = capsys.readouterr().err
    assert said.startswith("error: 2 mistakes:") and "--role=searcher" in said and "/nowhere holds no run" in said, said


def test_without_the_compiler_of_tpus_the_extra_is_named(tmp_path, capsys, one_device):
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("libtpu is installed here")
    said = refusal(tiny_run.command(tmp_path / "run", "--dry_run", "--topology=v5p:2x2x1")[3:], capsys)
    assert "the extra `tpu`" in said


def test_the_answer_comes_first_and_nothing_is_written(tmp_path, capsys, one_device):
    flags = tiny_run.command(tmp_path / "run", "--dry_run=full", "--compile")[3:]
    assert command_line.execute(main, flags) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[:3]] == list(compiling.ROLES)
    assert said.index("\nconfig:") > said.index("evaluator on") and "parameters:" in said and not (tmp_path / "run").exists()


def test_a_preset_is_the_shape_and_a_path_gives_the_tokenizer(tmp_path, capsys, one_device):
    tokenizer = random_checkpoints.byte_tokenizer(tmp_path / "tokenizer")
    model = random_checkpoints.write(tmp_path / "model", "llama-3.2-1b", tokenizer)
    (model / "model.safetensors").unlink()
    flags = ["--dry_run=full", f"--config.model.path={model}", "--config.model.preset=gpt2"]
    assert command_line.execute(main, tiny_run.command(tmp_path / "run", *flags)[3:]) == 0
    assert re.search(r"total +124,4", capsys.readouterr().out)
    assert "exclude each other" in refusal(tiny_run.command(tmp_path / "run", *flags[1:])[3:], capsys)


def test_a_signal_ends_a_dry_run_quietly(tmp_path):
    """The TPU's compiler, where it is installed, would answer by a stack trace."""
    flag = "--compile" if importlib.util.find_spec("libtpu") is None else "--topology=v5p:1x1x1"
    command = tiny_run.command(tmp_path / "run", "--dry_run", flag, "--role=trainer")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=tiny_run.ROOT, env=tiny_run.environment(), **pipes)
    told = iter(process.stderr.readline, "")
    assert any(" compiled in " in line for line in told), "no program was compiled"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == processes.STOPPED and not out, (process.returncode, err)
    assert all(" compiled in " in line for line in err.splitlines()), err


@pytest.fixture
def stand_ins(monkeypatch):
    """CPUs in the place of TPU chips."""
    monkeypatch.setattr(topologies, "devices", lambda topology: DEVICES)


def test_gpus_that_are_not_here_are_divided_among_the_roles(stand_ins):
    """As under --role=all; and 90 % of what each role may take is its limit by proxy."""
    experiment = composition.build(tiny_run.config(searchers__count=1))
    found = compiling.on_topologies(experiment, {"all": "H100x4"}, *compiling.ROLES)
    assert {role: len(on.devices) for role, on in found.items()} == {"trainer": 2, "searcher": 1, "evaluator": 1}
    assert all(on.limit == pytest.approx(0.9 * 0.95 * 79.6 * 2**30) for on in found.values())
    one = compiling.on_topologies(experiment, {"all": "MI300Xx1@192"}, *compiling.ROLES)
    assert [round(on.limit / 2**30 / 192 / 0.9, 3) for on in one.values()] == [0.475, 0.237, 0.237]
    each = compiling.on_topologies(experiment, {"trainer": "L4x8", "searcher": "v5p:2x2x1"}, *compiling.ROLES)
    assert len(each["trainer"].devices) == 8 and each["searcher"].limit is None and "evaluator" not in each
    with pytest.raises(ValueError, match="up to 64 GPUs of a role, not 65"):
        compiling.on_topologies(experiment, {"trainer": "L4x65"}, "trainer")
    with pytest.raises(ValueError, match=r"learner\.mesh make up 8 GPUs for trainer; there are 4"):
        compiling.on_topologies(with_settings(experiment, learner__mesh__fsdp=8), {"all": "H100x4"}, "trainer")


def test_an_answer_by_proxy_is_marked(stand_ins, tmp_path, capsys, one_device):
    flags = ["--dry_run", "--topology=H100x2", "--role=trainer", "--config.searchers.count=1"]
    assert command_line.execute(main, tiny_run.command(tmp_path / "run", *flags)[3:]) == 0
    said = capsys.readouterr().out
    assert (
        re.match(r"trainer    fits: .* of 68\.06 GiB \(.*\); by TPU proxy\n", said) and "(by TPU proxy, for 1 of H100x2)" in said
    )


@pytest.mark.slow
def test_programs_compile_for_a_tpu_that_is_not_here(tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler is not installed: pip install -e '.[tpu]'")
    topologies = "--topology=trainer=v5p:2x2x1,v5e:1x1"
    split = ["--config.learner.mesh.fsdp=2", "--config.learner.queries=4"]
    done = tiny_run.call(tiny_run.command(tmp_path / "run", "--dry_run", topologies, *split), timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"(?m)^(trainer|searcher|evaluator) +fits: ", done.stdout)) == 3, done.stdout
    assert " of 95.7" in done.stdout and " of 15.7" in done.stdout and "data=2 × fsdp=2" in done.stdout
    done = tiny_run.call(tiny_run.command(tmp_path / "run", "--dry_run", "--topology=A100x1", "--role=trainer"), timeout=600)
    assert re.match(r"trainer    fits: .* of 34\.20 GiB \(.*\); by TPU proxy\n", done.stdout), done.stdout + done.stderr
    refused = tiny_run.call(tiny_run.command(tmp_path / "run", "--dry_run", "--topology=v5p:3x3x3"))
    assert refused.returncode == 2 and "'v5p:3x3x3' is no topology" in refused.stderr
