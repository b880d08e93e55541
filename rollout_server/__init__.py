"""The rollout microservice: one vLLM engine that hands out samples as token ids."""
