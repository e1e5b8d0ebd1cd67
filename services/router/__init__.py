"""The OpenAI HTTP API in front of a backend, and one backend that runs the model in this process. See README.md."""
