"""`shoal serve`: serves a model to other programs over OpenAI's API, until Ctrl-C."""

from __future__ import annotations

import contextlib
import secrets
import sys
from typing import Any

from shoal.checks.settings import check_model
from shoal.config.commands import ServeConfig
from shoal.job.head import model_text
from shoal.job.job import Job
from shoal.report.console import Console
from shoal.serve.host_sampler import HostSampler
from shoal.serve.server import base_url, listen, make_server, require_packages, require_token
from shoal.weights.store import MemoryStore


def serve(config: ServeConfig, console: Console | None = None) -> dict[str, Any]:
    """Serves a model over OpenAI's API until Ctrl-C, and returns {"url": its URL}; Ctrl-C is no
    error. Raises ShoalError if a package or the model cannot be used, if the port is in use, or if
    other machines can reach the host and there is no token. The URL and the token are printed
    before the first request is taken. `config.token`: `auto` for a random one, "" for none.
    `config.port`: 0 for a free one from 8000 on. A `console` that is given can be used
    afterwards."""
    require_packages("serve", "starlette", "uvicorn")
    from shoal.serve.app import Api

    check_model(config.model)
    token = config.token
    if token == "auto":
        token = secrets.token_urlsafe(16)
    require_token(config.host, token, "use the model", 8000)
    with console or Console() as console, Job(config, console) as job:
        job.check()
        # Before weights are read, so that a port in use is reported at once.
        listening = job.stack.enter_context(listen(config.host, config.port, 8000))
        console.note(f"model: {model_text(config.model, job.model_source, job.model)}")
        sampler = job.stack.enter_context(contextlib.closing(open_sampler(job)))
        url = f"{base_url(config.host, listening)}/v1"
        console.text(f"OPENAI_BASE_URL={url} OPENAI_API_KEY={token or 'any'} (Ctrl-C ends it)")
        sys.stdout.flush()
        publisher = sampler if config.publication else None
        api = Api(sampler, token, config.timeout_seconds, publisher)
        with contextlib.suppress(KeyboardInterrupt):
            make_server(api.app()).run(sockets=[listening])
    return {"url": url}


def open_sampler(job: Job) -> HostSampler:
    """Loads a job's weights and returns the sampler that answers requests with them. The caller
    closes it. The weights as loaded are deleted once the sampler has its copy. The job must be one
    of `shoal serve`, whose settings are read."""
    config: ServeConfig = job.requested
    return HostSampler(
        name=config.model.path,
        tokenizer=job.tokenizer,
        make_engine=job.engine_maker(),
        params=config.sampling.params,
        store=MemoryStore(job.model, delete_source=True),
        weights=job.load_weights(),
        seed=config.seed,
    )
