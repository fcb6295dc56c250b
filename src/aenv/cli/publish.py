"""``aenv push``, ``pull``, ``release``, ``access``, ``yank`` and ``delete``: projects to the hub, and back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aenv import config, project
from aenv.cli.output import label, output_option, say, show_json, show_record
from aenv.cli.platform import confirm, hub_client, hub_option, named, patiently, plain, size, talk, yes_option
from aenv.cli.project import work_dir_option
from aenv.errors import AEnvError, Conflict, Invalid, NotFound, did_you_mean
from aenv.models import NAME, VERSION, EnvRef
from aenv.project.builtin import builtin

if TYPE_CHECKING:
    from aenv.client.hub import HubClient
    from aenv.project import Project
    from aenv.wire import Env, EnvRequest, Policy


@click.command()
@click.argument("target", metavar="[NAME or DIR]", required=False)
@work_dir_option
@click.option("-v", "--version", help="Push it as this version, which is written to config.json first.")
@click.option("--dry-run", is_flag=True, help="Check and pack, and show what would be pushed.")
@click.option("--force", is_flag=True, help="Replace the version on the hub, as long as it is not released.")
@hub_option
@output_option
def push(
    *,
    target: str | None,
    work_dir: Path,
    version: str | None,
    dry_run: bool,
    force: bool,
    hub_url: str | None,
    system_url: str | None,
    output: str,
) -> None:
    """Push the project to the hub.

    NAME must be the name in config.json here or in ./NAME, or that of a built-in environment. The files are checked as
    'aenv validate' does, packed, and read by the hub in a sandbox of its own. Pushing again what is there already
    changes nothing.

    \b
    Example:
      aenv push my-env
      aenv push my-env --version 1.1.0
      aenv push my-env --dry-run -o json
    """
    found = project_of(target, work_dir, shipped=True)
    _check(found)
    written = found.version
    if version is not None:
        if found.root == builtin(found.name):
            raise Invalid(f"{found.name} comes with this package as {found.version}", hint="leave --version out")
        found = _as_version(found, version, dry_run)
    package = project.pack(found)
    record: dict[str, Any] = {"name": found.name, "version": found.version, "digest": _digest(package)}
    record["size"] = len(package)
    if dry_run:
        if found.version != written:  # config.json is not changed now, and the digest would not be this one
            del record["digest"]
        show_record(record, output)
        say("nothing was pushed")
        return
    env = talk(_push(hub_client(hub_url, system_url), found, package, force), quiet=True)
    tools = [tool.name for tool in env.tools]
    if output == "json":
        show_json({**record, "status": env.status, "tools": tools, "env": plain(env)})
        return
    show_record({**record, "size": size(len(package)), "status": title(env), "tools": ", ".join(tools) or "-"}, output)
    if title(env) != "Released":
        say(f"when it is as it should be for good: aenv release {found.name}@{found.version}")


async def _push(hub: HubClient, found: Project, package: bytes, force: bool) -> Env:
    name, version = found.name, found.version
    try:
        await hub.create(_request(found))
    except Conflict as exc:
        try:
            there = await hub.get(EnvRef(name, version))
        except NotFound:  # it is for another reason that it cannot be pushed
            raise exc from None
        if there.digest == _digest(package) and title(there) in ("Ready", "Released"):
            say(f"{name}@{version} is on the hub already, with the same content")
            return there
        _may_replace(there, force)
        await hub.update(_request(found))
    say(f"pushing {name}@{version}, {size(len(package))}")
    return await patiently(
        hub.upload(name, version, package), lambda: f"the hub, which takes {name}@{version} and reads its tools"
    )


def _digest(package: bytes) -> str:
    """As the hub keeps it."""
    return project.digest(package).removeprefix("sha256:")


def _may_replace(there: Env, force: bool) -> None:
    """Raise unless the version may be replaced. One that never became ready is of no use to anybody yet."""
    what = f"{there.name}@{there.version}"
    if title(there) == "Released":
        raise Conflict(
            f"{what} is released, and never changes again",
            hint="push it as another version: --version, or version in config.json",
        )
    if title(there) == "Ready" and not force:
        raise Conflict(
            f"{what} is on the hub already, with other content",
            hint="push it as another version with --version, or give --force to replace it, since it is not released",
        )


def _request(found: Project) -> EnvRequest:
    from aenv.wire import EnvRequest

    return EnvRequest(
        name=found.name,
        version=found.version,
        description=found.description,
        tags=list(found.tags),
        code_url=str(found.config.get("codeUrl") or ""),
        artifacts=found.config.get("artifacts") or [],
        build_config=found.config.get("buildConfig") or {},
        test_config=found.config.get("testConfig") or {},
        deploy_config=found.config.get("deployConfig") or {},
    )


def project_of(target: str | None, work_dir: Path, *, shipped: bool = False) -> Project:
    """The project that is meant: in the directory named, or of that name here or in the directory of that name; with
    ``shipped`` also a built-in one."""
    if target is None:
        return project.read(work_dir)
    beside = work_dir / target.partition("@")[0]
    if os.sep in target or target in (".", ".."):
        return project.read(work_dir / target)
    ref = EnvRef.parse(target)
    seen = [project.read(path) for path in (work_dir, beside) if (path / project.CONFIG).is_file()]
    if shipped and (ours := builtin(ref.name)) is not None:
        seen.append(project.read(ours))
    for found in seen:
        if found.name == ref.name:
            if ref.version not in (None, found.version):
                raise Invalid(
                    f"{found.root / project.CONFIG} says version {found.version}, not {ref.version}",
                    hint="correct one of the two; --version writes it",
                )
            return found
    said = "".join(f"; {found.root / project.CONFIG} names {found.name}" for found in seen)
    raise NotFound(
        f"there is no project {ref.name!r} in {work_dir.absolute()} or in {beside}{said}",
        hint=did_you_mean(ref.name, [found.name for found in seen])
        if seen
        else "run it in the project's directory, or give the directory: ./DIR",
    )


def _as_version(found: Project, version: str, dry_run: bool) -> Project:
    if not VERSION.fullmatch(version):
        raise Invalid(f"{version!r} is not a semantic version", hint="use three numbers, for example 1.0.1")
    if version == found.version:
        return found
    if dry_run:
        return replace(found, version=version)
    changed = project.write(found, {"version": version})
    say(f"{found.root / project.CONFIG}: version {found.version} is now {version}")
    return changed


def _check(found: Project) -> None:
    from aenv.cli.validate import static_checks

    failed = []
    for row in static_checks(found.root, package=False)[1]:
        if row.status == "fail":
            failed.append(f"{row.check}: {row.detail} ({row.fix})")
        elif row.status == "warn":
            label("warning", f"{row.check}: {row.detail}")
    if failed:
        raise Invalid("\n".join([f"{found.name} cannot be pushed", *failed]), hint="'aenv validate' says more")


@click.command()
@click.argument("name", metavar="NAME[@VERSION]")
@click.option("-v", "--version", help="Which version: exact, a range such as ^1.0, or latest.")
@click.option("--to", type=click.Path(path_type=Path), help="Unpack into this directory, which is made.")
@click.option("--force", is_flag=True, help="Replace what is there.")
@hub_option
@output_option
def pull(
    *,
    name: str,
    version: str | None,
    to: Path | None,
    force: bool,
    hub_url: str | None,
    system_url: str | None,
    output: str,
) -> None:
    """Pull an environment from the hub.

    It is unpacked into ~/.aenv/envs/NAME/VERSION, where Environment(NAME) finds it without a platform. What came is
    checked against the digest that the hub keeps.

    \b
    Example:
      aenv pull mini-terminal@^1.0
      aenv pull mini-terminal@1.0.1 --to ./mini-terminal
    """
    ref = reference(name, version)
    env, data = talk(_pull(hub_client(hub_url, system_url), ref), quiet=True)
    folder = to or config.home() / "envs" / env.name / env.version
    if not to and not force and folder.is_dir() and _digest(project.pack(project.read(folder))) == env.digest:
        say(f"{env.id} is there already")
    else:
        _unpack(data, folder, force)
    record = {"name": env.name, "version": env.version, "digest": env.digest, "directory": str(folder.absolute())}
    if env.yanked:
        label("warning", f"{env.id} was yanked: {env.yanked}")
    show_record(record, output)


async def _pull(hub: HubClient, ref: EnvRef) -> tuple[Env, bytes]:
    env = await hub.get(ref)
    if env.name != ref.name or not NAME.fullmatch(env.name) or not VERSION.fullmatch(env.version):
        raise Invalid(f"the hub answered {env.name!r} {env.version!r} when asked for {ref}")
    if env.yanked and ref.version != env.version:
        raise Conflict(f"{env.id} was yanked: {env.yanked}", hint=f"if it is wanted none the less: aenv pull {env.id}")
    if not env.digest:
        raise NotFound(f"{env.id} has no package", hint="its owner pushes one with 'aenv push'")
    return env, await patiently(hub.download(env), lambda: f"{size(env.size)} of {env.id}")


def _unpack(data: bytes, folder: Path, force: bool) -> None:
    """In one step: whoever looks for the directory finds the old one or the new one, whole."""
    from aenv.project.archive import unpack

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()
        if not os.path.lexists(folder):
            unpack(data, folder)
            return
        if not force:
            raise Conflict(f"{folder} is there already", hint="give --force to replace it, or another place with --to")
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder.parent, ignore_cleanup_errors=True) as aside:
            unpack(data, Path(aside, "new"))
            folder.rename(Path(aside, "old"))
            Path(aside, "new").rename(folder)
    except OSError as exc:
        raise AEnvError(f"{folder} cannot be written: {exc.strerror or exc}") from exc


@click.command()
@click.argument("name", metavar="[NAME[@VERSION]]", required=False)
@work_dir_option
@hub_option
@output_option
def release(*, name: str | None, work_dir: Path, hub_url: str | None, system_url: str | None, output: str) -> None:
    """Release a version on the hub, after which it never changes.

    Without a version: that of the project here or in ./NAME, else the newest on the hub. Without a name: the project
    here.

    \b
    Example:
      aenv release my-env@1.0.0
    """
    ref = _meant(name, work_dir)
    env = talk(_release(hub_client(hub_url, system_url), ref))
    shown = {"name": env.name, "version": env.version, "status": title(env), "digest": env.digest}
    show_record({**shown, "status": env.status} if output == "json" else shown, output)


def _meant(name: str | None, work_dir: Path) -> EnvRef:
    ref = EnvRef.parse(name) if name is not None else None
    if ref is not None and ref.version is not None:
        return EnvRef(*named(str(ref), "release"))
    try:
        found = project_of(name, work_dir)
    except NotFound:
        if ref is None:
            raise
        return ref
    return EnvRef(found.name, found.version)


async def _release(hub: HubClient, ref: EnvRef) -> Env:
    from aenv.project.versions import newest

    version = ref.version
    if version is None:
        known = [env.version for env in await hub.versions(ref.name)]
        version = newest(known, EnvRef(ref.name)) or max(known, default=None)
    if version is None:
        raise NotFound(f"the hub has no version of {ref.name}", hint=f"push one first: 'aenv push {ref.name}'")
    return await hub.release(ref.name, version)


@click.command()
@click.argument("name")
@click.option("--public/--private", default=None, help="Whether everybody may see it.")
@click.option("--add-reader", metavar="WHO", multiple=True, help="Let somebody see it. Repeatable.")
@click.option("--remove-reader", metavar="WHO", multiple=True, help="Do not let somebody see it. Repeatable.")
@click.option("--add-writer", metavar="WHO", multiple=True, help="Let somebody push to it. Repeatable.")
@click.option("--remove-writer", metavar="WHO", multiple=True, help="Do not let somebody push to it. Repeatable.")
@click.option("--owner", metavar="WHO", help="Give it to somebody else.")
@hub_option
@output_option
def access(
    *,
    name: str,
    public: bool | None,
    add_reader: Sequence[str],
    remove_reader: Sequence[str],
    add_writer: Sequence[str],
    remove_writer: Sequence[str],
    owner: str | None,
    hub_url: str | None,
    system_url: str | None,
    output: str,
) -> None:
    """Show or change who may see an environment and push to it.

    What is not given stays as it is.

    \b
    Example:
      aenv access my-env
      aenv access my-env --private --add-reader ann --add-writer ben
    """
    from aenv.wire import PolicyChange

    async def work(hub: HubClient) -> Policy:
        policy = await hub.policy(name)
        change = PolicyChange(
            owner=owner,
            public=public,
            readers=_changed(policy.readers, add_reader, remove_reader),
            writers=_changed(policy.writers, add_writer, remove_writer),
        )
        return policy if change == PolicyChange() else await hub.set_policy(name, change)

    policy = talk(work(hub_client(hub_url, system_url)))
    record = {"name": name, **plain(policy)}
    if output == "table":
        record = {key: ", ".join(value) or "-" if isinstance(value, list) else value for key, value in record.items()}
        record["public"] = "yes" if policy.public else "no"
    show_record(record, output)


def _changed(known: Sequence[str], add: Sequence[str], remove: Sequence[str]) -> list[str] | None:
    """The list after the change; None when none is asked for."""
    if not add and not remove:
        return None
    return [who for who in dict.fromkeys([*known, *add]) if who not in remove]


@click.command()
@click.argument("name", metavar="NAME@VERSION")
@click.option("--reason", required=True, help="What those who depend on it are told.")
@hub_option
@output_option
def yank(*, name: str, reason: str, hub_url: str | None, system_url: str | None, output: str) -> None:
    """Withdraw a version: only who asks for exactly it still gets it.

    \b
    Example:
      aenv yank my-env@1.0.0 --reason "the reward was wrong"
    """
    env = talk(hub_client(hub_url, system_url).yank(*named(name, "yank"), reason))
    show_record({"name": env.name, "version": env.version, "yanked": env.yanked}, output)


@click.command()
@click.argument("name", metavar="NAME@VERSION")
@yes_option
@hub_option
@output_option
def delete(*, name: str, yes: bool, hub_url: str | None, system_url: str | None, output: str) -> None:
    """Delete a version from the hub.

    Only an admin deletes one that is released, since others may depend on it; 'aenv yank' withdraws it. Its number is
    not given again.

    \b
    Example:
      aenv delete my-env@1.0.0 --yes
    """
    which = named(name, "delete")
    confirm(f"Delete {name} from the hub?", yes)
    talk(hub_client(hub_url, system_url).delete(*which))
    if output == "json":
        show_json({"deleted": name})
    else:
        say(f"deleted {name}")


def reference(name: str, version: str | None) -> EnvRef:
    """``NAME[@VERSION]``, or the version given apart."""
    ref = EnvRef.parse(name)
    if version is None:
        return ref
    if ref.version not in (None, version):
        raise click.UsageError(f"{name} and --version {version} are two versions")
    return EnvRef.parse(f"{ref.name}@{version}")


def title(env: Env) -> str:
    """The status of a version in a word."""
    from aenv.wire import Status

    try:
        return Status(env.status).title
    except ValueError:
        return str(env.status)
