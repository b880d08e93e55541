"""The contract between the rollout server and whoever calls it.

Nothing here imports torch, vllm or fastapi: ``pip install .`` alone gives a working client.
"""
