"""The dry run that compiles: its figures against the programs of real roles, and for TPUs that are not here."""

import dataclasses
import importlib.util
import re
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
from tests.support import small_recipes, tiny_run

DEVICES = jax.devices()  # eight; the roles of the runs that are made here take one
RUN = layout.RunDir(Path("/nowhere"))
DECODES = ["caches", "next policy from its snapshot", "a parameter of the next policy", "prefill", "decode"]
PROGRAMS = {
    "trainer": ["init", "update", "update in micro-batches", "log-prob gap", "publish", "checkpoint"],
    "searcher": [*DECODES, "scoring by the reference"],
}


def programs(role: str, *, devices: int = 1, **settings) -> dict[str, Program]:
    return compiling.programs(composition.build(tiny_run.config(**settings)), RUN, role=role, devices=DEVICES[:devices])


def measured(role: str, *names: str, devices: int = 1, **settings) -> list[fitting.Fit]:
    """The figures of some programs of a role, the only ones that are compiled."""
    made, measure = programs(role, devices=devices, **settings), fitting.Measure()
    return [measure.fit(name, made[name]) for name in names]


def bytes_of(tree) -> int:
    """On the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def made(tmp_path_factory, one_device_throughout):
    """A real trainer that has begun, with its lease, a real searcher with weights, and the figures of both by name."""
    s = tiny_run.settings(tmp_path_factory.mktemp("made") / "run", tiny_run.config())
    on = compiling.Devices(devices=jax.devices())
    fits = {role: compiling.fit(s.experiment, s.run, role=role, on=on) for role in PROGRAMS}
    jobs.join(s, may_change_schedule=True)
    trainer, lease = training.make_trainer(s, publish_every_steps=1)
    trainer.publish_unless_there()
    trainer.flush_snapshot()
    searcher = jobs.make_searcher(s, name="searcher", account=TimeAccount())
    searcher.refresh()
    searcher.search()
    yield trainer, searcher, fits
    searcher.close()
    trainer.close()
    lease.release()


def fit_of(found: compiling.RoleFit, name: str) -> fitting.Fit:
    return next(fit for fit in found.fits if fit.name == name)


def test_every_program_of_a_role_has_figures(made):
    for role, found in made[2].items():
        assert [fit.name for fit in found.fits] == PROGRAMS[role]
        for fit in found.fits:
            assert fit.arguments + fit.outputs > 0 and not fit.refused and fit.peak >= fit.arguments + fit.temporaries
        assert found.takes == found.worst.peak == max(fit.peak for fit in found.fits) and found.limit == machine.memory()
    assert [*programs("evaluator")] == PROGRAMS["searcher"]


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


def test_shapes_are_those_of_the_arrays(made):
    """Whatever a role holds has the shape, dtype and sharding that the dry run compiles for."""
    trainer, searcher, _ = made
    of_trainer, of_searcher, lane = programs("trainer"), programs("searcher"), searcher._engine._lanes[0]
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


def test_programs_name_their_parts_for_profilers():
    named = {("trainer", "update"): "update score", ("searcher", "decode"): "decode"}
    for (role, program), scopes in (named | {("searcher", "scoring by the reference"): "score"}).items():
        names = programs(role)[program].lower().as_text(debug_info=True)
        for scope in scopes.split():
            assert re.search(rf'"jit\([^"]*/{scope}/', names), (program, scope)


def test_settings_decide_what_a_role_holds_and_which_programs_it_has(made):
    _, searcher, found = made
    decode = fit_of(found["searcher"], "decode")
    without = {"learner__reference__kind": "none"}
    assert [*programs("searcher", **without)] == DECODES and [*programs("evaluator", **without)] == PROGRAMS["searcher"]
    (unscored,) = measured("searcher", "decode", **without)
    assert "reference" not in unscored.beside and unscored.peak == decode.peak - decode.beside["reference"]
    in_place = programs("searcher", searchers__swap_memory="in_place")
    assert "next policy from its snapshot" not in in_place and "next policy" not in in_place["decode"].beside
    policy = bytes_of(searcher._engine._lanes[0]._weights)
    assert policy < decode.beside["next policy"] < 1.5 * policy, "one set of weights, and one parameter more"
    # The data ways of a mesh are lanes on devices of their own; only the first of them is described.
    (rounded,) = measured("searcher", "decode", devices=2, searchers__weights="int8", searchers__mesh__data=2)
    assert rounded.beside["next policy"] > 0
    whole, part = measured("searcher", "decode", "decode, part of a ring", task__response_length=128)
    assert part.temporaries > whole.temporaries and part.arguments == whole.arguments, "CPUs and GPUs copy it once a call"
    moving = dict(learner__objective="tba_prime", learner__reference__kind="reset", learner__reference__reset_optimizer=True)
    reset = programs("trainer", **moving, lora__rank=2)
    assert {"scoring by the moving reference", "copy to the moving reference", "restart of moments"} <= reset.keys()
    assert "moving reference" in reset["update"].beside and "frozen weights" not in reset["update"].beside
    (split,) = measured("trainer", "update", devices=4, learner__mesh__fsdp=2, learner__mesh__data=2)
    names, update = ("snapshots to be written", "checkpoint to be written"), fit_of(found["trainer"], "update")
    whole_size, size = (sum(fit.beside[name] for name in names) for fit in (update, split))
    assert whole_size / 2 <= size < 1.1 * whole_size / 2


def test_a_warm_start_is_compiled_where_there_is_one(tmp_path):
    experiment = composition.build(tiny_run.config(warm_start__steps=2, warm_start__batch_size=4))
    run = layout.RunDir(tmp_path)
    names = [*compiling.programs(experiment, run, role="trainer", devices=DEVICES[:1])]
    assert names == ["init of the warm start", "update of the warm start", *PROGRAMS["trainer"]]
    run.initial_reference.parent.mkdir(parents=True, exist_ok=True)
    run.initial_reference.write_text("{}")
    assert [*compiling.programs(experiment, run, role="trainer", devices=DEVICES[:1])] == PROGRAMS["trainer"]


def with_settings(experiment: composition.Experiment, **settings) -> composition.Experiment:
    config = experiment.config.copy_and_resolve_references()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in settings.items()})
    return dataclasses.replace(experiment, config=config)


def test_models_of_the_task_lie_beside_all_programs_of_their_devices():
    """A searcher has a reward model, an evaluator a gold model as well; on task_devices they are a group of their own."""
    c = small_recipes.config("tldr_pythia:small")
    c.task.prompt_length = 128
    summaries = composition.build(c)
    models = {"searcher": {"reward model"}, "evaluator": {"reward model", "gold model"}}
    made = {role: compiling.programs(summaries, RUN, role=role, devices=DEVICES[:1]) for role in models}
    for role, beside in models.items():
        assert [*made[role]] == [*PROGRAMS["searcher"], *(f"pass of the {name}" for name in sorted(beside, reverse=True))]
        for name, program in made[role].items():
            assert set(program.beside) & beside == beside - {name.removeprefix("pass of the ")}
    together, weights = made["searcher"]["pass of the reward model"], Path(c.task.tldr.reward_path, "model.safetensors")
    assert {"reference", "caches", "policy in use", "next policy"} == set(together.beside)
    size = fitting.Measure().size(made["searcher"]["decode"].beside["reward model"])
    assert 0.9 * weights.stat().st_size < size < 4 * weights.stat().st_size  # float16 in the file

    apart = with_settings(summaries, searchers__task_devices=2)
    alone = compiling.programs(apart, RUN, role="searcher", devices=DEVICES[:3])
    assert [*alone] == PROGRAMS["searcher"] and not any("reward model" in program.beside for program in alone.values())
    task = compiling.fit_task(apart, role="searcher", on=compiling.Devices(devices=DEVICES[:3]))
    assert task is not None and task.on_host == 2 and task.where.endswith("searchers.task_devices=2")
    (fit,) = task.fits  # each device has a whole copy
    assert not fit.beside and fit.arguments == fitting.Measure().size(together.arguments)
    assert "searcher, task  fits: " in compiling.describe([task], config=apart.config)
    small = dataclasses.replace(task, on_host=0, limit=1 << 20)
    said = compiling.describe([small], config=apart.config)
    assert "does not fit" in said and "change task.tldr.batch_rows=" in said
    for experiment, role in ((summaries, "searcher"), (apart, "trainer")):
        assert compiling.fit_task(experiment, role=role, on=compiling.Devices(devices=DEVICES[:1])) is None


def test_a_role_that_does_not_fit_is_told_what_to_change():
    room = {"temporaries": ("learner.micro_batch_tokens", "task.custom.judge")}
    sizes = dict(arguments=1 << 30, temporaries=20 << 30, outputs=1 << 30, aliased=1 << 30, beside={"snapshots": 1 << 30})
    fit = fitting.Fit(name="update", program=Program(function=print, arguments=(), room=room), **sizes, refused=True)
    found = compiling.RoleFit(role="trainer", where="a TPU", limit=16 << 30, fits=[fit], unchecked=["the warm start"])
    said = compiling.describe([found], config=tiny_run.config())
    numbers = "does not fit: 22.00 GiB of 16.00 GiB (update); most of it: temporaries, 20.00 GiB"
    assert said.startswith(f"trainer    {numbers}; change learner.micro_batch_tokens=0, task.custom.judge; not checked: the warm")
    assert "refused by the compiler" in said
    on_host = dataclasses.replace(found, on_host=1)
    both = [on_host, dataclasses.replace(on_host, role="searcher")]
    said = compiling.describe(both, config=tiny_run.config(searchers__count=2))
    assert "together   may not fit: up to 66.00 GiB of 16.00 GiB; all roles share this machine's memory" in said


def test_sizes_in_what_the_compiler_says():
    told = "required for HLO temporaries (32.50G) exceeds available HBM (15.75G). HLO"
    assert fitting.sizes_in(told) == [int(32.5 * 2**30), int(15.75 * 2**30)]
    assert fitting.sizes_in("Used 2.00T of 95.73G hbm. Exceeded") == [2 << 40, int(95.73 * 2**30)]
    assert fitting.sizes_in("error E1000 in module jit_update") == []


def refusal(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        command_line.execute(main, arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out and said.err.startswith("error: "), said.err
    return said.err


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--topology=nobody=v5p:2x2x1"], ["'nobody'", "trainer, searcher, evaluator"]),
        (["--topology=X100x8"], ["the memory of X100 is not known: say it as X100x8@GIB"]),
        (["--topology=v5p:0x1x1"], ["is no topology"]),
        (["--topology=trainer=v5p:2x2x1,trainer=v5e:2x2"], ["names the trainer twice"]),
        (["--nodry_run", "--compile"], ["--compile needs --dry_run"]),
        (["--compile", "--topology=v5p:2x2x1"], ["one of the two"]),
        (["--compile", "--config.model.attention=splash"], ["model.attention=splash needs a TPU", "cpu"]),
        (
            ["--topology=trainer=v5p:2x2x1", "--role=searcher", "--config.replay.mount=('/nowhere',)"],
            ["error: 2 mistakes:", "--role=searcher", "/nowhere holds no run"],
        ),
    ],
)
def test_bad_input_is_one_sentence(flags, words, tmp_path, capsys, one_device):
    said = refusal(tiny_run.command(tmp_path / "run", "--dry_run", *flags)[3:], capsys)
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists()


def test_a_victim_whose_slots_do_not_divide_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: DEVICES[:2])
    flags = ["--role=searcher", "--dry_run", "--compile", "--config.task.red_team.victim_concurrency=3"]
    small = tiny_run.command(tmp_path / "run", *flags, recipe="configs/red_team_gpt2.py:small", tiny=False)[3:]
    said = refusal(small, capsys)
    assert "task.red_team.victim_path=" in said and "slots=3 cannot be divided by the 2 ways" in said


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


def test_an_answer_by_proxy_is_marked_and_nothing_is_written(stand_ins, tmp_path, capsys, one_device, monkeypatch):
    """A signal ends a dry run quietly: the TPU's compiler would answer by a stack trace."""
    asked: list[None] = []
    monkeypatch.setattr(processes, "stop_at_once", lambda: asked.append(None))
    flags = ["--dry_run=full", "--topology=H100x2", "--role=trainer", "--config.searchers.count=1"]
    assert command_line.execute(main, tiny_run.command(tmp_path / "run", *flags)[3:]) == 0
    said = capsys.readouterr().out
    assert re.match(r"trainer    fits: .* of 68\.06 GiB \(.*\); by TPU proxy\n", said)
    assert "(by TPU proxy, for 1 of H100x2)" in said and said.index("\nconfig:") > said.index("trainer on") and asked
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_programs_compile_for_a_tpu_that_is_not_here(tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler is not installed: pip install -e '.[tpu]'")
    both, split = "--topology=trainer=v5p:2x2x1,v5e:1x1", ["--config.learner.mesh.fsdp=2", "--config.learner.queries=4"]
    done = tiny_run.call(tiny_run.command(tmp_path / "run", "--dry_run", both, *split), timeout=600)
    assert len(re.findall(r"(?m)^(trainer|searcher|evaluator) +fits: ", done.stdout)) == 3, done.stdout + done.stderr
    assert " of 95.7" in done.stdout and " of 15.7" in done.stdout and "data=2 × fsdp=2" in done.stdout
    refused = tiny_run.call(tiny_run.command(tmp_path / "run", "--dry_run", "--topology=v5p:3x3x3"))
    assert refused.returncode == 2 and "'v5p:3x3x3' is no topology" in refused.stderr
