"""The life of runs and tasks: `state` (pure), `store` (durable), `service` (the one owner that ties brain, store and devices together)."""
