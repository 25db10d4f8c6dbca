"""LLM steps: `batch` and `steps` (pure, in the daemon), `tokenise` (on the pool), `engine*` (in a device host), `convert` (GGUF to a folder)."""
