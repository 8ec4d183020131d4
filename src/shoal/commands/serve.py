"""`shoal serve`: an address that samples for other programs, until Ctrl-C."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import sys
from typing import Any

from shoal.config.schema import ServeConfig
from shoal.report.console import Console
from shoal.rollout.publisher import MemoryPublisher
from shoal.rollout.serving import HostSampler
from shoal.run.head import model_text
from shoal.run.job import Job
from shoal.run.preflight.settings import check_model
from shoal.serve import require_packages
from shoal.serve.server import LOOPBACK, base_url, listen, make_server
from shoal.types import ShoalError


def serve(config: ServeConfig, console: Console | None = None) -> dict[str, Any]:
    """Serves until Ctrl-C. ShoalError for a model that cannot be used, and a port in use."""
    require_packages("serve", "starlette", "uvicorn")
    from shoal.serve.app import Api

    check_model(config.model)
    token = secrets.token_urlsafe(16) if config.token == "auto" else config.token
    if config.host not in LOOPBACK and not token:
        raise ShoalError(f"host={config.host}: whoever reaches this address could use the model; set token=auto, or "
                         "leave host= out and forward the port: ssh -L 8000:127.0.0.1:8000 HOST", "token")
    with console or Console() as console, Job(config, console) as job:
        job.check()
        listening = listen(config.host, config.port, 8000)  # before weights are read: the port may be in use
        job.stack.callback(listening.close)
        console.note(f"model: {model_text(config.model, job.spec, job.model)}")
        sampler = open_sampler(job)
        job.stack.callback(sampler.close)
        api = Api(sampler, lambda key: not token or hmac.compare_digest(key.encode(), token.encode()), bool(token),
                  config.timeout_seconds, sampler if config.publication else None)
        url = f"{base_url(config.host, listening.getsockname()[1])}/v1"
        console.text(f"OPENAI_BASE_URL={url} OPENAI_API_KEY={token or 'any'} (Ctrl-C ends it)")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            make_server(api.app()).run(sockets=[listening])
    return {"url": url}


def open_sampler(job: Job) -> HostSampler:
    """The sampler of a job, with its weights."""
    config: ServeConfig = job.given
    return HostSampler(config.name or config.model.path, job.tokenizer, job.make_engine(), config.sampling.params,
                       MemoryPublisher(job.model), job.load_weights(), config.seed)
