"""An address that speaks the API of OpenAI, and vLLM's calls for tokens and weights, over anything that samples.

    calls    a request's body -> a `Call`, or an error that names the setting
    app      routes, limits, who may ask
    replies  completions -> the API's records, whole or as events
    server   sockets, and requests from other sites
"""
