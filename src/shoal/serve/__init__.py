"""An address that speaks the API of OpenAI, and vLLM's calls for tokens and weights, over anything that samples.

    calls    a request's body -> a `Call`, or an error that names the setting
    app      routes, limits, who may ask
    replies  completions -> the API's records, streamed or whole
    server   sockets, and requests from other sites

What samples is a `Sampler`: it says what a call may ask for and gives tokens with their log-probs and versions.
"""

from __future__ import annotations

from shoal.types import ShoalError


def require_packages(extra: str, *packages: str) -> None:
    """ShoalError if a package of an extra is missing."""
    for package in packages:
        try:
            __import__(package)
        except ImportError as error:
            raise ShoalError(f"{package} is not installed: `pip install '.[{extra}]'` in the clone of Shoal") from error
