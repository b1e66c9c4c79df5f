"""What is too old here is told and replaced; what is new enough stays."""

import json
import subprocess
import sys

import pytest

from tba_jax.commands import requirements
from tests.support import tiny_run

# jax, flax and transformers are those of Colab's image of August 2026 (Python 3.13); the others are new enough for tba_jax.
COLAB = dict(
    line.split()
    for line in """
        jax 0.7.2
        jaxlib 0.7.2
        jax-cuda12-plugin 0.7.2
        flax 0.11.2
        transformers 5.15.0
        optax 0.2.8
        numpy 2.2.0
        huggingface-hub 1.4.1
        matplotlib 3.10.0
        rich 14.3.1
        ipywidgets 7.7.1
        ipykernel 6.17.1
    """.strip().splitlines()
)


def unmet(versions: dict[str, str], *extras: str) -> dict[str, str]:
    """Package -> version that is replaced, "" where it is missing."""
    return {each.package: each.installed for each in requirements.unmet(requirements.listed(tiny_run.ROOT, *extras), versions)}


def test_of_colab_s_packages_the_old_ones_are_replaced_and_the_others_stay():
    found = unmet(COLAB, "colab")
    assert found["jax"] == "0.7.2" and found["flax"] == "0.11.2"
    stays = {"transformers", "optax", "numpy", "ipywidgets", "ipykernel", "matplotlib", "huggingface_hub", "rich"}
    assert not stays & found.keys(), f"they are new enough, and listed as unmet: {stays & found.keys()}"
    assert found["math-verify"] == "" == found["vaderSentiment"]


def test_a_version_is_told_with_the_bound_that_it_breaks():
    (told,) = requirements.unmet(["jax>=0.10"], COLAB)
    assert str(told) == "jax 0.7.2 is here and >=0.10 is needed: it is replaced now"
    (told,) = requirements.unmet(["math_verify>=0.9"], COLAB)
    assert "math_verify" in str(told) and "missing" in str(told)


@pytest.mark.parametrize(
    ("version", "replaced"), [("0.12.7", True), ("0.12.8", False), ("0.12.9", True), ("0.12.10", False), ("0.13.0rc1", False)]
)
def test_bounds_are_those_of_requirements_txt(version, replaced):
    assert ("flax" in unmet(COLAB | {"flax": version})) is replaced


def test_names_are_compared_as_pip_does():
    assert not requirements.unmet(["Math_Verify>=0.9", "jax[cuda12]"], {"math-verify": "0.9.0", "jax": "0.12.0"})


def test_a_requirement_of_another_python_is_none():
    assert not requirements.unmet(['tomli>=2; python_version < "3.11"'], {})


def test_the_accelerator_is_that_of_the_machine():
    of = requirements.accelerator
    assert (
        of(COLAB, gpu=False, tpu=False) == "" and of({}, gpu=True, tpu=False) == "cuda12" and of({}, gpu=False, tpu=True) == "tpu"
    )
    assert of({"jax-cuda13-plugin": "0.12.0"}, gpu=True, tpu=False) == "cuda13"


def test_of_what_pip_says_only_conflicts_are_told():
    conflict = "dopamine-rl 4.1.2 requires jax<0.8, but you have jax 0.12.0 which is incompatible."
    told = f"\x1b[33mWARNING: Location 'x' is ignored\x1b[0m\n\x1b[31mERROR: pip's dependency resolver …\n{conflict}\x1b[0m\n"
    assert requirements.conflicts(told) == [conflict] and requirements.conflicts("") == []


def test_an_imported_module_is_known_by_its_package():
    assert requirements.imported(["pytest", "numpy", "no-such-package"]) == ["numpy", "pytest"]


# Before anything is installed there is no package of requirements.txt.
WITHOUT_PACKAGES = """
import json, sys
from tba_jax.commands import requirements
named = {requirements.Requirement(line).name.replace("-", "_").lower() for line in requirements.listed(requirements.Path("."))}
print(json.dumps(sorted(named & set(sys.modules))))
"""


def test_it_imports_no_package_that_it_may_replace():
    done = subprocess.run([sys.executable, "-c", WITHOUT_PACKAGES], cwd=tiny_run.ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
