"""New weights from a training to all rollouts: `serve trainer`, `serve rollout`, `serve coordinator`. See README.md."""
