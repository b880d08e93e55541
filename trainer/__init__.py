"""GRPO on any model that a rollout server serves; it talks to the server over HTTP alone."""
