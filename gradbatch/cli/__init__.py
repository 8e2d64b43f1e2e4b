"""The ``gradbatch`` command. Its packages are an extra, so nothing else of gradbatch imports them."""

import importlib
import importlib.util
import sys


def main() -> None:
    """Run the command line; without typer or rich, say how to get them."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"The gradbatch command needs {' and '.join(missing)}: pip install 'gradbatch[cli]'")
    importlib.import_module("gradbatch.cli.app").app(prog_name="gradbatch")
