"""An address that speaks the API of OpenAI, and vLLM's for tokens and weights, over anything that
samples."""
