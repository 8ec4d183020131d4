"""`shoal view`: a page on one or several runs, served to this machine or written to one file.

    views      opens runs; makes the record of a view      run       the Run view, several runs
    server     records and page over HTTP                  curves    metrics by step, spikes
    one_file   both in one file                            verdict   the run in a sentence
    page/      HTML, CSS and ES modules                    groups    Groups, Group, Prompt, Tokens
                                                           completions  the table of completions
                                                           lint      what looks wrong

It only reads runs, apart from the note and tags that people write about one (`runs/notes.py`). A
run may write while it is read; no lock is taken."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import urllib.parse
from typing import Any

from shoal.buckets import address
from shoal.config.commands import ViewConfig
from shoal.files import check_new_file
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.serve.server import base_url, listen, make_server, require_packages, require_token
from shoal.text import count

NICENESS = 5
"""Added to the niceness of this process, so that a run that trains on the same cores goes first."""


def view(config: ViewConfig, console: Console | None = None) -> dict[str, Any]:
    """Serves the page until Ctrl-C and returns the paths of its runs (`runs`); with `to` writes the
    page to that file instead and returns at once, with the file's path (`to`) too. Serving prints
    the page's address, lowers the priority of this process, and with `config.open` opens a browser.
    ShoalError if a package is missing, a run is not found, the port is taken, or `groups` is set
    without `to`."""
    with console or Console() as console:
        if config.to:
            return _write(config, console)
        require_packages("view", "duckdb", "starlette", "uvicorn")
        from shoal.commands.view.server import make_app
        from shoal.commands.view.views import Viewer

        token = secrets.token_urlsafe(16) if config.token == "auto" else config.token
        require_token(config.host, token, "read the runs and write notes", 8700)
        if config.groups:
            raise ShoalError(
                "groups: it chooses what a file contains; name the file with to=page.html"
            )
        viewer = Viewer(config.runs)
        listening = listen(config.host, config.port)
        link = f"{base_url(config.host, listening)}/"
        if token:
            link += f"?token={urllib.parse.quote(token)}"
        with contextlib.suppress(OSError, AttributeError):
            os.nice(NICENESS)
        viewer.start()
        runs = [opened.run for opened in viewer.runs.values()]
        if viewer.notice:
            console.note(viewer.notice)
        for run in runs:
            for text in run.problems.values():
                console.note(f"{run.name}: {text}")
        what = runs[0].name if len(runs) == 1 else count(len(runs), "run")
        console.text(f"{what}: {link} (Ctrl-C ends it)")
        sys.stdout.flush()
        if config.open:
            _open_browser(link)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                make_server(make_app(viewer, token)).run(sockets=[listening])
        finally:
            viewer.close()
    return {"runs": [address(run.path) for run in runs]}


def _write(config: ViewConfig, console: Console) -> dict[str, Any]:
    """Writes the page to the file `config.to`, prints that, and returns the paths of its runs
    (`runs`) and of the file (`to`). ShoalError if the path cannot be that of a new file, if no run
    is found, or if a run lacks groups that are named."""
    from shoal.commands.view.one_file import write_page

    to = check_new_file(config.to, "to")
    runs, size = write_page(config, to)
    console.note(
        f"wrote {config.to}, {size / 1e6:.1f} MB: open it in a browser, it needs no network"
    )
    return {"runs": [address(run.path) for run in runs], "to": address(to)}


def _open_browser(address: str) -> None:
    """Opens the address in a browser if there is a display; does nothing over SSH, if stdout is no
    terminal, or if no browser can be started."""
    has_display = (
        sys.platform in ("darwin", "win32")
        or os.environ.get("DISPLAY")
        or os.environ.get("WAYLAND_DISPLAY")
    )
    if has_display and not os.environ.get("SSH_CONNECTION") and sys.stdout.isatty():
        import webbrowser

        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(address)
