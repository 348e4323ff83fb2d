"""Prints what pyproject.toml asks for: `requirements.py build`, or `requirements.py run [EXTRA]`."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())
if sys.argv[1] == "build":
    wanted = project["build-system"]["requires"]
else:
    wanted = project["project"]["dependencies"]
    for extra in sys.argv[2:]:
        wanted = wanted + project["project"]["optional-dependencies"][extra]
sys.stdout.write("".join(f"{each}\n" for each in wanted))
