"""A run's fleet, from its owner's machine: made, changed, looked at, stopped and ended.

Owns the order of the steps: nothing is bought before its price was shown, and a fleet that exists can be found from any
machine. Everything that is done to AWS is done by Terraform's commands, which are shown, or is one call that the help
shows.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cloud.aws.console import Activity, Console, Group
from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.core.snapshot import RunKeys
from harness.errors import ConfigError
from harness.fleet.costs import Bill, Machine, Offer, bill, boot_s, never_trained, offers, with_activities
from harness.fleet.definition import Definition
from harness.fleet.history import machines_of
from harness.fleet.home import CALL_S, Home
from harness.fleet.pack import pack
from harness.fleet.terraform import Terraform
from harness.fleet.vendor import Image, PackError
from harness.snapshots import records
from harness.snapshots.open import open_existing_store

BUCKET = "module.fleet.module.bucket"
_LOOK_S = 120.0
_STOPPING_ALARMS = ("no-progress", "never-ready")  # of terraform/aws/limits.tf
_PRICES_OF = 10  # types: a call for each on-demand price
_KEPT_BY_AWS = datetime.timedelta(days=90)


@dataclass(frozen=True)
class Planned:
    """What an apply would do.

    Attributes:
        changes: of variables, one line each.
        counts: how many resources are to be added, changed and destroyed.
        types: of the instances that the group may buy, best first; empty if they are chosen by requirements.
        offers: what these cost now, the cheapest first.
        desired: how many instances there will be.
        ringing: the alarms that set the group to zero again, since they ring still.
        on_demand_percentage: how many of them are bought on demand.
        boot_s: the median time from a launch to the first step that this run has shown; `None` if it has shown none.
        why_no_prices: why there are no prices, or not all.
    """

    changes: Sequence[str]
    counts: Mapping[str, int]
    types: Sequence[str]
    offers: Sequence[Offer]
    desired: int
    ringing: Sequence[str]
    on_demand_percentage: int
    boot_s: float | None
    why_no_prices: str


@dataclass(frozen=True)
class Looked:
    """What there is of a fleet.

    Attributes:
        group: `None` if there is none.
        activities: of the group, the newest first.
        alarms: their states, by name.
        bill: what it has cost; `None` if the run has no journal of instances.
        strangers: how many instances the group has started of which the run knows nothing.
        notes: what could not be found out, and why.
    """

    group: Group | None
    activities: Sequence[Activity]
    alarms: Mapping[str, str]
    bill: Bill | None
    strangers: int
    notes: Sequence[str]


class Fleet:
    """One run's fleet.

    Args:
        home: where it is kept.
        console: AWS, in its region.
        say: shows a line to the user.
    """

    def __init__(self, home: Home, console: Console, say: Callable[[str], None]) -> None:
        self.home, self._console, self._say = home, console, say
        self.terraform = Terraform(home.folder, say)

    @property
    def definition(self) -> Definition:
        """The variables. Raises ConfigError if there are none."""
        known = self.home.load()
        if known is None:
            raise ConfigError(
                f"there is no fleet of the run {self.home.run!r} in {self.home.region}: harness fleet up makes one. Is"
                " it in another region (--region), or in a bucket of another name (--bucket)?"
            )
        return known

    # ------------------------------------------------------------------------------------------------------------- up

    def up(
        self,
        given: Mapping[str, Any],
        unset: Iterable[str],
        code: Path | None,
        agrees: Callable[[Planned], bool],
        image: Image | None = None,
    ) -> bool:
        """Make the fleet, or bring it to another definition.

        Args:
            given: variables, laid over those that are known.
            unset: names of variables that are left to their defaults again.
            code: a folder or an archive on this machine that becomes `source_archive`; `None`: as it is.
            agrees: is asked once, before anything is bought.
            image: also pack the wheels that fit this image with a folder. `None`: do not.

        Returns:
            Whether it was done.

        Raises:
            ConfigError: the definition is wrong, or terraform failed.
            CloudError: AWS cannot be asked.
        """
        before = self.home.load() or Definition()
        definition = before.changed({**given, "run": self.home.run}, unset)
        if self.home.bucket is None and (named := definition.values.get("bucket")):
            self.home = self.home.in_bucket(str(named))
        with tempfile.TemporaryDirectory(prefix="harness-fleet-") as work:
            archive = self._archive(code, Path(work), image)
            definition = self._with_code(definition, archive)
            self._begin(definition)
            self._finish_letting_go(definition)
            plan = self.terraform.plan()
            if not agrees(self._planned(plan, definition, before)):
                return False
            if self.home.bucket is None:
                self._make_bucket(definition)
                definition = self._with_code(definition, archive)
                self.terraform.write(definition, self.home.region)
                self.home.save(definition)
                self.terraform.plan()
            else:
                self.home.save(definition)
            self.terraform.apply_plan()
        return True

    def _archive(self, code: Path | None, work: Path, image: Image | None) -> Path | None:
        if code is None or code.is_file():
            return code
        archive = work / "source.tar.gz"
        try:
            pack(code, archive, image)
        except PackError as err:
            raise ConfigError(f"the code cannot be packed: {err}") from err
        return archive

    def _with_code(self, definition: Definition, archive: Path | None) -> Definition:
        """Return the definition with the archive in the bucket: another machine, which has no such file, can plan."""
        if archive is None:
            return definition
        if self.home.bucket is None:
            return definition.changed({"source_archive": str(archive)}, ())
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        address = self.home.upload(archive, digest)
        self._say(f"the code is {address}")
        return definition.changed({"source_archive": address}, ())

    def _begin(self, definition: Definition) -> None:
        self.terraform.write(definition, self.home.region)
        if self.home.bucket is None:
            self.terraform.init()
        else:
            self.terraform.keep_state_in(self.home.bucket, self.home.state_key, self.home.region)

    def _make_bucket(self, definition: Definition) -> None:
        """Make the bucket first, and take the state into it, before there is anything that costs money."""
        self.terraform.run("apply", "-input=false", "-auto-approve", f"-target={BUCKET}", quiet=True)
        bucket = self.terraform.attribute("aws_s3_bucket", "bucket")
        self.home = self.home.in_bucket(bucket)
        self.home.save(definition)
        self.terraform.keep_state_in(bucket, self.home.state_key, self.home.region)

    def _planned(self, plan: Mapping[str, Any], definition: Definition, before: Definition) -> Planned:
        group = _resource(plan, "aws_autoscaling_group")
        policy = (group.get("mixed_instances_policy") or [{}])[0]
        overrides = ((policy.get("launch_template") or [{}])[0]).get("override") or []
        types = [str(one["instance_type"]) for one in overrides if one.get("instance_type")]
        found, why = self._offers(types)
        percentage = (policy.get("instances_distribution") or [{}])[0].get("on_demand_percentage_above_base_capacity")
        return Planned(
            changes=definition.differences(before),
            counts=_counts(plan),
            types=types,
            offers=found,
            desired=int(group.get("desired_capacity") or 0),
            ringing=self._ringing(),
            on_demand_percentage=int(percentage or 0),
            boot_s=boot_s(self._machines()) if self.home.bucket is not None else None,
            why_no_prices=why,
        )

    def _ringing(self) -> list[str]:
        try:
            alarms = self._console.alarms(f"{self.home.name}-", Deadline.after(CALL_S))
        except CloudError as err:
            self._say(f"whether an alarm rings is not known: {err}")
            return []
        return [name for name in _STOPPING_ALARMS if alarms.get(name) == "ALARM"]

    def _offers(self, types: Sequence[str]) -> tuple[list[Offer], str]:
        if not types:
            return [], "the types are chosen by requirements, when instances are bought"
        now = datetime.datetime.now(datetime.UTC)
        try:
            prices = self._console.spot_prices(types, now, now, Deadline.after(CALL_S))
        except CloudError as err:
            return [], str(err)
        on_demand, why = self._on_demand(types)
        return offers(prices, on_demand, types), why

    def _on_demand(self, types: Sequence[str]) -> tuple[dict[str, float | None], str]:
        found: dict[str, float | None] = dict.fromkeys(types)
        try:
            for type_ in types[:_PRICES_OF]:
                found[type_] = self._console.on_demand_price(type_, self.home.region, Deadline.after(CALL_S))
        except CloudError as err:
            return found, f"on-demand prices: {err}"
        return found, ""

    # ----------------------------------------------------------------------------------------------------------- look

    def look(self) -> Looked:
        """Find out what there is, what it does and what it has cost. What cannot be found out is a note."""
        deadline, notes = Deadline.after(_LOOK_S), list[str]()
        groups = self._console.groups(deadline, self.home.name)
        activities, alarms = list[Activity](), dict[str, str]()
        try:
            activities = list(self._console.activities(self.home.name, deadline)) if groups else []
            alarms = self._console.alarms(f"{self.home.name}-", deadline)
        except CloudError as err:
            notes.append(str(err))
        machines = with_activities(self._machines(), activities)
        there = {member.id for group in groups for member in group.members}
        machines = [_alive(machine) if machine.id in there else machine for machine in machines]
        cost, why = self._bill(machines)
        notes += [why] if why else []
        return Looked(
            group=groups[0] if groups else None,
            activities=activities,
            alarms=alarms,
            bill=cost,
            strangers=never_trained(machines, activities),
            notes=notes,
        )

    def _bill(self, machines: Sequence[Machine]) -> tuple[Bill | None, str]:
        if not machines:
            return None, ""
        now = datetime.datetime.now(datetime.UTC)
        since = max(min(machine.began_at for machine in machines), now - _KEPT_BY_AWS)
        types = sorted({machine.type for machine in machines})
        try:
            prices = self._console.spot_prices(types, since, now, Deadline.after(CALL_S))
        except CloudError as err:
            return None, str(err)
        on_demand, why = self._on_demand(types)
        return bill(machines, prices, on_demand, now), why

    def _machines(self) -> list[Machine]:
        """Return the instances that the run has had; none if its store has nothing, or cannot be asked."""
        store = open_existing_store(self.store)
        try:
            known = records.survey(store, RunKeys(self.home.run), Deadline.after(CALL_S))
        except CloudError:
            return []
        return machines_of(store, self.home.run, known.last_claim.generation) if known.last_claim is not None else []

    @property
    def store(self) -> str:
        """Where the run's checkpoints are."""
        prefix = (self.home.load() or Definition()).values.get("bucket_prefix") or "checkpoints"
        return f"s3://{self.home.bucket}/{prefix}"

    @property
    def log_group(self) -> str:
        """Where its nodes write."""
        return f"/harness/{self.home.run}"

    def serving(self) -> str:
        """Return the id of the instance that has the run. Raises ConfigError if none is in service."""
        groups = self._console.groups(Deadline.after(CALL_S), self.home.name)
        if not groups:
            raise ConfigError(f"there is no fleet {self.home.name} in {self.home.region}")
        members = sorted(groups[0].members, key=lambda member: member.state != "InService")
        if not members:
            raise ConfigError(f"{self.home.name} has no instance now; it wants {groups[0].desired}")
        return members[0].id

    def drill_template(self) -> str:
        """Return the id of the experiment that interrupts an instance. Raises ConfigError if there is none."""
        self._begin(self.definition)
        template = self.terraform.outputs().get("drill")
        if not template:
            raise ConfigError(f"harness fleet up {self.home.run} --set enable_drill=true adds the experiment")
        return str(template)

    # ------------------------------------------------------------------------------------------------------------ end

    def stop(self) -> None:
        """Have the group want no instances: what trains makes the newest step durable that fits in 120 s, and ends."""
        self._console.set_size(self.home.name, 0, Deadline.after(CALL_S))

    def down(self) -> str:
        """End everything but the bucket; return its name. A later `up` goes on with it.

        Raises:
            ConfigError: there is no such fleet, or terraform failed.
        """
        definition, bucket = self.definition, self._bucket()
        definition = definition.changed({"bucket": bucket}, ())
        self._begin(definition)
        self.home.save(definition)  # first: `up` finishes what is cut off after this
        self._finish_letting_go(definition)
        self.terraform.run("destroy", "-input=false", "-auto-approve")
        return bucket

    def down_with_checkpoints(self) -> None:
        """End everything, the bucket and all that is in it too.

        Raises:
            ConfigError: the bucket is not this fleet's own, or terraform failed.
        """
        definition, bucket = self.definition, self._bucket()
        self._begin(definition)
        if not self._owns_bucket():
            raise ConfigError(
                f"the bucket {bucket} was there before the fleet, or an earlier down has let it go: it stays. Its"
                f" objects of this run: aws s3 rm --recursive {self.store}/{self.home.run}"
            )
        self.terraform.write(definition.changed({"delete_checkpoints": True}, ()), self.home.region)
        self.terraform.run("apply", "-input=false", "-auto-approve", f"-target={BUCKET}", quiet=True)
        self.terraform.keep_state_here()  # the bucket takes the other copy with it
        self.terraform.run("destroy", "-input=false", "-auto-approve")
        self.home.forget()

    def _finish_letting_go(self, definition: Definition) -> None:
        """Take the bucket out of the state if the definition says that it is not the fleet's any more."""
        if definition.values.get("bucket") and self._owns_bucket():
            self.terraform.run("state", "rm", BUCKET, quiet=True)

    def _owns_bucket(self) -> bool:
        return any(address.startswith(BUCKET) for address in self.terraform.addresses())

    def _bucket(self) -> str:
        if self.home.bucket is None:
            raise ConfigError(f"there is no bucket of the run {self.home.run!r} yet: nothing was made")
        return self.home.bucket


def shell_command(instance: str, region: str) -> list[str]:
    """Return the command that opens a shell on an instance."""
    return ["aws", "ssm", "start-session", "--target", instance, *(["--region", region] if region else [])]


def choose_region(given: str | None) -> str:
    """Return the region of a fleet, and have every program that is started here use it.

    Raises:
        ConfigError: none is known.
    """
    from cloud.s3.client import new_session

    region = given or os.environ.get("AWS_REGION") or new_session().region_name
    if not region:
        raise ConfigError("which region? --region, AWS_REGION, or the profile of the AWS command line")
    os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"] = region
    return str(region)


def _alive(machine: Machine) -> Machine:
    return replace(machine, ended_at=None)


def _resource(plan: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the planned values of the first resource of a kind; empty if there is none."""
    modules = [plan.get("planned_values", {}).get("root_module", {})]
    while modules:
        module = modules.pop()
        modules += module.get("child_modules", [])
        for resource in module.get("resources", []):
            if resource["type"] == kind and resource["mode"] == "managed":
                return dict(resource["values"])
    return {}


def _counts(plan: Mapping[str, Any]) -> dict[str, int]:
    found = {"add": 0, "change": 0, "destroy": 0}
    for change in plan.get("resource_changes", []):
        actions = change["change"]["actions"]
        found["add"] += "create" in actions
        found["change"] += "update" in actions
        found["destroy"] += "delete" in actions
    return found
