"""The cases of the suite, in the order of their worth."""

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import Device
from benchmarks.gpu.suite import Case, Row, read_figures

KINDS = ("tests", "decode", "update", "torch", "wire", "int8", "run", "sweep")
# Settings of XLA that the sweep tries on the update, each in a process of its own because XLA reads them at the start.
_XLA = {
    "without latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=false",
    "with latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "without command buffers": "--xla_gpu_enable_command_buffer=",
}
# Kind of a case -> seconds without which it is not begun, and after which it is stopped: programs are compiled in this time.
_SECONDS = {
    "tests": (30, 150),
    "decode": (60, 330),
    "update": (40, 150),
    "torch": (30, 90),
    "wire": (20, 100),
    "int8": (60, 150),
    "run": (60, 150),
    "sweep": (30, 90),
}


def of(device: Device, output: Path, *, model: str, data: str) -> list[Case]:
    """The cases of a device. Args: output: folder of answers and logs; model, data: of the run on GSM8K, "": the repository's."""
    make = functools.partial(_case, output)
    sizes = ("--tiny",) if device.platform == "cpu" else ()
    counted = () if device.platform == "gpu" else ("--only_counted",)
    small, large = "qwen2.5-0.5b", "qwen2.5-1.5b"
    pythia, qwen = (make("decode", name, _decode(device, name), _read_decode) for name in ("pythia-410m", large))
    # A kernel that fails on a device costs the setting, not the row.
    xla = ("--attention=xla",) if device.platform != "cpu" else ()
    updates = [make("update", name, _measure("update", name, sizes), otherwise=xla) for name in (small, large)]
    torch = [make("torch", name, ("-m", "benchmarks.gpu.torch_update", f"--preset={name}", *sizes)) for name in (small, large)]
    return [
        make("tests", "GPU tests", ("-m", "benchmarks.gpu.runs", "--run=tests", *counted)),
        updates[0],
        qwen,
        *(torch[:1] if device.torch else []),
        updates[1],
        make("run", "GSM8K, two searchers", _run(device, output, model=model, data=data)),
        make("wire", f"weights of {large}", _measure("wire", large, (*sizes, "--repeats=3"))),
        pythia,
        *(
            make("int8", f"{large}, {weights} weights", _measure("decode", large, (*sizes, f"--weights={weights}")))
            for weights in ("full", "int8")
        ),
        *_sweep(make, device, small, sizes),
        *(torch[1:] if device.torch else []),
    ]


def _case(
    output: Path,
    kind: str,
    name: str,
    command: tuple[str, ...],
    read: Any = read_figures,
    environment: Mapping[str, str] | None = None,
    otherwise: tuple[str, ...] = (),
) -> Case:
    answer = output / f"{re.sub(r'[^a-z0-9.]+', '-', f'{kind} {name}'.lower())}.json"
    least, most = _SECONDS[kind]
    if not any("ANSWER" in each for each in command):
        command = (*command, "--answer=ANSWER")
    title = name if kind == "tests" else f"{kind}: {name}"
    command = tuple(each.replace("ANSWER", str(answer)) for each in command)
    limits: dict[str, Any] = dict(least=least, most=most, environment=environment or {}, otherwise=otherwise)
    return Case(name=title, kind=kind, command=command, answer=answer, read=read, **limits)


def _measure(what: str, preset: str, more: tuple[str, ...]) -> tuple[str, ...]:
    return ("-m", "benchmarks.gpu.measure", f"--what={what}", f"--preset={preset}", *more)


def _sweep(make: Any, device: Device, preset: str, sizes: tuple[str, ...]) -> list[Case]:
    """Attention, rematerialisation, donation and XLA's flags on the update of one shape, whose own row has the defaults."""
    settings = ["--attention=xla", "--remat=none", "--remat=dots", "--nodonate"]
    found = [make("sweep", setting.removeprefix("--"), _measure("update", preset, (*sizes, setting))) for setting in settings]
    if device.platform == "gpu":
        for name, flag in _XLA.items():
            flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS", ""), flag)))
            found.append(make("sweep", name, _measure("update", preset, sizes), environment={"XLA_FLAGS": flags}))
    return found


def _decode(device: Device, name: str) -> tuple[str, ...]:
    """benchmarks.decode with one and with 16 responses to a query. On a CPU a small case stands for each of the two shapes."""
    if device.platform == "cpu":
        small = "v4096_s1" if name.startswith("pythia") else "v4096_s16"
        return ("-m", "benchmarks.decode", f"--cases={small}", "--modes=ours", "--batch=16", "--repeats=1", "--out=ANSWER")
    shape = name.partition("-")[0].rstrip("0123456789.")
    return (
        "-m",
        "benchmarks.decode",
        "--device=gpu",
        f"--cases={shape}_s1,{shape}_s16",
        f"--modes={'ours,dynamic,static' if device.torch else 'ours'}",
        "--repeats=3",
        "--out=ANSWER",
    )


def _read_decode(answer: Path, case: Case) -> list[Row]:
    """The rows of benchmarks.decode: tokens a second, and the share of the bandwidth that the machine was measured to have."""
    made = []
    for found in json.loads(answer.read_text(encoding="utf-8"))["cases"].values():
        decoders, samples = found["decoders"], found["rows"] // found["queries"]
        for name, figures in decoders.items():
            read, bound = (100 * figures[f"share_of_{of}"] for of in ("bandwidth", "bound"))
            beside = f"{read:.0f} % of the measured bandwidth, {bound:.0f} % of the bound"
            if name != "ours" and "ours" in decoders:
                beside += f"; ours × {decoders['ours']['tokens_per_second'] / figures['tokens_per_second']:.2f}"
            figure = f"S = {samples}: {'ours' if name == 'ours' else f'`generate`, {name}'}"
            made.append(Row(case=case.name, figure=figure, value=f"{figures['tokens_per_second']:.0f} tokens/s", beside=beside))
    return made


def _run(device: Device, output: Path, *, model: str, data: str) -> tuple[str, ...]:
    """The recipe's small run with two searchers, which share the device with the trainer and the evaluator."""
    settings = ["--config.searchers.count=2"]
    if device.platform == "gpu":
        settings.append("--config.model.compute_dtype=bfloat16")
    if model:
        settings.append(f"--config.model.path={model}")
    if data:
        settings += [f"--config.task.gsm8k.{part}_path={data}" for part in ("train", "heldout")]
    return ("-m", "benchmarks.gpu.runs", "--run=gsm8k", f"--workdir={output / 'gsm8k'}", "--answer=ANSWER", "--", *settings)
