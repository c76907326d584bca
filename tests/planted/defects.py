"""Defects to plant: one line or two of the product, changed as a tired author might.

Each was chosen because it breaks a promise and nothing crashes at once. `tests/planted/plant.py` plants one after the
other and wants `scripts/test` to be red; tests/unit/support/test_planted.py wants every one of them to fit the code as
it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Defect:
    """What is changed where.

    Attributes:
        name: says what is wrong then.
        path: the file, from the clone's root.
        changes: what stands there exactly once, and what stands there afterwards.
        near: where a test is likely to find it: those run first. All others run only if these find nothing.
    """

    name: str
    path: str
    changes: tuple[tuple[str, str], ...]
    near: str

    def plant(self, root: Path) -> None:
        """Change the file below `root`. Raises ValueError where it does not fit."""
        file = root / self.path
        text = file.read_text()
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {self.path} has this {text.count(old)} times: {old!r}")
            text = text.replace(old, new)
        file.write_text(text)


def one(name: str, path: str, old: str, new: str, near: str) -> Defect:
    """A defect of one change."""
    return Defect(name, path, ((old, new),), near)


TRAINER, AGENT, CLOUD, NODE = "tests/unit/trainer", "tests/unit/agent", "tests/unit/cloud", "tests/unit/node"
SNAPSHOTS, PROCESS, WATCH = "tests/unit/snapshots", "tests/process", "tests/unit/watch"

DEFECTS = (
    # ---- the trainer
    one(
        "a snapshot is sealed before it is copied",
        "harness/trainer/staging/stager.py",
        "            deferred = self._copy(slot, layout, captured, copying, begun, overlap=overlap)\n"
        "            record = self._record(step, captured, layout, compares=compares)\n"
        "            copying.finish()\n"
        "        if (not deferred or self._overlap.validating) and not self._seal(grant, slot, record, started):\n",
        "            record = self._record(step, captured, layout, compares=compares)\n"
        "            sealed = self._seal(grant, slot, record, started)\n"
        "            deferred = self._copy(slot, layout, captured, copying, begun, overlap=overlap)\n"
        "            copying.finish()\n"
        "        if not sealed:\n",
        TRAINER,
    ),
    one(
        "a slot that is being filled still counts as sealed",
        "harness/trainer/staging/stager.py",
        "            slot.begin()\n            deferred",
        "            deferred",
        TRAINER,
    ),
    one(
        "a grant is used twice",
        "harness/trainer/staging/stager.py",
        "        self._used_grant = grant\n",
        "",
        TRAINER,
    ),
    one(
        "the step of a snapshot is off by one",
        "harness/trainer/training.py",
        '            "step": step,\n            "place"',
        '            "step": step + 1,\n            "place"',
        TRAINER,
    ),
    one(
        "what the user noted is not saved",
        "harness/trainer/training.py",
        '            "extra": captured.extra,\n',
        '            "extra": {},\n',
        TRAINER,
    ),
    one(
        "random numbers are not restored",
        "harness/trainer/loaders/known.py",
        "        self._random.set(rng)\n        self._pending_rng = rng\n",
        "        self._pending_rng = rng\n",
        TRAINER,
    ),
    one(
        "a loader's position is off by one",
        "harness/trainer/loaders/dataloader.py",
        '            "handed": self.handed,\n',
        '            "handed": max(0, self.handed - 1),\n',
        TRAINER,
    ),
    one(
        "an end that only the process tells counts before its exit code is known",
        "harness/trainer/training.py",
        "                self.finish(hold=held)\n",
        "                self.finish()\n",
        TRAINER,
    ),
    one(
        "a final snapshot that was held back counts whatever came of it",
        "harness/agent/save/pipeline.py",
        "            if counts:\n                self._last_sequence[self.pool.rank_of(index)] -= 1\n",
        "            if True:\n                self._last_sequence[self.pool.rank_of(index)] -= 1\n",
        AGENT,
    ),
    one(
        "the end of the run does not wait until its snapshot is durable",
        "harness/trainer/training.py",
        "        if not hold:\n            self.saving.wait_durable()\n",
        "",
        TRAINER,
    ),
    one(
        "data workers are seeded alike in every epoch",
        "harness/trainer/loaders/workers.py",
        '        return word_of(f"{batch.epoch_seed}/{batch.number}/{label}")\n',
        '        return word_of(f"{batch.number}/{label}")\n',
        TRAINER,
    ),
    # ---- between the two processes
    one(
        "a record that is damaged is believed",
        "harness/ipc/slots.py",
        "        if zlib.crc32(data) != crc:\n            return None\n",
        "",
        "tests/unit/ipc",
    ),
    one(
        "a slot that was never sealed has a record",
        "harness/ipc/slots.py",
        "        if magic != _MAGIC or state != SlotState.SEALED or offset + length > self.size:\n",
        "        if magic != _MAGIC or offset + length > self.size:\n",
        "tests/unit/ipc",
    ),
    one(
        "what is asked a second time is no news",
        "harness/ipc/control_page.py",
        "Request(value, Request.decode(self.words[word]).sequence + 1).encode()",
        "Request(value, Request.decode(self.words[word]).sequence).encode()",
        "tests/unit/ipc",
    ),
    # ---- the agent
    one(
        "a commit is not followed by a look at its shards",
        "harness/snapshots/commit.py",
        "        if _has_sizes(store, keys, standing, deadline):\n            return standing\n",
        "        return standing\n",
        SNAPSHOTS,
    ),
    one(
        "a slot is not looked at again after it was read",
        "harness/agent/save/jobs.py",
        "        intact=lambda: sealed.slot.record() == record,\n",
        "",
        AGENT,
    ),
    one(
        "a copy that differs is put over what a part names",
        "harness/snapshots/commit.py",
        "        if entries[index].crc64nvme != ours:\n",
        "        if False:\n",
        SNAPSHOTS,
    ),
    one(
        "a manifest is deleted after its shards",
        "harness/snapshots/retire.py",
        "    store.delete(keys.commit(snapshot), deadline=deadline)\n"
        '    prefix = f"{keys.snapshots}{snapshot}-"\n'
        "    for info in store.list(prefix, deadline=deadline):\n"
        "        if (named := keys.parse_directory(info.key)) is not None:\n"
        "            directories.add(named[1])\n"
        "    for directory in directories:\n"
        "        _remove_directory(store, keys, directory, deadline)\n"
        "        _take_back(store, keys, snapshot, directory, deadline)\n",
        '    prefix = f"{keys.snapshots}{snapshot}-"\n'
        "    for info in store.list(prefix, deadline=deadline):\n"
        "        if (named := keys.parse_directory(info.key)) is not None:\n"
        "            directories.add(named[1])\n"
        "    for directory in directories:\n"
        "        _remove_directory(store, keys, directory, deadline)\n"
        "        _take_back(store, keys, snapshot, directory, deadline)\n"
        "    store.delete(keys.commit(snapshot), deadline=deadline)\n",
        SNAPSHOTS,
    ),
    one(
        "a generation that is taken is used all the same",
        "harness/snapshots/commit.py",
        "            wanted = msgspec.structs.replace(wanted, generation=wanted.generation + 1)\n",
        "            return wanted\n",
        SNAPSHOTS,
    ),
    one(
        "a quarantined snapshot is resumed from",
        "harness/snapshots/records.py",
        "        commits=tuple(snapshot for snapshot in committed if snapshot not in quarantined),\n",
        "        commits=tuple(committed),\n",
        SNAPSHOTS,
    ),
    Defect(
        "what is read, by a resume or to verify it, is not compared",
        "harness/snapshots/fetch.py",
        (
            ("        if format_crc(crc) != self.entry.chunks[number]:\n", "        if crc is None:\n"),
            ("        if format_crc(crc) != self.entry.crc64nvme:\n", "        if crc is None:\n"),
        ),
        SNAPSHOTS,
    ),
    one(
        "the nearest snapshot is resumed from, and not the newest",
        "harness/snapshots/candidates.py",
        "key=lambda copy: (copy.id, _ORDER[copy.tier])",
        "key=lambda copy: (_ORDER[copy.tier], copy.id)",
        AGENT,
    ),
    one(
        "another run's snapshot is resumed from",
        "harness/snapshots/candidates.py",
        "    if manifest.run_id != run_id:\n",
        "    if not manifest.run_id:\n",
        AGENT,
    ),
    one(
        "a store that is down has no snapshot",
        "harness/snapshots/candidates.py",
        "            if not isinstance(err, NotFound) and not _is_one_place(copy, keys):\n"
        "                raise  # nothing may be concluded from a store that is down\n",
        "",
        AGENT,
    ),
    one(
        "a slot that the trainer may write is read",
        "harness/agent/save/pipeline.py",
        " if not self.pool.is_granted(index)]\n",
        "]\n",
        AGENT,
    ),
    one(
        "a rank ends before the others have sealed the last step",
        "harness/trainer/meeting.py",
        "        return self._stager.sealed_step == step and set_step is not None and set_step >= step\n",
        "        return self._stager.sealed_step == step\n",
        TRAINER,
    ),
    one(
        "only a rank that lays out its slots gives back what FSDP2 holds gathered",
        "harness/trainer/training.py",
        "            module.reshard()\n",
        "            pass\n",
        TRAINER,
    ),
    one(
        "ranks on both sides of a validation make a snapshot",
        "harness/core/policy/meeting.py",
        "    here = Place(top, Where.AFTER, max(view.passed for view in views if view.step == top))\n",
        "    here = Place(top, Where.FIRST)\n",
        "tests/unit/core",
    ),
    one(
        "ranks leave with what they had sealed before a notice, though they are beyond it",
        "harness/agent/trainers/meeting.py",
        "        if leaves and self.agreed != step:\n            return False\n",
        "",
        AGENT,
    ),
    one(
        "what an agent inherits half sealed keeps its ranks waiting",
        "harness/agent/requests.py",
        "            self._ranks.drop(self._pipeline.forget_others(self._ranks.meeting.agreed))\n",
        "            pass\n",
        "tests/ranks",
    ),
    one(
        "shares of two assignments make a snapshot",
        "harness/agent/save/snapshot_set.py",
        "    return sealed.record.generation, sealed.record.step, sealed.record.assignment\n",
        '    return sealed.record.generation, sealed.record.step, ""\n',
        AGENT,
    ),
    one(
        "a seal that was dropped is still part of a set",
        "harness/agent/save/pipeline.py",
        "            self.pool[index].begin()\n            for holder in",
        "            for holder in",
        AGENT,
    ),
    one(
        "a snapshot is whole without all of its ranks",
        "harness/agent/save/snapshot_set.py",
        "        if len(ranks) < sealed.record.world_size:\n            return None\n",
        "",
        AGENT,
    ),
    one(
        "one rank's layout takes the slots of all",
        "harness/agent/save/slot_pool.py",
        "        self._retired |= self._of(wanted.rank) - set(indexes)\n",
        "        self._retired |= set(self._slots) - set(indexes)\n",
        AGENT,
    ),
    one(
        "those who publish a snapshot do not agree where it goes",
        "harness/agent/save/jobs.py",
        "        return commit.Attempt(self.generation.nonce) if self.generation.nonce else commit.Attempt()\n",
        "        return commit.Attempt()\n",
        AGENT,
    ),
    one(
        "a slot that a tier reads is free",
        "harness/agent/save/pipeline.py",
        "            self.pool.hold(index, tier.name)\n        self._submit(tier, job)\n",
        "            pass\n        self._submit(tier, job)\n",
        AGENT,
    ),
    one(
        "an older step that is durable stands for the newest",
        "harness/agent/save/pipeline.py",
        "        return durable is not None and (self.sealed_step is None or durable >= self.sealed_step)\n",
        "        return durable is not None\n",
        AGENT,
    ),
    one(
        "a snapshot that is only local counts as durable at the end",
        "harness/core/policy/end.py",
        "ExitCode.INTERRUPTED if durable else ExitCode.INTERRUPTED_LOCAL",
        "ExitCode.INTERRUPTED",
        "tests/unit/core",
    ),
    one(
        "a store that fails once is not tried again",
        "harness/agent/save/tier.py",
        '                final = isinstance(err, SnapshotCorrupt) or self.name == "local"',
        '                final = True or self.name == "local"',
        AGENT,
    ),
    one(
        "retention keeps nothing that is known to be good",
        "harness/core/policy/retention.py",
        "        if snapshot < newest_good\n        and snapshot not in kept\n",
        "        if snapshot not in kept\n",
        "tests/unit/core",
    ),
    one(
        "a crash too many is forgiven",
        "harness/core/policy/restart.py",
        "    if count > max_crashes:\n",
        "    if count > max_crashes + 1:\n",
        "tests/unit/core",
    ),
    one(
        "a later start of few steps is older than an earlier one of many",
        "harness/core/snapshot.py",
        "    generation: int\n    step: int\n\n    def __post_init__",
        "    step: int\n    generation: int\n\n    def __post_init__",
        "tests/unit/core",
    ),
    one(
        "a changed shard is copied from the last snapshot",
        "harness/snapshots/dedup.py",
        "        candidates = [shard for shard in candidates if shard.chunks[index] == digest]\n",
        "        candidates = [shard for shard in candidates if shard.chunks[index] or digest]\n",
        SNAPSHOTS,
    ),
    one(
        "nobody waits for the agent of an older start",
        "harness/snapshots/handover.py",
        "        return [number for number in awaited if number not in silent]\n",
        "        return []\n",
        SNAPSHOTS,
    ),
    # ---- notices
    one(
        "a notice is lost",
        "harness/agent/notices/poller.py",
        "                self._on_notice(notice)\n",
        "",
        AGENT,
    ),
    one(
        "a notice is withdrawn by a service that does not answer",
        "harness/agent/notices/poller.py",
        "            self._failed(watched, err)\n            return\n",
        "            self._failed(watched, err)\n            notices = {}\n",
        AGENT,
    ),
    one(
        "a token that is no longer known is used for ever",
        "cloud/aws/metadata.py",
        "        if answer.status == 401:  # the token was revoked, or forgotten by a service that restarted\n"
        '            self._token = ""\n',
        "        if answer.status == 401:  # the token was revoked, or forgotten by a service that restarted\n",
        CLOUD,
    ),
    # ---- stores
    one(
        "a file is not synced before it has its name",
        "cloud/directory/draft.py",
        "        self._fs.fdatasync(draft.fd)\n",
        "",
        CLOUD,
    ),
    one(
        "the directories of a new name are not synced",
        "cloud/directory/tree.py",
        "            for fd in reversed(directories):\n                self.fs.fsync(fd)\n",
        "            list(reversed(directories))\n",
        CLOUD,
    ),
    one(
        "a commit replaces another one",
        "cloud/directory/store.py",
        "            taken = not self._drafts.link(draft, name)\n",
        "            self._fs.rename(draft.name, name, src_dir_fd=draft.directory, dst_dir_fd=draft.directory)\n"
        "            taken = False\n",
        "tests/contract",
    ),
    one(
        "a write that was cut short is not gone on with",
        "cloud/directory/draft.py",
        "            piece = piece[count:]\n",
        "            piece = piece[len(piece) :]\n",
        CLOUD,
    ),
    one(
        "S3 is not told that a commit must not replace another one",
        "cloud/s3/store.py",
        'Body=data, IfNoneMatch="*", ',
        "Body=data, ",
        "tests/contract",
    ),
    one(
        "a listing ends after its first page",
        "cloud/s3/store.py",
        '            if not page.get("IsTruncated"):\n                return\n            where',
        '            if "IsTruncated" in page:\n                return\n            where',
        "tests/contract",
    ),
    one(
        "a part that is there is taken for ours without a look at its sum",
        "cloud/s3/upload.py",
        "            if stored is not None and (stored.size, stored.crc) == (size, crc):\n",
        "            if stored is not None:\n",
        CLOUD,
    ),
    one(
        "another one's commit is taken for ours where a reply was lost",
        "cloud/retry.py",
        "                if not ours:\n                    raise\n",
        "                if not ours:\n                    return\n",
        CLOUD,
    ),
    # ---- the node
    one(
        "a failure while leaving stops the fleet",
        "harness/node/exit_policy.py",
        "        found = Consequence(tuple(act for act in found.actions if act in kept))\n",
        "        found = Consequence(tuple(act for act in found.actions if act in kept or act is Act.STOP))\n",
        NODE,
    ),
    one(
        "an agent that dies ends the job",
        "harness/node/exit_policy.py",
        "    if signum is not None or code is None:\n        return Ending.AGENT_DIED\n",
        "    if code is None:\n        return Ending.AGENT_DIED\n",
        NODE,
    ),
    # ---- programs that save by themselves
    one(
        "a checkpoint is taken while a process writes it",
        "harness/watch/judge.py",
        "    if (written := next((path for path in paths if path in known.writing), None)) is not None:\n",
        "    if (written := next(iter(()), None)) is not None:\n",
        WATCH,
    ),
    one(
        "a checkpoint counts before its other ranks have written",
        "harness/watch/judge.py",
        "        expected = max(ranks or 0 if each == 1 else 0, max(found, default=-1) + 1)\n",
        "        expected, ranks = max(found, default=-1) + 1, None\n",
        WATCH,
    ),
    one(
        "a mark that comes early is believed",
        "harness/watch/judge.py",
        "    return comes_last and bool(marks.has or any(pointer.is_last for pointer in adapter.pointers))\n",
        "    return bool(marks.has or any(pointer.is_last for pointer in adapter.pointers))\n",
        WATCH,
    ),
    one(
        "the first checkpoint counts though other files may follow its mark",
        "harness/watch/judge.py",
        "    is_told = told and not marks.late and (",
        "    is_told = told and (",
        WATCH,
    ),
    one(
        "a shard that is shorter than its metadata say counts as whole",
        "harness/watch/judge.py",
        "            if look.files[above + full].size < least_bytes:\n",
        "            if look.files[above + full].size < 0:\n",
        WATCH,
    ),
    one(
        "a pointer to a torn checkpoint stays",
        "harness/agent/resume/laying_back.py",
        '            folder = move_aside(self._root, there.pointers_without(torn), "torn")\n',
        "            folder = None\n",
        "tests/unit/agent/resume",
    ),
    one(
        "a zip that is cut off counts as whole",
        "harness/watch/sound.py",
        '        return "is cut off (a zip without its end)"\n',
        "        return None\n",
        WATCH,
    ),
    one(
        "a file that changes while it is set aside is kept",
        "harness/watch/aside.py",
        "            if Seen.of(os.fstat(source)) != seen or (linked and Seen.of(target.stat()) != seen):\n",
        "            if linked and Seen.of(target.stat()) != seen:\n",
        WATCH,
    ),
    one(
        "a write that falls short, as on a full disk, counts as a whole one",
        "harness/ipc/write.py",
        "    while data:\n",
        "    if data:\n",
        "tests/unit/agent/resume",
    ),
    one(
        "a process that outlives the program may still write",
        "harness/watch/watcher.py",
        "            self._family = sorted({*processes.family(self._pid), *outlived})\n",
        "            self._family = processes.family(self._pid)\n",
        WATCH,
    ),
    one(
        "a signal goes to a program that it ends",
        "harness/watch/asking.py",
        "    told = [each for each in listeners(save, pid) if processes.catches(each, signum)]\n",
        "    told = list(listeners(save, pid)) or [pid]\n",
        WATCH,
    ),
    one(
        "a torn checkpoint stays where the program looks for the greatest number",
        "harness/agent/resume/laying_back.py",
        "            newer = there.not_whole_after(-1 if is_same and there.is_dated else order)\n",
        "            newer = list[Judged]()\n",
        "tests/unit/agent/resume",
    ),
    one(
        "what is in the way of a checkpoint that is laid back is overwritten",
        "harness/watch/place.py",
        '    move_aside(root, [path], "replaced")\n    (root / path).parent',
        "    shutil.rmtree(root / path, ignore_errors=True)\n    (root / path).parent",
        "tests/unit/agent/resume",
    ),
    one(
        "an older snapshot is laid back over a newer checkpoint",
        "harness/agent/resume/laying_back.py",
        "            return whole, (whole.order > record.order) - (whole.order < record.order)\n",
        "            return whole, -(whole.order != record.order)\n",
        "tests/unit/agent/resume",
    ),
    one(
        "a file that was copied in the store keeps the path of the one that it is equal to",
        "harness/snapshots/commit.py",
        '    return FileEntry(**{**msgspec.structs.asdict(entry), "path": path})\n',
        '    return FileEntry(**{"path": path, **msgspec.structs.asdict(entry)})\n',
        SNAPSHOTS,
    ),
)
