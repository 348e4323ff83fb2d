"""Where a model is, and whether it is one."""

from __future__ import annotations

from pathlib import Path

from twostroke.errors import ConfigError


def locate_model(name: str) -> str:
    """The absolute path of a model's folder, or a hub name as it is.

    Raises ConfigError for no name, a file, a folder that holds no model, and a path that leads nowhere.
    """
    if not name:
        raise ConfigError("no model; name a folder or a hub name with --model")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"--model {name}: no config.json in it; give a model folder in the Hugging Face layout")
        return str(path.resolve())
    if path.exists():
        raise ConfigError(f"--model {name}: a file; give the folder of a model in the Hugging Face layout")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"--model {name}: no such folder")
    return name
