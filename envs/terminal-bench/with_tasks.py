"""A project like this one, with tasks of your own: python with_tasks.py TASKS TARGET [--name NAME] [--network none]."""

import argparse
import json
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", type=Path, help="a directory of Harbor tasks, or one task")
    parser.add_argument("target", type=Path, help="where the project is made")
    parser.add_argument("--name", help="its name; that of the target when not given")
    parser.add_argument("--network", choices=["full", "none"], default="full", help="what sandboxes reach")
    given = parser.parse_args()
    found = [given.tasks] if (given.tasks / "task.toml").is_file() else sorted(given.tasks.iterdir())
    tasks = [path for path in found if (path / "task.toml").is_file()]
    if not tasks:
        parser.error(f"no directory in {given.tasks} holds a task.toml")
    shutil.copytree(HERE, given.target, ignore=shutil.ignore_patterns("tasks", "__pycache__", "with_tasks.py"))
    for task in tasks:
        shutil.copytree(task, given.target / "tasks" / task.resolve().name, symlinks=True)
    config = json.loads((HERE / "config.json").read_text())
    config["name"] = given.name or given.target.resolve().name
    config["deployConfig"]["network"] = given.network
    config["deployConfig"]["service"]["storageName"] = config["name"]
    (given.target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
