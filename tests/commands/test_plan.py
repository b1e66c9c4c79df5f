"""The command that finds settings that fit: mistakes, and for TPUs that are not here the settings that it prints."""

import importlib.util
import math
import re
import shlex
import sys

import pytest

from tba_jax import __main__
from tba_jax.commands import plan
from tba_jax.experiment.compiling import RoleFit
from tba_jax.experiment.fitting import Fit
from tba_jax.experiment.planning import Place, Planned
from tests.support import tiny_run


def call(*flags: str) -> list[str]:
    settings = [flag for flag in tiny_run.command("DIR")[3:] if not flag.startswith("--workdir")]
    return ["plan", *settings, *flags]


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], ["--topology", "--gpus"]),
        (["--topology=v5p:2x2x1", "--gpus=H100x8"], ["one of --topology and --gpus"]),
        (["--topology=v5p"], ["'v5p' is no topology", "v5e:2x2"]),
        (["--topology=nobody=v5p:2x2x1"], ["'nobody'", "trainer, searcher, evaluator"]),
        (["--gpus=H100"], ["--gpus=H100 must be NAMExCOUNT"]),
        (["--gpus=K80x2"], ["the memory of K80 is not known"]),
        (["--gpus=abc"], ["--gpus=abc must be NAMExCOUNT"]),
        (["--gpus=H100x8", "--seconds=0"], ["--seconds=0 must be a whole number of at least 1"]),
        (["--gpus=H100x8", "--seconds=abc"], ["--seconds=abc must be a whole number of at least 1"]),
        (["--gpus=H100x8", "--config.learner.stepz=1"], ["learner.stepz"]),
    ],
)
def test_bad_input_is_one_sentence(flags, words, capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(call(*flags))
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out and said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    for word in words:
        assert word in said.err


def test_without_the_compiler_of_tpus_the_extra_is_named(capsys):
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("libtpu is installed here")
    for flag in ("--gpus=H100x8", "--topology=v5p:2x2x1"):
        with pytest.raises(SystemExit):
            __main__.main(call(flag))
        said = capsys.readouterr().err
        assert "the extra `tpu`" in said and ("--gpus=H100x8: TPU chips stand in for GPUs" in said) == ("gpus" in flag)


def planned(*flags: str) -> tuple[str, list[str]]:
    """What the command prints, and the dry run that it names."""
    done = tiny_run.call([sys.executable, "-m", "tba_jax", *call(*flags)], timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout, shlex.split(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("placement", [{}, {"searchers.count": 1}], ids=["TPUs", "GPUs"])
def test_the_dry_run_of_chips_that_stand_in_is_not_said_to_judge_gpus(placement):
    """Its limits are those of the chips: on TPUs the very ones of the plan, on GPUs others."""
    fit = Fit(name="update", program=None, arguments=1, temporaries=2, outputs=0, aliased=0, beside={}, refused=False)
    fits = RoleFit(role="trainer", where="", limit=4, fits=[fit], unchecked=[])
    place = Place(devices=[None], topology="v5p:1x1x1", name="1 × L4, by proxy v5p:1x1x1", limit=4)
    planned = Planned(role="trainer", place=place, settings={}, fit=fits, binds="nothing")
    *_, title, dry_run = plan.describe([planned], placement, command=["--config=x.py"]).splitlines()
    assert dry_run.endswith("--topology=trainer=v5p:1x1x1")
    assert ("those of the chips, not of the GPUs" in title) == bool(placement), title


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--topology=trainer=v5p:2x2x1,v5e:1x1", "--gpus=L4x3"])
def test_what_is_found_compiles(flag, tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler is not installed: pip install -e '.[tpu]'")
    said, dry_run = planned(flag)
    assert len(re.findall(r"(?m)^(trainer|searcher|evaluator) +fits ", said)) == 3 and said.count("limit: ") == 3, said
    assert ("by proxy" in said) == flag.startswith("--gpus")
    dry_run = [sys.executable, *dry_run[1:]]
    dry_run[dry_run.index("--workdir=DIR")] = f"--workdir={tmp_path / 'run'}"
    done = tiny_run.call(dry_run, timeout=600)
    assert done.returncode == 0 and len(re.findall(r"(?m)^(trainer|searcher|evaluator) +fits: ", done.stdout)) == 3, done.stderr


@pytest.mark.slow
def test_a_model_that_is_too_large_names_the_smallest_that_would_do():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler is not installed: pip install -e '.[tpu]'")
    wide = ["--config.model.width=8192", "--config.model.ffn=65536", "--config.model.layers=2", "--config.learner.queries=4"]
    done = tiny_run.call([sys.executable, "-m", "tba_jax", *call("--topology=trainer=v5e:1x1", *wide)], timeout=600)
    *told, error = done.stderr.split(" trying ")[-1].splitlines()
    chips = math.prod(map(int, re.findall(r"mesh.\w+=(\d+)", told[0])))
    found = {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"}[chips]
    assert done.returncode == 2 and error.endswith(f"the smallest that would do: {found}"), done.stderr
    limit = float(re.search(r"does not fit v5e:1x1 of ([\d.]+) GiB", error)[1])
    peaks = [re.findall(r"peak ([\d.]+) GiB", each) for each in done.stderr.split(" trying ")[1:]]
    assert [max(map(float, each)) <= limit for each in peaks] == [False] * (len(peaks) - 1) + [True], done.stderr
