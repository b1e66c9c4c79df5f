"""The pointer to the kept snapshots: what readers find, what stays, and two trainers that stall anywhere."""

import functools
import random
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba_jax.storage import fenced, places, published, snapshots
from tba_jax.storage.fenced import StaleEpoch
from tba_jax.storage.published import FIRST_PAUSE, Pointer, Published, lagging, retained
from tests.support.tiny_snapshots import SPECS, assert_same_bits, publish, random_params, shardings, withdraw

RULE: dict[str, Any] = dict(keep=2, keep_every=10, final_step=99)


def empty(policies: places.Place, step: int, epoch: int = 1, *, base: str = "") -> str:
    """The name of a new folder that holds one small file."""
    name = snapshots.new_name(step, epoch, base=base)
    places.make_folder(policies / name, below=2)
    places.write_bytes(policies / name / "file", b"x")
    return name


def test_pruning_keeps_the_best_while_it_is_the_best():
    steps, asked = [0, 7, 10, 14, 20, 21, 22], []
    assert retained(steps, **RULE | {"keep": 0}) == steps
    scores = {5: 0.99, 7: 0.9, 10: 0.1, 14: 0.8}  # the snapshot of step 5 is gone: it is nobody's best any more

    def told() -> dict[int, float]:
        asked.append(dict(scores))
        return scores

    assert retained(steps, **RULE | {"final_step": 14}, scores=told) == steps and asked.pop()
    assert retained(steps, **RULE, scores=told) == [0, 7, 10, 20, 21, 22]
    scores[20] = 0.95
    assert retained([0, 7, 10, 20, 21, 22], **RULE, scores=told) == [0, 10, 20, 21, 22] and len(asked) == 2
    assert retained([0, 10, 20, 21, 22], **RULE, scores=told) == [0, 10, 20, 21, 22] and len(asked) == 2, "nobody is asked"


def test_those_may_be_taken_up_that_are_as_much_older_than_the_newest():
    assert lagging([], lag=4) == [] and lagging([0, 2], lag=4) == [0] and lagging([0, 2, 4], lag=0) == [0, 2, 4]
    assert lagging([0, 20, 22, 24], lag=4) == [0, 20] and lagging([0, 2, 3, 4, 7], lag=4) == [0, 2, 3]
    assert lagging([22, 24], lag=4) == [], "above the one in use"


def test_the_pointer_lets_go_first_and_the_folder_goes_later(root):
    policies, now = root / "policy", [0.0]
    if root.__class__ is not places.Bucket:
        root.mkdir()
    pointer = Pointer(policies, epoch=1, keep_seconds=60, clock=lambda: now[0], **RULE)
    names = {}
    for step in (1, 2, 3, 4):
        now[0] = 10.0 * step
        pointer.add(step, names.setdefault(step, empty(policies, step)))
    assert [*published.kept(policies)] == [3, 4], "1 was let go of at 30 s, 2 at 40 s"
    assert set(names.values()) <= set(places.names_in(policies))
    now[0] = 90.0
    pointer.add(5, empty(policies, 5))
    assert not {names[1]} & set(places.names_in(policies)) and names[2] in places.names_in(policies)
    pointer.close()
    assert {*places.names_in(policies)} - {published.POINTER} == {pointer.kept[4], pointer.kept[5]}


def test_a_trainer_that_starts_takes_the_pointer_and_sweeps_what_nothing_points_at(root):
    policies = root / "policy"
    if root.__class__ is not places.Bucket:
        root.mkdir()
    first = Pointer(policies, epoch=1, **RULE)
    for step in (0, 1):
        first.add(step, empty(policies, step))
    killed, lost = empty(policies, 2), first.kept[1]
    places.remove_tree(policies / lost)
    second = Pointer(policies, epoch=2, **RULE)
    assert [*second.kept] == [0] == [*published.kept(policies)], "what is lost is published again"
    assert killed not in places.names_in(policies)
    with pytest.raises(StaleEpoch):
        first.add(3, empty(policies, 3))
    with pytest.raises(StaleEpoch):
        Pointer(policies, epoch=1, **RULE)
    second.add(1, empty(policies, 1, epoch=2))
    assert second.drop_after(0) == [1] and [*published.kept(policies)] == [0] and second.drop_after(0) == []


def test_a_base_stays_as_long_as_its_deltas_and_goes_after_them(root, monkeypatch):
    policies, removed, remove = root / "policy", [], places.remove_tree
    if root.__class__ is not places.Bucket:
        root.mkdir()
    monkeypatch.setattr(places, "remove_tree", lambda folder: (removed.append(folder.name), remove(folder)))
    pointer, names = Pointer(policies, epoch=1, **RULE), {}

    def add(step: int, base: int | None = None) -> None:
        pointer.add(step, names.setdefault(step, empty(policies, step, base=names[base] if base else "")))

    add(1)
    for step in (2, 3, 4):
        add(step, 1)
    assert [*published.kept(policies)] == [1, 3, 4] and removed == [names[2]]
    add(5)
    assert [*published.kept(policies)] == [1, 4, 5] and removed == [names[2], names[3]]
    add(6, 5)
    assert [*published.kept(policies)] == [5, 6] and removed[2:] == [names[4], names[1]]
    second = Pointer(policies, epoch=2, **RULE)
    assert [*second.kept.values()] == [names[5], names[6]]
    removed.clear()
    second.add(5, again := empty(policies, 5, epoch=2))
    assert [*second.kept.values()] == [again] and removed == [names[6], names[5]], "a delta cannot do without its own base"


def test_a_damaged_pointer_is_named_and_nothing_is_removed(tmp_path):
    folder = publish(tmp_path, 1)
    for file in (tmp_path / published.POINTER).iterdir():
        file.write_text("")
    for look in (lambda: published.kept(tmp_path), lambda: Pointer(tmp_path, epoch=2, **RULE)):
        with pytest.raises(ValueError, match=rf"{tmp_path / published.POINTER} is damaged"):
            look()
    assert folder.is_dir()


def reader(policies: Path, **settings: Any) -> Callable[..., Any]:
    return functools.partial(Published(policies, **settings).load_newest, SPECS, shardings())


def test_a_damaged_snapshot_is_read_once_and_told_once(tmp_path, monkeypatch, caplog):
    loads, whole = [], snapshots.load
    monkeypatch.setattr(
        snapshots, "load", lambda folder, *a, **settings: (loads.append(folder), whole(folder, *a, **settings))[1]
    )
    folders = [publish(tmp_path, step) for step in (2, 4)]
    places.remove(folders[1] / "embedding.weight" / "c" / "0" / "0")
    load = reader(tmp_path)
    step, params = load(newer_than=-1)
    assert step == 2
    assert_same_bits(params, random_params(2))
    for _ in range(5):
        assert load(newer_than=2) is None
    assert loads == folders[::-1]
    (told,) = [record.message for record in caplog.records]
    assert "step 4 is damaged" in told and "embedding.weight" in told
    found = load.func.__self__
    assert found.damage_above(3) == told and found.damage_above(4) == "" and found.whole() == [2]
    publish(tmp_path, 4, epoch=2)
    assert load(newer_than=2)[0] == 4 and found.damage_above(3) == ""


@pytest.mark.parametrize("file", ["embedding.weight/zarr.json", "layers.attention.query.weight/c/0/0/0/0"])
def test_a_torn_file_of_a_snapshot_costs_this_snapshot_alone(tmp_path, file):
    publish(tmp_path, 2)
    folder, whole = publish(tmp_path, 4), tmp_path / "whole"
    shutil.copytree(folder, whole)
    found = next(path for path in whole.rglob("*") if path.is_file() and path.relative_to(whole).as_posix().startswith(file[:32]))
    for left in (-3, 0, None):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        torn = folder / found.relative_to(whole)
        if left is None:
            torn.unlink()
        else:
            torn.write_bytes(torn.read_bytes()[:left])
        assert reader(tmp_path)(newer_than=-1)[0] == 2


def test_a_reader_that_loses_the_race_says_so_once_and_goes_on_with_growing_pauses(tmp_path, monkeypatch, caplog):
    for step in range(4):
        publish(tmp_path, step)
    whole, now, losses = snapshots.load, [0.0], [1, 1]

    def removed_meanwhile(*arguments, **settings):
        if losses:
            losses.pop()
            withdraw(tmp_path, max(published.kept(tmp_path)))
        return whole(*arguments, **settings)

    monkeypatch.setattr(snapshots, "load", removed_meanwhile)
    load = reader(tmp_path, clock=lambda: now[0])
    assert load(newer_than=-1) is None and len(losses) == 1
    assert load(newer_than=-1) is None and len(losses) == 1, "it pauses"
    now[0] = FIRST_PAUSE
    assert load(newer_than=-1) is None and not losses
    now[0] = 2 * FIRST_PAUSE
    assert load(newer_than=-1) is None, "the second pause is longer"
    now[0] = 3 * FIRST_PAUSE
    step, params = load(newer_than=-1)
    assert step == 1
    assert_same_bits(params, random_params(1))
    (told,) = [record.message for record in caplog.records]
    assert "was removed while it was read" in told and "publish.keep_seconds" in told


def test_a_snapshot_that_is_published_again_meanwhile_is_not_mixed(tmp_path, monkeypatch):
    """The other one has a folder of its own."""
    publish(tmp_path, 4)
    make = snapshots.jax.make_array_from_callback

    def again(*arguments):
        if fenced.read(tmp_path / published.POINTER).epoch != 2:
            publish(tmp_path, 4, random_params(9), epoch=2)
        return make(*arguments)

    monkeypatch.setattr(snapshots.jax, "make_array_from_callback", again)
    assert_same_bits(reader(tmp_path)(newer_than=-1)[1], random_params(4))
    assert_same_bits(reader(tmp_path)(newer_than=-1)[1], random_params(9))


class Turns:
    """Lets threads go on one at a time, from one call of storage to the next, in an order that a seed draws: a thread may stand
    still at any call, for as long as others go on."""

    def __init__(self, seed: int):
        self._random, self._condition = random.Random(seed), threading.Condition()
        self._waiting: dict[int, bool] = {}
        self._alive = self._running = 0

    def wait(self) -> None:
        me = threading.get_ident()
        with self._condition:
            if me in self._waiting:
                self._waiting[me] = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._waiting[me])

    def run(self, *bodies: Callable[[], None], look: Callable[[], None]) -> None:
        """Args: look: called between two turns, while all threads stand still."""

        def whole(body: Callable[[], None]) -> None:
            with self._condition:
                self._waiting[threading.get_ident()] = True
            self.wait()
            body()
            with self._condition:
                del self._waiting[threading.get_ident()]
                self._condition.notify_all()

        threads = [threading.Thread(target=whole, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        with self._condition:
            self._condition.wait_for(lambda: len(self._waiting) == len(bodies))
            favoured, patience = None, 0
            while True:
                self._condition.wait_for(lambda: not any(self._waiting.values()))
                look()
                if not self._waiting:
                    break
                if patience == 0 or favoured not in self._waiting:  # the others stand still for a while
                    favoured, patience = self._random.choice([*self._waiting]), self._random.randrange(1, 25)
                patience -= 1
                self._waiting[favoured] = True
                self._condition.notify_all()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("seed", range(40))
def test_two_trainers_that_stall_anywhere_leave_one_history_of_whole_snapshots(tmp_path, monkeypatch, kind, seed):
    root = tmp_path if kind == "local" else places.place(f"memory://turns/{uuid.uuid4().hex}")
    policies, turns, seen, ended = root / "policy", Turns(seed), [(0, 0)], []
    places.make_folder(policies)
    for name in ("create", "names_in", "remove", "remove_tree", "read_bytes", "write_bytes", "write_if", "read_version"):
        real = getattr(places, name)
        monkeypatch.setattr(places, name, lambda *a, real=real, **k: (turns.wait(), real(*a, **k))[1])

    def trainer() -> None:
        """Takes the next epoch, publishes, and stops once it is told that it was replaced. Its lease has run out at once."""
        lease, reached = root / "lease", -1
        while (taken := fenced.replace(lease, before := fenced.read(lease), {}, epoch=before.epoch + 1)) is None:
            pass
        try:
            pointer = Pointer(policies, epoch=taken.epoch, keep_seconds=60, clock=lambda: 0.0, **RULE)
            for step in range(1, 7):
                name = snapshots.new_name(step, taken.epoch)
                places.make_folder(policies / name)
                for part in ("a", "b"):
                    places.write_bytes(policies / name / part, f"{step} {taken.epoch}".encode())
                pointer.add(step, name)
                reached = step
        except (StaleEpoch, FileNotFoundError):  # its folder was swept while it was writing
            pass
        ended.append((taken.epoch, reached))

    def look() -> None:
        found = fenced.read(policies / published.POINTER)
        assert found.epoch >= seen[-1][0], "the pointer went back to an older epoch"
        seen.append(found.number)
        for step, folder in published._folders(policies, found).items():
            epoch = snapshots.step_and_epoch(folder.name)[1]
            assert epoch <= found.epoch
            for part in ("a", "b"):
                assert places.read_bytes(folder / part) == f"{step} {epoch}".encode(), "it is not whole, or mixed"

    turns.run(trainer, trainer, look=look)
    epoch, reached = max(ended)
    assert reached == 6, "the newer one is never kept from its work"
    assert fenced.read(policies / published.POINTER).epoch == epoch and [*published.kept(policies)] == [5, 6]
