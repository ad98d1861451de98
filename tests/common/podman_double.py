"""Stands in for podman: a container is a folder, and places in commands and scripts become those of the folder."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

PROGRAM = """#!{python}
import json, os, shutil, subprocess, sys
words, log, state = sys.argv[1:], {log!r}, {state!r}
with open(log, "a") as file:
    print(json.dumps(words), file=file)

def place(name):
    return os.path.join(state, name)

if words[0] == "build":
    shutil.copytree(words[3], place(words[2]), dirs_exist_ok=True)
elif words[0] == "run":
    name = next(word[7:] for word in words if word.startswith("--name="))
    shutil.copytree(place(words[words.index("sh") - 1]), place(name) + "/app")
    volumes = [word[9:].split(":") for word in words if word.startswith("--volume=")]
    json.dump({{inside: host for host, inside, *_ in volumes}}, open(place(name) + "/volumes", "w"))
elif words[0] == "cp":
    source, name = words[1], words[2].partition(":")[0]
    shutil.copytree(source, place(name) + "/tests")
elif words[0] == "rm":
    shutil.rmtree(place(words[-1]), ignore_errors=True)
elif words[0] == "exec":
    at = next(number for number, word in enumerate(words) if word.startswith("libra-"))
    own = place(words[at])
    folders = {{"/app": own + "/app", "/tests": own + "/tests", **json.load(open(own + "/volumes"))}}
    names = [word[6:] for word in words if word.startswith("--env=")]
    told = {{name: os.environ[name] for name in names}}

    def inner(word):
        for inside, host in folders.items():
            word = word.replace(inside + "/", host + "/")
        return word

    command = [inner(word) for word in words[at + 1:]]
    if command[-1] == "kill -9 -1":
        sys.exit()
    if command[-1].endswith("test.sh"):
        command = ["bash", "-c", inner(open(command[-1]).read())]
    told = {{name: inner(value) if name.startswith("LIBRA") else value for name, value in told.items()}}
    sys.exit(subprocess.call(command, cwd=own + "/app", env={{**told, "PATH": os.environ["PATH"]}}))
"""


class Podman:
    """A stand-in in a folder of its own.

    Attributes:
      folder: folder that PATH must begin with.
    """

    def __init__(self, root: Path) -> None:
        self.folder, self._log = root / "bin", root / "log"
        (root / "state").mkdir(parents=True)
        self.folder.mkdir()
        program = self.folder / "podman"
        program.write_text(PROGRAM.format(python=sys.executable, log=str(self._log), state=str(root / "state")))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def calls(self) -> list[list[str]]:
        """Returns the words of each call so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]
