"""A server with OpenAI's API, and vLLM's for tokens and weights, in front of anything that
samples."""
